"""What else could do an operator's work, to stand beside it in the same run.

Knows calls of PyTorch, torch.compile and FlagGems; must not know how they are timed. A baseline
does the same work on the same arguments; its result is not judged here.
"""

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch

Arguments = dict[str, Any]
Make = Callable[[Arguments], Callable[[], Any]]

# References worth compiling, at their largest case alone: each takes seconds to compile.
COMPILED = ("act_quant", "hyper_connection_step", "rms_norm", "store_window")


def _topk(a: Arguments) -> Callable[[], Any]:
    k = min(a["k"], a["scores"].shape[-1])
    return lambda: torch.topk(a["scores"], k, dim=-1)


def _fused_norm(a: Arguments) -> Callable[[], Any]:
    x, weight = a["x"], a["weight"].to(a["x"].dtype)
    return lambda: torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, a["eps"])


def _flag_gems_norm(a: Arguments) -> Callable[[], Any]:
    import flag_gems

    x, weight = a["x"], a["weight"].to(a["x"].dtype)
    return lambda: flag_gems.rms_norm(x, [x.shape[-1]], weight, a["eps"])


def _index_select(a: Arguments) -> Callable[[], Any]:
    return lambda: torch.nn.functional.embedding(a["index"], a["table"])


def _bfloat16(a: Arguments) -> Callable[[], Any]:
    codes, weight = a["codes"], a["weight"]
    x = torch.randn(codes.shape, device=codes.device, dtype=torch.bfloat16)
    matrix = torch.randn(weight.shape, device=codes.device, dtype=torch.bfloat16)
    return lambda: torch.nn.functional.linear(x, matrix)


def _scaled_mm(a: Arguments) -> Callable[[], Any]:
    codes, weight = (a[name].view(torch.float8_e4m3fn) for name in ("codes", "weight"))
    rows = torch.ones(codes.shape[0], 1, device=codes.device)
    columns = torch.ones(1, weight.shape[0], device=codes.device)
    return lambda: torch._scaled_mm(codes, weight.t(), rows, columns, out_dtype=torch.bfloat16)


TORCH: dict[str, tuple[tuple[str, Make], ...]] = {
    "topk_select": (("torch.topk", _topk),),
    "rms_norm": (("torch rms_norm", _fused_norm),),
    "gather_rows": (("torch embedding", _index_select),),
    "fp8_linear": (("cuBLAS bf16", _bfloat16), ("torch._scaled_mm, scales per row", _scaled_mm)),
}
FLAG_GEMS: dict[str, Make] = {"rms_norm": _flag_gems_norm}


def baselines(
    name: str, reference: Callable[..., Any], compiled: bool
) -> Iterator[tuple[str, Make]]:
    """Every baseline of an operator: its name, and from arguments its call.

    compiled: with torch.compile of the reference, where that is worth its time.
    """
    yield from TORCH.get(name, ())
    if name in FLAG_GEMS and importlib.util.find_spec("flag_gems") is not None:
        yield "FlagGems", FLAG_GEMS[name]
    if compiled and name in COMPILED:
        function = torch.compile(reference, dynamic=False)
        yield "torch.compile", lambda arguments: lambda: function(**arguments)

"""Contract of moe_gate, as data."""

from collections.abc import Callable, Iterator

import torch

from deepinfer.ops.moe_gate.reference import moe_gate
from deepinfer.ops.spec import (
    Argument,
    Arguments,
    Backend,
    Case,
    OpSpec,
    Tolerance,
    Work,
    size_of,
)


def _make(
    tokens: int, experts: int, selected: int, normalise: bool = True, strided: bool = False
) -> Callable[[torch.Generator, torch.device], Arguments]:
    """Logits and biases on coarse grids: scores are equal, or far apart as floats go."""

    def make(generator: torch.Generator, device: torch.device) -> Arguments:
        logits = torch.randint(-24, 25, (tokens, experts), generator=generator) / 8.0
        bias = torch.randint(-1, 2, (experts,), generator=generator) / 4.0
        logits = logits.to(device)
        if strided:
            logits = torch.cat([logits, logits + 1], dim=1)[:, :experts]
        return {
            "logits": logits,
            "bias": bias.to(device),
            "selected": selected,
            "scaling": 1.5,
            "normalise": normalise,
        }

    return make


def _values(generator: torch.Generator, device: torch.device) -> Arguments:
    """Extremes, ties, infinities, and numbers that are none."""
    nan, inf = float("nan"), float("inf")
    rows = [
        [0.0, -0.0, 0.0, -0.0, 0.0, 0.0, -0.0, 0.0],
        [nan, -60.0, nan, -61.0, -62.0, -63.0, nan, -64.0],
        [-1e30, -80.0, -70.0, -60.0, -30.0, -17.0, -10.0, -5.0],
        [3e4, 30.0, 20.5, 19.5, 10.0, 1e30, 1.0, 25.0],
        [-inf, 1.0, 2.0, -inf, 3.0, -inf, -inf, -inf],
    ]
    logits = torch.tensor(rows).to(device)
    bias = torch.zeros(8, device=device)
    return {"logits": logits, "bias": bias, "selected": 4, "scaling": 2.5, "normalise": True}


def _cases() -> Iterator[Case]:
    yield Case("5 tokens", "tiny", _make(5, 8, 2))
    yield Case("3 of 100", "tiny", _make(3, 100, 6))
    yield Case("no tokens", "hostile", _make(0, 8, 2))
    yield Case("one expert", "hostile", _make(2, 5, 1))
    yield Case("as they are", "hostile", _make(2, 16, 16, normalise=False))
    yield Case("values", "hostile", _values)
    yield Case("strided", "hostile", _make(3, 12, 3, strided=True))
    for tokens in (1, 17, 128, 4096):
        yield Case(f"{tokens} of 384", "released", _make(tokens, 384, 6))
    yield Case("60 of 128", "released", _make(60, 128, 3))


def _work(arguments: Arguments) -> Work:
    logits, selected = arguments["logits"], int(arguments["selected"])
    tokens = logits.numel() // logits.shape[-1]
    moved = size_of(logits, arguments["bias"]) + tokens * selected * 12
    return Work(bytes=moved, flops=10 * logits.numel())


SPECS: tuple[OpSpec, ...] = (
    OpSpec(
        name="moe_gate",
        summary="experts of each token and their route weights",
        arguments=(
            Argument("logits", "T E", "fp32", "in", "router logits"),
            Argument("bias", "E", "fp32", "in", "added to the scores for the choice alone"),
            Argument("ids", "T K", "int64", "out", "experts, the preferred first"),
            Argument("weights", "T K", "fp32", "out", "route weights"),
        ),
        reference=moe_gate,
        backends=(
            Backend("triton", "deepinfer.ops.moe_gate.triton:moe_gate"),
            Backend("tilelang", "deepinfer.ops.moe_gate.tilelang:moe_gate", narrow=True),
        ),
        cases=_cases,
        work=_work,
        # Both sides round exponentials, logarithms and roots their own way.
        tolerance={"weights": Tolerance("close", limit=4e-6)},
        stands_for=("tile_kernels.moe.moe_topk_gate",),
    ),
)

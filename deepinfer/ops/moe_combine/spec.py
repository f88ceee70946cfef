"""Contract of moe_combine, as data."""

from collections.abc import Callable, Iterator

import torch

from deepinfer.ops.moe_combine.reference import moe_combine
from deepinfer.ops.spec import Argument, Arguments, Backend, Case, OpSpec, Work, size_of


def _make(
    tokens: int,
    width: int,
    selected: int,
    shared: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    strided: bool = False,
) -> Callable[[torch.Generator, torch.device], Arguments]:
    """Values of many sizes, zeros of both signs and columns that cancel."""

    def make(generator: torch.Generator, device: torch.device) -> Arguments:
        y = torch.randn(tokens * selected, width, generator=generator)
        y *= torch.exp2(torch.randint(-100, 15, (1, width), generator=generator).float())
        y[:, ::7] = -0.0
        if selected > 1:
            y[1::selected, 1::5] = -y[::selected, 1::5]
        row = torch.randn(tokens, width, generator=generator)
        row[:, ::7] = -0.0
        y, row = y.to(dtype).to(device), row.to(dtype).to(device)
        if strided:
            y = torch.cat([y, y], dim=1)[:, :width]
            row = row.T.contiguous().T
        return {"y": y, "selected": selected, "shared": row if shared else None}

    return make


def _cases() -> Iterator[Case]:
    yield Case("3x96", "tiny", _make(3, 96, 2))
    yield Case("3x96-fp32", "tiny", _make(3, 96, 6, dtype=torch.float32))
    yield Case("0x64", "hostile", _make(0, 64, 6))
    yield Case("1x1 of 1", "hostile", _make(1, 1, 1, shared=False))
    yield Case("2x1056", "hostile", _make(2, 1056, 6, shared=False))
    yield Case("strided", "hostile", _make(3, 64, 3, strided=True))
    for tokens in (1, 17, 128, 4096):
        yield Case(f"{tokens}x5120", "released", _make(tokens, 5120, 6))
    yield Case("60x5120 of 3", "released", _make(60, 5120, 3))


def _work(arguments: Arguments) -> Work:
    y, shared = arguments["y"], arguments["shared"]
    written = y.numel() // int(arguments["selected"]) * y.element_size()
    return Work(bytes=size_of(y, shared) + written, flops=y.numel())


SPECS: tuple[OpSpec, ...] = (
    OpSpec(
        name="moe_combine",
        summary="sum of a token's expert rows and of its shared expert's",
        arguments=(
            Argument("y", "T*K H", "bf16 | fp32", "in", "rows of the routed experts"),
            Argument("shared", "T H", "as y", "in", "rows of the shared expert, or none"),
            Argument("out", "T H", "as y", "out", "sums, added in float32, rounded once"),
        ),
        reference=moe_combine,
        backends=(Backend("triton", "deepinfer.ops.moe_combine.triton:moe_combine"),),
        cases=_cases,
        work=_work,
        stands_for=("deep_gemm.fp8_fp4_mega_moe",),
    ),
)

"""Contract of linear, as data."""

from collections.abc import Callable, Iterator

import torch

from deepinfer.ops.linear.reference import linear
from deepinfer.ops.spec import Argument, Arguments, Backend, Case, OpSpec, Tolerance, Work, size_of


def random_operands(rows: int, outputs: int, columns: int) -> Callable[..., Arguments]:
    """Cases of bfloat16 operands, drawn on the device: a head takes a CPU ten seconds."""

    def make(generator: torch.Generator, device: torch.device) -> Arguments:
        there = torch.Generator(device).manual_seed(generator.initial_seed())
        x = torch.randn(rows, columns, generator=there, device=device)
        weight = torch.randn(outputs, columns, generator=there, device=device) * 0.02
        return {"x": x.bfloat16(), "weight": weight.bfloat16()}

    return make


def _strided(generator: torch.Generator, device: torch.device) -> Arguments:
    x = torch.randn(7, 3, 160, generator=generator).bfloat16().to(device)
    weight = torch.randn(70, 200, generator=generator).bfloat16().to(device)
    return {"x": x[:, 1, 16:144], "weight": weight[::2, 3:131]}


def _transposed(generator: torch.Generator, device: torch.device) -> Arguments:
    x = torch.randn(64, 5, generator=generator).bfloat16().to(device)
    weight = torch.randn(64, 40, generator=generator).bfloat16().to(device)
    return {"x": x.t(), "weight": weight.t()}


def _poisoned(generator: torch.Generator, device: torch.device) -> Arguments:
    """Rows of NaN, infinity, zeros of both signs, 1e-30 and 3e4."""
    rows = torch.tensor([1.0, float("nan"), float("inf"), 0.0, -0.0, 1e-30, 3e4])
    x = rows[:, None] * (torch.rand(7, 96, generator=generator) + 0.5)
    weight = torch.rand(33, 96, generator=generator) + 0.5
    return {"x": x.bfloat16().to(device), "weight": weight.bfloat16().to(device)}


def hostile_cases() -> Iterator[Case]:
    """Tiny and hostile cases of products of bfloat16 operands."""
    yield Case("5x96x128", "tiny", random_operands(5, 96, 128))
    yield Case("20x70x576", "tiny", random_operands(20, 70, 576))
    yield Case("0x32x64", "hostile", random_operands(0, 32, 64))
    yield Case("1x1x1", "hostile", random_operands(1, 1, 1))
    yield Case("3x17x100", "hostile", random_operands(3, 17, 100))
    yield Case("67x129x264", "hostile", random_operands(67, 129, 264))
    yield Case("strided", "hostile", _strided)
    yield Case("transposed", "hostile", _transposed)
    yield Case("poisoned", "hostile", _poisoned)


def _cases() -> Iterator[Case]:
    yield from hostile_cases()
    for name, outputs, columns in (
        ("compressor", 512, 5120),
        ("index-weights", 64, 5120),
        ("index-keys", 128, 512),
    ):
        for rows in (1, 16, 64, 512, 4096):
            yield Case(f"{rows}-{name}", "released", random_operands(rows, outputs, columns))


def work_of(arguments: Arguments, size: int) -> Work:
    """Read operands once, write results of `size` bytes."""
    x, weight = arguments["x"], arguments["weight"]
    results = x.shape[0] * weight.shape[0]
    return Work(bytes=size_of(x, weight) + results * size, flops=2 * results * x.shape[1])


SPECS: tuple[OpSpec, ...] = (
    OpSpec(
        name="linear",
        summary="x W^T in bfloat16, sums in float32, one rounding",
        arguments=(
            Argument("x", "T in", "bf16", "in", "rows, which may be strided"),
            Argument("weight", "out in", "bf16", "in", "matrix"),
            Argument("y", "T out", "as x", "out", "x W^T"),
        ),
        reference=linear,
        backends=(
            Backend("triton", "deepinfer.ops.linear.triton:linear"),
            Backend("torch", "deepinfer.ops.linear.cublas:linear", batch_invariant=False),
        ),
        cases=_cases,
        work=lambda arguments: work_of(arguments, 2),
        tolerance={"y": Tolerance("rounding", limit=2.0**-7, share=0.02)},
        stands_for=("deep_gemm.bf16_gemm_nt",),
    ),
)

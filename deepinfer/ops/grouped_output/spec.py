"""Contract of grouped_output, as data."""

from collections.abc import Callable, Iterator

import torch

from deepinfer.ops.grouped_output.reference import grouped_output
from deepinfer.ops.spec import Argument, Arguments, Backend, Case, OpSpec, Tolerance, Work, size_of


def _random(rows: int, groups: int, outputs: int, columns: int) -> Callable[..., Arguments]:
    def make(generator: torch.Generator, device: torch.device) -> Arguments:
        x = torch.randn(rows, groups, columns, generator=generator)
        weight = torch.randn(groups * outputs, columns, generator=generator) * 0.02
        return {"x": x.bfloat16().to(device), "weight": weight.bfloat16().to(device)}

    return make


def _strided(generator: torch.Generator, device: torch.device) -> Arguments:
    """Groups lie outside of rows, and channels are a part of wider ones."""
    given = _random(3, 5, 40, 200)(generator, device)
    x, weight = given["x"].transpose(0, 1), given["weight"]
    return {"x": x[:, :, 16:144], "weight": weight[:120, 3:131]}


def _transposed(generator: torch.Generator, device: torch.device) -> Arguments:
    """Neighbours in memory are groups, and outputs of the matrices."""
    x = torch.randn(64, 4, 5, generator=generator).bfloat16().to(device)
    weight = torch.randn(64, 40, generator=generator).bfloat16().to(device)
    return {"x": x.transpose(0, 2), "weight": weight.t()}


def _far(generator: torch.Generator, device: torch.device) -> Arguments:
    """The last group lies past 2^31 bytes."""
    given = _random(5, 3, 20, 64)(generator, device)
    step = 2**29 + 64
    memory = torch.empty(2 * step + 5 * 64, dtype=torch.bfloat16, device=device)
    x = memory.as_strided((5, 3, 64), (64, step, 1))
    x.copy_(given["x"])
    return {**given, "x": x}


def _poisoned(generator: torch.Generator, device: torch.device) -> Arguments:
    """Groups of NaN, infinity, zeros of both signs, 1e-30 and 3e4 in rows of their own."""
    values = torch.tensor([1.0, float("nan"), float("inf"), 0.0, -0.0, 1e-30, 3e4])
    x = torch.rand(7, 2, 96, generator=generator) + 0.5
    x[:, 0] *= values[:, None]
    weight = torch.rand(66, 96, generator=generator) + 0.5
    return {"x": x.bfloat16().to(device), "weight": weight.bfloat16().to(device)}


def cases() -> Iterator[Case]:
    """Tiny, hostile and released cases."""
    yield Case("5x2x32x64", "tiny", _random(5, 2, 32, 64))
    yield Case("20x3x64x320", "tiny", _random(20, 3, 64, 320))
    yield Case("0x2x32x64", "hostile", _random(0, 2, 32, 64))
    yield Case("1x1x1x1", "hostile", _random(1, 1, 1, 1))
    yield Case("3x5x17x100", "hostile", _random(3, 5, 17, 100))
    yield Case("67x2x72x136", "hostile", _random(67, 2, 72, 136))
    yield Case("strided", "hostile", _strided)
    yield Case("transposed", "hostile", _transposed)
    yield Case("past-2GiB", "hostile", _far)
    yield Case("poisoned", "hostile", _poisoned)
    for rows in (1, 16, 64, 512, 4096):
        yield Case(f"{rows}-wo_a", "released", _random(rows, 8, 1024, 4096))


def work(arguments: Arguments) -> Work:
    """Read operands once, write the result."""
    x, weight = arguments["x"], arguments["weight"]
    written = x.shape[0] * weight.shape[0] * x.element_size()
    return Work(bytes=size_of(x, weight) + written, flops=2 * x.shape[0] * weight.numel())


SPECS: tuple[OpSpec, ...] = (
    OpSpec(
        name="grouped_output",
        summary="x W^T of groups of channels with a matrix each, side by side",
        arguments=(
            Argument("x", "T G in", "bf16", "in", "rows, which may be strided"),
            Argument("weight", "G*O in", "bf16", "in", "matrices, group 0 first"),
            Argument("y", "T G*O", "as x", "out", "x[g] W[g]^T, rounded once"),
        ),
        reference=grouped_output,
        backends=(
            Backend("triton", "deepinfer.ops.grouped_output.triton:grouped_output"),
            Backend(
                "torch", "deepinfer.ops.grouped_output.cublas:grouped_output", batch_invariant=False
            ),
        ),
        cases=cases,
        work=work,
        tolerance={"y": Tolerance("rounding", limit=2.0**-7, share=0.02)},
        stands_for=("deep_gemm.fp8_einsum",),
    ),
)

"""Contracts of act_quant, fp8_quantise, fp4_quantise and mxfp4_quantise, as data."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from deepinfer.numerics import FP4_GROUP, FP8_GROUP, MXFP4_GROUP
from deepinfer.ops.act_quant.reference import (
    act_quant,
    fp4_quantise,
    fp8_quantise,
    mxfp4_quantise,
)
from deepinfer.ops.spec import Argument, Arguments, Backend, Case, OpSpec, Work

_INPUT = Argument("x", "T C", "bf16 | fp32", "in", "activations, finite")


def draw(
    generator: torch.Generator,
    rows: int,
    width: int,
    dtype: torch.dtype = torch.bfloat16,
    spread: int = 4,
) -> Tensor:
    """Normal values times 2^k, k from -spread to spread: groups of many sizes."""
    x = torch.randn(rows, width, generator=generator)
    power = torch.randint(-spread, spread + 1, (rows, 1), generator=generator)
    return (x * torch.exp2(power.float())).to(dtype)


def _random(
    rows: int, width: int, dtype: torch.dtype = torch.bfloat16, spread: int = 4
) -> Callable[[torch.Generator, torch.device], Arguments]:
    def make(generator: torch.Generator, device: torch.device) -> Arguments:
        return {"x": draw(generator, rows, width, dtype, spread).to(device)}

    return make


def _ties(generator: torch.Generator, device: torch.device) -> Arguments:
    """Midpoints of both grids at scale 1, and groups of one value."""
    fp8 = torch.tensor([448.0, 1.0625, 1.1875, 17.0, 19.0, 2.0**-10, 3 * 2.0**-10, -1.0625])
    fp4 = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    rows = [fp8.repeat(8), -fp8.repeat(8), fp4.repeat(8), -fp4.repeat(8), torch.full((64,), 3.0)]
    return {"x": torch.stack(rows).to(device)}


def _magnitudes(generator: torch.Generator, device: torch.device) -> Arguments:
    """1e-30 to 3e4 by rows and within rows, exact zeros of both signs."""
    powers = torch.logspace(-30, 4.477, 64)
    signs = torch.randint(0, 2, (6, 64), generator=generator) * 2.0 - 1.0
    rows = powers[torch.stack([torch.randperm(64, generator=generator) for _ in range(6)])] * signs
    rows[1] = 0.0
    rows[2] = -0.0
    rows[3] *= 1e-8
    rows[4, ::2] = 0.0
    return {"x": rows.to(device)}


def _strided(generator: torch.Generator, device: torch.device) -> Arguments:
    wide = draw(generator, 5, 192).to(device)
    return {"x": wide[:, 32:160]}


def _above_power(generator: torch.Generator, device: torch.device) -> Arguments:
    """Largest magnitudes at, just below and just above the points where the scale changes."""
    edges = torch.tensor([448.0, 6.0, 2688.0, 1.0, 0.01171875]).repeat_interleave(3)
    edges[1::3] = torch.nextafter(edges[1::3], torch.tensor(torch.inf))
    edges[2::3] = torch.nextafter(edges[2::3], torch.tensor(0.0))
    x = torch.rand(15, 64, generator=generator) * 2.0 - 1.0
    x[:, ::16] = 1.0
    return {"x": (x * edges.unsqueeze(-1)).to(device)}


def _cases(width: int) -> Callable[[], Iterator[Case]]:
    def cases() -> Iterator[Case]:
        yield Case("5x64", "tiny", _random(5, 64))
        yield Case("5x64-fp32", "tiny", _random(5, 64, torch.float32))
        yield Case("0x128", "hostile", _random(0, 128))
        yield Case("1x32", "hostile", _random(1, 32))
        yield Case("3x1056", "hostile", _random(3, 1056))
        yield Case("ties", "hostile", _ties)
        yield Case("magnitudes", "hostile", _magnitudes)
        yield Case("scale-edges", "hostile", _above_power)
        yield Case("strided", "hostile", _strided)
        for rows in (1, 17, 256, 4096):
            yield Case(f"{rows}x{width}", "released", _random(rows, width, spread=12))
        yield Case(f"4096x{width}-fp32", "released", _random(4096, width, torch.float32, 20))

    return cases


def _work(group: int, code_bits: int, scale_bytes: int) -> Callable[[Arguments], Work]:
    def work(arguments: Arguments) -> Work:
        x: Tensor = arguments["x"]
        count = x.numel()
        written = count * code_bits // 8 + count // group * scale_bytes
        return Work(bytes=count * x.element_size() + written, flops=4 * count)

    return work


def _work_values(arguments: Arguments) -> Work:
    x: Tensor = arguments["x"]
    return Work(bytes=2 * x.numel() * x.element_size(), flops=4 * x.numel())


def _backend(name: str) -> tuple[Backend, ...]:
    folder = "deepinfer.ops.act_quant"
    return (
        Backend("triton", f"{folder}.triton:{name}"),
        Backend("tilelang", f"{folder}.tilelang:{name}", narrow=True),
    )


SPECS: tuple[OpSpec, ...] = (
    OpSpec(
        name="act_quant",
        summary="values as an FP8 matrix product sees them, groups of 32 channels",
        arguments=(_INPUT, Argument("y", "T C", "as x", "out", "x rounded to FP8 and back")),
        reference=act_quant,
        backends=_backend("act_quant"),
        cases=_cases(5120),
        work=_work_values,
        stands_for=("quant", "tile_kernels.quant.per_token_cast"),
    ),
    OpSpec(
        name="fp8_quantise",
        summary="e4m3 codes and power-of-two scales of groups of 32 channels",
        arguments=(
            _INPUT,
            Argument("codes", "T C", "uint8", "out", "e4m3"),
            Argument("scales", "T C/32", "fp32", "out", "powers of two"),
        ),
        reference=fp8_quantise,
        backends=_backend("fp8_quantise"),
        cases=_cases(5120),
        work=_work(FP8_GROUP, 8, 4),
        stands_for=("quant", "tile_kernels.quant.per_token_cast"),
    ),
    OpSpec(
        name="fp4_quantise",
        summary="e2m1 pairs and e4m3 scales of groups of 16 channels",
        arguments=(
            _INPUT,
            Argument("packed", "T C/2", "uint8", "out", "e2m1, even channel low"),
            Argument("scales", "T C/16", "uint8", "out", "e4m3"),
        ),
        reference=fp4_quantise,
        backends=_backend("fp4_quantise"),
        cases=_cases(512),
        work=_work(FP4_GROUP, 4, 1),
        stands_for=("quant",),
    ),
    OpSpec(
        name="mxfp4_quantise",
        summary="e2m1 pairs and power-of-two scales of groups of 32 channels",
        arguments=(
            _INPUT,
            Argument("packed", "T C/2", "uint8", "out", "e2m1, even channel low"),
            Argument("scales", "T C/32", "uint8", "out", "e8m0"),
        ),
        reference=mxfp4_quantise,
        backends=_backend("mxfp4_quantise"),
        cases=_cases(4096),
        work=_work(MXFP4_GROUP, 4, 1),
        stands_for=("quant", "tile_kernels.quant.per_token_cast"),
    ),
)

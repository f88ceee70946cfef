"""Contracts of swiglu and swiglu_quantise, as data."""

from collections.abc import Callable, Iterator

import torch

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
from deepinfer.ops.swiglu.reference import swiglu, swiglu_quantise


def _make(
    rows: int,
    width: int,
    dtype: torch.dtype = torch.bfloat16,
    limit: float = 10.0,
    weighted: bool = False,
    strided: bool = False,
) -> Callable[[torch.Generator, torch.device], Arguments]:
    """Normal values of several sizes, with zeros, and magnitudes from 1e-30 to 3e4."""

    def make(generator: torch.Generator, device: torch.device) -> Arguments:
        both = torch.randn(rows, 2 * width, generator=generator) * 3.0
        both[:, ::11] = -0.0
        both[:, 1::13] *= 1e-30
        both[:, 2::17] *= 1e4
        gate, up = both.to(dtype).to(device).chunk(2, dim=-1)
        if not strided:
            gate, up = gate.contiguous(), up.contiguous()
        weight = torch.rand(rows, generator=generator).to(device) if weighted else None
        return {"gate": gate, "up": up, "limit": limit, "weight": weight}

    return make


def _cases() -> Iterator[Case]:
    yield Case("5x64", "tiny", _make(5, 64))
    yield Case("5x96-fp32", "tiny", _make(5, 96, torch.float32, weighted=True))
    yield Case("0x64", "hostile", _make(0, 64))
    yield Case("1x32 free", "hostile", _make(1, 32, limit=0.0))
    yield Case("strided", "hostile", _make(3, 1056, weighted=True, strided=True))
    for rows in (1, 17, 128, 4096):
        yield Case(f"{rows}x2304", "released", _make(rows, 2304))
    yield Case("4096x2304-fp32", "released", _make(4096, 2304, torch.float32, weighted=True))


def _work(quantised: bool) -> Callable[[Arguments], Work]:
    def work(arguments: Arguments) -> Work:
        gate = arguments["gate"]
        count = gate.numel()
        written = count + count // 8 if quantised else count * gate.element_size()
        return Work(bytes=2 * size_of(gate) + written, flops=8 * count)

    return work


_INPUTS = (
    Argument("gate", "T I", "bf16 | fp32", "in", "gate projection"),
    Argument("up", "T I", "as gate", "in", "up projection"),
    Argument("weight", "T", "fp32", "in", "route weights, or none"),
)

SPECS: tuple[OpSpec, ...] = (
    OpSpec(
        name="swiglu",
        summary="clamped SwiGLU, times a route weight",
        arguments=(*_INPUTS, Argument("hidden", "T I", "as gate", "out", "rounded once")),
        reference=swiglu,
        backends=(
            Backend("triton", "deepinfer.ops.swiglu.triton:swiglu"),
            Backend("tilelang", "deepinfer.ops.swiglu.tilelang:swiglu", narrow=True),
        ),
        cases=_cases,
        work=_work(False),
        # float32 results differ in their last bits, and few bfloat16 ones lie next to a tie.
        tolerance={"hidden": Tolerance("close", limit=2.0**-8)},
        stands_for=("tile_kernels.quant.swiglu_forward",),
    ),
    OpSpec(
        name="swiglu_quantise",
        summary="clamped SwiGLU, as an FP8 matrix product takes it",
        arguments=(
            *_INPUTS,
            Argument("codes", "T I", "e4m3", "out", "float8_e4m3fn"),
            Argument("scales", "T I/32", "fp32", "out", "powers of two"),
        ),
        reference=swiglu_quantise,
        backends=(
            Backend("triton", "deepinfer.ops.swiglu.triton:swiglu_quantise"),
            Backend("tilelang", "deepinfer.ops.swiglu.tilelang:swiglu_quantise", narrow=True),
        ),
        cases=_cases,
        work=_work(True),
        # One value next to a tie moves a code by a step, or the scale of its group by a factor.
        tolerance={
            "codes": Tolerance("rounding", limit=0.75, share=1e-3),
            "scales": Tolerance("rounding", limit=1.0, share=1e-3),
        },
        stands_for=("tile_kernels.quant.swiglu_forward_and_per_token_cast",),
    ),
)

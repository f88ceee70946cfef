"""Contracts of fp8_linear and fp8_widen, as data."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from deepinfer.numerics import FP8_GROUP, encode_e4m3
from deepinfer.ops.act_quant.reference import fp8_quantise
from deepinfer.ops.fp8_linear.reference import fp8_linear, fp8_widen, fp8_widen_weight
from deepinfer.ops.spec import Argument, Arguments, Backend, Case, OpSpec, Tolerance, Work, size_of

# Outputs and channels of the matrices of a released model.
MATRICES = {
    "wq_a": (1280, 5120),
    "wq_b": (32768, 1280),
    "wkv": (512, 5120),
    "wo_b": (5120, 8192),
    "shared-w1": (2304, 5120),
    "shared-w2": (5120, 2304),
    "index-wq_b": (4096, 1280),
}
# Tensor cores add FP8 products with about 14 bits: sums differ in the last places of float32, and
# now and then in the last place of bfloat16.
TOLERANCE = Tolerance("rounding", limit=2.0**-7, share=0.2)


def draw_activations(
    generator: torch.Generator, *shape: int, spread: int = 2
) -> tuple[Tensor, ...]:
    """Codes and scales per 32 channels of normal values, groups of sizes 2^-spread to 2^spread."""
    x = torch.randn(*shape, generator=generator).unflatten(-1, (-1, FP8_GROUP))
    power = torch.randint(-spread, spread + 1, (*x.shape[:-1], 1), generator=generator)
    return fp8_quantise((x * torch.exp2(power.float())).flatten(-2))


def draw_weight(
    generator: torch.Generator, outputs: int, columns: int, wide: bool, spread: int = 2
) -> tuple[Tensor, Tensor]:
    """Codes of normal values of at most 448, scales from 2^(-9 - spread) to 2^(-9 + spread).

    With `wide` the same matrix in the form of fp8_widen_weight.
    """
    codes = encode_e4m3((torch.randn(outputs, columns, generator=generator) * 110).clamp(-448, 448))
    size = (-(-outputs // FP8_GROUP), columns // FP8_GROUP)
    scales = torch.randint(118 - spread, 119 + spread, size, generator=generator, dtype=torch.uint8)
    return fp8_widen_weight(codes, scales)[:2] if wide else (codes, scales)


def arguments_of(*tensors: Tensor, device: torch.device) -> Arguments:
    """Codes, scales, weight and its scales by name."""
    names = ("codes", "scales", "weight", "weight_scales")
    return {n: t.to(device) for n, t in zip(names, tensors, strict=True)}


def _random(
    rows: int, outputs: int, columns: int, wide: bool, spread: int = 2
) -> Callable[..., Arguments]:
    def make(generator: torch.Generator, device: torch.device) -> Arguments:
        x = draw_activations(generator, rows, columns, spread=spread)
        w = draw_weight(generator, outputs, columns, wide, spread)
        return arguments_of(*x, *w, device=device)

    return make


def _all_wide(generator: torch.Generator, device: torch.device) -> Arguments:
    x = fp8_widen(*draw_activations(generator, 9, 256))
    return arguments_of(*x, *draw_weight(generator, 70, 256, True), device=device)


def _mixed(generator: torch.Generator, device: torch.device) -> Arguments:
    """Activations per 128, the last group of which is short, and a weight per 32."""
    x = fp8_widen(*draw_activations(generator, 3, 160))
    return arguments_of(*x, *draw_weight(generator, 33, 160, False), device=device)


def _strided(generator: torch.Generator, device: torch.device) -> Arguments:
    codes, scales = draw_activations(generator, 10, 384)
    weight, weight_scales = draw_weight(generator, 80, 384, True)
    given = arguments_of(codes, scales, weight, weight_scales, device=device)
    return {
        "codes": given["codes"][::2, 128:],
        "scales": given["scales"][::2, 4:],
        "weight": given["weight"][32:64, 128:],
        "weight_scales": given["weight_scales"][1:2, 1:],
    }


def _far(generator: torch.Generator, device: torch.device) -> Arguments:
    """The last row of activations lies past 2^31 bytes."""
    given = _random(3, 40, 128, True)(generator, device)
    step = 2**30 + 64
    memory = torch.empty(2 * step + 128, dtype=torch.uint8, device=device)
    codes = memory.as_strided((3, 128), (step, 1))
    codes.copy_(given["codes"])
    return {**given, "codes": codes}


def _poisoned(generator: torch.Generator, device: torch.device) -> Arguments:
    """Rows of NaN, of zeros of both signs and of subnormal codes; a matrix with blocks of zeros."""
    codes, scales = draw_activations(generator, 6, 256)
    weight, weight_scales = draw_weight(generator, 40, 256, True)
    codes[1] = 0x7F
    codes[2] = 0
    codes[3] = 0x80
    codes[4] = torch.randint(0, 8, (256,), generator=generator, dtype=torch.uint8)
    codes[5] = 0x7E
    weight[:32, :128] = 0
    weight_scales[0, 0] = 1
    return arguments_of(codes, scales, weight, weight_scales, device=device)


def _extreme(wide: bool) -> Callable[..., Arguments]:
    def make(generator: torch.Generator, device: torch.device) -> Arguments:
        """Scales of 2^-100 to 2^100 on one side and the inverse on the other."""
        codes, scales = draw_activations(generator, 4, 256, spread=0)
        weight, weight_scales = draw_weight(generator, 64, 256, wide, 0)
        half = scales.shape[1] // 2
        scales[:, :half] *= 2.0**100
        scales[:, half:] *= 2.0**-100
        half = weight_scales.shape[1] // 2
        weight_scales[:, :half] -= 100
        weight_scales[:, half:] += 100
        return arguments_of(codes, scales, weight, weight_scales, device=device)

    return make


def cases() -> Iterator[Case]:
    """Tiny, hostile and released cases."""
    yield Case("5x96x64", "tiny", _random(5, 96, 64, False))
    yield Case("5x96x256-wide", "tiny", _random(5, 96, 256, True))
    yield Case("9x70x256-all-wide", "tiny", _all_wide)
    yield Case("0x64x128-wide", "hostile", _random(0, 64, 128, True))
    yield Case("1x1x32", "hostile", _random(1, 1, 32, False))
    yield Case("1x1x128-wide", "hostile", _random(1, 1, 128, True))
    yield Case("3x33x160-mixed", "hostile", _mixed)
    yield Case("17x65x96", "hostile", _random(17, 65, 96, False))
    yield Case("33x131x1280-wide", "hostile", _random(33, 131, 1280, True))
    yield Case("67x40x640-wide-spread", "hostile", _random(67, 40, 640, True, 8))
    yield Case("strided-wide", "hostile", _strided)
    yield Case("past-2GiB-wide", "hostile", _far)
    yield Case("poisoned-wide", "hostile", _poisoned)
    yield Case("extreme", "hostile", _extreme(False))
    yield Case("extreme-wide", "hostile", _extreme(True))
    for name, (outputs, columns) in MATRICES.items():
        for rows in (1, 16, 64, 512, 4096):
            yield Case(f"{rows}-{name}-wide", "released", _random(rows, outputs, columns, True))
    for rows in (1, 64, 4096):
        yield Case(f"{rows}-wq_b", "released", _random(rows, 32768, 1280, False))


def work(arguments: Arguments) -> Work:
    """Read operands and scales once, write the result."""
    codes, weight = arguments["codes"], arguments["weight"]
    rows, outputs = codes.shape[0], weight.shape[0]
    read = size_of(codes, arguments["scales"], weight, arguments["weight_scales"])
    written = rows * outputs * arguments.get("dtype", torch.bfloat16).itemsize
    return Work(bytes=read + written, flops=2 * weight.numel() * rows)


def _widen_random(rows: int, columns: int, spread: int) -> Callable[..., Arguments]:
    def make(generator: torch.Generator, device: torch.device) -> Arguments:
        codes, scales = draw_activations(generator, rows, columns, spread=spread)
        return {"codes": codes.to(device), "scales": scales.to(device)}

    return make


def _widen_every_code(generator: torch.Generator, device: torch.device) -> Arguments:
    """Every code but NaN under factors 2^0 to 2^-20, rows of scale 0, extreme scales."""
    every = torch.arange(256, dtype=torch.uint8)
    every = every[(every & 0x7F) != 0x7F].repeat(21)
    codes = torch.nn.functional.pad(every, (0, -len(every) % 32)).unflatten(0, (-1, 32))
    rows = len(codes)
    codes = torch.cat([torch.full((rows, 32), 0x7E, dtype=torch.uint8), codes, codes], dim=1)
    scales = torch.ones(rows, 3)
    scales[:, 1] = torch.exp2(-torch.arange(rows).div(8, rounding_mode="floor").float())
    scales[:, 2] = 0.0
    scales[1] *= 2.0**-100
    scales[2] *= 2.0**100
    scales[3] = 0.0
    return {"codes": codes.to(device), "scales": scales.to(device)}


def _widen_strided(generator: torch.Generator, device: torch.device) -> Arguments:
    codes, scales = (t.to(device) for t in draw_activations(generator, 8, 512))
    return {"codes": codes[::2, 32:288], "scales": scales[::2, 1:9]}


def widen_cases() -> Iterator[Case]:
    """Tiny, hostile and released cases."""
    yield Case("5x256", "tiny", _widen_random(5, 256, 2))
    yield Case("0x128", "hostile", _widen_random(0, 128, 2))
    yield Case("1x32", "hostile", _widen_random(1, 32, 2))
    yield Case("7x416", "hostile", _widen_random(7, 416, 12))
    yield Case("every-code", "hostile", _widen_every_code)
    yield Case("strided", "hostile", _widen_strided)
    for columns in (1280, 5120, 8192):
        for rows in (1, 64, 4096):
            yield Case(f"{rows}x{columns}", "released", _widen_random(rows, columns, 2))


def _widen_work(arguments: Arguments) -> Work:
    codes, scales = arguments["codes"], arguments["scales"]
    return Work(bytes=2 * size_of(codes) + size_of(scales) + size_of(scales) // 4)


_SCALES = "ceil(out/32) in/32 | ceil(out/32) ceil(in/128)"
PRODUCT_ARGUMENTS = (
    Argument("weight", "out in", "u8 e4m3", "in", "matrix"),
    Argument("weight_scales", _SCALES, "u8 e8m0", "in", "one per 32 rows and 32 or 128 columns"),
)

SPECS: tuple[OpSpec, ...] = (
    OpSpec(
        name="fp8_linear",
        summary="FP8 x times FP8 matrix, scales per 32 or 128 channels, sums in float32",
        arguments=(
            Argument("codes", "T in", "u8 e4m3", "in", "activations"),
            Argument("scales", "T in/32 | T ceil(in/128)", "fp32", "in", "powers of two"),
            *PRODUCT_ARGUMENTS,
            Argument("y", "T out", "bf16 | fp32", "out", "x W^T, rounded once"),
        ),
        reference=fp8_linear,
        backends=(
            Backend("triton", "deepinfer.ops.fp8_linear.triton:fp8_linear"),
            Backend("triton_exact", "deepinfer.ops.fp8_linear.triton:fp8_linear_exact"),
        ),
        cases=cases,
        work=work,
        tolerance={"y": TOLERANCE},
        stands_for=("deep_gemm.fp8_fp4_gemm_nt",),
    ),
    OpSpec(
        name="fp8_widen",
        summary="FP8 activations from one scale per 32 channels to one per 128",
        arguments=(
            Argument("codes", "T C", "u8 e4m3", "in", "activations"),
            Argument("scales", "T C/32", "fp32", "in", "powers of two"),
            Argument("wide_codes", "T C", "u8 e4m3", "out", "codes under the largest of four"),
            Argument("wide_scales", "T ceil(C/128)", "fp32", "out", "the largest of four scales"),
        ),
        reference=fp8_widen,
        backends=(Backend("triton", "deepinfer.ops.fp8_linear.triton:fp8_widen"),),
        cases=widen_cases,
        work=_widen_work,
        stands_for=("deep_gemm.transform_sf_into_required_layout",),
    ),
)

"""Triton kernels of act_quant, and the device functions that quantise one group per row of a tile.

Knows groups of channels; must not know what a tensor stands for. Groups never cross a program, so
every value depends on its own group alone.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.errors import Unsupported
from deepinfer.kernels import formats
from deepinfer.kernels.launch import INTERPRETED, require_gpu
from deepinfer.kernels.signature import Signature
from deepinfer.numerics import FP4_GROUP, FP8_GROUP, MXFP4_GROUP

# Values and warps of one program.
TILES = {
    "act_quant": (2048, 4),
    "fp8_quantise": (2048, 4),
    "fp4_quantise": (1024, 4),
    "mxfp4_quantise": (2048, 4),
}

_ON_BITS = tl.constexpr(INTERPRETED)


@triton.jit
def reciprocal(scale):
    """1 / scale of powers of two from 2^-126 to 2^126, exactly: a product instead of a division."""
    return (0x7F000000 - scale.to(tl.uint32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def fp8_scale(largest):
    """Power-of-two scale (float32) of a group whose largest magnitude is `largest`."""
    # 448 is 1.75 * 2^8, and no float32 is so little above 1.75 * 2^k that its quotient would round
    # to a power of two: the mantissa alone decides which power is next.
    bits = tl.maximum(largest, 1e-4).to(tl.uint32, bitcast=True)
    return (((bits + 0x1FFFFF) & 0x7F800000) - (8 << 23)).to(tl.float32, bitcast=True)


@triton.jit
def mxfp4_scale(largest):
    """Power-of-two scale (float32) of an MXFP4 group; the floor is 6 * 2^-126."""
    # As in `fp8_scale`: 6 is 1.5 * 2^2.
    bits = tl.maximum(largest, 7.052966104933725e-38).to(tl.uint32, bitcast=True)
    return (((bits + 0x3FFFFF) & 0x7F800000) - (2 << 23)).to(tl.float32, bitcast=True)


@triton.jit
def _divide(x, divisor, inverse):
    """x / divisor of x from 0 on, correctly rounded unless it is subnormal.

    Divisors have at most four significant bits, so that no quotient lies near the middle of two
    numbers; `inverse` is 1 / divisor to within a few units of the last place.
    """
    if _ON_BITS:  # the interpreter's fma rounds twice
        return tl.div_rn(x, divisor)
    quotient = x * inverse
    return tl.fma(tl.fma(-quotient, divisor, x), inverse, quotient)


@triton.jit
def fp4_scale_code(largest):
    """e4m3 byte of the scale of an FP4 group; the floor is 6 * 2^-9, the encoding stops at 448."""
    return formats.encode_e4m3(_divide(tl.maximum(largest, 0.01171875), 6.0, 1.0 / 6.0))


@triton.jit
def _round_steps(x, SMALLEST: tl.constexpr, POWERS: tl.constexpr):
    """float32 `x` in steps of 2^-23 * POWERS of the power of two below it, at least SMALLEST."""
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = tl.abs(x)
    power = tl.maximum(magnitude, SMALLEST).to(tl.uint32, bitcast=True) & 0x7F800000
    # The sum is a multiple of its own last place, which is the step. The product is exact.
    shift = power.to(tl.float32, bitcast=True) * POWERS
    rounded = (magnitude + shift) - shift
    return (rounded.to(tl.uint32, bitcast=True) | (bits & 0x80000000)).to(tl.float32, bitcast=True)


@triton.jit
def round_e4m3(x):
    """float32 `x`, |x| at most 448, rounded to the e4m3 grid without leaving float32."""
    return _round_steps(x, 0.015625, 1048576.0)


@triton.jit
def round_e2m1(x):
    """float32 `x`, |x| at most 6, rounded to the e2m1 grid without leaving float32."""
    return _round_steps(x, 1.0, 4194304.0)


@triton.jit
def round_fp8(x):
    """Groups [n, 32] float32 as FP8 sees them, float32; exact in bfloat16 too."""
    scale = fp8_scale(tl.max(tl.abs(x), axis=1))
    return round_e4m3(x * reciprocal(scale)[:, None]) * scale[:, None]


@triton.jit
def round_mxfp4(x):
    """Groups [n, 32] float32 with MXFP4 rounding, float32; exact in bfloat16 too."""
    scale = mxfp4_scale(tl.max(tl.abs(x), axis=1))
    return round_e2m1(x * reciprocal(scale)[:, None]) * scale[:, None]


@triton.jit
def pack_fp8(x):
    """Groups [n, 32] float32 to e4m3 bytes [n, 32] and scales [n] float32."""
    scale = fp8_scale(tl.max(tl.abs(x), axis=1))
    return formats.encode_e4m3(x * reciprocal(scale)[:, None]), scale


@triton.jit
def pack_fp4(even, odd):
    """Groups of 16 as channel pairs [n, 8] float32 to pair bytes [n, 8] and scale bytes [n]."""
    code = fp4_scale_code(tl.max(tl.maximum(tl.abs(even), tl.abs(odd)), axis=1))
    scale = formats.decode_e4m3(code)[:, None]
    # The scale is no power of two, and code boundaries are hit: this has to be a true division.
    double = scale * 2.0
    inverse = 1.0 / double
    low = tl.minimum(_divide(tl.abs(even), double, inverse), 3.0)
    high = tl.minimum(_divide(tl.abs(odd), double, inverse), 3.0)
    pair = formats.e2m1_code(low, even) | (formats.e2m1_code(high, odd) << 4)
    return pair.to(tl.uint8), code


@triton.jit
def pack_mxfp4(even, odd):
    """Groups of 32 as channel pairs [n, 16] float32 to pair bytes [n, 16] and scale bytes [n]."""
    scale = mxfp4_scale(tl.max(tl.maximum(tl.abs(even), tl.abs(odd)), axis=1))
    inverse = reciprocal(scale)[:, None] * 0.5
    low = formats.e2m1_code(tl.abs(even) * inverse, even)
    high = formats.e2m1_code(tl.abs(odd) * inverse, odd)
    return (low | (high << 4)).to(tl.uint8), formats.encode_e8m0(scale)


@triton.jit
def _load_groups(x, groups, SIZE: tl.constexpr, GROUPS: tl.constexpr):
    """This program's groups [GROUPS, SIZE] float32, their places, and which of them exist."""
    first = tl.program_id(0).to(tl.int64) * GROUPS
    group = tl.arange(0, GROUPS)
    inside = (first + group < groups)[:, None]
    place = group[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    value = tl.load(x + first * SIZE + place, mask=inside, other=0).to(tl.float32)
    return value, first, place, inside


@triton.jit(do_not_specialize=["groups"])
def _act_quant(x, out, groups, GROUPS: tl.constexpr):
    value, first, place, inside = _load_groups(x, groups, 32, GROUPS)
    rounded = round_fp8(value).to(out.dtype.element_ty)  # exact: no rounding here
    tl.store(out + first * 32 + place, rounded, mask=inside)


@triton.jit(do_not_specialize=["groups"])
def _fp8_quantise(x, codes, scales, groups, GROUPS: tl.constexpr):
    value, first, place, inside = _load_groups(x, groups, 32, GROUPS)
    packed, scale = pack_fp8(value)
    tl.store(codes + first * 32 + place, packed, mask=inside)
    group = tl.arange(0, GROUPS)
    tl.store(scales + first + group, scale, mask=first + group < groups)


@triton.jit(do_not_specialize=["groups"])
def _fp4_quantise(x, packed, scales, groups, SIZE: tl.constexpr, GROUPS: tl.constexpr):
    value, first, _, inside = _load_groups(x, groups, SIZE, GROUPS)
    even, odd = tl.split(tl.reshape(value, (GROUPS, SIZE // 2, 2)))
    if SIZE == 16:
        codes, scale = pack_fp4(even, odd)
    else:
        codes, scale = pack_mxfp4(even, odd)
    group = tl.arange(0, GROUPS)
    place = group[:, None] * (SIZE // 2) + tl.arange(0, SIZE // 2)[None, :]
    # A lane stores the four bytes that a load of 16 bytes gave it: for wider stores, which the
    # compiler would prefer, bytes would have to change lanes.
    place = tl.max_contiguous(place, (1, 4))
    tl.store(packed + first * (SIZE // 2) + place, codes, mask=inside)
    tl.store(scales + first + group, scale, mask=first + group < groups)


def require_groups(x: Tensor, size: int) -> None:
    """Refuse tensors that cannot be cut into groups of `size` channels by a kernel.

    Raises:
        Unsupported: no GPU, a dtype that is neither bfloat16 nor float32, or an odd width.
    """
    require_gpu(x)
    if x.dtype not in (torch.bfloat16, torch.float32):
        raise Unsupported(f"{x.dtype}: takes bfloat16 and float32")
    if x.shape[-1] % size:
        raise Unsupported(f"{x.shape[-1]} channels are no multiple of {size}")


def flat_rows(x: Tensor) -> Tensor:
    """`x` [..., C] as [T, C] with adjacent channels; a copy only where strides do not allow it."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(1) == 1 else flat.contiguous()


def _tile(name: str, size: int) -> tuple[int, int]:
    """Groups of `size` channels and warps of one program."""
    values, warps = TILES[name]
    return values // size, warps


def act_quant(x: Tensor) -> Tensor:
    """See the reference. Inputs that are not contiguous are copied first.

    Raises:
        Unsupported: see `require_groups`; a gradient is wanted.
    """
    require_groups(x, FP8_GROUP)
    if x.requires_grad and torch.is_grad_enabled():
        raise Unsupported("has no gradient")
    x = x.contiguous()
    out = torch.empty_like(x)
    groups = x.numel() // FP8_GROUP
    if groups:
        count, warps = _tile("act_quant", FP8_GROUP)
        _act_quant[(triton.cdiv(groups, count),)](x, out, groups, GROUPS=count, num_warps=warps)
    return out


def fp8_quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """See the reference. Inputs that are not contiguous are copied first.

    Raises:
        Unsupported: see `require_groups`.
    """
    require_groups(x, FP8_GROUP)
    x = x.contiguous()
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    shape = (*x.shape[:-1], x.shape[-1] // FP8_GROUP)
    scales = torch.empty(shape, dtype=torch.float32, device=x.device)
    groups = scales.numel()
    if groups:
        count, warps = _tile("fp8_quantise", FP8_GROUP)
        grid = (triton.cdiv(groups, count),)
        _fp8_quantise[grid](x, codes, scales, groups, GROUPS=count, num_warps=warps)
    return codes, scales


def _quantise_fp4(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    require_groups(x, size)
    x = x.contiguous()
    lead, width = x.shape[:-1], x.shape[-1]
    packed = torch.empty((*lead, width // 2), dtype=torch.uint8, device=x.device)
    scales = torch.empty((*lead, width // size), dtype=torch.uint8, device=x.device)
    groups = scales.numel()
    if groups:
        count, warps = _tile("fp4_quantise" if size == FP4_GROUP else "mxfp4_quantise", size)
        grid = (triton.cdiv(groups, count),)
        _fp4_quantise[grid](
            x, packed, scales, groups, SIZE=size, GROUPS=count, num_warps=warps
        )  # fmt: skip
    return packed, scales


def fp4_quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """See the reference. Inputs that are not contiguous are copied first.

    Raises:
        Unsupported: see `require_groups`.
    """
    return _quantise_fp4(x, FP4_GROUP)


def mxfp4_quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """See the reference. Inputs that are not contiguous are copied first.

    Raises:
        Unsupported: see `require_groups`.
    """
    return _quantise_fp4(x, MXFP4_GROUP)


def _signature(
    name: str, kernel: Any, size: int, outputs: dict[str, str], **constants: int
) -> Signature:
    groups, warps = _tile(name, size)
    types = {"x": "*bf16", **outputs, "groups": "i32"}
    constants["GROUPS"] = groups
    return Signature(name, kernel, types, constants, warps, divisible=("groups",))


_FP4 = {"packed": "*u8", "scales": "*u8"}

SIGNATURES: tuple[Signature, ...] = (
    _signature("act_quant", _act_quant, FP8_GROUP, {"out": "*bf16"}),
    _signature("fp8_quantise", _fp8_quantise, FP8_GROUP, {"codes": "*u8", "scales": "*fp32"}),
    _signature("fp4_quantise", _fp4_quantise, FP4_GROUP, _FP4, SIZE=FP4_GROUP),
    _signature("mxfp4_quantise", _fp4_quantise, MXFP4_GROUP, _FP4, SIZE=MXFP4_GROUP),
)

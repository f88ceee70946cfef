"""Number formats inside Triton kernels: rounding, packing, power-of-two scales.

The same rules as `deepinfer.numerics`, bit for bit. Compiled kernels use the GPU's conversions; the
interpreter's do not round correctly, so there bf16 and e4m3 are rounded on the bits. Kernels load,
convert to float32 at once, and narrow when they store.
"""

import triton
import triton.language as tl

from deepinfer.kernels.launch import INTERPRETED

_ON_BITS = tl.constexpr(INTERPRETED)


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """float32 `x` in `dtype` (bf16 or float32), to nearest, ties to even."""
    if dtype == tl.bfloat16 and _ON_BITS:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        quiet = (bits >> 16) | 0x40
        kept = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, quiet, rounded)
        return kept.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """float32 `x` rounded to `dtype` (bf16 or float32) as `narrow` does, but still float32."""
    if dtype == tl.float32:
        return x
    elif _ON_BITS:
        return narrow(x, dtype).to(tl.float32)
    else:
        # The high half of a pair is where float32 has the same bits. A single conversion, as
        # `narrow` compiles to where its result is not stored, takes eight times as long.
        bits = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $1, 0f00000000;",
            "=r,f", [x], dtype=tl.uint32, is_pure=True, pack=1,
        )  # fmt: skip
        return bits.to(tl.float32, bitcast=True)


@triton.jit
def ceil_power_of_two(x):
    """2^ceil(log2(x)) of positive normal float32 `x`, exactly."""
    bits = x.to(tl.uint32, bitcast=True)
    return ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def encode_e8m0(scale):
    """Exponent byte (uint8) of positive power-of-two float32 values."""
    return (scale.to(tl.uint32, bitcast=True) >> 23).to(tl.uint8)


@triton.jit
def decode_e8m0(code):
    """2^(code - 127) for bytes 1 .. 254; byte 0 gives the subnormal 2^-127."""
    bits = code.to(tl.uint32) << 23
    return tl.where(bits == 0, 0x400000, bits).to(tl.float32, bitcast=True)


@triton.jit
def encode_e4m3(x):
    """e4m3 byte (uint8) of float32 `x`, to nearest, ties to even, clamped to 448; NaN is 0x7F."""
    if not _ON_BITS:
        # One value to a register: of values converted in pairs, as `x.to(tl.float8e4nv)` does, the
        # ptxas of Triton 3.6 reads the second byte before it is there, unless pairs are stored.
        code = tl.inline_asm_elementwise(
            "{ .reg .b16 t; cvt.rn.satfinite.e4m3x2.f32 t, 0f00000000, $1; cvt.u32.u16 $0, t; }",
            "=r,f", [x], dtype=tl.uint32, is_pure=True, pack=1,
        )  # fmt: skip
        return code.to(tl.uint8)
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    # Normal: keep three mantissa bits, rounded; the exponent bias changes from 127 to 7.
    rounded = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20
    normal = rounded - ((127 - 7) << 3)
    # Below 2^-6 the step is 2^-9: adding 1.5 * 2^14 lets the float32 addition round to it.
    shifted = magnitude.to(tl.float32, bitcast=True) + 24576.0
    small = shifted.to(tl.uint32, bitcast=True) & 0xFF
    code = tl.where(magnitude < 0x3C800000, small, normal)
    code = tl.where(magnitude >= 0x43E00000, 0x7E, code)
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (code | sign).to(tl.uint8)


@triton.jit
def decode_e4m3(code):
    """float32 value of e4m3 bytes (uint8); 0x7F and 0xFF give NaN."""
    wide = code.to(tl.uint32)
    magnitude = wide & 0x7F
    normal = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)
    value = tl.where(magnitude == 0x7F, float("nan"), value)
    return tl.where(wide >= 0x80, -value, value)


@triton.jit
def e2m1_code(half, signed):
    """e2m1 nibble (uint32) of twice float32 `half`, 0 to 3, with the sign of `signed`.

    To nearest, ties to the even code.
    """
    # The step of the grid is 1/2 below 2 and doubles at 2 and at 4: half the power of two below
    # the value. The sum with 2^22 such powers is rounded to steps, which it counts in its lowest
    # bits. A step of its exponent, which the shift brings to bit 1, stands for two codes; halves
    # make the exponent, without such steps, a multiple of four.
    power = tl.maximum(half, 0.5).to(tl.uint32, bitcast=True) & 0x7F800000
    total = half + power.to(tl.float32, bitcast=True) * 4194304.0
    bits = total.to(tl.uint32, bitcast=True)
    sign = (signed.to(tl.uint32, bitcast=True) >> 28) & 8
    return ((bits + (bits >> 22)) & 7) | sign


@triton.jit
def encode_e2m1(x):
    """e2m1 nibble (uint8) of float32 `x`, |x| at most 6, to nearest, ties to the even code."""
    return e2m1_code(tl.abs(x) * 0.5, x).to(tl.uint8)


@triton.jit
def decode_e2m1(code):
    """float32 value of e2m1 nibbles (any integer type, low four bits)."""
    wide = code.to(tl.uint32) & 0xF
    magnitude = wide & 7
    # Codes 2 .. 7 are normal: one mantissa bit, exponent bias 1; code 1 is one half.
    normal = ((magnitude << 22) + (126 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 2, magnitude.to(tl.float32) * 0.5, normal)
    return tl.where(wide >= 8, -value, value)

"""Reference of act_quant: what rounding an activation does to its values, and its codes.

Knows one tensor; must not know which matrix consumes it.
"""

import torch
from torch import Tensor

from deepinfer.numerics import (
    E2M1_MAX,
    E4M3_MAX,
    FP4_GROUP,
    FP8_GROUP,
    MXFP4_GROUP,
    accumulate_dtype,
    encode_e2m1,
    encode_e4m3,
    encode_e8m0,
    fp4_scale,
    fp8_scale,
    mxfp4_scale,
    pack_nibbles,
    round_e2m1,
    straight_through,
)


def _groups(x: Tensor, size: int) -> Tensor:
    return x.to(accumulate_dtype(x.dtype)).unflatten(-1, (-1, size))


def _round(x: Tensor) -> Tensor:
    groups = _groups(x, FP8_GROUP)
    scale = fp8_scale(groups)
    # No clamp: the scale keeps |x / s| within half a step of 448, which rounds to 448.
    codes = (groups / scale).to(torch.float32).to(torch.float8_e4m3fn)
    return (codes.to(groups.dtype) * scale).flatten(-2).to(x.dtype)


def act_quant(x: Tensor) -> Tensor:
    """`x` rounded to FP8 and back, per token over groups of 32 channels (model description 3.1).

    s = 2^ceil(log2(max(amax, 1e-4) / 448)), y = s * e4m3(clamp(x / s, -448, 448)), ties to even.

    Args:
        x: [..., C], C a multiple of 32, bfloat16, float32 or float64.

    Returns:
        [..., C] in the dtype of `x`, exactly the value an FP8 matrix product would see. Gradients
        pass straight through.
    """
    return straight_through(x, _round)


def fp8_quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales whose product is `act_quant(x)`: what an FP8 matrix product takes.

    Args:
        x: [T, C], C a multiple of 32, finite.

    Returns:
        codes [T, C] uint8 (e4m3), scales [T, C/32] float32, powers of two.
    """
    groups = _groups(x, FP8_GROUP)
    scale = fp8_scale(groups)
    codes = encode_e4m3((groups / scale).clamp(-E4M3_MAX, E4M3_MAX)).flatten(-2)
    return codes, scale.squeeze(-1).to(torch.float32)


def _pack(groups: Tensor, scale: Tensor) -> Tensor:
    codes = round_e2m1((groups / scale).clamp(-E2M1_MAX, E2M1_MAX))
    return pack_nibbles(encode_e2m1(codes).flatten(-2))


def fp4_quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """FP4 with an e4m3 scale per 16 channels: s = e4m3(min(max(amax, 6 * 2^-9) / 6, 448)).

    Args:
        x: [T, C], C a multiple of 16, finite. Values beyond 6 s become 6 s.

    Returns:
        packed [T, C/2] uint8 (e2m1 pairs, the even channel in the low half), scales [T, C/16]
        uint8 (e4m3). x / s ties go to the even code.
    """
    groups = _groups(x, FP4_GROUP)
    scale = fp4_scale(groups)
    return _pack(groups, scale), encode_e4m3(scale).squeeze(-1)


def mxfp4_quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """FP4 with a power-of-two scale per 32 channels: s = 2^ceil(log2(max(amax, 6 * 2^-126) / 6)).

    Args:
        x: [T, C], C a multiple of 32, finite.

    Returns:
        packed [T, C/2] uint8 (e2m1 pairs, the even channel in the low half), scales [T, C/32]
        uint8 (e8m0). x / s ties go to the even code.
    """
    groups = _groups(x, MXFP4_GROUP)
    scale = mxfp4_scale(groups)
    return _pack(groups, scale), encode_e8m0(scale).squeeze(-1)

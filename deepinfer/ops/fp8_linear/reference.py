"""References of fp8_linear and fp8_widen, and the preparation of weights for the fast product.

Knows codes and scales of one matrix; must not know which matrix it is.

Scales come per 32 channels, as they are quantised, or per 128: the product on a GPU then applies
a quarter of them. A group of 128 takes the largest of its four scales; codes of the others are
multiplied by a power of two and rounded to e4m3 again, which is exact unless a value falls below
2^-6 of its new scale. There the step is 2^-9, so that no value moves by more than 2^-10 of the
new scale: at most 2^-17.8 of the largest value of the group, wherever that has a code of 224 or
more, as the quantisers of this package see to.
"""

import torch
from torch import Tensor

from deepinfer.numerics import FP8_GROUP, decode_e4m3, decode_e8m0, encode_e4m3

WIDE_GROUP = 128  # channels that share a scale in the fast product
_PARTS = WIDE_GROUP // FP8_GROUP


def group_size(columns: int, count: int) -> int:
    """Channels that share a scale, 32 or 128, when `columns` channels have `count` scales."""
    for size in (FP8_GROUP, WIDE_GROUP):
        if count == -(-columns // size):
            return size
    raise AssertionError(f"{count} scales for {columns} channels")


def dequantise(codes: Tensor, scales: Tensor) -> Tensor:
    """float32 [..., C] of codes [..., C] and float32 scales [..., C/32 or C/128]."""
    columns = codes.shape[-1]
    size = group_size(columns, scales.shape[-1])
    return decode_e4m3(codes) * scales.repeat_interleave(size, dim=-1)[..., :columns]


def dequantise_weight(weight: Tensor, scales: Tensor) -> Tensor:
    """float32 [out, in] of codes and e8m0 scales [out/32, in/32 or in/128] (rounded up)."""
    rows = decode_e8m0(scales).repeat_interleave(FP8_GROUP, dim=0)[: weight.shape[0]]
    return dequantise(weight, rows)


def fp8_linear(
    codes: Tensor,
    scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """y = x W^T of dequantised operands, sums in float32, rounded once.

    Args:
        codes: [T, in] uint8 (e4m3), in a multiple of 32.
        scales: [T, in/32] or [T, ceil(in/128)] float32, powers of two.
        weight: [out, in] uint8 (e4m3).
        weight_scales: [ceil(out/32), in/32] or [ceil(out/32), ceil(in/128)] uint8 (e8m0, codes
            1 to 254): one per 32 rows and 32 or 128 columns.
        dtype: bfloat16 or float32.

    Returns:
        [T, out] in `dtype`. Defined where the product of every activation scale with every weight
        scale is a normal float32. A NaN stays in its row.
    """
    x, matrix = dequantise(codes, scales), dequantise_weight(weight, weight_scales)
    return torch.nn.functional.linear(x, matrix).to(dtype)


def fp8_widen(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Activations with one scale per 128 channels instead of 32: the largest of four.

    Args:
        codes: [T, C] uint8 (e4m3), C a multiple of 32.
        scales: [T, C/32] float32, powers of two.

    Returns:
        codes [T, C] and scales [T, ceil(C/128)] of the same values, up to the bound of this module.
    """
    count = scales.shape[-1]
    grouped = torch.nn.functional.pad(scales, (0, -count % _PARTS)).unflatten(-1, (-1, _PARTS))
    wide = grouped.amax(-1)
    factor = grouped / torch.where(wide == 0.0, 1.0, wide).unsqueeze(-1)
    spread = factor.flatten(-2)[..., :count].repeat_interleave(FP8_GROUP, dim=-1)
    return encode_e4m3(decode_e4m3(codes) * spread), wide


def fp8_widen_weight(weight: Tensor, weight_scales: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A weight with one scale per 32 rows and 128 columns, made once when it is loaded.

    Args:
        weight: [out, in] uint8 (e4m3), in a multiple of 32.
        weight_scales: [ceil(out/32), in/32] uint8 (e8m0).

    Returns:
        weight [out, in] uint8, scales [ceil(out/32), ceil(in/128)] uint8, and for every new block
        the most by which a value moved, in steps of 2^-10 of the block's scale (float32, 0 to 1).
    """
    rows, columns = weight.shape
    count = weight_scales.shape[-1]
    padded = torch.nn.functional.pad(weight_scales, (0, -count % _PARTS)).unflatten(
        -1, (-1, _PARTS)
    )
    wide = padded.amax(-1)
    power = (padded.to(torch.int32) - wide.to(torch.int32).unsqueeze(-1)).flatten(-2)[..., :count]
    factor = decode_e8m0((power + 127).clamp_min(0))
    spread = factor.repeat_interleave(FP8_GROUP, dim=0)[:rows].repeat_interleave(FP8_GROUP, dim=1)
    exact = decode_e4m3(weight) * spread
    codes = encode_e4m3(exact)
    moved = (decode_e4m3(codes) - exact).abs() * 1024.0
    moved = torch.nn.functional.pad(moved, (0, -columns % WIDE_GROUP, 0, -rows % FP8_GROUP))
    blocks = moved.unflatten(0, (-1, FP8_GROUP)).unflatten(2, (-1, WIDE_GROUP))
    return codes, wide, blocks.amax((1, 3))

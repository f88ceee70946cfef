"""Weight formats of the checkpoint: quantise to bytes and dequantise bit-exactly.

Knows the three quantised formats of model description 5.2; must not know names or files.
"""

import torch
from torch import Tensor

from deepinfer.numerics import (
    E2M1_MAX,
    E4M3_MAX,
    ceil_power_of_two,
    decode_e4m3,
    decode_e8m0,
    encode_e2m1,
    encode_e4m3,
    encode_e8m0,
    pack_nibbles,
    round_e2m1,
    unpack_e2m1,
)

BLOCK = 32
# Smallest positive scale: an all-zero block still needs one, and 2^-126 is a normal float32.
_SMALLEST_SCALE = 2.0**-126


def _blocks(weight: Tensor, row_block: int) -> Tensor:
    """[out, in] to [out/rows, rows, in/32, 32], zero-padded to whole blocks."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(
        weight.to(torch.float32), (0, -columns % BLOCK, 0, -rows % row_block)
    )
    return padded.unflatten(0, (-1, row_block)).unflatten(2, (-1, BLOCK))


def _unblock(blocks: Tensor, rows: int, columns: int) -> Tensor:
    return blocks.flatten(2, 3).flatten(0, 1)[:rows, :columns]


def _block_scale(blocks: Tensor, largest: float) -> Tensor:
    """Smallest power of two under which no value of the block exceeds `largest`."""
    amax = blocks.abs().amax(dim=(1, 3), keepdim=True)
    return ceil_power_of_two((amax / largest).clamp_min(_SMALLEST_SCALE))


def _quantise_fp8(weight: Tensor, row_block: int) -> tuple[Tensor, Tensor]:
    blocks = _blocks(weight, row_block)
    scale = _block_scale(blocks, E4M3_MAX)
    codes = encode_e4m3((blocks / scale).clamp(-E4M3_MAX, E4M3_MAX))
    return _unblock(codes, *weight.shape).contiguous(), encode_e8m0(scale)[:, 0, :, 0]


def quantise_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[out, in] to e4m3 codes [out, in] and e8m0 scales [out/32, in/32] (both uint8).

    One power of two per 32 x 32 block, 2^ceil(log2(amax / 448)); codes round to nearest, ties to
    even. Sizes that are no multiple of 32 are padded with zeros for the scales only.
    """
    return _quantise_fp8(weight, BLOCK)


def quantise_fp8_row(table: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, columns] to e4m3 codes and e8m0 scales [rows, columns/32], one per row."""
    return _quantise_fp8(table, 1)


def quantise_fp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[out, in] to packed e2m1 pairs [out, in/2] and e8m0 scales [out, in/32] (both uint8).

    One power of two per row and 32 columns, 2^ceil(log2(amax / 6)); even columns take the low
    nibble. `in` must be a multiple of 32.
    """
    blocks = _blocks(weight, 1)
    scale = _block_scale(blocks, E2M1_MAX)
    codes = encode_e2m1(round_e2m1((blocks / scale).clamp(-E2M1_MAX, E2M1_MAX)))
    return pack_nibbles(_unblock(codes, *weight.shape)), encode_e8m0(scale)[:, 0, :, 0]


def _spread(scale: Tensor, like: Tensor, row_block: int) -> Tensor:
    rows, columns = like.shape
    wide = decode_e8m0(scale).repeat_interleave(BLOCK, dim=1)[:, :columns]
    return wide.repeat_interleave(row_block, dim=0)[:rows]


def dequantise_fp8(codes: Tensor, scale: Tensor) -> Tensor:
    """float32 [out, in] of e4m3 codes and 32 x 32 block scales (uint8); every product is exact."""
    return decode_e4m3(codes) * _spread(scale, codes, BLOCK)


def dequantise_fp8_row(codes: Tensor, scale: Tensor) -> Tensor:
    """float32 [rows, columns] of e4m3 codes and scales per row and 32 columns (uint8)."""
    return decode_e4m3(codes) * _spread(scale, codes, 1)


def dequantise_fp4(packed: Tensor, scale: Tensor) -> Tensor:
    """float32 [out, in] of packed e2m1 pairs [out, in/2] and scales per row and 32 columns."""
    values = unpack_e2m1(packed)
    return values * _spread(scale, values, 1)

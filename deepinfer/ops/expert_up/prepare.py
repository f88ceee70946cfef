"""The layout in which expert matrices are multiplied: packed once, when a checkpoint is loaded.

Knows FP4 matrices with a scale per 32 channels; must not know kernels. No value changes.

A word of 32 bits holds eight channels of one group: magnitudes in groups of four bits, signs in the
bits between, bit 8i + 7 that of channel i and bit 8i + 3 that of channel 4 + i. A kernel can use
either half as it is to look up a table. 64 rows of 128 channels follow each other in memory.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.numerics import decode_e8m0, pack_nibbles, unpack_e2m1

CHUNK = 128  # channels of one word of shifts
TILE_ROWS = 64
_MOST_SHIFT = 12  # 6 * 2^(12 - 6) is below the largest e4m3 value, 0.5 * 2^(1 - 6) is normal


@dataclass(frozen=True)
class ExpertMatrices:
    """One matrix of every expert: value = e2m1 * 2^(base + shift - 127).

    Attributes:
        codes: [E, N/64, C, 64, 64] uint8, tiles of 64 rows and 128 channels, zeros past the last.
        shifts: [E, N/64, C, 64] int32, byte g: the exponent of group 4 c + g above the row's.
        base: [E, N] uint8. Shifts lie between 1 and 12, so that e4m3 holds value * 2^(121 - base);
            where a row's scales differ by more, its base is 0 and shifts are the scales' bytes.
        width: channels.
        fits: no base is 0.
    """

    codes: Tensor
    shifts: Tensor
    base: Tensor
    width: int
    fits: bool

    @property
    def experts(self) -> int:
        """E."""
        return self.codes.shape[0]

    @property
    def rows(self) -> int:
        """N."""
        return self.base.shape[1]

    @property
    def chunks(self) -> int:
        """C."""
        return self.shifts.shape[2]


def _pack_words(nibbles: Tensor) -> Tensor:
    """[..., n] nibbles, n a multiple of 8, to [..., n/2] bytes of words."""
    words = nibbles.unflatten(-1, (-1, 8))
    size, sign = words & 7, words >> 3
    packed = size[..., 0::2] | (size[..., 1::2] << 4) | (sign[..., :4] << 7) | (sign[..., 4:] << 3)
    return packed.flatten(-2)


def _unpack_words(codes: Tensor) -> Tensor:
    """[..., n/2] bytes of words to [..., n] nibbles."""
    words = codes.unflatten(-1, (-1, 4))
    size = torch.stack([words & 7, (words >> 4) & 7], dim=-1).flatten(-2)
    sign = torch.cat([words >> 7, (words >> 3) & 1], dim=-1)
    return (size | (sign << 3)).flatten(-2)


def _to_tiles(rows: Tensor, chunks: int) -> Tensor:
    """[N, C * n] to [N/64, C, 64, n], zeros past the last row."""
    missing = -len(rows) % TILE_ROWS
    padded = torch.nn.functional.pad(rows, (0, 0, 0, missing))
    return padded.view(-1, TILE_ROWS, chunks, rows.shape[1] // chunks).transpose(1, 2)


def _from_tiles(tiles: Tensor, rows: int) -> Tensor:
    return tiles.transpose(1, 2).flatten(0, 1).flatten(1)[:rows]


def _shifts(nibbles: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Shifts [..., N, groups] and base [..., N] (uint8) of one expert's rows."""
    used = ((nibbles & 7) != 0).unflatten(-1, (-1, 32)).any(-1)
    scale = scales.to(torch.int16)
    largest = torch.where(used, scale, 0).amax(-1, keepdim=True)
    smallest = torch.where(used, scale, 255).amin(-1, keepdim=True)
    base = largest - _MOST_SHIFT
    fits = (largest < 255) & (base >= 1) & (smallest > base)
    empty = ~used.any(-1, keepdim=True)
    base = torch.where(fits, base, torch.where(empty, 1, 0))
    # A group of zeros has no value that its scale could change.
    shift = torch.where(fits | empty, (scale - base).clamp(1, _MOST_SHIFT), scale)
    return shift.to(torch.uint8), base.squeeze(-1).to(torch.uint8)


def prepare(packed: Tensor, scales: Tensor) -> ExpertMatrices:
    """Matrices as the checkpoint has them in the layout of the kernels; waits for the device.

    Args:
        packed: [E, N, C/2] uint8 e2m1 pairs, the even channel in the low half; C a multiple of 32.
            w1 and w3 [E, 2, I, C/2] are taken flattened to [E, 2 I, C/2].
        scales: [E, N, C/32] uint8 e8m0, no NaN (255).
    """
    experts, rows, half = packed.shape
    width = 2 * half
    assert width % 32 == 0, width
    chunks = -(-width // CHUNK)
    device = packed.device
    tiles = (experts, -(-rows // TILE_ROWS), chunks, TILE_ROWS)
    codes = torch.empty((*tiles, 64), dtype=torch.uint8, device=device)
    shifts = torch.empty(tiles, dtype=torch.int32, device=device)
    base = torch.empty((experts, rows), dtype=torch.uint8, device=device)
    missing = chunks * CHUNK - width
    for number in range(experts):  # one at a time: nibbles take four times the room
        one = packed[number]
        nibbles = torch.stack([one & 15, one >> 4], dim=-1).flatten(-2)
        shift, base[number] = _shifts(nibbles, scales[number])
        codes[number] = _to_tiles(
            _pack_words(torch.nn.functional.pad(nibbles, (0, missing))), chunks
        )
        padded = torch.nn.functional.pad(shift, (0, missing // 32), value=1)
        shifts[number] = _to_tiles(padded.contiguous().view(torch.int32), chunks).squeeze(-1)
    return ExpertMatrices(codes, shifts, base, width, bool((base > 0).all()))


def dequantise(weights: ExpertMatrices, dtype: torch.dtype) -> Tensor:
    """Values [E, N, C], exact in float32 and bfloat16."""
    shape = (weights.experts, weights.rows, weights.width)
    out = torch.empty(shape, dtype=dtype, device=weights.codes.device)
    for number in range(weights.experts):
        codes = _from_tiles(weights.codes[number], weights.rows)
        values = unpack_e2m1(pack_nibbles(_unpack_words(codes)))
        shift = _from_tiles(weights.shifts[number].unsqueeze(-1), weights.rows)
        shift = shift.contiguous().view(torch.uint8)[:, : weights.width // 32]
        scale = decode_e8m0(shift + weights.base[number].unsqueeze(-1))
        groups = values[:, : weights.width].unflatten(-1, (-1, 32)) * scale.unsqueeze(-1)
        out[number] = groups.flatten(-2)
    return out

"""Reference of engram_gather: FP8 rows of a table, dequantised and joined.

Knows row numbers and stored bytes; must not know how the numbers were found.
"""

import torch
from torch import Tensor

from deepinfer.numerics import FP8_GROUP, decode_e4m3, decode_e8m0


def engram_gather(codes: Tensor, scales: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """[table[rows[0]] | table[rows[1]] | ...] per token (model description 3.10 d).

    value = e4m3(code) * 2^(scale - 127), a scale for every 32 columns, rounded once to `dtype`.
    A row number outside of the table, negative ones included, gives zeros; nothing is read then.

    Args:
        codes: [R, F] uint8, F a multiple of 32; scales: [R, F / 32] uint8, 255 is NaN. The released
            tables have 384 million rows. They may stay in host memory: on a CPU any tensor, for a
            GPU pinned ones, whose rows kernels read over the bus.
        rows: [..., C] int64, on the CPU for a table on the CPU that is not pinned.
        dtype: bfloat16, float32 or float64.

    Returns:
        [..., C * F], on the device of `rows`.
    """
    count = codes.shape[0]
    valid = (rows >= 0) & (rows < count)
    places = torch.where(valid, rows, 0).to(codes.device)
    values = decode_e4m3(codes[places]).unflatten(-1, (-1, FP8_GROUP))
    values = (values * decode_e8m0(scales[places]).unsqueeze(-1)).flatten(-2).to(dtype)
    values = values.to(rows.device)
    return torch.where(valid.unsqueeze(-1), values, 0).flatten(-2)

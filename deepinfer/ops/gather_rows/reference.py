"""Reference of gather_rows.

Knows a table and row numbers; must not know what either means.
"""

import torch
from torch import Tensor


def gather_rows(table: Tensor, index: Tensor) -> Tensor:
    """table[index], with zeros for numbers outside of 0 .. R - 1.

    Nothing is read for such a number, whether negative or too large.

    Args:
        table: [R, C] of any dtype, copied bit for bit; index: [...] int32 or int64.

    Returns:
        [..., C] in the dtype of `table`.
    """
    count = table.shape[0]
    if count == 0:
        return table.new_zeros((*index.shape, table.shape[1]))
    valid = (index >= 0) & (index < count)
    rows = table[torch.where(valid, index, 0)]
    return torch.where(valid.unsqueeze(-1), rows, torch.zeros_like(rows))

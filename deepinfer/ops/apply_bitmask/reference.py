"""Reference of apply_bitmask.

Knows logits and bits; must not know grammars.
"""

import torch
from torch import Tensor


def apply_bitmask(logits: Tensor, mask: Tensor, rows: Tensor) -> None:
    """logits[rows[i], t] = -inf where bit t % 32 of mask[i, t // 32] is 0, in place.

    A negative row, or one past the last, stands for none. A row may be named once.

    Args:
        logits: [B, V] float32 or bfloat16; mask: [M, ceil(V / 32)] int32; rows: [M] int64.
    """
    B, V = logits.shape
    if B == 0:
        return
    token = torch.arange(V, device=logits.device)
    allowed = (mask[:, token // 32] >> (token % 32)) & 1  # [M, V]
    valid = (rows >= 0) & (rows < B)
    forbidden = (allowed == 0) & valid.unsqueeze(-1)
    times = torch.zeros(B, V, dtype=torch.int32, device=logits.device)
    times.index_add_(0, torch.where(valid, rows, 0), forbidden.to(torch.int32))
    logits.masked_fill_(times > 0, float("-inf"))

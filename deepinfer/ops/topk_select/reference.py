"""Reference of topk_select.

Knows scores; must not know what the selected entries hold.
"""

import torch
from torch import Tensor


def order_keys(scores: Tensor) -> Tensor:
    """int64 keys that order as `scores` do along the last axis, lower index first among equals.

    The high half is the float32 score as an ordered integer (-0 equals +0, NaN is below
    everything), the low half counts down with the index, so that keys are unique.
    """
    clean = torch.where(torch.isnan(scores), float("-inf"), scores).to(torch.float32) + 0.0
    bits = clean.view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    count_down = torch.arange(scores.shape[-1], 0, -1, device=scores.device)
    return (ordered << 32) + count_down


def topk_select(scores: Tensor, k: int) -> Tensor:
    """Indices of the k largest scores of each row, ascending, padded with -1.

    Entries of -inf or NaN are never selected; among equal scores the lower index wins
    (model description 3.8).

    Args:
        scores: [..., n] float32 or float64 (compared as float32); k: entries wanted.

    Returns:
        [..., min(k, n)] int64.
    """
    entries = scores.shape[-1]
    k = min(k, entries)
    chosen = order_keys(scores).topk(k, dim=-1, sorted=False).indices
    valid = scores.gather(-1, chosen) > float("-inf")
    ascending = torch.where(valid, chosen, entries).sort(dim=-1).values
    return torch.where(ascending < entries, ascending, -1)

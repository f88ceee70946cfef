"""Reference of moe_combine.

Knows rows of experts; must not know which experts they were.
"""

import torch
from torch import Tensor


def moe_combine(y: Tensor, selected: int, shared: Tensor | None = None) -> Tensor:
    """out[t] = bf16(y[t K] + y[t K + 1] + ... + shared[t]), added in this order in float32.

    Args:
        y: [T * K, H] bfloat16 or float32; selected: K; shared: [T, H] of the same dtype, or None.

    Returns:
        [T, H] in the dtype of y.
    """
    rows = y.to(torch.float32).unflatten(0, (-1, selected))
    total = rows[:, 0]
    for number in range(1, selected):
        total = total + rows[:, number]
    if shared is not None:
        total = total + shared.to(torch.float32)
    return total.to(y.dtype)

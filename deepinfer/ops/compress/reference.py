"""Reference of the compressor's pooling.

Knows complete groups of tokens; must not know how groups are collected across steps.
"""

import torch
from torch import Tensor


def pool_groups(values: Tensor, gates: Tensor) -> Tensor:
    """z[c] = sum_k softmax_k(g_k[c]) * a_k[c] per channel (model description 3.6).

    Args:
        values: a [..., r, D]; gates: g [..., r, D]; float32 or wider, r tokens of one group.

    Returns:
        [..., D] in the same dtype; the caller rounds it.
    """
    return (torch.softmax(gates, dim=-2) * values).sum(-2)

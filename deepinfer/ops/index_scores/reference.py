"""Reference of index_scores.

Knows queries and keys as values; must not know pages or which layer they belong to.
"""

import torch
from torch import Tensor

from deepinfer.numerics import accumulate_dtype


def index_scores(queries: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """score[t, j] = sum_h relu(q[t, h] . k[j]) * w[t, h] (model description 3.7).

    Args:
        queries: [..., T, Hi, Di] values already rounded to MXFP4.
        weights: [..., T, Hi] head weights, which may be negative.
        keys: [..., n, Di] values already rounded to MXFP4.

    Returns:
        [..., T, n] float32 or wider. Products of MXFP4 values are exact; the sums are not rounded
        below float32.
    """
    wide = accumulate_dtype(queries.dtype)
    heads = queries.shape[-2]
    rows = queries.to(wide).flatten(-3, -2)
    dots = torch.matmul(rows, keys.to(wide).transpose(-1, -2)).unflatten(-2, (-1, heads))
    return torch.matmul(weights.to(wide).unsqueeze(-2), torch.relu(dots)).squeeze(-2)

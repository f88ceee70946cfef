"""Reference of attention with a sink over gathered or masked keys.

Knows queries, keys and validity; must not know rings, pages or layers.
"""

import torch
from torch import Tensor

from deepinfer.numerics import accumulate_dtype, constant

# Stands for the maximum of no scores: far below any score, and finite so that it can be subtracted.
NO_KEY = -1.0e30


def attention_with_sink(
    queries: Tensor, keys: Tensor, valid: Tensor, sink: Tensor, scale: float
) -> Tensor:
    """Attention whose values are its keys, with one sink per head (model description 3.5).

    score = (q . k) * scale, M = max score, P = exp(score - M), Z = sum P + exp(sink - M),
    o = sum(P * k) / Z. P is rounded to the dtype of the queries for the sum with the keys only;
    Z adds unrounded values. A query without any valid key gives 0.

    Args:
        queries: [..., T, N, D].
        keys: [..., T, n, D], the keys of each query, or [..., 1, n, D] shared by all.
        valid: [..., T, n] bool, or [..., 1, n]. A key that is not valid may hold anything, NaN
            included, unless keys are shared and `valid` is not: then all must be finite.
        sink: [N], float32 or wider.

    Returns:
        [..., T, N, D] in the dtype of `queries`.
    """
    wide = accumulate_dtype(queries.dtype)
    if keys.shape[-3] == valid.shape[-2]:
        keys = torch.where(valid.unsqueeze(-1), keys, 0.0)
    wide_keys = keys.to(wide)
    scores = torch.matmul(queries.to(wide), wide_keys.transpose(-1, -2)) * constant(scale, wide)
    scores = scores.masked_fill(~valid.unsqueeze(-2), float("-inf"))
    top = scores.amax(-1, keepdim=True).clamp_min(NO_KEY)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True) + torch.exp(sink.unsqueeze(-1) - top)
    mixed = torch.matmul(weights.to(queries.dtype).to(wide), wide_keys)
    return (mixed / total).to(queries.dtype)

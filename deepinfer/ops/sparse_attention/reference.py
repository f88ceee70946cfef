"""Reference of attention with a sink, over gathered or masked keys and over packed records.

Knows queries, keys, validity and records; must not know pages or layers.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from deepinfer.numerics import accumulate_dtype, constant
from deepinfer.ops.kv_records import unpack_compressed, unpack_window

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


def sparse_attention(
    queries: Tensor,
    window: Tensor,
    own: Tensor,
    window_index: Tensor,
    compressed: Tensor | None,
    compressed_index: Tensor | None,
    sink: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attention with a sink over records that each query lists (model description 3.5).

    score = (q . k) * scale over the valid entries of both lists, M = max score,
    P = exp(score - M), Z = sum P + exp(sink - M), out = sum(P * k) / Z, the P of the last sum
    rounded to the dtype of the queries; lse = log2(sum exp(score)), without the sink.

    Negative entries name no key and may stand anywhere; a key that is listed twice counts twice.
    Nothing is read of records that no list names. A query without any key gets out 0, lse -inf.

    Args:
        queries: [T, N, D].
        window: [R, D + D/32] uint8, FP8 records of the ring.
        own: [T2, D + D/32] uint8, records of this step.
        window_index: [T, W] int32; i < R names record i of `window`, i >= R record i - R of `own`.
        compressed: [E, D/2 + D/16] uint8, FP4 records; None if there are none.
        compressed_index: [T, K] int32 into `compressed`; None together with it.
        sink: [N] float32; -inf for a head without one.

    Returns:
        out [T, N, D] in the dtype of `queries`, lse [T, N] float32 (float64 for float64 queries).
    """
    wide = accumulate_dtype(queries.dtype)
    lists = [_Listed((window, own), window_index, unpack_window, wide)]
    if compressed is not None and compressed_index is not None:
        lists.append(_Listed((compressed,), compressed_index, unpack_compressed, wide))
    parts = []
    for first in range(0, max(1, len(queries)), _ROWS):
        rows = slice(first, first + _ROWS)
        keys = torch.cat([listed.keys(rows) for listed in lists], dim=1)
        valid = torch.cat([listed.index[rows] >= 0 for listed in lists], dim=1)
        parts.append(_attend(queries[rows], keys, valid, sink, scale))
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


_ROWS = 256  # queries at a time: their decoded keys are large


class _Listed:
    """Keys that an index list names in tables of records, which count as one; zeros for none.

    Where the list is longer than the tables, they are decoded once and values are gathered,
    otherwise the records of the list are gathered and decoded.
    """

    def __init__(
        self, tables: tuple[Tensor, ...], index: Tensor,
        unpack: Callable[[Tensor, torch.dtype], Tensor], dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self.index = index
        self._tables = tables
        self._unpack = unpack
        self._dtype = dtype
        self._values: Tensor | None = None
        if index.numel() > sum(len(table) for table in tables):
            decoded = [unpack(table, dtype) for table in tables]
            self._values = torch.cat([*decoded, decoded[0].new_zeros(1, decoded[0].shape[-1])])

    def keys(self, rows: slice) -> Tensor:
        """[rows, n, D] of some rows of the list."""
        index = self.index[rows].long()
        if self._values is not None:
            last = len(self._values) - 1
            place = torch.where((index >= 0) & (index < last), index, last)
            return torch.nn.functional.embedding(place, self._values)
        records = self._tables[0].new_zeros(1)
        for table in self._tables:
            if len(table):
                found = table[index.clamp(0, len(table) - 1)]
                records = torch.where((index >= 0).unsqueeze(-1), found, records)
            index = index - len(table)
        if records.dim() == 1:  # a list of nothing, or of names in empty tables
            records = records.expand(*index.shape, self._tables[0].shape[-1])
        return self._unpack(records, self._dtype)


def _attend(
    queries: Tensor, keys: Tensor, valid: Tensor, sink: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    wide = keys.dtype
    if keys.shape[1] == 0:
        empty = torch.zeros_like(queries, dtype=wide).sum(-1)
        return torch.zeros_like(queries), empty - math.inf
    scores = torch.matmul(queries.to(wide), keys.transpose(-1, -2)) * constant(scale, wide)
    scores = scores.masked_fill(~valid.unsqueeze(-2), -math.inf)
    top = scores.amax(-1, keepdim=True).clamp_min(NO_KEY)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    lse = (torch.log2(total) + top * constant(1.0 / math.log(2.0), wide)).squeeze(-1)
    mixed = torch.matmul(weights.to(queries.dtype).to(wide), keys)
    out = mixed / (total + torch.exp(sink.to(wide).unsqueeze(-1) - top))
    return torch.where(valid.any(-1)[:, None, None], out, 0.0).to(queries.dtype), lse

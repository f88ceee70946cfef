"""References of index_scores, paged_index_scores and candidate_scores.

Knows queries, keys as values and as pages of MXFP4 records; must not know which layer they belong
to, or what is selected by the scores.
"""

import torch
from torch import Tensor

from deepinfer.numerics import MXFP4_GROUP, accumulate_dtype, decode_e8m0, unpack_e2m1

_CHUNK = 32  # rows whose own keys are unpacked at a time


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


def _keys(
    codes: Tensor, scales: Tensor, pages: Tensor, offsets: Tensor, dtype: torch.dtype
) -> Tensor:
    """Values [..., Di] of the entries at `offsets` of `pages` (any equal shapes)."""
    values = unpack_e2m1(codes[pages, offsets], dtype).unflatten(-1, (-1, MXFP4_GROUP))
    return (values * decode_e8m0(scales[pages, offsets], dtype).unsqueeze(-1)).flatten(-2)


def _entry_keys(
    codes: Tensor, scales: Tensor, page_table: Tensor, entries: Tensor, dtype: torch.dtype
) -> Tensor:
    """Values [N, n, Di] of entries [N, n] (or [1, n]) of N sequences, one row of the table each.

    Entries past the table are read from its last page; they must be invisible.
    """
    per_page = codes.shape[1]
    columns = (entries // per_page).clamp_max(page_table.shape[1] - 1)
    pages = page_table.gather(1, columns.expand(page_table.shape[0], -1)).clamp_min(0)
    return _keys(codes, scales, pages, (entries % per_page).expand_as(pages), dtype)


def paged_index_scores(
    queries: Tensor,
    weights: Tensor,
    codes: Tensor,
    scales: Tensor,
    page_table: Tensor,
    sequence: Tensor,
    visible: Tensor,
    width: int,
) -> Tensor:
    """Scores of the visible entries of each row's own sequence, from the packed cache.

    score[t, j] = sum_h relu(q[t, h] . k[j]) * w[t, h], k[j] entry j of sequence[t]: offset j % e of
    page page_table[sequence[t], j // e].

    Args:
        queries: [T, Hi, Di] bf16 or float32, values already rounded to MXFP4.
        weights: [T, Hi] float32 head weights, which may be negative.
        codes: [P, e, Di/2] uint8 e2m1 pairs of the index keys, e entries per page.
        scales: [P, e, Di/32] uint8 e8m0 scales; those of visible entries are no NaN (255).
        page_table: [B, M] int64 pages of each sequence.
        sequence: [T] int64 row of the page table of each query row, in any order; rows of one
            sequence that follow each other share the work of a kernel.
        visible: [T] int64 number of visible entries, at most `width` and M * e.
        width: columns of the result, known to the host.

    Returns:
        [T, width] float32 or wider, -inf in columns from visible[t] on. Nothing of an invisible
        entry gets into the result, whatever its bytes are.
    """
    numbers = torch.arange(width, device=queries.device)
    sees = numbers < visible.unsqueeze(-1)
    wide = accumulate_dtype(queries.dtype)
    scores = torch.full((len(queries), width), float("-inf"), dtype=wide, device=queries.device)
    if scores.numel() == 0:
        return scores
    entries = numbers.unsqueeze(0)
    if len(queries) > len(page_table):
        # Many rows for each sequence: unpack a sequence once, and keep the scores of its rows.
        for number in range(len(page_table)):
            keys = _entry_keys(codes, scales, page_table[number : number + 1], entries, wide)
            own = sees & (sequence == number).unsqueeze(-1)
            scores = torch.where(own, index_scores(queries, weights, keys[0]), scores)
        return scores
    for first in range(0, len(queries), _CHUNK):
        rows = slice(first, first + _CHUNK)
        keys = _entry_keys(codes, scales, page_table[sequence[rows]], entries, wide)
        found = index_scores(queries[rows].unsqueeze(1), weights[rows].unsqueeze(1), keys)
        scores[rows] = torch.where(sees[rows], found.squeeze(1), float("-inf"))
    return scores


def candidate_scores(
    queries: Tensor,
    weights: Tensor,
    codes: Tensor,
    scales: Tensor,
    page_table: Tensor,
    sequence: Tensor,
    visible: Tensor,
    blocks: Tensor,
    block_size: int,
) -> Tensor:
    """The scores of paged_index_scores for the entries of listed blocks only, side by side.

    Args:
        queries, weights, codes, scales, page_table, sequence, visible: see paged_index_scores.
        blocks: [T, C] int32 block numbers of each row, ascending, padded with -1 at the end.
        block_size: entries of a block; pages hold whole blocks.

    Returns:
        [T, C * block_size] float32 or wider. Column c * block_size + i is entry
        blocks[t, c] * block_size + i, -inf where the block is -1 or the entry is not visible.
    """
    inside = torch.arange(block_size, device=queries.device)
    entries = (blocks.long().unsqueeze(-1) * block_size + inside).flatten(1)
    sees = (entries >= 0) & (entries < visible.unsqueeze(-1))
    wide = accumulate_dtype(queries.dtype)
    scores = torch.full(entries.shape, float("-inf"), dtype=wide, device=queries.device)
    if scores.numel() == 0:
        return scores
    for first in range(0, len(queries), _CHUNK):
        rows = slice(first, first + _CHUNK)
        table = page_table[sequence[rows]]
        keys = _entry_keys(codes, scales, table, entries[rows].clamp_min(0), wide)
        found = index_scores(queries[rows].unsqueeze(1), weights[rows].unsqueeze(1), keys)
        scores[rows] = torch.where(sees[rows], found.squeeze(1), float("-inf"))
    return scores

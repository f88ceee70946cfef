"""Triton kernels of verify_drafts; most of the work is done by those of sample_tokens.

Knows judgements of rows; must not know how drafts were made.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.errors import Unsupported
from deepinfer.kernels.launch import require_gpu
from deepinfer.kernels.signature import Signature
from deepinfer.ops.sample_tokens.reference import STREAM_TOKEN
from deepinfer.ops.sample_tokens.triton import (
    DRAW_WARPS,
    draw_kernel,
    draw_signature,
    residual_mass,
)
from deepinfer.ops.token_masses.triton import (
    chunk_masses,
    factor_of,
    filter_rows,
    inverse_of,
    kept_mass,
    largest_logit,
    last_of_row,
    masses_of,
    require,
    signature,
    unsigned_keys,
)


@triton.jit(do_not_specialize=["chunks"])
def residual_kernel(
    logits, row_stride, V, chunks, temperature, counts, maxima, sums, state, parts,
    draft_ids, draft_probs, residuals,
    REPEAT: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Residual mass of one chunk, for drafts that were drawn from a distribution."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    sequence = row // REPEAT
    step = row % REPEAT
    heat = tl.load(temperature + sequence)
    top, usable = largest_logit(maxima, row, chunks, PADDED)
    if not ((step < tl.load(counts + sequence)) & usable & (heat > 0)):
        return
    inverse = inverse_of(heat)
    factor = factor_of(maxima, sums, row, chunks, top, inverse, PADDED)
    last, ties, tie_mass, floor = last_of_row(state, row)
    masses, before = chunk_masses(parts, row, chunks, ties, tie_mass, PADDED)
    total = tl.sum(masses, axis=0)
    rank = tl.sum(tl.where(tl.arange(0, PADDED) == chunk, before, 0), axis=0)
    first = (sequence * (REPEAT - 1) + step) * V
    left = tl.full((), 0, tl.int64)
    for start in range(0, CHUNK, BLOCK):
        column = chunk * CHUNK + start + tl.arange(0, BLOCK)
        inside = column < V
        logit = tl.load(logits + row * row_stride + column, mask=inside, other=float("-inf"))
        mass = masses_of(logit, top, inverse, factor)
        key = unsigned_keys(logit).to(tl.int64)
        equal = (key == last).to(tl.int32)
        ranks = rank + tl.cumsum(equal, axis=0)
        mass = kept_mass(mass, key, ranks, last, ties, floor)
        less = residual_mass(mass, column, inside, -1, draft_probs, first, total)
        left += tl.sum(less, axis=0)
        rank += tl.sum(equal, axis=0)
    tl.store(residuals + row * chunks + chunk, left)


@triton.jit
def finish_kernel(
    draft_ids, counts, drawn, accepts, statuses, accepted, tokens, status,
    REPEAT: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """One sequence: the drafts before the first that fell, and that row's own token."""
    sequence = tl.program_id(0).to(tl.int64)
    step = tl.arange(0, PADDED)
    count = tl.load(counts + sequence).to(tl.int32)
    judged = step < count
    row = sequence * REPEAT + step
    stays = tl.load(accepts + row, mask=judged, other=0)
    stop = tl.min(tl.where(stays == 0, step, PADDED), axis=0)
    stop = tl.minimum(stop, count)
    draft = tl.load(draft_ids + sequence * (REPEAT - 1) + step, mask=step < stop, other=-1)
    token = tl.load(drawn + row, mask=step == stop, other=-1)
    token = tl.where(step < stop, draft.to(tl.int64), token)
    tl.store(tokens + row, token, mask=step < REPEAT)
    tl.store(accepted + sequence, stop)
    tl.store(status + sequence, tl.load(statuses + sequence * REPEAT + stop))


def verify_drafts(
    logits: Tensor,
    draft_ids: Tensor,
    counts: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    draft_probs: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See the reference; seven launches, eight with `draft_probs`.

    Raises:
        Unsupported: see `filter_rows` of token_masses; counts that are not int32 or int64.
    """
    require_gpu(logits)
    require((torch.int64,), draft_ids=draft_ids, seeds=seeds, positions=positions)
    require((torch.int32, torch.int64), counts=counts)
    if draft_probs is not None and draft_probs.dtype != torch.float32:
        raise Unsupported(f"draft_probs of {draft_probs.dtype}")
    B, repeat, V = logits.shape
    counts, draft_ids = counts.contiguous(), draft_ids.contiguous()
    rows = filter_rows(
        logits.reshape(B * repeat, V), temperature, top_k, top_p, min_p, counts, repeat
    )
    device = logits.device
    accepted, status = (torch.empty(B, dtype=torch.int32, device=device) for _ in range(2))
    tokens = torch.empty((B, repeat), dtype=torch.int64, device=device)
    if B == 0:
        return accepted, tokens, status
    statistics = (rows.maxima, rows.sums)
    found = (rows.state, rows.parts)
    residuals = None
    if draft_probs is not None:
        draft_probs = draft_probs.contiguous()
        residuals = torch.empty((B * repeat, rows.chunks), dtype=torch.int64, device=device)
        residual_kernel[(B * repeat, rows.chunks)](
            *rows.first, counts, *statistics, *found, draft_ids, draft_probs, residuals,
            **rows.walk, num_warps=4,
        )  # fmt: skip
    accepts, statuses = (
        torch.empty(B * repeat, dtype=torch.int32, device=device) for _ in range(2)
    )
    drawn = torch.empty(B * repeat, dtype=torch.int64, device=device)
    draw_kernel[(B * repeat,)](
        *rows.first, seeds.contiguous(), positions.contiguous(), counts, *statistics, rows.best,
        *found, draft_ids, draft_probs, residuals, drawn, accepts, statuses, STREAM=STREAM_TOKEN,
        **rows.walk, num_warps=DRAW_WARPS,
    )  # fmt: skip
    finish_kernel[(B,)](
        draft_ids, counts, drawn, accepts, statuses, accepted, tokens, status, REPEAT=repeat,
        PADDED=max(2, triton.next_power_of_2(repeat)), num_warps=1,
    )  # fmt: skip
    return accepted, tokens, status


_ONE_HOT = ("draft_probs", "residuals")

SIGNATURES: tuple[Signature, ...] = (
    signature("residual of 6 rows", residual_kernel, REPEAT=6),
    draw_signature("draw, one-hot drafts", _ONE_HOT, 6),
    draw_signature("draw, drafts with probabilities", (), 6),
    Signature(
        "finish",
        finish_kernel,
        {
            **dict.fromkeys(("draft_ids", "drawn", "tokens"), "*i64"),
            **dict.fromkeys(("counts", "accepts", "statuses", "accepted", "status"), "*i32"),
        },
        {"REPEAT": 6, "PADDED": 8},
        num_warps=1,
    ),
)

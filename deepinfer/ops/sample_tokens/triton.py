"""Triton kernel of sample_tokens: the draw; verify_drafts judges drafts with it.

Knows masses of chunks and seeds; must not know requests. What stays of a row, and the mass of each
chunk, comes from token_masses; one program finds the chunk that the drawn mass falls into, and the
place in it.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.launch import require_gpu
from deepinfer.kernels.philox import uniform
from deepinfer.kernels.signature import Signature
from deepinfer.ops.sample_tokens.reference import (
    STREAM_ACCEPT,
    STREAM_RESIDUAL,
    STREAM_TOKEN,
)
from deepinfer.ops.token_masses.triton import (
    chunk_masses,
    factor_of,
    filter_rows,
    inverse_of,
    is_live,
    kept_mass,
    largest_logit,
    last_of_row,
    masses_of,
    require,
    signature,
    unsigned_keys,
)

DRAW_WARPS = 8  # one program has to read a whole chunk, so it is a wide one

_ACCEPT = tl.constexpr(STREAM_ACCEPT)
_RESIDUAL = tl.constexpr(STREAM_RESIDUAL)
_FAR = tl.constexpr(1 << 30)


@triton.jit
def residual_mass(mass, column, inside, draft, draft_probs, first, total):
    """What is left for a rejected draft: the kept mass less the draft's own distribution."""
    if draft_probs is None:
        return tl.where(column == draft, 0, mass)
    else:
        share = tl.load(draft_probs + first + column, mask=inside, other=0.0).to(tl.float64)
        return tl.maximum(mass - (share * total.to(tl.float64)).to(tl.int64), 0)


@triton.jit(do_not_specialize=["V", "chunks"])
def draw_kernel(
    logits, row_stride, V, chunks, temperature, seeds, positions, counts, maxima, sums, best,
    state, parts, draft_ids, draft_probs, residuals, tokens, accepts, statuses,
    STREAM: tl.constexpr, REPEAT: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    PADDED: tl.constexpr,
):  # fmt: skip
    """One row: judge its draft if it has one, and draw unless the draft is accepted.

    draft_ids: None when there are no drafts; then accepts is not written. A row's position is
    that of its sequence plus its number in the sequence.
    """
    row = tl.program_id(0).to(tl.int64)
    if not is_live(counts, row, REPEAT):
        return
    sequence = row // REPEAT
    step = row % REPEAT
    heat = tl.load(temperature + sequence)
    top, usable = largest_logit(maxima, row, chunks, PADDED)
    chunk = tl.arange(0, PADDED)
    largest = tl.load(maxima + row * chunks + chunk, mask=chunk < chunks, other=float("-inf"))
    first = tl.load(best + row * chunks + chunk, mask=chunk < chunks, other=_FAR)
    token = tl.min(tl.where(largest == top, first, _FAR), axis=0).to(tl.int64)
    token = tl.where(usable, token, -1)
    judged = row < 0
    first_prob = (sequence * (REPEAT - 1) + step) * V
    draft = tl.full((), -1, tl.int64)
    if draft_ids is not None:
        judged = step < tl.load(counts + sequence)
        draft = tl.load(draft_ids + sequence * (REPEAT - 1) + step, mask=judged, other=-1)
        draft = draft.to(tl.int64)
        draft = tl.where((draft >= 0) & (draft < V), draft, -1)
    accept = judged & usable & (draft == token)
    if usable & (heat > 0):
        inverse = inverse_of(heat)
        factor = factor_of(maxima, sums, row, chunks, top, inverse, PADDED)
        last, ties, tie_mass, floor = last_of_row(state, row)
        masses, before = chunk_masses(parts, row, chunks, ties, tie_mass, PADDED)
        total = tl.sum(masses, axis=0)
        seed = tl.load(seeds + sequence)
        position = tl.load(positions + sequence) + step
        u = uniform(seed, position, STREAM)
        from_residual = row < 0
        if draft_ids is not None:
            home = tl.maximum(draft, 0) // CHUNK
            at_draft = tl.load(
                logits + row * row_stride + draft, mask=draft >= 0, other=float("-inf")
            )
            draft_key = unsigned_keys(at_draft).to(tl.int64)
            draft_rank = tl.sum(tl.where(chunk == home, before, 0), axis=0)
            if draft_key == last:
                for begin in range(0, CHUNK, BLOCK):
                    place = home * CHUNK + begin + tl.arange(0, BLOCK)
                    other = tl.load(
                        logits + row * row_stride + place, mask=place <= draft,
                        other=float("-inf"),
                    )  # fmt: skip
                    same = (unsigned_keys(other).to(tl.int64) == last) & (place <= draft)
                    draft_rank += tl.sum(same.to(tl.int64), axis=0)
            own = masses_of(at_draft, top, inverse, factor)
            own = kept_mass(own, draft_key, draft_rank, last, ties, floor)
            chance = tl.full((), 1.0, tl.float64)
            if draft_probs is not None:
                at = tl.maximum(draft, 0) + first_prob
                chance = tl.load(draft_probs + at, mask=draft >= 0, other=0.0).to(tl.float64)
            bar = uniform(seed, position, _ACCEPT) * (chance * total.to(tl.float64))
            accept = judged & (bar < own.to(tl.float64))
            if judged:
                u = uniform(seed, position, _RESIDUAL)
                if draft_probs is None:
                    left = tl.where(chunk == home, masses - own, masses)
                else:
                    left = tl.load(residuals + row * chunks + chunk, mask=chunk < chunks, other=0)
                # Nothing left: both distributions are the same, and either will do.
                from_residual = tl.sum(left, axis=0) > 0
                masses = tl.where(from_residual, left, masses)
        token = draft
        if not accept:
            upto = tl.cumsum(masses, axis=0)
            goal = (u * tl.sum(masses, axis=0).to(tl.float64)).to(tl.int64)
            inside_chunk = tl.minimum(tl.sum((upto <= goal).to(tl.int64), axis=0), chunks - 1)
            here = chunk == inside_chunk
            passed = tl.sum(tl.where(here, upto - masses, 0), axis=0)
            rank = tl.sum(tl.where(here, before, 0), axis=0)
            token = inside_chunk * CHUNK
            for start in range(0, CHUNK, BLOCK):
                column = inside_chunk * CHUNK + start + tl.arange(0, BLOCK)
                inside = column < V
                logit = tl.load(
                    logits + row * row_stride + column, mask=inside, other=float("-inf")
                )
                mass = masses_of(logit, top, inverse, factor)
                key = unsigned_keys(logit).to(tl.int64)
                equal = (key == last).to(tl.int32)
                ranks = rank + tl.cumsum(equal, axis=0)
                mass = kept_mass(mass, key, ranks, last, ties, floor)
                if draft_ids is not None:
                    read = inside & judged
                    less = residual_mass(mass, column, read, draft, draft_probs, first_prob, total)
                    mass = tl.where(from_residual, less, mass)
                sofar = passed + tl.cumsum(mass, axis=0)
                token += tl.sum(((sofar <= goal) & inside).to(tl.int64), axis=0)
                passed += tl.sum(mass, axis=0)
                rank += tl.sum(equal, axis=0)
            token = tl.minimum(token, V - 1)
    tl.store(tokens + row, token)
    tl.store(statuses + row, tl.where(usable, 0, 1))
    if draft_ids is not None:
        tl.store(accepts + row, accept.to(tl.int32))


def sample_tokens(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    stream: int = STREAM_TOKEN,
) -> tuple[Tensor, Tensor]:
    """See the reference; six launches. Columns that do not lie side by side are copied first.

    Exponentials differ in the last place from the reference's, so that a number that falls on the
    edge between two tokens may give the other one.

    Raises:
        Unsupported: see `filter_rows`.
    """
    require_gpu(logits)
    require((torch.int64,), seeds=seeds, positions=positions)
    rows = filter_rows(logits, temperature, top_k, top_p, min_p)
    B = logits.shape[0]
    tokens = torch.empty(B, dtype=torch.int64, device=logits.device)
    statuses = torch.empty(B, dtype=torch.int32, device=logits.device)
    if B:
        draw_kernel[(B,)](
            *rows.first, seeds.contiguous(), positions.contiguous(), None, rows.maxima, rows.sums,
            rows.best, rows.state, rows.parts, None, None, None, tokens, None, statuses,
            STREAM=stream, **rows.walk, num_warps=DRAW_WARPS,
        )  # fmt: skip
    return tokens, statuses


def draw_signature(name: str, absent: tuple[str, ...], repeat: int) -> Signature:
    """A form of draw_kernel, which is not specialised for the width of rows."""
    constants = {"REPEAT": repeat, "STREAM": STREAM_TOKEN}
    general = signature(name, draw_kernel, absent, DRAW_WARPS, **constants)
    return replace(general, divisible=("row_stride",))


_NO_DRAFTS = ("counts", "draft_ids", "draft_probs", "residuals", "accepts")

SIGNATURES: tuple[Signature, ...] = (draw_signature("draw", _NO_DRAFTS, 1),)

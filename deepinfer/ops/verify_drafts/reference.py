"""Reference of verify_drafts: which drafts stay, and the token after them.

Knows logits of the rows after each draft; must not know how drafts were made or what a cache keeps.
"""

import torch
from torch import Tensor

from deepinfer.ops.sample_tokens.reference import (
    STREAM_ACCEPT,
    STREAM_RESIDUAL,
    STREAM_TOKEN,
    draw,
    uniforms,
)
from deepinfer.ops.token_masses import token_masses


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
    """Rejection sampling: the tokens are distributed as if each were drawn by `sample_tokens`.

    q is the filtered distribution of a row, p that of its draft d: one-hot at d without
    `draft_probs`. From the first draft on, d stays if u * p(d) < q(d), u from the stream of
    judgements; the first one that does not is replaced by a token from max(q - p, 0), normalised,
    drawn with the stream of residuals (from q where nothing is left); if all stay, the next token
    comes from q with the stream of tokens, so that without drafts this is `sample_tokens`.
    Rows of temperature 0 keep drafts that equal the argmax. All in whole multiples of 2^-52.

    Args:
        logits: [B, n + 1, V] float32; row j follows draft j - 1 and judges draft j.
        draft_ids: [B, n] int64; an id outside of the vocabulary is rejected.
        counts: [B] int32, drafts of each sequence, 0 .. n; later ones and later rows are not read.
        temperature, top_k, top_p, min_p, seeds: [B], as in `sample_tokens`.
        positions: [B] int64, of row 0's token; row j's is that plus j.
        draft_probs: [B, n, V] float32, sums 1.

    Returns:
        Drafts that stay [B] int32; tokens [B, n + 1] int64, those and the next one, then -1;
        status [B] int32, 1 where the row after the last draft that stays is no distribution:
        then its token is -1.
    """
    B, rows, V = logits.shape
    n = rows - 1
    device = logits.device

    def spread(values: Tensor) -> Tensor:
        return values.repeat_interleave(rows)

    shared = [spread(x) for x in (temperature, top_k, top_p, min_p)]
    masses, usable = token_masses(logits.reshape(B * rows, V), *shared)
    step = torch.arange(rows, device=device)
    at = (positions.unsqueeze(-1) + step).reshape(-1)
    seed = spread(seeds)
    total = masses.sum(-1, keepdim=True)
    judged = (step < counts.unsqueeze(-1)).reshape(-1)
    padded = torch.nn.functional.pad(draft_ids, (0, 1), value=-1).reshape(-1)
    padded = torch.where(judged & (padded >= 0) & (padded < V), padded, -1)
    draft = padded.clamp_min(0).unsqueeze(-1)
    mass = torch.where(padded >= 0, masses.gather(-1, draft).squeeze(-1), 0).double()
    if draft_probs is None:
        chance = torch.ones_like(mass)
        left = masses.scatter(-1, draft, torch.where(padded < 0, masses[:, 0], 0).unsqueeze(-1))
        left = torch.where((padded >= 0).unsqueeze(-1), left, masses)
    else:
        probs = torch.nn.functional.pad(draft_probs, (0, 0, 0, 1)).reshape(B * rows, V).double()
        # A greedy row's draft stays or falls by itself.
        cold = shared[0].unsqueeze(-1) == 0
        chance = torch.where(cold, 1.0, probs.gather(-1, draft)).squeeze(-1)
        left = (masses - (probs * total.double()).long()).clamp_min(0)
        left = torch.where(cold, masses, left)
    accept = uniforms(seed, at, STREAM_ACCEPT) * (chance * total.squeeze(-1).double()) < mass
    accept = (accept & judged & usable).view(B, rows)
    left = torch.where(judged.unsqueeze(-1) & (left.sum(-1, keepdim=True) > 0), left, masses)
    fresh = uniforms(seed, at, STREAM_TOKEN)
    u = torch.where(judged, uniforms(seed, at, STREAM_RESIDUAL), fresh)
    drawn = torch.where(usable, draw(left, u), -1).view(B, rows)
    accepted = accept.int().cumprod(-1).sum(-1, keepdim=True)  # [B, 1]
    tokens = torch.where(step < accepted, padded.view(B, rows), -1)
    tokens = torch.where(step == accepted, drawn, tokens)
    status = (~usable).view(B, rows).gather(-1, accepted).squeeze(-1)
    assert accepted.shape == (B, 1) and tokens.shape == (B, n + 1)
    return accepted.squeeze(-1).to(torch.int32), tokens, status.to(torch.int32)

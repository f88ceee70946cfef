"""Log-probabilities of tokens under the model's own distribution, as replies report them.

Knows raw logits and token ids; must not know sampling parameters, text or requests.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenLogprobs:
    """One token under the raw distribution.

    Attributes:
        token_id: the token.
        logprob: its log-probability, natural logarithm; -inf where the model rules it out.
        rank: its place in descending order, from 1; among equals the lower id comes first.
        top: the most likely (token id, logprob) pairs in that order.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


def token_logprobs(logits: Tensor, chosen: Tensor, k: int) -> list[TokenLogprobs]:
    """log_softmax of unprocessed logits at the chosen tokens and at the k most likely ones.

    Temperature and filters have no part in it. Rank and `top` share one order: logits
    descending, the lower id first among equals.

    Args:
        logits: [B, V] float32.
        chosen: [B] int64 token ids.
        k: alternatives per row; more than V gives V.

    Returns:
        One entry per row.
    """
    assert logits.dim() == 2 and logits.dtype == torch.float32, (logits.shape, logits.dtype)
    assert chosen.shape == logits.shape[:1] and k >= 0
    logprobs = torch.log_softmax(logits, -1)
    own = logits.gather(-1, chosen.unsqueeze(-1))  # [B, 1]
    ids = torch.arange(logits.shape[-1], device=logits.device)
    ahead = (logits > own) | ((logits == own) & (ids < chosen.unsqueeze(-1)))
    ranks = (ahead.sum(-1) + 1).tolist()
    values = logprobs.gather(-1, chosen.unsqueeze(-1)).squeeze(-1).tolist()
    tops = [_top(logits[row], logprobs[row], k) for row in range(logits.shape[0])]
    rows = zip(chosen.tolist(), values, ranks, tops, strict=True)
    return [TokenLogprobs(token, value, rank, top) for token, value, rank, top in rows]


def _top(logits: Tensor, logprobs: Tensor, k: int) -> tuple[tuple[int, float], ...]:
    """The k largest of one row, [V]; torch.topk alone leaves the order of equals open."""
    if k == 0:
        return ()
    threshold = logits.topk(min(k, logits.shape[0])).values[-1]
    ids = (logits >= threshold).nonzero().flatten()  # ascending, k or more
    order = logits[ids].sort(descending=True, stable=True).indices[:k]
    ids = ids[order]
    return tuple(zip(ids.tolist(), logprobs[ids].tolist(), strict=True))

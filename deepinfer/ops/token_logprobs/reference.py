"""Reference of token_logprobs and top_logprobs.

Knows raw logits and token ids; must not know sampling parameters.
"""

import torch
from torch import Tensor

from deepinfer.ops.topk_select.reference import order_keys


def token_logprobs(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """log_softmax at one token per row, and the token's place in descending order, from 1.

    Among equal logits the lower id comes first.

    Args:
        logits: [B, V] float32, without NaN or +inf, and not all -inf; ids: [B] int64, below V. A
            negative id gives -inf and place 0.

    Returns:
        [B] float32, [B] int64.
    """
    valid = ids >= 0
    chosen = ids.clamp_min(0).unsqueeze(-1)
    logprobs = torch.log_softmax(logits, -1).gather(-1, chosen).squeeze(-1)
    own = logits.gather(-1, chosen)
    column = torch.arange(logits.shape[-1], device=logits.device)
    ahead = (logits > own) | ((logits == own) & (column < chosen))
    rank = ahead.sum(-1) + 1
    return torch.where(valid, logprobs, float("-inf")), torch.where(valid, rank, 0)


def top_logprobs(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k most likely tokens of each row in that order, the lower id first among equals.

    Args:
        logits: [B, V] float32, as in `token_logprobs`; k: more than V gives V.

    Returns:
        Ids [B, k] int64, -1 in place of tokens of -inf, and log-probabilities [B, k] float32.
    """
    k = min(k, logits.shape[-1])
    ids = order_keys(logits).topk(k, dim=-1).indices
    values = torch.log_softmax(logits, -1).gather(-1, ids)
    return torch.where(logits.gather(-1, ids) > float("-inf"), ids, -1), values

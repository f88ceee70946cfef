"""Reference of count_tokens and penalise.

Knows logits and how often tokens occurred; must not know requests.
"""

import torch
from torch import Tensor


def count_tokens(ids: Tensor, counts: Tensor) -> None:
    """counts[b, t] += how often t is in ids[b], in place; ids outside of the vocabulary are none.

    Args:
        ids: [B, L] int64 or int32, padded with -1; counts: [B, V] int32.
    """
    inside = (ids >= 0) & (ids < counts.shape[1])
    if counts.shape[1]:
        counts.scatter_add_(1, torch.where(inside, ids, 0).long(), inside.to(torch.int32))


def penalise(
    logits: Tensor,
    prompt_counts: Tensor,
    output_counts: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
    bias_ids: Tensor,
    bias_values: Tensor,
) -> None:
    """Penalties, then biases, in place.

    A positive logit of a token that the prompt or the output holds is divided by the repetition
    penalty, another one multiplied by it; then every token of the output loses presence +
    frequency * (how often it is there); then logits[b, bias_ids[b, i]] += bias_values[b, i], the
    values of an id that is listed twice added up first. Rows whose penalties are 1, 0 and 0 are
    touched by their biases only.

    Args:
        logits: [B, V] float32. prompt_counts, output_counts: [B, V] int32. repetition, presence,
            frequency: [B] float32. bias_ids: [B, K] int64, -1 for none; bias_values: [B, K]
            float32.
    """
    if logits.numel() == 0:
        return
    again = repetition.unsqueeze(-1)
    seen = (prompt_counts > 0) | (output_counts > 0)
    scaled = torch.where(logits > 0, logits / again, logits * again)
    changed = torch.where(seen, scaled, logits)
    lost = presence.unsqueeze(-1) + frequency.unsqueeze(-1) * output_counts
    changed = torch.where(output_counts > 0, changed - lost, changed)
    neutral = ((repetition == 1) & (presence == 0) & (frequency == 0)).unsqueeze(-1)
    valid = (bias_ids >= 0) & (bias_ids < logits.shape[1])
    values = torch.where(valid, bias_values, 0.0).double()
    bias = torch.zeros(logits.shape, dtype=torch.float64, device=logits.device)
    bias.scatter_add_(1, torch.where(valid, bias_ids, 0), values)
    logits.copy_(torch.where(neutral, logits, changed) + bias.float())

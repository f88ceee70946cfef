"""Reference of schedule_drafts.

Knows estimated chances; must not know tokens or how long a step takes.
"""

import torch
from torch import Tensor


def schedule_drafts(confidence: Tensor, counts: Tensor, budget: Tensor) -> Tensor:
    """Drafts of each sequence that are verified when there are `budget` rows for all of them.

    Draft j of a sequence is reached and accepted with chance confidence[0] * ... * confidence[j],
    multiplied in that order in float32; the largest chances of all sequences are taken, at equal
    chances the lower sequence and then the lower j. They never grow with j, so that each sequence
    gets its first drafts (model description 7.3). Which of a sequence's drafts are taken must not
    depend on later ones; so `budget` must not come from these confidences.

    Args:
        confidence: [B, n] float32, NaN counts as 0, others are brought into 0 .. 1. counts: [B]
            int32, drafts that there are, 0 .. n. budget: [1] int64; less than 0 is 0.

    Returns:
        [B] int32, together min(budget, sum(counts)).
    """
    B, n = confidence.shape
    chance = torch.where(confidence > 0, confidence.clamp_max(1.0), 0.0)
    rates: list[Tensor] = []
    for j in range(n):
        rates.append(chance[:, j] * rates[-1] if rates else chance[:, 0])
    if B == 0 or n == 0:
        return torch.zeros(B, dtype=torch.int32, device=confidence.device)
    exists = torch.arange(n, device=confidence.device) < counts.unsqueeze(-1)
    flat = torch.where(exists, torch.stack(rates, dim=-1), -1.0).reshape(-1)
    order = flat.sort(descending=True, stable=True).indices
    rank = torch.empty_like(order)
    rank.scatter_(0, order, torch.arange(B * n, device=order.device))
    taken = (rank.view(B, n) < budget) & exists
    return taken.sum(-1).to(torch.int32)

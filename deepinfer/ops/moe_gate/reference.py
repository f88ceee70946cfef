"""Reference of moe_gate.

Knows router logits; must not know the experts.
"""

import torch
from torch import Tensor

from deepinfer.ops.topk_select.reference import order_keys


def moe_gate(
    logits: Tensor, bias: Tensor, selected: int, scaling: float, normalise: bool
) -> tuple[Tensor, Tensor]:
    """Experts of each token and their route weights (model description 3.9).

    s = sqrt(softplus(logits)); the experts are the largest s + bias, lower id first among equals;
    the weights come from s alone: s / (sum of the selected + 1e-20) * scaling, or s * scaling
    without normalisation or with a single expert.

    Args:
        logits: [..., E] float32 or wider; bias: [E].
        selected: K, experts of each token.

    Returns:
        ids [..., K] int64 ascending by preference, weights [..., K].
    """
    scores = torch.sqrt(torch.nn.functional.softplus(logits))
    ids = order_keys((scores + bias).detach()).topk(selected, dim=-1).indices
    weights = scores.gather(-1, ids)
    if normalise and selected > 1:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids, weights * scaling

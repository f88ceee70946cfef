"""Reference of token_masses: temperature, top-k, top-p and min-p.

Knows logits and parameters on a device; must not know what is drawn. Nothing here waits for the
device.
"""

import torch
from torch import Tensor

# Probabilities are summed as whole multiples of 2^-52: integer sums do not depend on their order.
UNIT = 2.0**52


def token_masses(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> tuple[Tensor, Tensor]:
    """Kept probabilities in units of 2^-52, not renormalised, and which rows are distributions.

    p = softmax(logits / temperature). In descending order of logits, the lower id first among
    equals, a token stays while fewer than top_k tokens and less than top_p mass precede it; then
    tokens with p < min_p * max(p) go. Temperature 0 leaves 2^52 at the lowest id of the largest
    logit.

    Returns:
        [B, V] int64, of which faulty rows mean nothing, and [B] bool.
    """
    vocabulary, device = logits.shape[-1], logits.device
    largest = logits.amax(-1, keepdim=True)
    usable = largest.isfinite()
    logits = torch.where(usable, logits, 0.0)
    largest = torch.where(usable, largest, 0.0)
    ends = torch.finfo(torch.float32)
    divisor = temperature.float().clamp(ends.tiny, ends.max).unsqueeze(-1)
    masses = (torch.softmax((logits - largest) / divisor, -1).double() * UNIT).long()
    order = logits.sort(dim=-1, descending=True, stable=True).indices
    in_order = masses.gather(-1, order)
    before = in_order.cumsum(-1) - in_order
    k, p = top_k.unsqueeze(-1), top_p.double().unsqueeze(-1)
    limit = torch.where((k > 0) & (k < vocabulary), k, vocabulary)
    # "Off" is no bound at all: rounded masses may add up to a little more than 1.
    bound = torch.where(p < 1, p * UNIT, torch.inf)
    kept = (torch.arange(vocabulary, device=device) < limit) & (before < bound)
    masses = masses * torch.zeros_like(kept).scatter(-1, order, kept)
    floor = min_p.double().unsqueeze(-1) * masses.amax(-1, keepdim=True)
    masses = masses * (masses >= floor)
    best = logits.argmax(-1, keepdim=True)
    sure = torch.zeros_like(masses).scatter(-1, best, int(UNIT))
    return torch.where(temperature.unsqueeze(-1) == 0, sure, masses), usable.squeeze(-1)

"""Reference of engram_hash: n-gram classes to table rows.

Knows classes, multipliers and primes; must not know tokens or tables.
"""

import torch
from torch import Tensor


def engram_hash(classes: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor) -> Tensor:
    """Table rows of each token's n-grams (model description 3.10 c).

    h_1 = c_0 * m_0, h_n = h_(n-1) xor (c_(n-1) * m_(n-1)); the row of order n and head i is
    h_n mod prime[n][i] + offset[n][i]. Products stay below 2^63 by construction.

    Args:
        classes: [..., G] int64, class of the token itself, of the one before it, ...
        multipliers: [G] int64.
        primes: [G - 1, heads] int64, order 2 first; offsets: the same shape.

    Returns:
        [..., (G - 1) * heads] int64, order-major.
    """
    products = classes * multipliers
    state = products[..., 0]
    rows = []
    for order in range(1, classes.shape[-1]):
        state = state ^ products[..., order]
        rows.append(state.unsqueeze(-1) % primes[order - 1] + offsets[order - 1])
    return torch.cat(rows, dim=-1)

"""Reference of sample_tokens: seeded draws by inverse CDF.

Knows masses and seeds on a device; must not know requests. Nothing here waits for
the device.
"""

import torch
from torch import Tensor

from deepinfer.ops.token_masses import token_masses

# Philox streams: draws from the model's own distribution, judgements of drafts, and draws from
# what a rejected draft leaves.
STREAM_TOKEN, STREAM_ACCEPT, STREAM_RESIDUAL = 0, 1, 2

_LOW = 0xFFFFFFFF


def uniforms(seeds: Tensor, positions: Tensor, stream: int) -> Tensor:
    """Philox4x32-10 numbers in [0, 1), as `deepinfer.testing.philox.uniforms` gives them.

    Args:
        seeds, positions: int64 of one shape; their bits are taken as unsigned.

    Returns:
        float64 of that shape.
    """
    c0, c1 = positions & _LOW, (positions >> 32) & _LOW
    c2, c3 = torch.full_like(c0, stream), torch.zeros_like(c0)
    k0, k1 = seeds & _LOW, (seeds >> 32) & _LOW
    for _ in range(10):  # products wrap, and the mask takes the sign from their upper half
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1 = ((p1 >> 32) & _LOW) ^ c1 ^ k0, p1 & _LOW
        c2, c3 = ((p0 >> 32) & _LOW) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + 0x9E3779B9) & _LOW, (k1 + 0xBB67AE85) & _LOW
    bits = (c0 << 21) | (c1 >> 11)
    return bits.to(torch.float64) * 2.0**-53


def draw(masses: Tensor, u: Tensor) -> Tensor:
    """First id whose cumulative mass exceeds u * total: [B, V] int64, [B] float64 to [B] int64."""
    cumulative = masses.cumsum(-1)
    target = (u * cumulative[:, -1]).floor().long().unsqueeze(-1)
    return torch.searchsorted(cumulative, target, right=True).squeeze(-1)


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
    """One token per row, drawn from `token_masses` by inverse CDF in vocabulary order.

    The token is the first id whose cumulative mass exceeds u * total, u the Philox number of
    (seed, position, stream). Temperature 0 is the argmax, the lowest id of equals.

    Args:
        logits: [B, V] float32. temperature: [B] float32, >= 0. top_k: [B] integers, no limit
            where <= 0 or >= V. top_p: [B] float32 or float64 in (0, 1], 1 = off. min_p: the same
            in [0, 1], 0 = off. seeds, positions: [B] int64, the bits of unsigned numbers.

    Returns:
        Token ids [B] int64, -1 in rows that are no distribution (NaN, +inf, or nothing but -inf),
        and their status [B] int32: 0 drawn, 1 no distribution.
    """
    masses, usable = token_masses(logits, temperature, top_k, top_p, min_p)
    ids = draw(masses, uniforms(seeds, positions, stream))
    return torch.where(usable, ids, -1), (~usable).to(torch.int32)

"""Random numbers as a pure function of (seed, position, stream): Philox4x32-10.

Knows arithmetic on 32-bit words; must not know torch, requests or any generator state.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_WORD = np.uint64(32)


def philox4x32(counter: NDArray[np.uint32], key: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Ten rounds of Philox on every row (Salmon et al., SC 2011; the words of Random123).

    A round maps (c0, c1, c2, c3) to (hi(M1 c2) ^ c1 ^ k0, lo(M1 c2), hi(M0 c0) ^ c3 ^ k1,
    lo(M0 c0)); the key grows by the Weyl constants between rounds.

    Args:
        counter: [..., 4] uint32.
        key: [..., 2] uint32.

    Returns:
        [..., 4] uint32.
    """
    # 64-bit lanes hold the products whole, so no step depends on integer overflow.
    c0, c1, c2, c3 = np.moveaxis(counter.astype(np.uint64), -1, 0)
    k0, k1 = np.moveaxis(key.astype(np.uint64), -1, 0)
    for _ in range(_ROUNDS):
        p0 = np.uint64(_MULTIPLIERS[0]) * c0
        p1 = np.uint64(_MULTIPLIERS[1]) * c2
        c0, c1, c2, c3 = (p1 >> _WORD) ^ c1 ^ k0, p1 & _LOW, (p0 >> _WORD) ^ c3 ^ k1, p0 & _LOW
        k0 = (k0 + np.uint64(_KEY_STEPS[0])) & _LOW
        k1 = (k1 + np.uint64(_KEY_STEPS[1])) & _LOW
    return np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32)


def uniforms(seeds: Sequence[int], positions: Sequence[int], stream: int) -> NDArray[np.float64]:
    """One uniform number in [0, 1) per row.

    The counter is (position low, position high, stream, 0), the key (seed low, seed high). The
    upper 53 bits of the output's first two words, word 0 first, divided by 2^53.

    Args:
        seeds: B whole numbers in [0, 2^64).
        positions: B whole numbers in [0, 2^64).
        stream: a whole number in [0, 2^32) that separates draws at one position.

    Returns:
        [B] float64. Row i depends on (seeds[i], positions[i], stream) only.
    """
    assert len(seeds) == len(positions) and 0 <= stream < 2**32
    rows = len(seeds)
    seed = np.array(seeds, dtype=np.uint64)
    position = np.array(positions, dtype=np.uint64)
    third = np.full(rows, stream, dtype=np.uint64)
    fourth = np.zeros(rows, dtype=np.uint64)
    counter = np.stack([position & _LOW, position >> _WORD, third, fourth], axis=-1)
    key = np.stack([seed & _LOW, seed >> _WORD], axis=-1)
    words = philox4x32(counter.astype(np.uint32), key.astype(np.uint32)).astype(np.uint64)
    bits = ((words[:, 0] << _WORD) | words[:, 1]) >> np.uint64(64 - 53)
    return bits.astype(np.float64) * 2.0**-53


def uniform(seed: int, position: int, stream: int) -> float:
    """The uniform number in [0, 1) of (seed, position, stream); see `uniforms`."""
    return float(uniforms([seed], [position], stream)[0])

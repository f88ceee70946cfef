"""Seeded uniform numbers inside Triton kernels: Philox4x32-10.

The same words and the same numbers as `deepinfer.sampling.philox`, bit for bit.
"""

import triton
import triton.language as tl


@triton.jit
def uniform(seed, position, stream):
    """float64 in [0, 1) of int64 `seed` and `position` and of `stream`, a small constant.

    Seed and position are taken as the 64 bits that they are. The upper 53 bits of the first two
    output words, divided by 2^53.
    """
    # 64-bit lanes hold the products whole.
    low = tl.full((), 0xFFFFFFFF, tl.uint64)
    first = tl.full((), 0xD2511F53, tl.uint64)
    second = tl.full((), 0xCD9E8D57, tl.uint64)
    c0 = position.to(tl.uint64) & low
    c1 = position.to(tl.uint64) >> 32
    c2 = tl.full((), 0, tl.uint64) + stream
    c3 = tl.full((), 0, tl.uint64)
    k0 = seed.to(tl.uint64) & low
    k1 = seed.to(tl.uint64) >> 32
    for _ in tl.static_range(10):
        p0 = c0 * first
        p1 = c2 * second
        c0 = (p1 >> 32) ^ c1 ^ k0
        c1 = p1 & low
        c2 = (p0 >> 32) ^ c3 ^ k1
        c3 = p0 & low
        k0 = (k0 + 0x9E3779B9) & low
        k1 = (k1 + 0xBB67AE85) & low
    bits = ((c0 << 32) | c1) >> 11
    return bits.to(tl.int64).to(tl.float64) * 1.1102230246251565e-16

"""Triton kernel of cp_mirror: every entry finds its sequence by bisection.

Knows prefix sums; must not know what rows hold.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.errors import Unsupported
from deepinfer.kernels.launch import require_gpu
from deepinfer.kernels.signature import Signature
from deepinfer.ops.cp_mirror.reference import local_starts

_BLOCK = 256


@triton.jit
def _sequence_of(bounds, entry, n, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """The last of bounds[0 .. n] that is not above the entry."""
    low = tl.full((BLOCK,), 0, tl.int32)
    high = tl.full((BLOCK,), 0, tl.int32) + n
    for _ in tl.static_range(STEPS):
        middle = (low + high + 1) >> 1
        below = tl.load(bounds + middle) <= entry
        low = tl.where(below, middle, low)
        high = tl.where(below, high, middle - 1)
        high = tl.maximum(low, high)
    return low


@triton.jit(do_not_specialize=["n", "ranks", "rank", "total", "length"])
def mirror_kernel(
    starts, local, mirror, reverse, n, ranks, rank, total, length,
    STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK places of the rank, and BLOCK rows."""
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    pieces = 2 * ranks

    sequence = _sequence_of(local, entry, n, STEPS, BLOCK)
    real = sequence < n
    first = tl.load(starts + sequence, mask=real, other=0)
    size = tl.load(starts + sequence + 1, mask=real, other=0) - first
    width = tl.maximum((size + pieces - 1) // pieces, 1)
    within = entry - tl.load(local + sequence, mask=real, other=0)
    number = tl.where(within < width, rank, pieces - 1 - rank)
    offset = number * width + within % width
    row = tl.where(real & (offset < size), first + offset, -1)
    tl.store(mirror + entry, row, mask=entry < length)

    sequence = _sequence_of(starts, entry, n, STEPS, BLOCK)
    real = sequence < n
    first = tl.load(starts + sequence, mask=real, other=0)
    size = tl.load(starts + sequence + 1, mask=real, other=0) - first
    width = tl.maximum((size + pieces - 1) // pieces, 1)
    within = entry - first
    number = within // width
    late = number >= ranks
    owner = tl.where(late, pieces - 1 - number, number)
    place = tl.load(local + sequence, mask=real, other=0) + within % width
    place = owner * length + place + tl.where(late, width, 0)
    tl.store(reverse + entry, tl.where(real, place, -1), mask=entry < total)


def cp_mirror(
    starts: Tensor, ranks: int, rank: int, total: int, length: int
) -> tuple[Tensor, Tensor]:
    """See the reference; one launch, after those of `local_starts`.

    Raises:
        Unsupported: no GPU, starts that are not int64.
    """
    require_gpu(starts)
    if starts.dtype != torch.int64:
        raise Unsupported(f"starts of {starts.dtype}")
    starts = starts.contiguous()
    n = starts.shape[0] - 1
    mirror = torch.empty(length, dtype=torch.int64, device=starts.device)
    reverse = torch.empty(total, dtype=torch.int64, device=starts.device)
    most = max(total, length)
    if most:
        mirror_kernel[(triton.cdiv(most, _BLOCK),)](
            starts, local_starts(starts, ranks), mirror, reverse, n, ranks, rank, total, length,
            STEPS=(n + 1).bit_length(), BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip
    return mirror, reverse


SIGNATURES: tuple[Signature, ...] = (
    Signature(
        "cp_mirror",
        mirror_kernel,
        {
            **dict.fromkeys(("starts", "local", "mirror", "reverse"), "*i64"),
            **dict.fromkeys(("n", "ranks", "rank", "total", "length"), "i32"),
        },
        {"STEPS": 8, "BLOCK": _BLOCK},
    ),
)

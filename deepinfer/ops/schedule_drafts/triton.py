"""Triton kernel of schedule_drafts: every draft counts the ones that come before it.

Knows tiles of chances; must not know tokens.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.errors import Unsupported
from deepinfer.kernels.launch import require_gpu
from deepinfer.kernels.signature import Signature

_ENTRIES = 64  # drafts that a program compares at a time
_MOST = 32


@triton.jit
def _chances(confidence, counts, sequence, B, n, SIDE: tl.constexpr, PADDED: tl.constexpr):
    """[SIDE * PADDED] chances of the drafts of SIDE sequences, -1 where there is none."""
    inside = sequence < B
    count = tl.load(counts + sequence, mask=inside, other=0)
    column = tl.arange(0, PADDED)
    running = tl.full((SIDE,), 1.0, tl.float32)
    chance = tl.full((SIDE, PADDED), -1.0, tl.float32)
    for j in tl.static_range(PADDED):
        there = inside & (j < n) & (j < count)
        own = tl.load(confidence + sequence * n + j, mask=there, other=0.0)
        running = running * tl.where(own > 0, tl.where(own < 1.0, own, 1.0), 0.0)
        here = there[:, None] & (column == j)[None, :]
        chance = tl.where(here, running[:, None], chance)
    return tl.reshape(chance, (SIDE * PADDED,))


@triton.jit(do_not_specialize=["B", "n"])
def schedule_kernel(
    confidence, counts, budget, granted, B, n, SIDE: tl.constexpr, PADDED: tl.constexpr
):  # fmt: skip
    """SIDE sequences."""
    sequence = tl.program_id(0) * SIDE + tl.arange(0, SIDE)
    mine = _chances(confidence, counts, sequence, B, n, SIDE, PADDED)
    place = tl.program_id(0) * SIDE * PADDED + tl.arange(0, SIDE * PADDED)
    rank = tl.full((SIDE * PADDED,), 0, tl.int32)
    start = tl.full((), 0, tl.int32)
    while start < B:
        others = start + tl.arange(0, SIDE)
        theirs = _chances(confidence, counts, others, B, n, SIDE, PADDED)
        at = start * PADDED + tl.arange(0, SIDE * PADDED)
        higher = theirs[None, :] > mine[:, None]
        equal = (theirs[None, :] == mine[:, None]) & (at[None, :] < place[:, None])
        rank += tl.sum((higher | equal).to(tl.int32), axis=1)
        start += SIDE
    taken = (rank < tl.load(budget)) & (mine >= 0)
    number = tl.sum(tl.reshape(taken.to(tl.int32), (SIDE, PADDED)), axis=1)
    tl.store(granted + sequence, number, mask=sequence < B)


def schedule_drafts(confidence: Tensor, counts: Tensor, budget: Tensor) -> Tensor:
    """See the reference; one launch.

    Raises:
        Unsupported: no GPU, other dtypes, or more than 32 drafts of a sequence.
    """
    require_gpu(confidence)
    if confidence.dtype != torch.float32 or counts.dtype != torch.int32:
        raise Unsupported(f"confidence of {confidence.dtype}, counts of {counts.dtype}")
    if budget.dtype != torch.int64 or budget.numel() != 1:
        raise Unsupported(f"a budget of {budget.dtype} {[*budget.shape]}")
    B, n = confidence.shape
    if n > _MOST:
        raise Unsupported(f"{n} drafts: takes at most {_MOST}")
    granted = torch.empty(B, dtype=torch.int32, device=confidence.device)
    if n == 0:
        return granted.zero_()
    padded = max(2, triton.next_power_of_2(n))
    side = _ENTRIES // padded
    if B:
        schedule_kernel[(triton.cdiv(B, side),)](
            confidence.contiguous(), counts.contiguous(), budget, granted, B, n, SIDE=side,
            PADDED=padded, num_warps=4,
        )  # fmt: skip
    return granted


SIGNATURES: tuple[Signature, ...] = (
    Signature(
        "schedule_drafts",
        schedule_kernel,
        {
            "confidence": "*fp32", "counts": "*i32", "budget": "*i64", "granted": "*i32",
            "B": "i32", "n": "i32",
        },
        {"SIDE": 8, "PADDED": 8},
    ),
)  # fmt: skip

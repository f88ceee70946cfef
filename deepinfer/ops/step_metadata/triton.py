"""Step metadata on a GPU: one small kernel each, so that a step needs nothing from the host.

Knows tiles of rows; must not know what a ring holds.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.errors import Unsupported
from deepinfer.kernels.launch import require_gpu
from deepinfer.kernels.signature import Signature

_ROWS = 8  # rows of a program with a window
_FLAT = 256  # rows of the other programs


@triton.jit(do_not_specialize=["T", "ring", "rings"])
def window_kernel(
    positions, starts, slots, first_row, floors, out, T, ring, rings,
    WINDOW: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Windows of ROWS rows."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = rows < T
    column = tl.arange(0, PADDED)
    position = tl.load(positions + rows, mask=live, other=0)
    start = tl.load(starts + rows, mask=live, other=0)
    slot = tl.load(slots + rows, mask=live, other=0)
    first = tl.load(first_row + rows, mask=live, other=0)
    floor = tl.load(floors + rows, mask=live, other=0)
    wanted = position[:, None] - (WINDOW - 1) + column[None, :].to(tl.int64)
    valid = (wanted >= floor[:, None]) & (wanted >= 0)
    shift = first - start + rings.to(tl.int64) * ring
    # Negative numbers, whose remainders would differ, are invalid.
    kept = slot[:, None] * ring + tl.where(valid, wanted, 0) % ring
    place = tl.where(wanted >= start[:, None], wanted + shift[:, None], kept)
    place = tl.where(valid, place, -1).to(tl.int32)
    inside = live[:, None] & (column < WINDOW)[None, :]
    tl.store(out + rows[:, None] * WINDOW + column[None, :], place, mask=inside)


@triton.jit(do_not_specialize=["T", "ring"])
def target_kernel(positions, slots, left, out, T, ring, BLOCK: tl.constexpr):
    """Targets of BLOCK rows."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = row < T
    position = tl.load(positions + row, mask=live, other=0)
    slot = tl.load(slots + row, mask=live, other=0)
    keep = tl.load(left + row, mask=live, other=0) <= ring
    tl.store(out + row, tl.where(keep, slot * ring + position % ring, -1), mask=live)


@triton.jit(do_not_specialize=["B"])
def length_kernel(lengths, planned, accepted, source, B, BLOCK: tl.constexpr):
    """Lengths of BLOCK sequences."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    number = tl.load(source + at, mask=at < B, other=-1)
    known = number >= 0
    rejected = tl.load(planned + at, mask=known, other=0)
    rejected -= tl.load(accepted + number, mask=known, other=0)
    length = tl.load(lengths + at, mask=known, other=0)
    tl.store(lengths + at, length - rejected, mask=known)


@triton.jit(do_not_specialize=["T", "n"])
def token_kernel(token_ids, source, sampled, drafts, draft_step, T, n, BLOCK: tl.constexpr):
    """Tokens of BLOCK rows."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    number = tl.load(source + row, mask=row < T, other=-1).to(tl.int64)
    step = tl.load(draft_step + row, mask=row < T, other=-1).to(tl.int64)
    valid = (number >= 0) & (step >= 0) & (step <= n)
    first = tl.load(sampled + number, mask=valid & (step == 0), other=0).to(tl.int64)
    later = tl.load(drafts + number * n + step - 1, mask=valid & (step > 0), other=0).to(tl.int64)
    token = tl.where(step == 0, first, later)
    tl.store(token_ids + row, token.to(token_ids.dtype.element_ty), mask=valid)


def _require(dtypes: tuple[torch.dtype, ...], *tensors: Tensor) -> None:
    require_gpu(tensors[0])
    if any(x.dtype not in dtypes for x in tensors):
        names = " or ".join(str(d) for d in dtypes)
        raise Unsupported(f"tensors that are not {names}")


def _require_dense(*changed: Tensor) -> None:
    if any(not x.is_contiguous() for x in changed):
        raise Unsupported("a changed tensor that is not contiguous")


def window_index(
    positions: Tensor, starts: Tensor, slots: Tensor, first_row: Tensor, floors: Tensor,
    window: int, ring: int, rings: int,
) -> Tensor:  # fmt: skip
    """See the reference; one launch.

    Raises:
        Unsupported: no GPU, a tensor that is not int64.
    """
    rows = (positions, starts, slots, first_row, floors)
    _require((torch.int64,), *rows)
    T = positions.shape[0]
    out = torch.empty((T, window), dtype=torch.int32, device=positions.device)
    if out.numel():
        window_kernel[(triton.cdiv(T, _ROWS),)](
            *(x.contiguous() for x in rows), out, T, ring, rings, WINDOW=window,
            PADDED=triton.next_power_of_2(window), ROWS=_ROWS, num_warps=4,
        )  # fmt: skip
    return out


def ring_targets(positions: Tensor, slots: Tensor, left: Tensor, ring: int) -> Tensor:
    """See the reference; one launch.

    Raises:
        Unsupported: no GPU, a tensor that is not int64.
    """
    _require((torch.int64,), positions, slots, left)
    T = positions.shape[0]
    out = torch.empty_like(positions, memory_format=torch.contiguous_format)
    if T:
        rows = (x.contiguous() for x in (positions, slots, left))
        target_kernel[(triton.cdiv(T, _FLAT),)](*rows, out, T, ring, BLOCK=_FLAT, num_warps=4)
    return out


def fix_lengths(lengths: Tensor, planned: Tensor, accepted: Tensor, source: Tensor) -> None:
    """See the reference; one launch.

    Raises:
        Unsupported: no GPU, a tensor that is not int32, lengths that are not contiguous.
    """
    _require((torch.int32,), lengths, planned, accepted, source)
    _require_dense(lengths)
    B = lengths.shape[0]
    if B and accepted.shape[0]:
        length_kernel[(triton.cdiv(B, _FLAT),)](
            lengths, planned.contiguous(), accepted.contiguous(), source.contiguous(), B,
            BLOCK=_FLAT, num_warps=4,
        )  # fmt: skip


def fix_token_ids(
    token_ids: Tensor, source: Tensor, sampled: Tensor, drafts: Tensor, draft_step: Tensor
) -> None:
    """See the reference; one launch.

    Raises:
        Unsupported: no GPU, a tensor that is neither int32 nor int64, token ids that are not
            contiguous.
    """
    _require((torch.int32, torch.int64), token_ids, source, sampled, drafts, draft_step)
    _require_dense(token_ids)
    T = token_ids.shape[0]
    if T and sampled.shape[0]:
        token_kernel[(triton.cdiv(T, _FLAT),)](
            token_ids, source.contiguous(), sampled.contiguous(), drafts.contiguous(),
            draft_step.contiguous(), T, drafts.shape[1], BLOCK=_FLAT, num_warps=4,
        )  # fmt: skip


_ROW = ("positions", "starts", "slots", "first_row", "floors")
SIGNATURES = (
    Signature(
        "window_index",
        window_kernel,
        {
            **dict.fromkeys(_ROW, "*i64"),
            "out": "*i32",
            **dict.fromkeys(("T", "ring", "rings"), "i32"),
        },
        {"WINDOW": 128, "PADDED": 128, "ROWS": _ROWS},
    ),
    Signature(
        "ring_targets",
        target_kernel,
        {**dict.fromkeys(("positions", "slots", "left", "out"), "*i64"), "T": "i32", "ring": "i32"},
        {"BLOCK": _FLAT},
    ),
    Signature(
        "fix_lengths",
        length_kernel,
        {**dict.fromkeys(("lengths", "planned", "accepted", "source"), "*i32"), "B": "i32"},
        {"BLOCK": _FLAT},
    ),
    Signature(
        "fix_token_ids",
        token_kernel,
        {
            **dict.fromkeys(("token_ids", "sampled", "drafts"), "*i64"),
            **dict.fromkeys(("source", "draft_step"), "*i32"),
            "T": "i32",
            "n": "i32",
        },
        {"BLOCK": _FLAT},
    ),
)

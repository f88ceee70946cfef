"""Triton kernels of moe_plan: one launch for few rows, three for many.

Knows expert ids; must not know the experts. Places come from comparing ids and from counts, which
are integers: timing changes nothing.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.errors import Unsupported
from deepinfer.kernels.launch import require_gpu
from deepinfer.kernels.signature import Signature
from deepinfer.ops.moe_plan.reference import plan_tiles

ONE_LAUNCH = 8192  # most rows whose places are found by comparing each with all others
OWN = 16  # rows of one program then
SLOTS = 256  # rows of one program otherwise
MAX_EXPERTS = 1024
STEP = 512  # ids that are compared or counted at once
_STEP = tl.constexpr(32)  # the same within one part


@triton.jit
def _count(ids, first, rows, E_PAD: tl.constexpr, SLOTS: tl.constexpr):
    """How many of SLOTS ids from `first` on are each of E_PAD experts."""
    slot = first + tl.arange(0, SLOTS)
    own = tl.load(ids + slot, mask=slot < rows, other=0).to(tl.int32)
    return tl.histogram(own, E_PAD, mask=slot < rows)


@triton.jit
def _rank(ids, first, rows, own, slot, SLOTS: tl.constexpr):
    """How many of SLOTS ids from `first` on, before each of `slot`, equal its id `own`."""
    rank = tl.zeros(slot.shape, tl.int32)
    for start in range(0, SLOTS, _STEP):
        other = first + start + tl.arange(0, _STEP)
        their = tl.load(ids + other, mask=other < rows, other=-1).to(tl.int32)
        same = (their[None, :] == own[:, None]) & (other[None, :] < slot[:, None])
        rank += tl.sum(same.to(tl.int32), axis=1)
    return rank


@triton.jit
def _store_tiles(tiles, expert, start, count, experts, length, BLOCK: tl.constexpr):
    """The table of tiles from the start and the number of rows of every expert."""
    need = tl.where(expert < experts, (count + BLOCK - 1) // BLOCK, 0)
    upto = tl.cumsum(need, axis=0)
    total = tl.sum(need, axis=0)
    most = tl.max(need, axis=0)
    number = 0
    while number < most:
        place = upto - need + number
        mine = number < need
        tl.store(tiles + 2 * place, expert, mask=mine)
        tl.store(tiles + 2 * place + 1, start + number * BLOCK, mask=mine)
        number += 1
    begin = 0
    while begin < length:
        place = begin + tl.arange(0, 256)
        empty = (place >= total) & (place < length)
        tl.store(tiles + 2 * place, tl.full((256,), -1, tl.int32), mask=empty)
        tl.store(tiles + 2 * place + 1, tl.full((256,), -1, tl.int32), mask=empty)
        begin += 256


@triton.jit
def _place_few(ids, order, first, rows, OWN: tl.constexpr, STEP: tl.constexpr):
    """Places of OWN slots from `first` on, from all other ids."""
    slot = first + tl.arange(0, OWN)
    own = tl.load(ids + slot, mask=slot < rows, other=-1).to(tl.int32)
    before = tl.zeros((OWN, STEP), tl.int32)
    start = 0
    while start < rows:
        other = start + tl.arange(0, STEP)
        their = tl.load(ids + other, mask=other < rows, other=2147483647).to(tl.int32)
        same = (their[None, :] == own[:, None]) & (other[None, :] < slot[:, None])
        before += ((their[None, :] < own[:, None]) | same).to(tl.int32)
        start += STEP
    tl.store(order + tl.sum(before, axis=1), slot, mask=slot < rows)


@triton.jit(do_not_specialize=["rows", "length"])
def _plan_few(
    ids, order, ends, tiles, rows, experts, length,
    BLOCK: tl.constexpr, E_PAD: tl.constexpr, OWN: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Everything: the first program ends and tiles, the others places of OWN slots each."""
    if tl.program_id(0) == 0:
        expert = tl.arange(0, E_PAD)
        count = tl.zeros((E_PAD,), tl.int32)
        first = 0
        while first < rows:
            count += _count(ids, first, rows, E_PAD, STEP)
            first += STEP
        end = tl.cumsum(count, axis=0)
        tl.store(ends + expert, end, mask=expert < experts)
        _store_tiles(tiles, expert, end - count, count, experts, length, BLOCK)
    else:
        _place_few(ids, order, (tl.program_id(0) - 1) * OWN, rows, OWN, STEP)


@triton.jit(do_not_specialize=["rows"])
def _count_slots(ids, counts, rows, E_PAD: tl.constexpr, SLOTS: tl.constexpr):
    """Rows of each expert among SLOTS slots: counts [programs, E_PAD]."""
    program = tl.program_id(0)
    expert = tl.arange(0, E_PAD)
    count = _count(ids, program * SLOTS, rows, E_PAD, SLOTS)
    tl.store(counts + program * E_PAD + expert, count)


@triton.jit(do_not_specialize=["parts", "length"])
def _plan_many(
    counts, ends, tiles, parts, experts, length, BLOCK: tl.constexpr, E_PAD: tl.constexpr
):
    """Ends and tiles; counts become the place of each part's first row of each expert."""
    expert = tl.arange(0, E_PAD)
    part = tl.arange(0, 16)
    count = tl.zeros((E_PAD,), tl.int32)
    first = 0
    while first < parts:
        place = (first + part)[:, None] * E_PAD + expert[None, :]
        own = tl.load(counts + place, mask=(first + part < parts)[:, None], other=0)
        count += tl.sum(own, axis=0)
        first += 16
    end = tl.cumsum(count, axis=0)
    tl.store(ends + expert, end, mask=expert < experts)
    start = end - count
    _store_tiles(tiles, expert, start, count, experts, length, BLOCK)
    first = 0
    while first < parts:
        place = (first + part)[:, None] * E_PAD + expert[None, :]
        inside = (first + part < parts)[:, None]
        own = tl.load(counts + place, mask=inside, other=0)
        before = tl.cumsum(own, axis=0) - own
        tl.store(counts + place, before + start[None, :], mask=inside)
        start += tl.sum(own, axis=0)
        first += 16


@triton.jit(do_not_specialize=["rows"])
def _place_slots(ids, counts, order, rows, E_PAD: tl.constexpr, SLOTS: tl.constexpr):
    first = tl.program_id(0) * SLOTS
    slot = first + tl.arange(0, SLOTS)
    own = tl.load(ids + slot, mask=slot < rows, other=0).to(tl.int32)
    begin = tl.load(counts + tl.program_id(0) * E_PAD + own, mask=slot < rows, other=0)
    place = begin + _rank(ids, first, rows, own, slot, SLOTS)
    tl.store(order + place, slot, mask=slot < rows)


def moe_plan(ids: Tensor, experts: int, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """See the reference. Ids that are not contiguous are copied first.

    Raises:
        Unsupported: no GPU, more than MAX_EXPERTS experts, or 2^24 rows.
    """
    require_gpu(ids)
    if experts > MAX_EXPERTS or ids.numel() >= 2**24:
        raise Unsupported(f"{experts} experts, {ids.numel()} rows: takes {MAX_EXPERTS}, 2^24")
    flat = ids.contiguous().flatten()
    rows, device = len(flat), ids.device
    length = plan_tiles(rows, experts, block)
    order = torch.empty(rows, dtype=torch.int32, device=device)
    ends = torch.empty(experts, dtype=torch.int32, device=device)
    tiles = torch.empty((length, 2), dtype=torch.int32, device=device)
    pad = max(32, triton.next_power_of_2(experts))
    if rows <= ONE_LAUNCH:
        _plan_few[(1 + triton.cdiv(rows, OWN),)](
            flat, order, ends, tiles, rows, experts, length,
            BLOCK=block, E_PAD=pad, OWN=OWN, STEP=STEP, num_warps=8,
        )  # fmt: skip
        return order, ends, tiles
    parts = triton.cdiv(rows, SLOTS)
    counts = torch.empty((parts, pad), dtype=torch.int32, device=device)
    _count_slots[(parts,)](flat, counts, rows, E_PAD=pad, SLOTS=SLOTS, num_warps=8)
    constants = {"BLOCK": block, "E_PAD": pad, "num_warps": 8}
    _plan_many[(1,)](counts, ends, tiles, parts, experts, length, **constants)
    _place_slots[(parts,)](flat, counts, order, rows, E_PAD=pad, SLOTS=SLOTS, num_warps=8)
    return order, ends, tiles


_TYPES = {
    "ids": "*i64",
    "order": "*i32",
    "ends": "*i32",
    "tiles": "*i32",
    "counts": "*i32",
    "rows": "i32",
    "parts": "i32",
    "experts": "i32",
    "length": "i32",
}


def _signature(name: str, kernel: object, warps: int, **constants: int) -> Signature:
    names: list[str] = kernel.arg_names  # type: ignore[attr-defined]
    types = {key: value for key, value in _TYPES.items() if key in names}
    return Signature(name, kernel, types, constants, num_warps=warps)


SIGNATURES: tuple[Signature, ...] = (
    _signature("plan_few", _plan_few, 8, BLOCK=16, E_PAD=512, OWN=OWN, STEP=STEP),
    _signature("count_slots", _count_slots, 8, E_PAD=512, SLOTS=SLOTS),
    _signature("plan_many", _plan_many, 8, BLOCK=64, E_PAD=512),
    _signature("place_slots", _place_slots, 8, E_PAD=512, SLOTS=SLOTS),
)

"""Triton kernels that find out which tokens of a row stay, and how much mass they have.

Knows rows of logits and parameters; must not know what is drawn. See the reference.

Nothing is sorted. A row is cut into chunks of fixed size, so that few rows use many programs, and
goes through these launches, each of which reads the chunks once:

    statistics: largest logit and sum of exponentials of every chunk, largest logits of groups;
    histogram, three times: masses and counts by 11, 11 and 10 bits of the logits' order, of the
        tokens that share the bits found so far; integer sums, so that order does not matter;
    sums: mass of every chunk above the last kept logit, and how often that logit occurs.

A mass depends on nothing but the logit and the row's statistics, and these are combined with
integer sums as well: all launches see the same masses.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.errors import Unsupported
from deepinfer.kernels.launch import require_gpu
from deepinfer.kernels.signature import Signature
from deepinfer.ops.token_masses.reference import UNIT
from deepinfer.ops.topk_select.triton import order_keys

BLOCK, CHUNK = 2048, 8192  # logits of one step of a program's loop, and of a program
GROUP = 128  # logits of which the largest bounds top-k from below
MAX_VOCABULARY = 1 << 18
BINS = 2048
STATE = 4  # numbers that a level leaves for the next one

_BINS = tl.constexpr(BINS)
_STATE = tl.constexpr(STATE)
_UNIT = tl.constexpr(UNIT)
_FAR = tl.constexpr(1 << 30)


@triton.jit
def unsigned_keys(logit):
    """uint32 that orders as float32 `logit`."""
    return order_keys(logit).to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def inverse_of(temperature):
    """1 / temperature, the temperature kept within the normal numbers."""
    bounded = tl.maximum(temperature, 1.1754943508222875e-38)
    return tl.div_rn(bounded * 0 + 1.0, tl.minimum(bounded, 3.4028234663852886e38))


@triton.jit
def is_live(counts, row, REPEAT: tl.constexpr):
    """Whether the row is one of the first counts + 1 of its sequence's REPEAT rows."""
    if counts is None:
        return row >= 0
    else:
        return row % REPEAT <= tl.load(counts + row // REPEAT)


@triton.jit
def largest_logit(maxima, row, chunks, PADDED: tl.constexpr):
    """The row's largest logit (0 in faulty rows), and whether the row is a distribution."""
    chunk = tl.arange(0, PADDED)
    largest = tl.load(maxima + row * chunks + chunk, mask=chunk < chunks, other=float("-inf"))
    top = tl.max(largest, axis=0)
    usable = (top > float("-inf")) & (top < float("inf"))
    return tl.where(usable, top, 0.0), usable


@triton.jit
def factor_of(maxima, sums, row, chunks, top, inverse, PADDED: tl.constexpr):
    """float64 by which exp((logit - top) / temperature) becomes a mass."""
    chunk = tl.arange(0, PADDED)
    inside = chunk < chunks
    largest = tl.load(maxima + row * chunks + chunk, mask=inside, other=float("-inf"))
    total = tl.load(sums + row * chunks + chunk, mask=inside, other=0.0)
    part = (total * tl.exp((largest - top) * inverse)).to(tl.float64)
    # Whole multiples of 2^-40: the sum does not depend on how a kernel adds.
    whole = tl.sum((part * 1099511627776.0).to(tl.int64), axis=0)
    return _UNIT * 1099511627776.0 / tl.maximum(whole, 1).to(tl.float64)


@triton.jit
def masses_of(logit, top, inverse, factor):
    """int64 masses of logits, in units of 2^-52."""
    return (tl.exp((logit - top) * inverse).to(tl.float64) * factor).to(tl.int64)


@triton.jit
def _limits(top_k, top_p, row, V):
    """How many tokens and which mass end the kept ones, and whether there is an end at all."""
    k = tl.load(top_k + row).to(tl.int64)
    p = tl.load(top_p + row).to(tl.float64)
    by_count = (k > 0) & (k < V)
    by_mass = p < 1.0
    exact = p * _UNIT
    bound = exact.to(tl.int64)
    bound = tl.where(bound.to(tl.float64) < exact, bound + 1, bound)
    # More than there can be, and still far from overflow.
    bound = tl.where(by_mass, bound, tl.full((), 1 << 60, tl.int64))
    return tl.where(by_count, k, tl.full((), 1 << 30, tl.int64)), bound, by_count, by_mass


@triton.jit
def _descend(hist, mass_left, count_left):
    """The first bin at which mass or count reaches its limit.

    Returns the bin (_BINS if there is none), and mass and count of the bins before it.
    """
    bins = tl.arange(0, _BINS)
    mass = tl.load(hist + bins)
    count = tl.load(hist + _BINS + bins).to(tl.int32)
    upto_mass = tl.cumsum(mass, axis=0)
    upto_count = tl.cumsum(count, axis=0)
    before = (upto_mass < mass_left) & (upto_count < count_left)
    found = tl.sum(before.to(tl.int32), axis=0)
    mass_before = tl.max(tl.where(before, upto_mass, 0), axis=0)
    count_before = tl.max(tl.where(before, upto_count, 0), axis=0)
    return found, mass_before, count_before.to(tl.int64)


@triton.jit
def _bound_of_groups(groups, row, number, k, PADDED: tl.constexpr):
    """Key of the k-th largest of the groups' largest logits; of -inf if there are fewer."""
    at = tl.arange(0, PADDED)
    value = tl.load(groups + row * number + at, mask=at < number, other=float("-inf"))
    key = order_keys(value)
    low = tl.full((), -2139095040, tl.int64)
    high = tl.where(k <= number, tl.max(key, axis=0).to(tl.int64), low)
    while low < high:
        middle = low + ((high - low + 1) >> 1)
        enough = tl.sum((key >= middle.to(tl.int32)).to(tl.int32), axis=0) >= k
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    return low.to(tl.int32)


@triton.jit(do_not_specialize=["chunks"])
def statistics_kernel(
    logits, row_stride, V, chunks, temperature, counts, maxima, sums, best, groups,
    REPEAT: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Of one chunk: largest logit (inf if one is NaN or inf), its lowest id, sum of exp."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    if not is_live(counts, row, REPEAT):
        return
    heat = tl.load(temperature + row // REPEAT)
    inverse = inverse_of(tl.where(heat > 0, heat, 1.0))  # of no use where it is 0
    top = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    place = tl.full((), 0, tl.int32)
    faults = tl.full((), 0, tl.int32)
    per_block: tl.constexpr = BLOCK // GROUP
    for start in range(0, CHUNK, BLOCK):
        column = chunk * CHUNK + start + tl.arange(0, BLOCK)
        logit = tl.load(logits + row * row_stride + column, mask=column < V, other=float("-inf"))
        wrong = (logit != logit) | (logit == float("inf"))
        faults += tl.sum(wrong.to(tl.int32), axis=0)
        logit = tl.where(wrong, float("-inf"), logit)
        largest = tl.max(logit, axis=0)
        first = tl.min(tl.where(logit == largest, column, _FAR), axis=0)
        place = tl.where(largest > top, first, place)
        higher = tl.maximum(top, largest)
        # Of nothing but -inf no difference may be taken.
        safe = tl.where(higher > float("-inf"), higher, 0.0)
        total = total * tl.exp((top - safe) * inverse)
        total += tl.sum(tl.exp((logit - safe) * inverse), axis=0)
        top = higher
        group = (chunk * CHUNK + start) // GROUP + tl.arange(0, per_block)
        of_groups = tl.max(tl.reshape(logit, (per_block, GROUP)), axis=1)
        tl.store(groups + row * chunks * (CHUNK // GROUP) + group, of_groups)
    tl.store(maxima + row * chunks + chunk, tl.where(faults > 0, float("inf"), top))
    tl.store(sums + row * chunks + chunk, total)
    tl.store(best + row * chunks + chunk, place)


@triton.jit(do_not_specialize=["chunks"])
def histogram_kernel(
    logits, row_stride, V, chunks, temperature, top_k, top_p, counts, maxima, sums, groups,
    hist, state,
    LEVEL: tl.constexpr, REPEAT: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    GROUP: tl.constexpr, PADDED: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Masses and counts of one chunk by the bits of LEVEL (0, 1, 2), highest logits first.

    hist: [rows, 3, 2, _BINS] int64, zero at first. state: [rows, 3, _STATE] int64: the bits
    found, and mass and count left for the tokens that have them; -1 where all tokens stay.
    """
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    if not is_live(counts, row, REPEAT):
        return
    heat = tl.load(temperature + row // REPEAT)
    count_left, mass_left, by_count, by_mass = _limits(top_k, top_p, row // REPEAT, V)
    top, usable = largest_logit(maxima, row, chunks, PADDED)
    if not ((by_count | by_mass) & usable & (heat > 0)):
        return
    inverse = inverse_of(heat)
    factor = factor_of(maxima, sums, row, chunks, top, inverse, PADDED)
    least_mass = tl.full((), 1, tl.int64)
    least_key = tl.full((), -2139095040, tl.int32)
    bits = tl.full((), 0, tl.int64)
    if LEVEL == 0:
        # All masses up to this one together are less than half of what top-p leaves out.
        spare = (1.0 - tl.load(top_p + row // REPEAT).to(tl.float64)) * (_UNIT * 0.5) / V
        least_mass = tl.where(by_mass, tl.maximum(spare.to(tl.int64), 1), 1)
        if by_count:
            number = chunks * (CHUNK // GROUP)
            least_key = _bound_of_groups(groups, row, number, count_left, GROUPS)
    else:
        if LEVEL == 2:
            bits = tl.load(state + row * 3 * _STATE)
            mass_left = tl.load(state + row * 3 * _STATE + 1)
            count_left = tl.load(state + row * 3 * _STATE + 2)
        if bits >= 0:
            found, mass_before, count_before = _descend(
                hist + (row * 3 + LEVEL - 1) * 2 * _BINS, mass_left, count_left
            )
            bits = tl.where(found < _BINS, bits * _BINS + (_BINS - 1 - found), -1)
            mass_left -= mass_before
            count_left -= count_before
        if chunk == 0:
            known = state + (row * 3 + LEVEL - 1) * _STATE
            tl.store(known, bits)
            tl.store(known + 1, mass_left)
            tl.store(known + 2, count_left)
        if bits < 0:
            return
    into = hist + (row * 3 + LEVEL) * 2 * _BINS
    for start in range(0, CHUNK, BLOCK):
        column = chunk * CHUNK + start + tl.arange(0, BLOCK)
        logit = tl.load(logits + row * row_stride + column, mask=column < V, other=float("-inf"))
        key = unsigned_keys(logit)
        if LEVEL == 0:
            digit = key >> 21
            chosen = (order_keys(logit) >= least_key) & (column < V)
        elif LEVEL == 1:
            digit = (key >> 10) & (_BINS - 1)
            chosen = (key >> 21) == bits.to(tl.uint32)
        else:
            digit = key & 1023
            chosen = (key >> 10) == bits.to(tl.uint32)
        # Most blocks have nothing that counts: exponentials are what costs time.
        if tl.max(chosen.to(tl.int32), axis=0) > 0:
            mass = masses_of(logit, top, inverse, factor)
            chosen = chosen & (mass >= least_mass)
            place = (_BINS - 1) - digit.to(tl.int32)
            one = tl.full((BLOCK,), 1, tl.int64)
            tl.atomic_add(into + place, mass, mask=chosen, sem="relaxed")
            tl.atomic_add(into + _BINS + place, one, mask=chosen & by_count, sem="relaxed")


@triton.jit(do_not_specialize=["chunks"])
def sums_kernel(
    logits, row_stride, V, chunks, temperature, top_k, top_p, min_p, counts, maxima, sums,
    hist, state, parts,
    REPEAT: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Of one chunk: mass of the tokens above the last kept logit, and how many are at it.

    The last entry of the row's state becomes: that logit's key (-1: all stay), how many of its
    tokens stay, the mass of each of them, and the least mass that min-p lets stay.
    """
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    if not is_live(counts, row, REPEAT):
        return
    heat = tl.load(temperature + row // REPEAT)
    count_left, mass_left, by_count, by_mass = _limits(top_k, top_p, row // REPEAT, V)
    top, usable = largest_logit(maxima, row, chunks, PADDED)
    if not (usable & (heat > 0)):
        return
    inverse = inverse_of(heat)
    factor = factor_of(maxima, sums, row, chunks, top, inverse, PADDED)
    highest = (tl.exp(top - top).to(tl.float64) * factor).to(tl.int64)
    exact = tl.load(min_p + row // REPEAT).to(tl.float64) * highest.to(tl.float64)
    floor = exact.to(tl.int64)
    floor = tl.maximum(tl.where(floor.to(tl.float64) < exact, floor + 1, floor), 1)
    last = tl.full((), -1, tl.int64)
    ties = tl.full((), 0, tl.int64)
    tie_mass = tl.full((), 0, tl.int64)
    if by_count | by_mass:
        place = state + (row * 3 + 1) * _STATE
        bits = tl.load(place)
        if bits >= 0:
            mass_left = tl.load(place + 1)
            count_left = tl.load(place + 2)
            found, mass_before, count_before = _descend(
                hist + (row * 3 + 2) * 2 * _BINS, mass_left, count_left
            )
            last = bits * 1024 + (_BINS - 1 - found)
            # Of tokens with equal logits those stay that less than the limits precede. Counts
            # are kept for top-k only; a mass comes from the key itself.
            signed = (last - 0x80000000).to(tl.int32)
            magnitude = tl.abs(signed) | (signed & -0x80000000)
            tie_mass = masses_of(magnitude.to(tl.float32, bitcast=True), top, inverse, factor)
            tie_mass = tl.maximum(tie_mass, 1)
            by_mass_left = (mass_left - mass_before + tie_mass - 1) // tie_mass
            ties = tl.minimum(by_mass_left, count_left - count_before)
            tie_mass = tl.where(tie_mass >= floor, tie_mass, 0)
    if chunk == 0:
        place = state + (row * 3 + 2) * _STATE
        tl.store(place, last)
        tl.store(place + 1, ties)
        tl.store(place + 2, tie_mass)
        tl.store(place + 3, floor)
    above = tl.full((), 0, tl.int64)
    equal = tl.full((), 0, tl.int64)
    for start in range(0, CHUNK, BLOCK):
        column = chunk * CHUNK + start + tl.arange(0, BLOCK)
        logit = tl.load(logits + row * row_stride + column, mask=column < V, other=float("-inf"))
        mass = masses_of(logit, top, inverse, factor)
        key = unsigned_keys(logit).to(tl.int64)
        above += tl.sum(tl.where((key > last) & (mass >= floor), mass, 0), axis=0)
        equal += tl.sum(((key == last) & (column < V)).to(tl.int64), axis=0)
    tl.store(parts + (row * chunks + chunk) * 2, above)
    tl.store(parts + (row * chunks + chunk) * 2 + 1, equal)


@triton.jit
def kept_mass(mass, key, rank, last, ties, floor):
    """Masses of the kept tokens; rank: number of the token among those with its logit, from 1."""
    stays = (key > last) | ((key == last) & (rank <= ties))
    return tl.where(stays & (mass >= floor), mass, 0)


@triton.jit
def last_of_row(state, row):
    """What `sums_kernel` left: last kept key, its tokens that stay, their mass, least mass."""
    place = state + (row * 3 + 2) * _STATE
    return tl.load(place), tl.load(place + 1), tl.load(place + 2), tl.load(place + 3)


@triton.jit
def chunk_masses(parts, row, chunks, ties, tie_mass, PADDED: tl.constexpr):
    """Kept mass of every chunk, and how many ties come before it."""
    chunk = tl.arange(0, PADDED)
    inside = chunk < chunks
    above = tl.load(parts + (row * chunks + chunk) * 2, mask=inside, other=0)
    equal = tl.load(parts + (row * chunks + chunk) * 2 + 1, mask=inside, other=0)
    before = tl.cumsum(equal, axis=0) - equal
    stay = tl.minimum(tl.maximum(ties - before, 0), equal)
    return above + stay * tie_mass, before


@dataclass(frozen=True)
class Rows:
    """Rows of logits and what the launches up to `sums_kernel` have found out about them.

    Attributes:
        repeat: rows that share the parameters of one sequence. counts: [B] of each sequence's rows
            the first counts + 1 are worked on; None: all.
    """

    logits: Tensor
    temperature: Tensor
    counts: Tensor | None
    repeat: int
    chunks: int
    constants: dict[str, int]
    maxima: Tensor
    sums: Tensor
    best: Tensor
    state: Tensor
    parts: Tensor

    @property
    def first(self) -> tuple[Tensor, int, int, int, Tensor]:
        """The arguments with which every kernel begins."""
        rows = self.logits
        return rows, rows.stride(0), rows.shape[1], self.chunks, self.temperature

    @property
    def walk(self) -> dict[str, int]:
        """Constants of the kernels that read all chunks of a row."""
        return {**self.constants, "PADDED": triton.next_power_of_2(self.chunks)}


def _sizes(vocabulary: int) -> dict[str, int]:
    block = min(BLOCK, max(256, triton.next_power_of_2(vocabulary)))
    return {"BLOCK": block, "CHUNK": CHUNK if vocabulary > BLOCK else block}


def require(dtypes: tuple[torch.dtype, ...], **tensors: Tensor) -> None:
    """Refuse tensors of other dtypes.

    Raises:
        Unsupported: with the name of the tensor.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in dtypes:
            raise Unsupported(f"{name} of {tensor.dtype}")


def filter_rows(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor,
    counts: Tensor | None = None, repeat: int = 1,
) -> Rows:  # fmt: skip
    """Find out which tokens of each row [B * repeat, V] stay; five launches.

    Raises:
        Unsupported: no GPU, other dtypes than the reference's, or a vocabulary out of range.
    """
    require_gpu(logits)
    require((torch.float32,), logits=logits, temperature=temperature)
    require((torch.int32, torch.int64), top_k=top_k)
    require((torch.float32, torch.float64), top_p=top_p, min_p=min_p)
    R, V = logits.shape
    if not 0 < V <= MAX_VOCABULARY:
        raise Unsupported(f"a vocabulary of {V}: takes 1 to {MAX_VOCABULARY}")
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    sizes = _sizes(V)
    chunks = triton.cdiv(V, sizes["CHUNK"])
    number = chunks * sizes["CHUNK"] // GROUP

    def room(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty((R, *shape), dtype=dtype, device=logits.device)

    maxima, sums = (room(chunks, dtype=torch.float32) for _ in range(2))
    best, groups = room(chunks, dtype=torch.int32), room(number, dtype=torch.float32)
    state, parts = room(3, STATE, dtype=torch.int64), room(chunks, 2, dtype=torch.int64)
    constants = {"REPEAT": repeat, **sizes}
    rows = Rows(
        logits, temperature.contiguous(), counts, repeat, chunks, constants, maxima, sums, best,
        state, parts,
    )  # fmt: skip
    if R == 0:
        return rows
    hist = torch.zeros((R, 3, 2, BINS), dtype=torch.int64, device=logits.device)
    ends = (top_k.contiguous(), top_p.contiguous())
    grid = (R, chunks)
    statistics_kernel[grid](
        *rows.first, counts, maxima, sums, best, groups, GROUP=GROUP, **constants, num_warps=4
    )
    for level in range(3):
        histogram_kernel[grid](
            *rows.first, *ends, counts, maxima, sums, groups, hist, state, LEVEL=level,
            GROUP=GROUP, GROUPS=triton.next_power_of_2(number), **rows.walk, num_warps=4,
        )  # fmt: skip
    sums_kernel[grid](
        *rows.first, *ends, min_p.contiguous(), counts, maxima, sums, hist, state, parts,
        **rows.walk, num_warps=4,
    )  # fmt: skip
    return rows


# Types of arguments, in all kernels.
_TYPES = {
    "logits": "*fp32", "row_stride": "i32", "V": "i32", "chunks": "i32", "temperature": "*fp32",
    "top_k": "*i32", "top_p": "*fp32", "min_p": "*fp32", "counts": "*i32", "maxima": "*fp32",
    "sums": "*fp32", "best": "*i32", "groups": "*fp32", "hist": "*i64", "state": "*i64",
    "parts": "*i64", "seeds": "*i64", "positions": "*i64", "draft_ids": "*i64",
    "draft_probs": "*fp32", "residuals": "*i64", "tokens": "*i64", "accepts": "*i32",
    "statuses": "*i32",
}  # fmt: skip


def signature(
    name: str, kernel: Any, absent: tuple[str, ...] = (), warps: int = 4, **constants: int
) -> Signature:
    """A form for 129280 logits; `absent` arguments are None."""
    known = {"REPEAT": 1, "GROUP": GROUP, "PADDED": 16, "GROUPS": 1024, **_sizes(129280)}
    names = kernel.arg_names
    values: dict[str, object] = {k: v for k, v in known.items() if k in names}
    values |= {**constants, **dict.fromkeys(absent)}
    types = {k: v for k, v in _TYPES.items() if k in names and k not in absent}
    return Signature(name, kernel, types, values, num_warps=warps, divisible=("row_stride", "V"))


SIGNATURES: tuple[Signature, ...] = (
    signature("statistics", statistics_kernel, ("counts",)),
    *(signature(f"histogram {i}", histogram_kernel, ("counts",), LEVEL=i) for i in range(3)),
    signature("sums", sums_kernel, ("counts",)),
    signature("statistics of 6 rows", statistics_kernel, REPEAT=6),
    signature("histogram of 6 rows", histogram_kernel, REPEAT=6, LEVEL=1),
    signature("sums of 6 rows", sums_kernel, REPEAT=6),
)

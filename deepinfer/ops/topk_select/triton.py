"""Triton kernels of topk_select, and the launcher that selects for other operators too.

Knows rows of float32 scores; must not know what the selected columns hold.

One idea: the k best scores of a row lie in the k groups of neighbouring columns whose largest
scores are the k best, the lower group winning a tie. (For every group that is left out there are k
better ones, each with a score that beats all of the group's.) So a row is described by the largest
scores of its groups, those by the largest of their groups, and so on until one program can hold a
level. That program selects k of the highest level, looks into the groups that these stand for,
selects k of their members, and so on down to the scores themselves. Every step takes at most a
tile whatever the scores are, and reads few of them.

The k-th largest of a tile is found by counting how many scores reach two thresholds at a time: no
histogram, so that equal scores cost no more than others. Places come from a prefix sum. No atomic
operations, and the result is exact: sizes of groups and tiles can change nothing but the time.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.errors import Unsupported
from deepinfer.kernels.launch import require_gpu
from deepinfer.kernels.signature import Signature

MAX_SELECTED = 4096
MAX_ENTRIES = 1 << 22
MAX_TILE = 16384  # scores of one program: two counts share an int32
LEAST = 64  # columns that there is room for, and registers of a thread

_NOTHING = tl.constexpr(-2139095040)  # the key of -inf, below the keys of all other numbers
_LARGEST = tl.constexpr(3.4028234663852886e38)


class _Plan(NamedTuple):
    """How rows are selected from: changes nothing but the time.

    Attributes:
        tile: scores of one program, where k allows it.
        whole: scores of the most groups whose largest scores that program finds itself.
        each: scores of a tile in each thread.
        chunk: scores of one program of the kernel that finds the largest of the other groups.
        registers: most of them that a thread gets for each of its scores, LEAST in all.
    """

    tile: int
    whole: int
    each: int
    chunk: int
    registers: int = 16


MANY_ROWS = 512
# As little time for a row as possible.
_FEW = _Plan(tile=4096, whole=16384, each=32, chunk=2048)
# As few instructions as possible, and several rows at a time on a multiprocessor.
_MANY = _Plan(tile=4096, whole=16384, each=32, chunk=4096, registers=4)


@triton.jit
def order_keys(score):
    """int32 that orders as float32 `score`: -0 equals +0, NaN equals -inf."""
    bits = score.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    key = tl.where(bits < 0, -magnitude, bits)
    return tl.where(magnitude > 0x7F800000, _NOTHING, key)


@triton.jit
def _score_of(key):
    """The float32 score of a key; -0 has become +0."""
    return (tl.abs(key) | (key & -0x80000000)).to(tl.float32, bitcast=True)


@triton.jit
def _without_nan(score):
    return tl.where(score == score, score, float("-inf"))


@triton.jit
def _counts(score, low, high):
    """How many of `score` reach the keys `low` and `high`, at most MAX_TILE each."""
    reach_low = (score >= _score_of(low)).to(tl.int32)
    reach_high = (score >= _score_of(high)).to(tl.int32)
    both = tl.sum(reach_low + (reach_high << 16), axis=0)
    return both & 0xFFFF, both >> 16


@triton.jit
def _between(low, high, share):
    """Key of the score that lies `share` of the way from key `low` to key `high`."""
    a = _score_of(low)
    b = tl.minimum(_score_of(high), _LARGEST)  # of +inf there is no part
    return order_keys((1.0 - share) * a + share * b)


@triton.jit
def _threshold(score, low, high, k):
    """Key that the k best reach, and how many are above it where more than k may reach it.

    low, high: keys of the least score that may be the k-th best, and of the largest score. If
    fewer than k reach `low`, so do all that are not -inf, and it is the threshold.
    The second result is k where no more than k reach the threshold.
    """
    above_low, reach_high = _counts(score, low + 1, high)
    # From here on `reach` scores reach `low`, at least k unless low == high, and `above` of them,
    # fewer than k, are above `high`.
    only_high = reach_high >= k
    only_low = above_low < k
    above = tl.where(only_high, 0, tl.where(only_low, above_low, reach_high))
    reach = tl.where(only_high | only_low, k + 1, above_low)
    new_low = tl.where(only_high, high, tl.where(only_low, low, low + 1))
    high = tl.where(only_high, high, tl.where(only_low, low, high - 1))
    low = new_low
    while (low < high) & (reach > k):
        # The middle of the keys bounds the number of steps; the guess mostly needs fewer.
        middle = (low | high) - ((low ^ high) >> 1)
        share = (reach - k + 0.5) / (reach - above + 1.0)
        guess = tl.minimum(tl.maximum(_between(low, high, share), low + 1), high)
        first = tl.minimum(middle, guess)
        second = tl.maximum(middle, guess)
        many, few = _counts(score, first, second)
        low = tl.where(few >= k, second, tl.where(many >= k, first, low))
        reach = tl.where(few >= k, few, tl.where(many >= k, many, reach))
        high = tl.where(many < k, first - 1, tl.where(few < k, second - 1, high))
        above = tl.where(many < k, many, tl.where(few < k, few, above))
    return low, tl.where(reach == k, k, above)


@triton.jit
def _choose(score, low, high, count, k):
    """The k best of a tile: their places from 0, -1 for others; the threshold; and their number.

    count, low: that many scores, k or fewer, were found to reach the key `low`; with fewer than k
    that says nothing.
    """
    if count < k:
        valid = score > float("-inf")
        count = tl.minimum(k, tl.sum(valid.to(tl.int32), axis=0))
        low = order_keys(tl.min(tl.where(valid, score, float("inf")), axis=0))
    key, above = _threshold(score, low, high, k)
    threshold = tl.where(count > 0, _score_of(key), float("inf"))
    if above < k:
        equal = score == threshold
        rank = tl.cumsum(equal.to(tl.int32), axis=0)
        score = tl.where(equal & (rank > k - above), float("-inf"), score)
    chosen = score >= threshold
    place = tl.cumsum(chosen.to(tl.int32), axis=0) - 1
    # Two bytes: the store wants them in other threads than the prefix sum does.
    return tl.where(chosen, place, -1).to(tl.int16), key, count


@triton.jit
def _width_above(width, FAN: tl.constexpr):
    """Groups of a level of `width` scores, to a multiple of 16: the last ones may be empty."""
    return tl.cdiv(width, FAN * 16) * 16


@triton.jit
def _maxima(
    scores,
    maxima,
    entries,
    row_stride,
    total,
    LEVELS: tl.constexpr,
    FAN: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Largest scores, without NaN, of groups of FAN columns, of groups of FAN groups, and so on.

    maxima: [rows, total], the levels of a row one after the other.
    """
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    score = tl.load(scores + row * row_stride + column, mask=column < entries, other=float("-inf"))
    best = _without_nan(score)
    start = maxima + row * total
    width = entries
    for level in tl.static_range(LEVELS):
        best = tl.max(tl.reshape(best, [CHUNK // FAN ** (level + 1), FAN]), axis=1)
        width = _width_above(width, FAN)
        place = chunk * (CHUNK // FAN ** (level + 1)) + tl.arange(0, CHUNK // FAN ** (level + 1))
        tl.store(start + place, best, mask=place < width)
        start += width


@triton.jit
def _level(row_scores, row_maxima, entries, LEVEL: tl.constexpr, FAN: tl.constexpr):
    """Where a level of a row starts, and how wide it is; level 0 is the scores."""
    start = row_scores
    width = entries
    if LEVEL > 0:
        start = row_maxima
        width = _width_above(width, FAN)
        for _ in tl.static_range(LEVEL - 1):
            start += width
            width = _width_above(width, FAN)
    return start, width


@triton.jit
def _members(start, width, group, FAN: tl.constexpr):
    """Columns and scores of groups, [groups, FAN]; of a negative group -inf."""
    column = group[:, None] * FAN + tl.arange(0, FAN)[None, :]
    inside = (group >= 0)[:, None] & (column < width)
    return column, tl.load(start + column, mask=inside, other=float("-inf"))


@triton.jit(do_not_specialize=["k"])
def _select(
    scores,
    maxima,
    groups,
    out,
    entries,
    row_stride,
    total,
    k,
    LEVELS: tl.constexpr,
    WHOLE: tl.constexpr,
    FAN: tl.constexpr,
    TOP: tl.constexpr,
    K_PAD: tl.constexpr,
):
    """The k best columns of one row.

    maxima: see _maxima; without the highest level if WHOLE, which is found here.
    groups: int32 [rows, LEVELS, K_PAD], room for what is selected of a level.
    """
    row = tl.program_id(0).to(tl.int64)
    row_scores = scores + row * row_stride
    row_maxima = maxima + row * total
    rest = tl.arange(0, K_PAD)
    column = tl.arange(0, TOP)
    if WHOLE:
        start, width = _level(row_scores, row_maxima, entries, LEVELS - 1, FAN)
        score = tl.max(_without_nan(_members(start, width, column, FAN)[1]), axis=1)
    else:
        start, width = _level(row_scores, row_maxima, entries, LEVELS, FAN)
        score = tl.load(start + column, mask=column < width, other=float("-inf"))
        score = _without_nan(score)
    high = order_keys(tl.max(score, axis=0))
    count = tl.full((), 0, tl.int32)
    place, low, count = _choose(score, high, high, count, k)
    for step in tl.static_range(LEVELS):
        selected = groups + (row * LEVELS + step) * K_PAD
        place = place.to(tl.int32)
        tl.store(selected + place, column, mask=place >= 0)
        # Other threads of this program read what was written.
        tl.debug_barrier()
        group = tl.load(selected + rest, mask=rest < count, other=-1)
        start, width = _level(row_scores, row_maxima, entries, LEVELS - 1 - step, FAN)
        column, score = _members(start, width, group, FAN)
        column = tl.reshape(column, [K_PAD * FAN])
        score = tl.reshape(score, [K_PAD * FAN])
        place, low, count = _choose(score, low, high, count, k)
    place = place.to(tl.int32)
    tl.store(out + row * k + place, column.to(out.dtype.element_ty), mask=place >= 0)
    empty = (rest >= count) & (rest < k)
    tl.store(out + row * k + rest, tl.full((K_PAD,), -1, out.dtype.element_ty), mask=empty)


class _Shape(NamedTuple):
    """Sizes of both kernels; `stored` levels are the first one's, of `total` groups a row."""

    levels: int
    stored: int
    total: int
    fan: int
    top: int
    k_pad: int
    chunk: int
    warps: int
    registers: int


def _shape(plan: _Plan, entries: int, k: int) -> _Shape:
    k_pad = max(LEAST, triton.next_power_of_2(k))
    fan = min(16, max(4, plan.tile // k_pad))
    tile = max(plan.tile, k_pad * fan)
    widths = [entries]
    while widths[-1] > tile:
        widths.append(triton.cdiv(widths[-1], fan * 16) * 16)
    levels = len(widths) - 1
    whole = levels > 0 and widths[-2] <= plan.whole
    stored = levels - whole
    top = max(LEAST, triton.next_power_of_2(widths[-1]))
    largest = max(top, k_pad * fan if levels else 0)
    threads = max(largest // plan.each, top * fan // (2 * plan.each) if whole else 0)
    warps = min(32, max(1, threads // 32))
    chunk = max(plan.chunk, 16 * fan**stored)
    total = sum(widths[1 : stored + 1])
    registers = min(255, 2048 // warps, max(LEAST, plan.registers * largest // (32 * warps)))
    return _Shape(levels, stored, total, fan, top, k_pad, chunk, warps, registers)


def _launch(plan: _Plan, scores: Tensor, k: int, dtype: torch.dtype) -> Tensor:
    rows, entries = scores.shape
    levels, stored, total, fan, top, k_pad, chunk, warps, registers = _shape(plan, entries, k)
    sizes = (entries, scores.stride(0), total)
    maxima = groups = scores  # nobody looks at them where they have no levels
    if stored:
        maxima = torch.empty((rows, total), dtype=torch.float32, device=scores.device)
        constants = {"LEVELS": stored, "FAN": fan, "CHUNK": chunk}
        grid = (rows, triton.cdiv(entries, chunk))
        _maxima[grid](scores, maxima, *sizes, **constants, num_warps=_maxima_warps(chunk))
    if levels:
        groups = torch.empty((rows, levels, k_pad), dtype=torch.int32, device=scores.device)
    out = torch.empty((rows, k), dtype=dtype, device=scores.device)
    constants = {"LEVELS": levels, "WHOLE": stored < levels, "FAN": fan, "TOP": top, "K_PAD": k_pad}
    options = {"num_warps": warps, "maxnreg": registers}
    _select[(rows,)](scores, maxima, groups, out, *sizes, k, **constants, **options)
    return out


def _maxima_warps(chunk: int) -> int:
    return min(32, chunk // 512)


def select_rows(scores: Tensor, k: int, dtype: torch.dtype) -> Tensor:
    """[T, min(k, n)] columns of the k largest of each row of float32 scores [T, n].

    See the reference of topk_select for the rule. Columns of a row must lie side by side, rows
    anywhere; other scores are copied first.

    Raises:
        Unsupported: no GPU, scores of another dtype, more than MAX_SELECTED columns wanted, or
            more than MAX_ENTRIES in a row.
    """
    require_gpu(scores)
    if scores.dtype != torch.float32:
        raise Unsupported(f"{scores.dtype}: takes float32")
    rows, entries = scores.shape
    k = min(k, entries)
    if k > MAX_SELECTED:
        raise Unsupported(f"{k} columns wanted: selects at most {MAX_SELECTED}")
    if entries > MAX_ENTRIES:
        raise Unsupported(f"rows of {entries}: selects from at most {MAX_ENTRIES}")
    if rows == 0 or k == 0:
        return torch.empty((rows, k), dtype=dtype, device=scores.device)
    if scores.stride(1) != 1:
        scores = scores.contiguous()
    return _launch(_MANY if rows >= MANY_ROWS else _FEW, scores, k, dtype)


def topk_select(scores: Tensor, k: int) -> Tensor:
    """See the reference. Scores whose columns do not lie side by side are copied first.

    Raises:
        Unsupported: see `select_rows`.
    """
    lead = scores.shape[:-1]
    flat = scores if scores.dim() == 2 else scores.flatten(0, -2) if lead else scores.unsqueeze(0)
    found = select_rows(flat, k, torch.int64)
    return found.reshape(*lead, found.shape[-1])


def _signatures(name: str, plan: _Plan, entries: int, k: int, dtype: str) -> list[Signature]:
    """The kernels of rows of `entries` scores."""
    levels, stored, _, fan, top, k_pad, chunk, warps, _ = _shape(plan, entries, k)
    sizes = {"scores": "*fp32", "maxima": "*fp32", "entries": "i32", "row_stride": "i32"}
    constants: dict[str, object] = {"FAN": fan}
    divisible = ("entries", "row_stride", "total")
    types = sizes | {"groups": "*i32", "out": dtype, "k": "i32"}
    if not levels:
        types["groups"] = "*fp32"
    if stored:
        sizes["total"] = types["total"] = "i32"
    else:
        types["total"] = "i32"
    select = constants | {"LEVELS": levels, "WHOLE": stored < levels, "TOP": top, "K_PAD": k_pad}
    found = [Signature(name, _select, types, select, num_warps=warps, divisible=divisible)]
    if stored:
        largest = constants | {"LEVELS": stored, "CHUNK": chunk}
        warps = _maxima_warps(chunk)
        title = f"{name}: groups"
        found.append(
            Signature(title, _maxima, sizes, largest, num_warps=warps, divisible=divisible)
        )
    return found


SIGNATURES: tuple[Signature, ...] = (
    *_signatures("topk_select 512 of 4096", _FEW, 4096, 512, "*i64"),
    *_signatures("topk_select 512 of 16384", _FEW, 16384, 512, "*i64"),
    *_signatures("topk_select 512 of 16384, many rows", _MANY, 16384, 512, "*i64"),
    *_signatures("topk_select 512 of 131072", _FEW, 131072, 512, "*i64"),
    *_signatures("topk_select 512 of 1048576", _FEW, 1048576, 512, "*i64"),
    *_signatures("candidate blocks 2048 of 16384", _FEW, 16384, 2048, "*i32"),
    *_signatures("candidate blocks 2048 of 131072", _FEW, 131072, 2048, "*i32"),
    *_signatures("candidate blocks 2048 of 131072, many rows", _MANY, 131072, 2048, "*i32"),
)

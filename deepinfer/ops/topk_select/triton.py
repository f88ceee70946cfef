"""Triton kernels of topk_select, and the launcher that selects for other operators too.

Knows rows of float32 scores; must not know what the selected columns hold.

A program keeps a chunk of a row in registers and finds the k-th largest score by bisection over
integers that order as the scores do: no histogram, so equal scores cost no more than others. The
columns above the threshold, and the first of those at the threshold, go out in ascending order,
their places counted by a prefix sum. Of a row of several chunks each keeps its own k best, side by
side, until one chunk is left: the k best of all are among them, still in ascending order, so that
the lower column wins a tie at every level. No atomic operations: timing changes nothing.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.errors import Unsupported
from deepinfer.kernels.launch import require_gpu
from deepinfer.kernels.signature import Signature

SMALL_CHUNK, CHUNK = 4096, 8192  # scores of one program; counts share an int32: at most 2^15
MAX_SELECTED = 4096  # half a chunk, so that every level leaves half of the scores or less

_NOTHING = tl.constexpr(-2139095040)  # the key of -inf, below the keys of all other numbers


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
def _threshold(key, k):
    """The k-th largest of `key`; the key of -inf if no more than k are above it."""
    above = tl.sum((key > _NOTHING).to(tl.int32), axis=0)
    # Of at least k keys >= low, and of fewer than k keys > high, as int64: the middle may not wrap.
    low = tl.full((), -2139095040, tl.int64)
    high = tl.max(key, axis=0).to(tl.int64)
    high = tl.where(above > k, high, low)
    while low < high:
        middle = low + ((high - low + 1) >> 1)
        count = tl.sum((key >= middle.to(tl.int32)).to(tl.int32), axis=0)
        low = tl.where(count >= k, middle, low)
        # With exactly k keys from the middle on there is no need to go on.
        high = tl.where(count > k, high, tl.where(count == k, middle, middle - 1))
    return low.to(tl.int32)


@triton.jit(do_not_specialize=["k"])
def _select(
    scores,
    numbers,
    best,
    out,
    entries,
    row_stride,
    chunks,
    k,
    K_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The k best of one chunk of one row: columns to `out`, and their scores to `best`.

    numbers: columns that the scores stand for, [rows, entries]; None: their own. best: None when
    this is the last level.
    """
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = column < entries
    score = tl.load(scores + row * row_stride + column, mask=inside, other=float("-inf"))
    key = order_keys(score)
    threshold = _threshold(key, k)
    above = (key > threshold).to(tl.int32)
    equal = ((key == threshold) & (key > _NOTHING)).to(tl.int32)
    wanted = k - tl.sum(above, axis=0)
    count = tl.minimum(k, k - wanted + tl.sum(equal, axis=0))
    # Both counts up to and including a column, in the halves of one integer.
    upto = tl.cumsum(above | (equal << 16), axis=0)
    rank = upto >> 16  # among those at the threshold, from 1
    chosen = (key > threshold) | ((key == threshold) & (key > _NOTHING) & (rank <= wanted))
    place = (upto & 0xFFFF) + tl.minimum(rank, wanted) - 1
    first = (row * chunks + chunk) * k
    if numbers is None:
        number = column
    else:
        number = tl.load(numbers + row * entries + column, mask=chosen, other=-1)
    tl.store(out + first + place, number.to(out.dtype.element_ty), mask=chosen)
    rest = tl.arange(0, K_PAD)
    empty = (rest >= count) & (rest < k)
    tl.store(out + first + rest, tl.full((K_PAD,), -1, out.dtype.element_ty), mask=empty)
    if best is not None:
        tl.store(best + first + place, _score_of(key), mask=chosen)
        tl.store(best + first + rest, tl.full((K_PAD,), float("-inf"), tl.float32), mask=empty)


def _warps(chunk: int) -> int:
    """16 scores in each thread: twice as many do not fit into its registers."""
    return max(1, chunk // 512)


def chunk_of(entries: int, k: int) -> int:
    """Scores of one program, from static sizes only."""
    most = SMALL_CHUNK if 8 * k <= SMALL_CHUNK else CHUNK
    return min(most, max(128, triton.next_power_of_2(entries)))


def _level(scores: Tensor, numbers: Tensor | None, k: int, dtype: torch.dtype) -> list[Tensor]:
    """One launch: columns [rows, chunks, k], and their scores when there are several chunks."""
    rows, entries = scores.shape
    chunk = chunk_of(entries, k)
    chunks = triton.cdiv(entries, chunk)
    out = torch.empty((rows, chunks, k), dtype=dtype, device=scores.device)
    best = None
    if chunks > 1:
        best = torch.empty((rows, chunks, k), dtype=torch.float32, device=scores.device)
    constants = {"K_PAD": max(128, triton.next_power_of_2(k)), "CHUNK": chunk}
    arguments = (scores, numbers, best, out, entries, scores.stride(0), chunks, k)
    _select[(rows, chunks)](*arguments, **constants, num_warps=_warps(chunk))
    return [out] if best is None else [out, best]


def select_rows(scores: Tensor, k: int, dtype: torch.dtype) -> Tensor:
    """[T, min(k, n)] columns of the k largest of each row of float32 scores [T, n].

    See the reference of topk_select for the rule. Columns of a row must lie side by side, rows
    anywhere; other scores are copied first.

    Raises:
        Unsupported: no GPU, scores of another dtype, or more than MAX_SELECTED columns wanted.
    """
    require_gpu(scores)
    if scores.dtype != torch.float32:
        raise Unsupported(f"{scores.dtype}: takes float32")
    rows, entries = scores.shape
    k = min(k, entries)
    if k > MAX_SELECTED:
        raise Unsupported(f"{k} columns wanted: selects at most {MAX_SELECTED}")
    if rows == 0 or k == 0:
        return torch.empty((rows, k), dtype=dtype, device=scores.device)
    if scores.stride(1) != 1:
        scores = scores.contiguous()
    numbers = None
    while scores.shape[1] > chunk_of(scores.shape[1], k):
        numbers, scores = (x.flatten(1) for x in _level(scores, numbers, k, torch.int32))
    return _level(scores, numbers, k, dtype)[0].squeeze(1)


def topk_select(scores: Tensor, k: int) -> Tensor:
    """See the reference. Scores whose columns do not lie side by side are copied first.

    Raises:
        Unsupported: see `select_rows`.
    """
    lead = scores.shape[:-1]
    flat = scores if scores.dim() == 2 else scores.flatten(0, -2) if lead else scores.unsqueeze(0)
    found = select_rows(flat, k, torch.int64)
    return found.reshape(*lead, found.shape[-1])


def _signature(name: str, k: int, chunk: int, last: bool, numbered: bool, dtype: str) -> Signature:
    types = {"scores": "*fp32", "out": dtype, "entries": "i32", "row_stride": "i32", "k": "i32"}
    constants: dict[str, object] = {"K_PAD": triton.next_power_of_2(k), "CHUNK": chunk}
    if numbered:
        types["numbers"] = "*i32"
    else:
        constants["numbers"] = None
    if last:
        constants |= {"best": None, "chunks": 1}
    else:
        types |= {"best": "*fp32", "chunks": "i32"}
    divisible = ("entries", "row_stride")
    return Signature(name, _select, types, constants, num_warps=_warps(chunk), divisible=divisible)


SIGNATURES: tuple[Signature, ...] = (
    _signature("topk_select 512 of 512", 512, 512, True, False, "*i64"),
    _signature("topk_select 512 of 4096", 512, SMALL_CHUNK, True, False, "*i64"),
    _signature("topk_select 512, first level", 512, SMALL_CHUNK, False, False, "*i32"),
    _signature("topk_select 512, middle level", 512, SMALL_CHUNK, False, True, "*i32"),
    _signature("topk_select 512, last level", 512, SMALL_CHUNK, True, True, "*i64"),
    _signature("candidate blocks 2048 of 8192", 2048, CHUNK, True, False, "*i32"),
    _signature("candidate blocks 2048, first level", 2048, CHUNK, False, False, "*i32"),
    _signature("candidate blocks 2048, middle level", 2048, CHUNK, False, True, "*i32"),
    _signature("candidate blocks 2048, last level", 2048, CHUNK, True, True, "*i32"),
)

"""Triton kernels of paged_index_scores and candidate_scores.

Knows page-major MXFP4 index keys and rows of queries; must not know selection.

One row against one tile of entries is always the same arithmetic: one matrix product over all
channels, in one order, and one sum over heads. A score therefore has the same bits in every kernel,
whatever the number of rows or the way in which its entry was found.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.errors import Unsupported
from deepinfer.kernels.launch import DOT_DTYPE, INTERPRETED, require_gpu
from deepinfer.kernels.signature import Signature
from deepinfer.numerics import MXFP4_GROUP
from deepinfer.ops.index_scores.tiles import score_tiles

WARPS = 4
MAX_WIDTH = 2**30  # columns are numbered in 32 bits, with room for the entry that does not exist


class Shape(NamedTuple):
    """How a kernel divides its work.

    Attributes:
        reps: eights of entries that each warp takes of a tile; even, as a product takes 16.
        ahead: tiles whose keys are on their way while one is scored.
        programs: programs that run at the same time; more would wait for these to end.
        registers: of a thread at most, None for what the compiler wants.
    """

    reps: int
    ahead: int
    programs: int
    registers: int | None = None

    @property
    def tile(self) -> int:
        """Entries of a tile."""
        return 8 * WARPS * self.reps


ONE = Shape(reps=4, ahead=1, programs=528)  # rows alone
LISTED = Shape(reps=2, ahead=1, programs=792)  # candidates
SEVERAL = Shape(reps=2, ahead=1, programs=792, registers=168)  # rows that may share keys
TOGETHER = 4  # rows of a program that may share keys


@triton.jit
def _load_queries(
    queries,
    weights,
    base,
    here,
    heads,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_PAD: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    DOT: tl.constexpr,
):
    """`here` rows from `base` on: an operand [32 G, ROWS * heads], and weights [ROWS * heads]."""
    number = tl.arange(0, ROWS * HEADS_PAD)
    row = number // HEADS_PAD
    head = number % HEADS_PAD
    present = (head < heads) & (row < here)
    channel = tl.arange(0, GROUPS_PAD * 32)
    inside = present[:, None] & (channel < GROUPS * 32)[None, :]
    place = (row * heads + head)[:, None] * (GROUPS * 32) + channel[None, :]
    query = tl.load(queries + base * heads * (GROUPS * 32) + place, mask=inside, other=0).to(DOT)
    query = tl.reshape(query, (ROWS * HEADS_PAD, GROUPS_PAD, 4, 2, 2, 2))
    query = tl.permute(query, (0, 4, 5, 2, 1, 3))
    query = tl.reshape(query, (ROWS * HEADS_PAD, GROUPS_PAD * 32))
    weight = tl.load(weights + base * heads + row * heads + head, mask=present, other=0)
    return tl.trans(query), weight.to(tl.float32)


@triton.jit
def _publish(WARPS: tl.constexpr, PACKED: tl.constexpr):
    """What is in shared memory may be read by the tensor cores: no loop needs a barrier for that.

    Every thread that wrote says so to the asynchronous copies and products, then all wait.
    """
    if PACKED:
        tl.inline_asm_elementwise(
            "fence.proxy.async.shared::cta; mov.b32 $0, $1;",
            "=r,r",
            [tl.arange(0, 32 * WARPS)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
        tl.debug_barrier()


@triton.jit(do_not_specialize=["pages"])
def _score_row(
    queries,
    weights,
    codes,
    scales,
    page_table,
    sequence,
    visible,
    blocks,
    scores,
    heads,
    width,
    pages,
    block_count,
    code_stride,
    scale_stride,
    PER_PAGE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_PAD: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    REPS: tl.constexpr,
    AHEAD: tl.constexpr,
    WARPS: tl.constexpr,
    TURNS: tl.constexpr,
    DOT: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Columns of one row: entries (BLOCK_SIZE 0), or parts of blocks. Programs take turns."""
    row = tl.program_id(0).to(tl.int64)
    query, weight = _load_queries(
        queries, weights, row, 1, heads, 1, GROUPS, GROUPS_PAD, HEADS_PAD, DOT
    )
    _publish(WARPS, PACKED)
    number = tl.arange(0, 1)
    most = tl.load(visible + row).to(tl.int32)
    seen = most + number
    table = page_table + tl.load(sequence + row) * pages
    own = blocks
    if BLOCK_SIZE:
        own = blocks + row * block_count
    score_tiles(
        query, weight, codes, scales, table, own, scores + (row + number) * width, number == 0,
        seen, most, tl.program_id(1), tl.num_programs(1), width, code_stride, scale_stride,
        PER_PAGE, BLOCK_SIZE, 1, GROUPS, GROUPS_PAD, HEADS_PAD, REPS, AHEAD, WARPS, TURNS, DOT,
        PACKED,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "pages"])
def _score_rows(
    queries,
    weights,
    codes,
    scales,
    page_table,
    sequence,
    visible,
    scores,
    rows,
    heads,
    width,
    pages,
    code_stride,
    scale_stride,
    PER_PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_PAD: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    REPS: tl.constexpr,
    AHEAD: tl.constexpr,
    WARPS: tl.constexpr,
    TURNS: tl.constexpr,
    DOT: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Entries of ROWS rows: keys are read once for each run of rows of a sequence."""
    base = tl.program_id(0).to(tl.int64) * ROWS
    here = tl.minimum(rows - base, ROWS).to(tl.int32)
    query, weight = _load_queries(
        queries, weights, base, here, heads, ROWS, GROUPS, GROUPS_PAD, HEADS_PAD, DOT
    )
    _publish(WARPS, PACKED)
    number = tl.arange(0, ROWS)
    seen = tl.load(visible + base + number, mask=number < here, other=0).to(tl.int32)
    out = scores + (base + number) * width
    begin = 0
    while begin < here:
        current = tl.load(sequence + base + begin)
        end = here
        most = 0
        # One number after the other: what comes from a tensor is not known to be uniform.
        for back in tl.static_range(ROWS):
            index = ROWS - 1 - back
            owner = tl.load(sequence + base + index, mask=index < here, other=-1)
            end = tl.where((index > begin) & (index < here) & (owner != current), index, end)
        for index in tl.static_range(ROWS):
            sees = tl.load(visible + base + index, mask=index < here, other=0).to(tl.int32)
            most = tl.maximum(most, tl.where((index >= begin) & (index < end), sees, 0))
        taken = (number >= begin) & (number < end)
        score_tiles(
            query, weight, codes, scales, page_table + current * pages, None, out, taken, seen,
            most, tl.program_id(1), tl.num_programs(1), width, code_stride, scale_stride, PER_PAGE,
            0, ROWS, GROUPS, GROUPS_PAD, HEADS_PAD, REPS, AHEAD, WARPS, TURNS, DOT, PACKED,
        )  # fmt: skip
        begin = end


def _require_keys(queries: Tensor, codes: Tensor, scales: Tensor, width: int) -> None:
    """Refuse what the kernels cannot read.

    Raises:
        Unsupported: no GPU, another dtype of queries, channels that are no multiple of 32, records
            of a page that do not lie side by side or at addresses of words, or too many columns.
    """
    require_gpu(queries)
    if queries.dtype not in (torch.bfloat16, torch.float32):
        raise Unsupported(f"{queries.dtype}: takes bfloat16 and float32")
    channels = queries.shape[-1]
    if channels % MXFP4_GROUP:
        raise Unsupported(f"{channels} channels are no multiple of {MXFP4_GROUP}")
    for records, size in ((codes, channels // 2), (scales, channels // MXFP4_GROUP)):
        assert records.shape[-1] == size, (records.shape, size)
        apart = records.shape[1] > 1 and records.stride(1) != size
        if apart or records.stride(2) not in (1, size):
            raise Unsupported("the records of a page do not lie side by side")
    if codes.data_ptr() % 4 or codes.stride(0) % 4 or codes.stride(1) % 4:
        raise Unsupported("codes at addresses that are no multiples of 4")
    if width > MAX_WIDTH:
        raise Unsupported(f"{width} columns: takes at most {MAX_WIDTH}")


def _constants(
    queries: Tensor, codes: Tensor, shape: Shape, width: int, split: int
) -> dict[str, object]:
    groups = queries.shape[2] // MXFP4_GROUP
    return {
        "PER_PAGE": codes.shape[1],
        "GROUPS": groups,
        "GROUPS_PAD": max(2, triton.next_power_of_2(groups)),
        "HEADS_PAD": max(16, triton.next_power_of_2(queries.shape[1])),
        "REPS": shape.reps,
        "AHEAD": shape.ahead,
        "WARPS": WARPS,
        "TURNS": triton.cdiv(width, shape.tile * split) if INTERPRETED else 0,
        "DOT": DOT_DTYPE,
        "PACKED": not INTERPRETED,
        "num_warps": WARPS,
        "num_stages": 1,  # loads run ahead by hand, in registers
        "maxnreg": shape.registers,
    }


def rows_share_keys(rows: int, sequences: int) -> bool:
    """Whether so many rows belong to each sequence that keys should be read for several at once."""
    return rows >= 2 * sequences


@functools.lru_cache(maxsize=4096)
def splits(count: int, width: int, shape: Shape) -> int:
    """Programs that share the columns of each of `count` rows (or runs of rows).

    Tiles go round them, so that each has as many visible ones. The least time is sought of tiles
    one after the other, where a program begins and ends as slowly as it scores two tiles.
    """
    tiles = triton.cdiv(width, shape.tile)

    def time(split: int) -> int:
        return triton.cdiv(count * split, shape.programs) * (triton.cdiv(tiles, split) + 2)

    return min(range(1, min(tiles, shape.programs) + 1), key=time)


def paged_index_scores(
    queries: Tensor,
    weights: Tensor,
    codes: Tensor,
    scales: Tensor,
    page_table: Tensor,
    sequence: Tensor,
    visible: Tensor,
    width: int,
) -> Tensor:
    """See the reference. All arguments but codes and scales are copied if not contiguous.

    Values of a group whose scale is 2^-127 of the largest of its entry, or less, may count as 0.

    Raises:
        Unsupported: see `_require_keys`.
    """
    _require_keys(queries, codes, scales, width)
    rows, heads, _ = queries.shape
    scores = torch.empty((rows, width), dtype=torch.float32, device=queries.device)
    if scores.numel() == 0:
        return scores
    words = codes.view(torch.int32)
    tensors = [queries.contiguous(), weights.contiguous(), words, scales]
    tensors += [page_table.contiguous(), sequence.contiguous(), visible.contiguous()]
    pages, strides = page_table.shape[1], (words.stride(0), scales.stride(0))
    if rows_share_keys(rows, page_table.shape[0]):
        runs = triton.cdiv(rows, TOGETHER)
        split = splits(runs, width, SEVERAL)
        constants = _constants(queries, codes, SEVERAL, width, split)
        arguments = [*tensors, scores, rows, heads, width, pages, *strides]
        _score_rows[runs, split](*arguments, ROWS=TOGETHER, **constants)
    else:
        split = splits(rows, width, ONE)
        constants = _constants(queries, codes, ONE, width, split)
        arguments = [*tensors, None, scores, heads, width, pages, 0, *strides]
        _score_row[rows, split](*arguments, BLOCK_SIZE=0, **constants)
    return scores


def candidate_scores(
    queries: Tensor,
    weights: Tensor,
    codes: Tensor,
    scales: Tensor,
    page_table: Tensor,
    sequence: Tensor,
    visible: Tensor,
    blocks: Tensor,
    block_size: int,
) -> Tensor:
    """See the reference. All arguments but codes and scales are copied if not contiguous.

    Values of a group whose scale is 2^-127 of the largest of its entry, or less, may count as 0.

    Raises:
        Unsupported: see `_require_keys`.
    """
    width = blocks.shape[1] * block_size
    _require_keys(queries, codes, scales, width)
    rows, heads, _ = queries.shape
    scores = torch.empty((rows, width), dtype=torch.float32, device=queries.device)
    if scores.numel() == 0:
        return scores
    words = codes.view(torch.int32)
    tensors = [queries.contiguous(), weights.contiguous(), words, scales, page_table.contiguous()]
    tensors += [sequence.contiguous(), visible.contiguous(), blocks.contiguous(), scores]
    sizes = [heads, width, page_table.shape[1], blocks.shape[1], words.stride(0), scales.stride(0)]
    split = splits(rows, width, LISTED)
    constants = _constants(queries, codes, LISTED, width, split)
    _score_row[rows, split](*tensors, *sizes, BLOCK_SIZE=block_size, **constants)
    return scores


_TYPES = {
    "queries": "*bf16",
    "weights": "*fp32",
    "codes": "*i32",
    "scales": "*u8",
    "page_table": "*i64",
    "sequence": "*i64",
    "visible": "*i64",
    "scores": "*fp32",
    "heads": "i32",
    "width": "i32",
    "pages": "i32",
    "code_stride": "i32",
    "scale_stride": "i32",
}
_RELEASED = {
    "PER_PAGE": 64,
    "GROUPS": 4,
    "GROUPS_PAD": 4,
    "HEADS_PAD": 32,
    "WARPS": WARPS,
    "TURNS": 0,
    "DOT": tl.bfloat16,
    "PACKED": True,
}
_DIVISIBLE = ("heads", "width", "code_stride", "scale_stride")


SIGNATURES: tuple[Signature, ...] = (
    Signature(
        "paged_index_scores 1 row",
        _score_row,
        {**_TYPES, "block_count": "i32"},
        {**_RELEASED, "REPS": ONE.reps, "AHEAD": ONE.ahead, "blocks": None, "BLOCK_SIZE": 0},
        num_stages=1,
        divisible=_DIVISIBLE,
    ),
    Signature(
        f"paged_index_scores {TOGETHER} rows",
        _score_rows,
        {**_TYPES, "rows": "i32"},
        {**_RELEASED, "REPS": SEVERAL.reps, "AHEAD": SEVERAL.ahead, "ROWS": TOGETHER},
        num_stages=1,
        divisible=_DIVISIBLE,
        maxnreg=SEVERAL.registers,
    ),
    Signature(
        "candidate_scores",
        _score_row,
        {**_TYPES, "blocks": "*i32", "block_count": "i32"},
        {**_RELEASED, "REPS": LISTED.reps, "AHEAD": LISTED.ahead, "BLOCK_SIZE": 8},
        num_stages=1,
        divisible=(*_DIVISIBLE, "block_count"),
    ),
)

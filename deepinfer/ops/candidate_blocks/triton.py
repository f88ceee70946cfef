"""Triton kernels of candidate_block_list and restore_entries.

Knows blocks of columns; must not know how the best of them are found: topk_select does that.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.errors import Unsupported
from deepinfer.kernels.launch import require_gpu
from deepinfer.kernels.signature import Signature
from deepinfer.ops.topk_select.triton import select_rows

TILE = 2048  # scores of one program
MAX_BLOCK = 1024
COLUMNS = 512  # selected columns of one program
ALIGNED = 16  # columns that Triton tells numbers of columns apart by


@triton.jit(do_not_specialize=["count"])
def _block_best(
    scores,
    visible,
    best,
    entries,
    row_stride,
    count,
    SIZE: tl.constexpr,
    SIZE_PAD: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Largest score of each block, without NaN; +inf for the block of the newest visible entry.

    best: [rows, count], -inf for blocks past the last.
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    offset = tl.arange(0, SIZE_PAD)
    column = block[:, None] * SIZE + offset[None, :]
    inside = (column < entries) & (offset < SIZE)[None, :]
    score = tl.load(scores + row * row_stride + column, mask=inside, other=float("-inf"))
    top = tl.max(tl.where(score == score, score, float("-inf")), axis=1)
    seen = tl.load(visible + row)
    # The maximum keeps the dividend positive: with nothing visible no block is the newest.
    newest = (seen > 0) & (block == tl.maximum(seen - 1, 0) // SIZE)
    tl.store(best + row * count + block, tl.where(newest, float("inf"), top), mask=block < count)


@triton.jit
def _restore(
    selected,
    blocks,
    out,
    width,
    block_count,
    BLOCK_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    column = tl.load(selected + row * width + place, mask=place < width, other=-1)
    chosen = column >= 0
    block = tl.load(
        blocks + row * block_count + tl.maximum(column, 0) // BLOCK_SIZE, mask=chosen, other=-1
    ).to(column.dtype)
    entry = block * BLOCK_SIZE + column % BLOCK_SIZE
    entry = tl.where(chosen & (block >= 0), entry, -1)
    tl.store(out + row * width + place, entry, mask=place < width)


def candidate_block_list(scores: Tensor, visible: Tensor, block_size: int, blocks: int) -> Tensor:
    """See the reference. Scores whose columns do not lie side by side are copied first.

    Raises:
        Unsupported: no GPU, scores that are not float32 [T, n], blocks of more than MAX_BLOCK
            entries, or more blocks wanted than topk_select selects.
    """
    require_gpu(scores)
    if scores.dtype != torch.float32 or scores.dim() != 2:
        raise Unsupported(f"{scores.dtype} {list(scores.shape)}: takes float32 [T, n]")
    if block_size > MAX_BLOCK:
        raise Unsupported(f"blocks of {block_size} entries: takes at most {MAX_BLOCK}")
    rows, entries = scores.shape
    # Full vectors of columns, the last of which are -inf: the kernels that select are compiled for
    # that, and any other number would need some of its own.
    count = triton.cdiv(entries, block_size)
    width = triton.cdiv(count, ALIGNED) * ALIGNED
    best = torch.empty((rows, width), dtype=torch.float32, device=scores.device)
    if best.numel():
        if scores.stride(1) != 1:
            scores = scores.contiguous()
        pad = triton.next_power_of_2(block_size)
        many = TILE // pad
        sizes = (entries, scores.stride(0), width)
        constants = {"SIZE": block_size, "SIZE_PAD": pad, "BLOCKS": many}
        grid = (rows, triton.cdiv(width, many))
        _block_best[grid](scores, visible.contiguous(), best, *sizes, **constants)
    return select_rows(best, min(blocks, count), torch.int32)


def restore_entries(selected: Tensor, blocks: Tensor, block_size: int) -> Tensor:
    """See the reference. Arguments that are not contiguous are copied first.

    Raises:
        Unsupported: no GPU.
    """
    require_gpu(selected)
    rows, width = selected.shape
    out = torch.empty((rows, width), dtype=selected.dtype, device=selected.device)
    if out.numel():
        grid = (rows, triton.cdiv(width, COLUMNS))
        tensors = (selected.contiguous(), blocks.contiguous(), out)
        sizes = (width, blocks.shape[1])
        _restore[grid](*tensors, *sizes, BLOCK_SIZE=block_size, COLUMNS=COLUMNS)
    return out


SIGNATURES: tuple[Signature, ...] = (
    Signature(
        "best of blocks of 8",
        _block_best,
        {
            "scores": "*fp32",
            "visible": "*i64",
            "best": "*fp32",
            "entries": "i32",
            "row_stride": "i32",
            "count": "i32",
        },
        {"SIZE": 8, "SIZE_PAD": 8, "BLOCKS": TILE // 8},
        divisible=("entries", "row_stride"),
    ),
    Signature(
        "restore_entries",
        _restore,
        {"selected": "*i64", "blocks": "*i32", "out": "*i64", "width": "i32", "block_count": "i32"},
        {"BLOCK_SIZE": 8, "COLUMNS": COLUMNS},
        divisible=("width", "block_count"),
    ),
)

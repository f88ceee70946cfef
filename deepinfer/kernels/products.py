"""What matrix products share: sizes of tiles, fixed splits of sums, and the sum over splits.

Knows rows, outputs and channels; must not know formats.

A sum over channels is cut into chunks, whose number depends on the matrix alone. Chunks are added
in order, by the program that computed all of them or by `sum_splits`, with the same result: few
rows spread the chunks over the GPU, many rows do not need to.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from deepinfer.kernels import formats
from deepinfer.kernels.launch import INTERPRETED

# Programs among which few rows are spread. With this many steps loaded ahead they read as fast as
# one for each processor would, and a matrix of 80 tiles needs no second kernel that adds chunks.
PROGRAMS = 72
FEWEST_CHANNELS = 256  # of one chunk
MOST_CHANNELS = 4096  # of one chunk of a matrix that has fewer tiles than there are processors
PROCESSORS = 132
SUM_TILE = 1024
OVERLAP = True  # whether sums of splits are launched while the product that makes them runs


class Tile(NamedTuple):
    """How one program works: rows and outputs of its tile, warps, and buffered steps.

    ahead: scales are buffered, too.
    """

    rows: int
    outputs: int
    warps: int
    stages: int
    ahead: bool = False


@triton.jit
def place_of_tile(tiles_t, tiles_n, SWIZZLE: tl.constexpr):
    """(tile of rows, tile of outputs) of a program: neighbours share SWIZZLE tiles of outputs."""
    program = tl.program_id(0)
    width = SWIZZLE * tiles_t
    first = (program // width) * SWIZZLE
    size = tl.minimum(tiles_n - first, SWIZZLE)
    inside = program % width
    return inside // size, first + inside % size


@triton.jit
def tile_positions(tile, count, BLOCK: tl.constexpr, ALIGN: tl.constexpr):
    """First position (int64) of a tile, offsets [BLOCK] from there, and which are to be stored.

    ALIGN 0: `count` is below BLOCK. There is one tile, and the last position stands for those past
    the end. Otherwise the last tile is moved back until it is full, so that neither loads nor
    stores need masks: what two tiles compute is stored twice with the same bits. All first
    positions are then multiples of ALIGN.
    """
    offset = tl.arange(0, BLOCK)
    if ALIGN == 0:
        first = (tile * 0).to(tl.int64)
        stored = offset < count
        offset = tl.minimum(offset, count - 1)
    else:
        first = tl.multiple_of(tl.minimum(tile * BLOCK, count - BLOCK).to(tl.int64), ALIGN)
        stored = offset >= 0
    return first, offset, stored


@triton.jit(do_not_specialize=["count"])
def sum_splits(
    partial,
    out,
    count,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    ALIGN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """out[i] = narrow(0 + partial[0, i] + partial[1, i] + ...) for i below `count`.

    ALIGN: `count` is a multiple of it.
    OVERLAP: launched before the kernel in front has ended; wait until all it wrote is there.
    """
    if OVERLAP:
        gdc_wait()
    count = tl.multiple_of(count.to(tl.int64), ALIGN)
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = place < count
    total = tl.zeros((TILE,), dtype=tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(partial + split * count + place, mask=inside, other=0.0)
    tl.store(out + place, formats.narrow(total, out.dtype.element_ty), mask=inside)


def alignment(count: int, block: int) -> int:
    """ALIGN of `tile_positions`."""
    if count < block:
        return 0
    return 16 if count % 16 == 0 else 1


def chunk_steps(outputs: int, groups: int, columns: int, step: int) -> int:
    """Steps of `step` channels of one chunk: what depends on it is the order of additions.

    All chunks are equally long.
    """
    tiles, steps = triton.cdiv(outputs, 64) * groups, triton.cdiv(columns, step)
    splits = min(triton.cdiv(PROGRAMS, tiles), max(1, columns // FEWEST_CHANNELS))
    if tiles < PROCESSORS:
        splits = max(splits, triton.cdiv(columns, MOST_CHANNELS))
    return next(n for n in range(triton.cdiv(steps, splits), steps + 1) if steps % n == 0)


def _programs(rows: int, outputs: int, groups: int, tile: Tile) -> int:
    return triton.cdiv(rows, tile.rows) * triton.cdiv(outputs, tile.outputs) * groups


def tile_of(rows: int, outputs: int, groups: int = 1, chunks: int = 1) -> Tile:
    """Tile of a bfloat16 product of `rows` rows with matrices of `outputs` rows.

    The largest has no registers left for a sum of chunks, and is slow where it is not full.
    """
    if rows <= 16:
        return Tile(16, 64, 4, 8)
    if rows <= 32:
        return Tile(32, 64, 4, 8)
    large, largest = Tile(128, 128, 8, 4), Tile(256, 128, 8, 3)
    if rows <= 64 or _programs(rows, outputs, groups, large) < PROCESSORS:
        return Tile(64, 64, 4, 6)
    few = _programs(rows, outputs, groups, largest) < 4 * PROCESSORS
    return large if few or chunks > 1 or rows < largest.rows else largest


def fp8_tile_of(rows: int, outputs: int) -> Tile:
    """Tile of an FP8 product: smaller, as every step has a sum of its own in registers.

    While one program of a processor adds such a sum, another one multiplies.
    """
    if rows <= 64:
        wide = outputs >= 128 * PROCESSORS
        if rows <= 16:
            return Tile(16, 128, 8, 5, True) if wide else Tile(16, 64, 4, 8, True)
        if rows <= 32:
            return Tile(32, 128, 8, 5, True) if wide else Tile(32, 64, 4, 8, True)
        return Tile(64, 128, 8, 4, True) if wide else Tile(64, 64, 4, 6, True)
    large = Tile(64, 128, 4, 4)
    few = _programs(rows, outputs, 1, large) < 256  # two for almost every processor
    return Tile(64, 64, 4, 4) if few else large


def grid_of(rows: int, outputs: int, groups: int, tile: Tile, splits: int) -> tuple[int, int, int]:
    """Grid of a product; the second axis is 1 where a program adds up all chunks itself.

    More rows make spread chunks more expensive: each of them is written and read again.
    """
    programs = _programs(rows, outputs, groups, tile)
    few = programs < (PROCESSORS if rows <= 64 else PROCESSORS // 2)
    return programs // groups, splits if few else 1, groups


def telling_rows(most: int) -> tuple[int, ...]:
    """Counts of rows up to `most` that meet every form of every product.

    With them whatever will be needed can be compiled beforehand. A form is a tile, whether chunks
    are spread, and an alignment; from 64 rows on the first two change at three counts at most,
    each of which is four times the one before or more.
    """
    counts = {1, 16, 17, 32, 33, 64, most // 16 * 16, most - 1, most}
    step = 64
    while step < most:
        counts |= {step + 1, step + 16}
        step *= 2
    return tuple(sorted(n for n in counts if 1 <= n <= most))


def overlaps() -> bool:
    """Whether FP8 products let `add_splits` be launched while they run."""
    return OVERLAP and not INTERPRETED


def add_splits(partial: Tensor, out: Tensor, overlap: bool = False) -> None:
    """Sum `partial` [splits, ...] float32 into contiguous `out` [...].

    overlap: the kernel launched just before made `partial`, and allows dependents early.
    """
    count = out.numel()
    sum_splits[(triton.cdiv(count, SUM_TILE),)](
        partial,
        out,
        count,
        SPLITS=partial.shape[0],
        TILE=SUM_TILE,
        ALIGN=16 if out.shape[-1] % 16 == 0 else 1,
        OVERLAP=overlap,
        **({"launch_pdl": True} if overlap else {}),
    )


def buffer_of(out: Tensor, splits: int) -> Tensor:
    """Where programs store: `out`, or float32 [splits, ...] that `add_splits` sums."""
    if splits == 1:
        return out
    return torch.empty((splits, *out.shape), dtype=torch.float32, device=out.device)

"""Triton kernels of expert_down: exact, and with scales absorbed into the codes.

Knows tiles of rows that share an expert; must not know who chose it. See expert_up for the two
forms.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.errors import Unsupported
from deepinfer.kernels import formats
from deepinfer.kernels.experts import (
    align_rows,
    aligned_products,
    as_operand,
    as_words,
    exact_products,
    fragment_warps,
    require_rows,
    short_rows,
    tile_bounds,
)
from deepinfer.kernels.launch import INTERPRETED, require_gpu
from deepinfer.kernels.signature import Signature
from deepinfer.ops.expert_up.prepare import ExpertMatrices

COLUMNS = 128  # of y, in one program


@triton.jit
def _down_tile(
    x,
    x_scales,
    codes,
    shifts,
    base,
    order,
    out,
    first,
    start,
    end,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    EXACT: tl.constexpr,
    WARPS: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Columns from `first` on of plan rows from `start` to `end`, at most BM, of one expert."""
    row = start + tl.arange(0, BM)
    exists = row < end
    column = first + tl.arange(0, BN)
    inside = column < ROWS
    n = tl.where(inside, column, 0)
    own_base = tl.load(base + n).to(tl.int32)
    slot = tl.load(order + row, mask=exists, other=0).to(tl.int64)
    source = tl.where(exists, row, 0).to(tl.int64)
    if EXACT:
        y = exact_products(
            x, x_scales, source, exists, codes, shifts, n, inside, own_base,
            WIDTH, CHUNKS, BN, BM, PACKED,
        )  # fmt: skip
    else:
        y = aligned_products(
            x, source * (CHUNKS * 128), exists, codes, shifts, n, inside,
            CHUNKS, BN, BM, WARPS, PACKED,
        )  # fmt: skip
        y = y * formats.decode_e8m0(own_base + 6)[:, None] * tl.load(x_scales + source)[None, :]
    value = formats.narrow(tl.trans(y), tl.bfloat16)
    place = slot[:, None] * ROWS + column[None, :]
    tl.store(out + place, value, mask=exists[:, None] & inside[None, :])


@triton.jit
def _down(
    x,
    x_scales,
    codes,
    shifts,
    base,
    order,
    ends,
    tiles,
    out,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    SHORT: tl.constexpr,
    EXACT: tl.constexpr,
    ONLY: tl.constexpr,
    WARPS: tl.constexpr,
    PACKED: tl.constexpr,
):
    """One tile. ONLY: 0 every tile, 1 tiles whose matrix rows all fit, 2 the others."""
    expert, start, end = tile_bounds(ends, tiles)
    if expert < 0:
        return
    first = tl.program_id(0) * BN
    base += expert * ROWS
    if ONLY != 0:
        n = first + tl.arange(0, BN)
        lowest = tl.load(base + tl.where(n < ROWS, n, 0)).to(tl.int32)
        if (tl.min(lowest, axis=0) > 0) != (ONLY == 1):
            return
    PADDED: tl.constexpr = (ROWS + 63) // 64 * 64
    codes += expert * (PADDED * CHUNKS * (64 if PACKED else 16))
    shifts += expert * (PADDED * CHUNKS)
    if SHORT > 0 and end - start <= SHORT:
        _down_tile(
            x, x_scales, codes, shifts, base, order, out, first, start, end,
            WIDTH, ROWS, CHUNKS, BN, SHORT, EXACT, WARPS, PACKED,
        )  # fmt: skip
    else:
        _down_tile(
            x, x_scales, codes, shifts, base, order, out, first, start, end,
            WIDTH, ROWS, CHUNKS, BN, BM, EXACT, WARPS, PACKED,
        )  # fmt: skip


def options_of(block: int, exact: bool) -> dict[str, int]:
    """Warps and stages for tiles of `block` rows."""
    if exact:
        return {"num_warps": 4 if block <= 32 else 8, "num_stages": 3}
    return {"num_warps": 4 if block <= 64 else 8, "num_stages": 4 if block <= 32 else 3}


def _launch(arguments: list[Tensor], weights: ExpertMatrices, block: int, **how: int) -> None:
    columns = min(COLUMNS, triton.next_power_of_2(weights.rows)) if INTERPRETED else COLUMNS
    grid = (triton.cdiv(weights.rows, columns), len(arguments[7]))
    options = options_of(block, bool(how["EXACT"]))
    _down[grid](
        *arguments, WIDTH=weights.width, ROWS=weights.rows, CHUNKS=weights.chunks,
        BN=columns, BM=block, SHORT=short_rows(block, bool(how["EXACT"])),
        WARPS=fragment_warps(options["num_warps"], columns), PACKED=not INTERPRETED,
        **how, **options,
    )  # fmt: skip


def _check(x: Tensor, scales: Tensor, weights: ExpertMatrices, block: int) -> None:
    require_gpu(x)
    require_rows(x, scales, weights.width)
    if block not in (16, 32, 64, 128):
        raise Unsupported(f"tiles of {block} rows: takes 16, 32, 64 and 128")


def expert_down(
    hidden: Tensor,
    scales: Tensor,
    weights: ExpertMatrices,
    order: Tensor,
    ends: Tensor,
    tiles: Tensor,
    block: int,
) -> Tensor:
    """See the reference. Rows get one scale each: see align_rows for how far a code may move.

    Raises:
        Unsupported: no GPU, or another block than 16 to 128.
    """
    _check(hidden, scales, weights, block)
    rows = len(order)
    out = torch.empty((rows, weights.rows), dtype=torch.bfloat16, device=hidden.device)
    if rows:
        codes, scales = hidden.contiguous().view(torch.uint8), scales.contiguous()
        aligned, row_scales = align_rows(codes, scales)
        rest = [as_words(weights.codes), weights.shifts, weights.base, order, ends, tiles, out]
        fast = [as_operand(aligned), row_scales, *rest]
        _launch(fast, weights, block, EXACT=0, ONLY=0 if weights.fits else 1)
        if not weights.fits:
            _launch([as_operand(codes), scales, *rest], weights, block, EXACT=1, ONLY=2)
    return out


def expert_down_exact(
    hidden: Tensor,
    scales: Tensor,
    weights: ExpertMatrices,
    order: Tensor,
    ends: Tensor,
    tiles: Tensor,
    block: int,
) -> Tensor:
    """See the reference; no code moves, every scale is applied to sums over its 32 channels.

    Raises:
        Unsupported: see `expert_down`.
    """
    _check(hidden, scales, weights, block)
    rows = len(order)
    out = torch.empty((rows, weights.rows), dtype=torch.bfloat16, device=hidden.device)
    if rows:
        arguments = [as_operand(hidden.contiguous()), scales.contiguous(), as_words(weights.codes)]
        arguments += [weights.shifts, weights.base, order, ends, tiles, out]
        _launch(arguments, weights, block, EXACT=1, ONLY=0)
    return out


TYPES = {
    "x": "*fp8e4nv",
    "x_scales": "*fp32",
    "codes": "*u8",
    "shifts": "*i32",
    "base": "*u8",
    "order": "*i32",
    "ends": "*i32",
    "tiles": "*i32",
}

SIGNATURES: tuple[Signature, ...] = tuple(
    Signature(
        f"expert_down {'exact ' * exact}{block} rows{', some fit' * (only == 1)}",
        _down,
        {**TYPES, "out": "*bf16"},
        {
            "WIDTH": 2304,
            "ROWS": 5120,
            "CHUNKS": 18,
            "BN": COLUMNS,
            "BM": block,
            "SHORT": short_rows(block, bool(exact)),
            "EXACT": exact,
            "ONLY": only,
            "WARPS": options_of(block, bool(exact))["num_warps"],
            "PACKED": True,
        },
        num_warps=options_of(block, bool(exact))["num_warps"],
        num_stages=options_of(block, bool(exact))["num_stages"],
    )
    for exact, only, block in (
        *((0, 0, block) for block in (16, 32, 64, 128)),
        (0, 1, 16),
        (1, 0, 16),
        (1, 0, 64),
    )
)

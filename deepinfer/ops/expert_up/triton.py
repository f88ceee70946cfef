"""Triton kernels of expert_up: exact, and with scales absorbed into the codes.

Knows tiles of rows that share an expert; must not know who chose it.

A program multiplies a tile of rows with the same columns of w1 and w3. `expert_up` gives each row
one scale first (see align_rows) and keeps scales out of the loop; tiles with matrix rows whose
scales differ too much for that are left to the exact kernel, which is launched only where there
are any. `expert_up_exact` applies scales every 32 channels.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.errors import Unsupported
from deepinfer.kernels import formats
from deepinfer.kernels.experts import (
    _align_rows,
    align_constants,
    align_rows,
    aligned_products,
    as_operand,
    as_words,
    exact_products,
    fragment_warps,
    paired_rows,
    require_rows,
    short_rows,
    split_pairs,
    tile_bounds,
)
from deepinfer.kernels.launch import INTERPRETED, require_gpu
from deepinfer.kernels.signature import Signature
from deepinfer.numerics import FP8_GROUP
from deepinfer.ops.act_quant.triton import pack_fp8
from deepinfer.ops.expert_up.prepare import ExpertMatrices
from deepinfer.ops.swiglu.triton import activate

COLUMNS = 64  # of w1 and of w3, in one program


@triton.jit
def _activate(gate, up, route, limit):
    """Hidden values [BM, BN] float32, rounded to bfloat16, of sums [BN, BM]."""
    g = formats.narrow(tl.trans(gate), tl.bfloat16).to(tl.float32)
    u = formats.narrow(tl.trans(up), tl.bfloat16).to(tl.float32)
    hidden = activate(g, u, limit) * route[:, None]
    return formats.narrow(hidden, tl.bfloat16).to(tl.float32)


@triton.jit
def _store_groups(hidden, codes, scales, row, exists, first, HALF: tl.constexpr, BN: tl.constexpr):
    """Quantise [BM, BN] in groups of 32 and store them from column `first` on."""
    BM: tl.constexpr = hidden.shape[0]
    groups: tl.constexpr = BN // 32
    packed, scale = pack_fp8(tl.reshape(hidden, (BM * groups, 32)))
    packed = tl.reshape(packed, (BM, BN))
    scale = tl.reshape(scale, (BM, groups))
    place = row.to(tl.int64)
    column = first + tl.arange(0, BN)
    inside = exists[:, None] & (column < HALF)[None, :]
    tl.store(codes + place[:, None] * HALF + column[None, :], packed, mask=inside)
    group = first // 32 + tl.arange(0, groups)
    inside = exists[:, None] & (group < HALF // 32)[None, :]
    tl.store(scales + place[:, None] * (HALF // 32) + group[None, :], scale, mask=inside)


@triton.jit
def _up_tile(
    x,
    x_scales,
    codes,
    shifts,
    base,
    order,
    route,
    out,
    out_scales,
    limit,
    first,
    start,
    end,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    CHUNKS: tl.constexpr,
    SELECTED: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    EXACT: tl.constexpr,
    WARPS: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Columns from `first` on of plan rows from `start` to `end`, at most BM, of one expert."""
    row = start + tl.arange(0, BM)
    exists = row < end
    n, column = paired_rows(first, WARPS, HALF, BN)
    inside = column < HALF
    own_base = tl.load(base + n).to(tl.int32)
    slot = tl.load(order + row, mask=exists, other=0)
    token = (slot // SELECTED).to(tl.int64)
    if EXACT:
        both = exact_products(
            x, x_scales, token, exists, codes, shifts, n, inside, own_base,
            WIDTH, CHUNKS, 2 * BN, BM, PACKED,
        )  # fmt: skip
    else:
        both = aligned_products(
            x, token * (CHUNKS * 128), exists, codes, shifts, n, inside,
            CHUNKS, 2 * BN, BM, WARPS, PACKED,
        )  # fmt: skip
        scale = formats.decode_e8m0(own_base + 6)
        both = both * scale[:, None] * tl.load(x_scales + token)[None, :]
    gate, up = split_pairs(both, WARPS)
    weight = tl.load(route + slot, mask=exists, other=0)
    hidden = _activate(gate, up, weight, limit)
    _store_groups(hidden, out, out_scales, row, exists, first, HALF, BN)


@triton.jit
def _up(
    x,
    x_scales,
    codes,
    shifts,
    base,
    order,
    ends,
    tiles,
    route,
    out,
    out_scales,
    limit,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    CHUNKS: tl.constexpr,
    SELECTED: tl.constexpr,
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
    base += expert * (2 * HALF)
    if ONLY != 0:
        n, _ = paired_rows(first, WARPS, HALF, BN)
        if (tl.min(tl.load(base + n).to(tl.int32), axis=0) > 0) != (ONLY == 1):
            return
    ROWS: tl.constexpr = (2 * HALF + 63) // 64 * 64
    codes += expert * (ROWS * CHUNKS * (64 if PACKED else 16))
    shifts += expert * (ROWS * CHUNKS)
    if SHORT > 0 and end - start <= SHORT:
        _up_tile(
            x, x_scales, codes, shifts, base, order, route, out, out_scales, limit,
            first, start, end, WIDTH, HALF, CHUNKS, SELECTED, BN, SHORT, EXACT, WARPS, PACKED,
        )  # fmt: skip
    else:
        _up_tile(
            x, x_scales, codes, shifts, base, order, route, out, out_scales, limit,
            first, start, end, WIDTH, HALF, CHUNKS, SELECTED, BN, BM, EXACT, WARPS, PACKED,
        )  # fmt: skip


def options_of(block: int, exact: bool) -> dict[str, int]:
    """Warps and stages for tiles of `block` rows, and most registers where they decide."""
    if exact:
        return {"num_warps": 4 if block <= 32 else 8, "num_stages": 3}
    if block == 64:  # two programs share a multiprocessor; only what follows the loop spills
        return {"num_warps": 8, "num_stages": 3, "maxnreg": 128}
    return {"num_warps": 4 if block <= 32 else 8, "num_stages": 4 if block <= 32 else 3}


def _launch(
    arguments: list[Tensor],
    weights: ExpertMatrices,
    selected: int,
    block: int,
    limit: float,
    **how: int,
) -> None:
    half = weights.rows // 2
    columns = min(COLUMNS, triton.next_power_of_2(half)) if INTERPRETED else COLUMNS
    grid = (triton.cdiv(half, columns), len(arguments[7]))
    options = options_of(block, bool(how["EXACT"]))
    _up[grid](
        *arguments, float(limit), WIDTH=weights.width, HALF=half, CHUNKS=weights.chunks,
        SELECTED=selected, BN=columns, BM=block, SHORT=short_rows(block, bool(how["EXACT"])),
        WARPS=fragment_warps(options["num_warps"], 2 * columns), PACKED=not INTERPRETED,
        **how, **options,
    )  # fmt: skip


def _check(x: Tensor, x_scales: Tensor, weights: ExpertMatrices, route: Tensor, block: int) -> None:
    require_gpu(x)
    require_rows(x, x_scales, weights.width)
    if block not in (16, 32, 64, 128):
        raise Unsupported(f"tiles of {block} rows: takes 16, 32, 64 and 128")
    if route.dtype != torch.float32 or weights.rows % (2 * FP8_GROUP):
        raise Unsupported("takes float32 route weights and a multiple of 32 columns")


def expert_up(
    x: Tensor,
    x_scales: Tensor,
    weights: ExpertMatrices,
    order: Tensor,
    ends: Tensor,
    tiles: Tensor,
    route: Tensor,
    block: int,
    limit: float,
) -> tuple[Tensor, Tensor]:
    """See the reference. Rows get one scale each: see align_rows for how far a code may move.

    Raises:
        Unsupported: no GPU, route weights that are not float32, another block than 16 to 128.
    """
    _check(x, x_scales, weights, route, block)
    rows, half = len(order), weights.rows // 2
    out = torch.empty((rows, half), dtype=torch.uint8, device=x.device)
    scales = torch.empty((rows, half // FP8_GROUP), dtype=torch.float32, device=x.device)
    if rows:
        codes, x_scales = x.contiguous().view(torch.uint8), x_scales.contiguous()
        aligned, row_scales = align_rows(codes, x_scales)
        rest = [as_words(weights.codes), weights.shifts, weights.base, order, ends, tiles]
        rest += [route.contiguous(), out, scales]
        fast = [as_operand(aligned), row_scales, *rest]
        _launch(fast, weights, route.shape[1], block, limit, EXACT=0, ONLY=0 if weights.fits else 1)
        if not weights.fits:
            exact = [as_operand(codes), x_scales, *rest]
            _launch(exact, weights, route.shape[1], block, limit, EXACT=1, ONLY=2)
    return out.view(torch.float8_e4m3fn), scales


def expert_up_exact(
    x: Tensor,
    x_scales: Tensor,
    weights: ExpertMatrices,
    order: Tensor,
    ends: Tensor,
    tiles: Tensor,
    route: Tensor,
    block: int,
    limit: float,
) -> tuple[Tensor, Tensor]:
    """See the reference; no code moves, every scale is applied to sums over its 32 channels.

    Raises:
        Unsupported: see `expert_up`.
    """
    _check(x, x_scales, weights, route, block)
    rows, half = len(order), weights.rows // 2
    out = torch.empty((rows, half), dtype=torch.uint8, device=x.device)
    scales = torch.empty((rows, half // FP8_GROUP), dtype=torch.float32, device=x.device)
    if rows:
        arguments = [as_operand(x.contiguous()), x_scales.contiguous(), as_words(weights.codes)]
        arguments += [weights.shifts, weights.base, order, ends, tiles, route.contiguous()]
        _launch([*arguments, out, scales], weights, route.shape[1], block, limit, EXACT=1, ONLY=0)
    return out.view(torch.float8_e4m3fn), scales


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

SIGNATURES: tuple[Signature, ...] = (
    Signature(
        "align_rows",
        _align_rows,
        {"x": "*u8", "scales": "*fp32", "out": "*u8", "row_scales": "*fp32"},
        align_constants(5120),
    ),
    *(
        Signature(
            f"expert_up {'exact ' * exact}{block} rows{', some fit' * (only == 1)}",
            _up,
            {**TYPES, "route": "*fp32", "out": "*u8", "out_scales": "*fp32", "limit": "fp32"},
            {
                "WIDTH": 5120,
                "HALF": 2304,
                "CHUNKS": 40,
                "SELECTED": 6,
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
            spills=128 * (block == 128),  # after the loop
        )
        for exact, only, block in (
            *((0, 0, block) for block in (16, 32, 64, 128)),
            (0, 1, 16),
            (1, 0, 16),
            (1, 0, 64),
        )
    ),
)

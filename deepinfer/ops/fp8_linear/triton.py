"""Triton kernels of fp8_linear and fp8_widen.

Knows codes, scales and groups of channels; must not know which matrix it multiplies.

A step of the sum is one FP8 product over the channels of one scale, 128 or 32, which starts from
zero: tensor cores add FP8 products with few bits, and float32 takes over after every step. The sum
of a row is made of the same steps in the same order whatever the number of rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from deepinfer.errors import Unsupported
from deepinfer.kernels import formats
from deepinfer.kernels.launch import INTERPRETED, require_gpu
from deepinfer.kernels.products import (
    SUM_TILE,
    Tile,
    add_splits,
    alignment,
    buffer_of,
    chunk_steps,
    fp8_tile_of,
    grid_of,
    overlaps,
    place_of_tile,
    sum_splits,
    tile_positions,
)
from deepinfer.kernels.signature import Signature
from deepinfer.numerics import FP8_GROUP
from deepinfer.ops.fp8_linear.reference import WIDE_GROUP, group_size

SWIZZLE = 8
WIDEN_GROUPS = 16  # groups of 128 channels that one program of fp8_widen takes


# Whatever counts rows has no forms of its own: no kernel is compiled for another number of rows.
@triton.jit(do_not_specialize=["rows", "tiles_t", "scale_step"])
def _fp8_product(
    x,
    x_scales,
    weight,
    weight_scales,
    out,
    rows,
    outputs,
    tiles_t,
    tiles_n,
    x_row,
    scale_row,
    scale_step,
    weight_row,
    weight_scale_row,
    COLUMNS: tl.constexpr,
    X_GROUP: tl.constexpr,
    W_GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
    SPREAD: tl.constexpr,
    SWIZZLE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UNROLL: tl.constexpr,
    AHEAD: tl.constexpr,
    OVERLAP: tl.constexpr,
    ALIGN_T: tl.constexpr,
    ALIGN_N: tl.constexpr,
    DECODE: tl.constexpr,
):
    """One tile [BLOCK_N, BLOCK_T]; out is [T, out], or [splits, T, out] float32.

    SPREAD: the second axis of the grid takes one chunk each; else a program adds all of them up.
    OVERLAP: the next kernel, which waits for this one's results itself, may be launched at once.
    ALIGN_T: as in `tile_positions`; `scale_step` is a multiple of it, too.
    UNROLL: steps of one turn of the loop; divides CHUNK.
    AHEAD: turns whose scales are buffered as operands are; None: scales are loaded when needed.
    DECODE: operands are bytes, and products are float32's (the interpreter has no FP8).
    """
    if OVERLAP:
        gdc_launch_dependents()
    STEPS: tl.constexpr = COLUMNS // BLOCK_K
    tile_t, tile_n = place_of_tile(tiles_t, tiles_n, SWIZZLE)
    row, t, stored_t = tile_positions(tile_t, rows, BLOCK_T, ALIGN_T)
    output, n, stored_n = tile_positions(tile_n, outputs, BLOCK_N, ALIGN_N)
    k = tl.arange(0, BLOCK_K)
    x_place = x + (row + t)[None, :] * x_row + k[:, None]
    weight_place = weight + (output + n)[:, None] * weight_row + k[None, :]
    x_scale_place = x_scales + row * scale_row + t * scale_row
    scale_step = scale_step.to(tl.int64)
    if ALIGN_T > 1:
        scale_step = tl.multiple_of(scale_step, ALIGN_T)
    weight_scale_place = weight_scales + (output + n) // 32 * weight_scale_row
    weight_scale_address = weight_scale_place.to(tl.int64)
    first = 0
    if SPREAD:
        first = tl.program_id(1) * CHUNK
        out += tl.program_id(1).to(tl.int64) * rows * outputs
    total = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
    chunk = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
    for number in tl.range(0, (CHUNK if SPREAD else STEPS) // UNROLL, num_stages=AHEAD):
        for part in tl.static_range(UNROLL):
            channel = (first + number * UNROLL + part) * BLOCK_K
            a = tl.load(weight_place + channel)
            b = tl.load(x_place + channel)
            x_scale = tl.load(x_scale_place + channel // X_GROUP * scale_step)
            if AHEAD is None:
                code = tl.load(weight_scale_place + channel // W_GROUP)
            else:
                # Bytes cannot be copied asynchronously: take the aligned word around each.
                address = weight_scale_address + channel // W_GROUP
                word = tl.load((address & -4).to(tl.pointer_type(tl.uint32)))
                code = word >> ((address & 3) * 8).to(tl.uint32) & 0xFF
            if DECODE:
                product = tl.dot(formats.decode_e4m3(a), formats.decode_e4m3(b))
            else:
                product = tl.dot(a, b)
            scale = formats.decode_e8m0(code)[:, None] * x_scale[None, :]
            chunk += product * scale
        if not SPREAD and CHUNK < STEPS:  # noqa: SIM102
            if (number + 1) * UNROLL % CHUNK == 0:
                total += chunk
                chunk = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
    if SPREAD or CHUNK == STEPS:
        total = chunk
    place = out + row * outputs + output + t[None, :] * outputs + n[:, None]
    value = formats.narrow(total, out.dtype.element_ty)
    tl.store(place, value, mask=stored_t[None, :] & stored_n[:, None])


@triton.jit
def move_codes(code, factor):
    """e4m3 bytes of the values of bytes `code` times `factor`, not negative; -0.0 stays."""
    moved = formats.encode_e4m3(formats.decode_e4m3(code) * factor)
    return (moved & 0x7F) | (code & 0x80)


@triton.jit(do_not_specialize=["rows"])
def _fp8_widen(
    codes,
    scales,
    wide_codes,
    wide_scales,
    rows,
    code_row,
    scale_row,
    scale_step,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """GROUPS groups of 128 channels; wide_scales is [groups of a row, T].

    Scales of one group lie side by side, as tiles of products read them.
    """
    WIDE: tl.constexpr = (COLUMNS + 127) // 128
    number = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    row, wide = number // WIDE, number % WIDE
    exists = row < rows
    part = wide[:, None] * 4 + tl.arange(0, 4)[None, :]
    present = exists[:, None] & (part < COLUMNS // 32)
    place = scales + row[:, None] * scale_row + part * scale_step
    scale = tl.load(place, mask=present, other=0.0)
    largest = tl.max(scale, axis=1)
    factor = tl.div_rn(scale, tl.where(largest == 0.0, 1.0, largest)[:, None])
    channel = part[:, :, None] * 32 + tl.arange(0, 32)[None, None, :]
    code = tl.load(
        codes + row[:, None, None] * code_row + channel, mask=present[:, :, None], other=0
    )
    moved = move_codes(code, factor[:, :, None])
    target = wide_codes + row[:, None, None] * COLUMNS + channel
    tl.store(target, moved, mask=present[:, :, None])
    tl.store(wide_scales + wide * rows + row, largest, mask=exists)


def _require_codes(codes: Tensor, scales: Tensor) -> None:
    require_gpu(codes)
    if codes.dtype != torch.uint8 or scales.dtype != torch.float32:
        raise Unsupported(f"takes uint8 codes and float32 scales, not {codes.dtype}")
    if codes.shape[-1] % FP8_GROUP:
        raise Unsupported(f"{codes.shape[-1]} channels are no multiple of {FP8_GROUP}")


def fp8_widen(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """See the reference. Scales of neighbouring rows lie side by side.

    Raises:
        Unsupported: see `_require_codes`.
    """
    _require_codes(codes, scales)
    rows, columns = codes.shape
    codes = codes if codes.stride(1) == 1 else codes.contiguous()
    wide = triton.cdiv(columns, WIDE_GROUP)
    wide_codes = torch.empty(codes.shape, dtype=torch.uint8, device=codes.device)
    wide_scales = torch.empty((wide, rows), dtype=torch.float32, device=codes.device)
    if codes.numel():
        _fp8_widen[(triton.cdiv(rows * wide, WIDEN_GROUPS),)](
            codes,
            scales,
            wide_codes,
            wide_scales,
            rows,
            codes.stride(0),
            *scales.stride(),
            COLUMNS=columns,
            GROUPS=WIDEN_GROUPS,
        )
    return wide_codes, wide_scales.t()


def _operand(codes: Tensor) -> Tensor:
    return codes if INTERPRETED else codes.view(torch.float8_e4m3fn)


def product(
    codes: Tensor,
    scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    dtype: torch.dtype,
    widen: bool,
    tile: Tile | None = None,
) -> Tensor:
    """fp8_linear with a tile of choice.

    Args:
        widen: bring activations to one scale per 128 channels where the weight has such scales.

    Raises:
        Unsupported: see `_require_codes`; another dtype of the weight or of the result.
    """
    _require_codes(codes, scales)
    if weight.dtype != torch.uint8 or weight_scales.dtype != torch.uint8:
        raise Unsupported(f"takes uint8 weights and scales, not {weight.dtype}")
    if dtype not in (torch.bfloat16, torch.float32):
        raise Unsupported(f"gives bfloat16 and float32, not {dtype}")
    rows, columns = codes.shape
    out = torch.empty((rows, weight.shape[0]), dtype=dtype, device=codes.device)
    if out.numel() == 0 or columns == 0:
        return out.zero_()
    weight_group = group_size(columns, weight_scales.shape[1])
    wide = columns % WIDE_GROUP == 0 and weight_group == WIDE_GROUP
    if wide and widen and group_size(columns, scales.shape[1]) == FP8_GROUP:
        codes, scales = fp8_widen(codes, scales)
    x_group = group_size(columns, scales.shape[1])
    codes = codes if codes.stride(1) == 1 else codes.contiguous()
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    weight_scales = weight_scales if weight_scales.stride(1) == 1 else weight_scales.contiguous()
    block_k = WIDE_GROUP if wide and x_group == WIDE_GROUP else FP8_GROUP
    _launch(codes, scales, weight, weight_scales, out, (x_group, weight_group, block_k), tile)
    return out


def _chunk(outputs: int, columns: int, step: int) -> int:
    """Steps of a chunk. Both sizes of steps, 32 and 128 channels, split a sum alike."""
    if columns % WIDE_GROUP:
        return columns // step
    return chunk_steps(outputs, 1, columns, WIDE_GROUP) * (WIDE_GROUP // step)


def _launch(
    codes: Tensor,
    scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    out: Tensor,
    sizes: tuple[int, int, int],
    tile: Tile | None,
) -> None:
    rows, columns = codes.shape
    outputs = weight.shape[0]
    block_k = sizes[2]
    chunk = _chunk(outputs, columns, block_k)
    splits = triton.cdiv(columns // block_k, chunk)
    tile = tile or fp8_tile_of(rows, outputs)
    grid = grid_of(rows, outputs, 1, tile, splits)
    buffer = buffer_of(out, grid[1])
    if rows >= tile.rows and rows > 1 and scales.stride(0) != 1:
        # A tile reads one scale of every row in each step.
        scales = scales.t().contiguous().t()
    _fp8_product[grid](
        _operand(codes),
        scales,
        _operand(weight),
        weight_scales,
        buffer,
        rows,
        outputs,
        triton.cdiv(rows, tile.rows),
        triton.cdiv(outputs, tile.outputs),
        codes.stride(0),
        *scales.stride(),
        weight.stride(0),
        weight_scales.stride(0),
        num_warps=tile.warps,
        num_stages=tile.stages,
        **_constants(rows, outputs, columns, sizes, chunk, grid[1] > 1, tile, scales.stride(1)),
    )
    if grid[1] > 1:
        add_splits(buffer, out, overlaps())


def _unroll(columns: int, step: int, tile: Tile) -> int:
    """Steps of one turn: small tiles take short steps in fours, and load as far ahead as long."""
    small = tile.rows * tile.outputs <= 1024 * tile.warps
    return WIDE_GROUP // step if columns % WIDE_GROUP == 0 and small else 1


def _constants(
    rows: int,
    outputs: int,
    columns: int,
    sizes: tuple[int, int, int],
    chunk: int,
    spread: bool,
    tile: Tile,
    scale_step: int,
) -> dict[str, object]:
    align = alignment(rows, tile.rows)
    return {
        "COLUMNS": columns,
        "X_GROUP": sizes[0],
        "W_GROUP": sizes[1],
        "CHUNK": chunk,
        "SPREAD": spread,
        "SWIZZLE": SWIZZLE,
        "BLOCK_T": tile.rows,
        "BLOCK_N": tile.outputs,
        "BLOCK_K": sizes[2],
        "UNROLL": _unroll(columns, sizes[2], tile),
        "AHEAD": tile.stages if tile.ahead and sizes[2] == WIDE_GROUP else None,
        "OVERLAP": spread and overlaps(),
        "ALIGN_T": align if scale_step % 16 == 0 else min(align, 1),
        "ALIGN_N": alignment(outputs, tile.outputs),
        "DECODE": INTERPRETED,
    }


def fp8_linear(
    codes: Tensor,
    scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """See the reference. Activations take one scale per 128 channels where the weight has them.

    Raises:
        Unsupported: see `product`.
    """
    return product(codes, scales, weight, weight_scales, dtype, widen=True)


def fp8_linear_exact(
    codes: Tensor,
    scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """See the reference. All scales are applied as they are given.

    Raises:
        Unsupported: see `product`.
    """
    return product(codes, scales, weight, weight_scales, dtype, widen=False)


def _signature(name: str, outputs: int, columns: int, rows: int, exact: bool = False) -> Signature:
    """The form of the product that a matrix of a released size takes."""
    size = FP8_GROUP if exact else WIDE_GROUP
    chunk = _chunk(outputs, columns, size)
    tile = fp8_tile_of(rows, outputs)
    splits = triton.cdiv(columns // size, chunk)
    spread = grid_of(rows, outputs, 1, tile, splits)[1] > 1
    divisible = ("outputs", "x_row", "weight_row")
    numbers = ("rows", "tiles_t", "tiles_n", "scale_step", "weight_scale_row", *divisible)
    return Signature(
        f"{name}-{rows}",
        _fp8_product,
        {
            "x": "*fp8e4nv",
            "x_scales": "*fp32",
            "weight": "*fp8e4nv",
            "weight_scales": "*u8",
            "out": "*fp32" if spread else "*bf16",
            **dict.fromkeys(numbers, "i32"),
        },
        {
            "scale_row": 1,
            **_constants(rows, outputs, columns, (size, size, size), chunk, spread, tile, rows),
            "DECODE": False,
        },
        num_warps=tile.warps,
        num_stages=tile.stages,
        divisible=divisible,
    )


SIGNATURES: tuple[Signature, ...] = (
    *(_signature("wq_b", 32768, 1280, rows) for rows in (1, 16, 32, 64, 4096, 4097)),
    *(_signature("wo_b", 5120, 8192, rows) for rows in (16, 4096)),
    *(_signature("wkv", 512, 5120, rows) for rows in (16, 512, 8192)),
    *(_signature("wq_b-exact", 32768, 1280, rows, True) for rows in (16, 4096)),
    Signature(
        "fp8_widen",
        _fp8_widen,
        {
            "codes": "*u8",
            "scales": "*fp32",
            "wide_codes": "*u8",
            "wide_scales": "*fp32",
            "rows": "i32",
            "code_row": "i32",
            "scale_row": "i32",
            "scale_step": "i32",
        },
        {"COLUMNS": 5120, "GROUPS": WIDEN_GROUPS},
        divisible=("code_row",),
    ),
    Signature(
        "sum_splits",
        sum_splits,
        {"partial": "*fp32", "out": "*bf16", "count": "i32"},
        {"SPLITS": 4, "TILE": SUM_TILE, "ALIGN": 16, "OVERLAP": False},
    ),
)

"""Triton kernel of linear; wide_linear and grouped_output use the same product.

Knows bfloat16 rows and matrices; must not know which. The sum of a row has the same order
whatever the number of rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.errors import Unsupported
from deepinfer.kernels import formats
from deepinfer.kernels.launch import DOT_DTYPE, require_gpu
from deepinfer.kernels.products import (
    Tile,
    add_splits,
    alignment,
    buffer_of,
    chunk_steps,
    grid_of,
    place_of_tile,
    tile_of,
    tile_positions,
)
from deepinfer.kernels.signature import Signature

SWIZZLE = 8
BLOCK_K = 64  # the same for every tile: chunks are made of such steps


# Whatever counts rows has no forms of its own: no kernel is compiled for another number of rows.
@triton.jit(do_not_specialize=["rows", "tiles_t"])
def _product(
    x,
    weight,
    out,
    rows,
    outputs,
    tiles_t,
    tiles_n,
    x_row,
    x_group,
    weight_row,
    out_row,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    SPREAD: tl.constexpr,
    SWIZZLE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ALIGN_T: tl.constexpr,
    ALIGN_N: tl.constexpr,
    DOT: tl.constexpr,
):
    """One tile [BLOCK_N, BLOCK_T] of one group; out is [T, G * O], or [splits, T, G * O] float32.

    SPREAD: the second axis of the grid takes one chunk each; else a program adds all of them up.
    """
    STEPS: tl.constexpr = (COLUMNS + BLOCK_K - 1) // BLOCK_K
    tile_t, tile_n = place_of_tile(tiles_t, tiles_n, SWIZZLE)
    group = tl.program_id(2).to(tl.int64)
    row, t, stored_t = tile_positions(tile_t, rows, BLOCK_T, ALIGN_T)
    output, n, stored_n = tile_positions(tile_n, outputs, BLOCK_N, ALIGN_N)
    matrix_row = group * outputs + output
    k = tl.arange(0, BLOCK_K)
    x_place = x + group * x_group + (row + t)[None, :] * x_row + k[:, None]
    weight_place = weight + (matrix_row + n)[:, None] * weight_row + k[None, :]
    first = 0
    if SPREAD:
        first = tl.program_id(1) * CHUNK
        out += tl.program_id(1).to(tl.int64) * rows * out_row
    total = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
    chunk = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
    for number in range(CHUNK if SPREAD else STEPS):
        step = first + number
        channel = step * BLOCK_K
        if COLUMNS % BLOCK_K == 0:
            a = tl.load(weight_place + channel)
            b = tl.load(x_place + channel)
        else:
            here = channel + k < COLUMNS
            a = tl.load(weight_place + channel, mask=here[None, :], other=0.0)
            b = tl.load(x_place + channel, mask=here[:, None], other=0.0)
        chunk = tl.dot(a.to(DOT), b.to(DOT), chunk)
        if not SPREAD and CHUNK < STEPS:  # noqa: SIM102
            if (step + 1) % CHUNK == 0:
                total += chunk
                chunk = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
    if SPREAD or CHUNK == STEPS:
        total = chunk
    place = out + row * out_row + matrix_row + t[None, :] * out_row + n[:, None]
    value = formats.narrow(total, out.dtype.element_ty)
    tl.store(place, value, mask=stored_t[None, :] & stored_n[:, None])


def product(x: Tensor, weight: Tensor, dtype: torch.dtype, tile: Tile | None = None) -> Tensor:
    """x W^T of bfloat16 operands, rounded once to `dtype`, with a tile of choice.

    Args:
        x: [T, in], or [T, G, in] for a product of every group with a matrix of its own.
        weight: [out, in], or [G * O, in].

    Raises:
        Unsupported: no GPU, or operands that are not bfloat16.
    """
    require_gpu(x)
    if x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16:
        raise Unsupported(f"takes bfloat16 operands, not {x.dtype} and {weight.dtype}")
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        raise Unsupported("has no gradient")
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=dtype, device=x.device)
    if out.numel() == 0 or x.shape[-1] == 0:
        return out.zero_()
    x = x if x.stride(-1) == 1 else x.contiguous()
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    _launch(x if x.ndim == 3 else x.unsqueeze(1), weight, out, tile)
    return out


def _launch(x: Tensor, weight: Tensor, out: Tensor, tile: Tile | None) -> None:
    rows, groups, columns = x.shape
    assert weight.shape[0] % groups == 0, (weight.shape, groups)
    outputs = weight.shape[0] // groups
    chunk = chunk_steps(outputs, groups, columns, BLOCK_K)
    splits = triton.cdiv(triton.cdiv(columns, BLOCK_K), chunk)
    tile = tile or tile_of(rows, outputs, groups, splits)
    grid = grid_of(rows, outputs, groups, tile, splits)
    buffer = buffer_of(out, grid[1])
    _product[grid](
        x,
        weight,
        buffer,
        rows,
        outputs,
        triton.cdiv(rows, tile.rows),
        triton.cdiv(outputs, tile.outputs),
        x.stride(0),
        x.stride(1) if groups > 1 else 0,  # 0 is aligned
        weight.stride(0),
        out.shape[1],
        num_warps=tile.warps,
        num_stages=tile.stages,
        **_constants(rows, outputs, columns, chunk, grid[1] > 1, tile),
    )
    if grid[1] > 1:
        add_splits(buffer, out)


def _constants(
    rows: int, outputs: int, columns: int, chunk: int, spread: bool, tile: Tile
) -> dict[str, object]:
    return {
        "COLUMNS": columns,
        "CHUNK": chunk,
        "SPREAD": spread,
        "SWIZZLE": SWIZZLE,
        "BLOCK_T": tile.rows,
        "BLOCK_N": tile.outputs,
        "BLOCK_K": BLOCK_K,
        "ALIGN_T": min(alignment(rows, tile.rows), 1),  # rows are aligned by their stride
        "ALIGN_N": alignment(outputs, tile.outputs),
        "DOT": DOT_DTYPE,
    }


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """See the reference.

    Raises:
        Unsupported: see `product`.
    """
    return product(x, weight, torch.bfloat16)


def product_signature(
    name: str, outputs: int, columns: int, rows: int, dtype: str, groups: int = 1
) -> Signature:
    """The form of the product that a matrix of a released size takes."""
    chunk = chunk_steps(outputs, groups, columns, BLOCK_K)
    splits = triton.cdiv(triton.cdiv(columns, BLOCK_K), chunk)
    tile = tile_of(rows, outputs, groups, splits)
    spread = grid_of(rows, outputs, groups, tile, splits)[1] > 1
    divisible = ("outputs", "x_row", "x_group", "weight_row", "out_row")
    numbers = ("rows", "tiles_t", "tiles_n", *divisible)
    return Signature(
        f"{name}-{rows}",
        _product,
        {
            "x": "*bf16",
            "weight": "*bf16",
            "out": "*fp32" if spread else f"*{dtype}",
            **dict.fromkeys(numbers, "i32"),
        },
        _constants(rows, outputs, columns, chunk, spread, tile),
        num_warps=tile.warps,
        num_stages=tile.stages,
        divisible=divisible,
    )


SIGNATURES: tuple[Signature, ...] = tuple(
    product_signature("compressor", 512, 5120, rows, "bf16") for rows in (16, 64, 4096)
)

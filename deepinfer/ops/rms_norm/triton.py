"""Triton kernel of rms_norm, and the device function that normalises rows of a tile.

Knows rows; must not know where in the model they stand. A row is summed in chunks of a size that
depends on its width alone, so its result does not depend on other rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.errors import Unsupported
from deepinfer.kernels import formats
from deepinfer.kernels.launch import require_gpu
from deepinfer.kernels.signature import Signature
from deepinfer.numerics import FP8_GROUP
from deepinfer.ops.act_quant.triton import flat_rows, round_fp8

TILE = 2048  # values of one program and pass, in rows of less than the largest chunk
_LARGEST_CHUNK = 1024
_SMALLEST_CHUNK = 64


@triton.jit
def inverse_root(squares, eps, COLUMNS: tl.constexpr):
    """rsqrt(mean + eps) of rows [n, columns] of float32 squares, zero past COLUMNS."""
    return tl.rsqrt(tl.div_rn(tl.sum(squares, axis=1), COLUMNS * 1.0) + eps)


@triton.jit
def load_rows(x, row, inside, stride, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """Rows [n, BLOCK] float32 of `x`, zero past COLUMNS; row (int64) and inside are [n, 1]."""
    column = tl.arange(0, BLOCK)[None, :]
    mask = inside & (column < COLUMNS)
    return tl.load(x + row * stride + column, mask=mask, other=0).to(tl.float32)


@triton.jit
def normalise_rounded(
    x, weight, eps, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr
):
    """Rows `x` [n, BLOCK] of `load_rows` normalised and rounded to DTYPE, in float32."""
    column = tl.arange(0, BLOCK)
    scale = tl.load(weight + column, mask=column < COLUMNS, other=0).to(tl.float32)
    inverse = inverse_root(x * x, eps, COLUMNS)
    normed = scale[None, :] * (x * inverse[:, None])
    return formats.narrow(normed, DTYPE).to(tl.float32)


@triton.jit
def _rms_norm(
    x,
    weight,
    out,
    rows,
    stride,
    eps,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    QUANTISE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = (row < rows)[:, None]
    column = tl.arange(0, CHUNK)
    source = x + row[:, None] * stride
    target = out + row[:, None] * COLUMNS
    squares = tl.zeros((ROWS, CHUNK), dtype=tl.float32)
    for part in tl.static_range((COLUMNS + CHUNK - 1) // CHUNK):
        here = part * CHUNK + column
        mask = inside
        if COLUMNS % CHUNK != 0:
            mask = inside & (here < COLUMNS)[None, :]
        value = tl.load(source + here[None, :], mask=mask, other=0).to(tl.float32)
        squares += value * value
    inverse = inverse_root(squares, eps, COLUMNS)[:, None]
    # The second pass finds the row in the L1 cache: keeping it in registers would need a tile as
    # wide as the next power of two, 60 % more work at 5120 columns.
    for part in tl.static_range((COLUMNS + CHUNK - 1) // CHUNK):
        here = part * CHUNK + column
        mask = inside
        if COLUMNS % CHUNK != 0:
            mask = inside & (here < COLUMNS)[None, :]
        value = tl.load(source + here[None, :], mask=mask, other=0).to(tl.float32)
        scale = tl.load(weight + here, mask=here < COLUMNS, other=0).to(tl.float32)
        normed = formats.narrow(scale[None, :] * (value * inverse), out.dtype.element_ty)
        if QUANTISE:
            groups = tl.reshape(normed.to(tl.float32), (ROWS * CHUNK // 32, 32))
            rounded = tl.reshape(round_fp8(groups), (ROWS, CHUNK))
            normed = rounded.to(out.dtype.element_ty)  # exact: no rounding here
        tl.store(target + here[None, :], normed, mask=mask)


def chunk_of(columns: int) -> int:
    """Columns of one pass: a power of two that divides `columns` where one of some size does."""
    dividing = columns & -columns
    if dividing >= _SMALLEST_CHUNK:
        return min(dividing, _LARGEST_CHUNK)
    return min(max(triton.next_power_of_2(columns), FP8_GROUP), _LARGEST_CHUNK)


def _blocks(columns: int) -> dict[str, int]:
    chunk = chunk_of(columns)
    # Wide rows get a program each: few of them should still reach every multiprocessor.
    rows = 1 if chunk == _LARGEST_CHUNK else TILE // chunk
    return {"COLUMNS": columns, "CHUNK": chunk, "ROWS": rows}


def rms_norm(x: Tensor, weight: Tensor, eps: float, act_quant: bool = False) -> Tensor:
    """See the reference. Rows may be strided; other strides are copied first.

    Raises:
        Unsupported: no GPU, a dtype other than bfloat16 and float32, a weight that is not float32,
            a gradient is wanted, or act_quant with a width that is no multiple of 32.
    """
    require_gpu(x)
    if x.dtype not in (torch.bfloat16, torch.float32) or weight.dtype != torch.float32:
        raise Unsupported(f"takes bfloat16 or float32 with a float32 weight, not {x.dtype}")
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        raise Unsupported("has no gradient")
    columns = x.shape[-1]
    if act_quant and columns % FP8_GROUP:
        raise Unsupported(f"act_quant: {columns} channels are no multiple of {FP8_GROUP}")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return out
    flat = flat_rows(x)
    rows, blocks = flat.shape[0], _blocks(columns)
    _rms_norm[(triton.cdiv(rows, blocks["ROWS"]),)](
        flat,
        weight.contiguous(),
        out,
        rows,
        flat.stride(0),
        eps,
        QUANTISE=act_quant,
        **blocks,
    )
    return out


def _signature(columns: int, quantise: bool) -> Signature:
    return Signature(
        f"rms_norm-{columns}{'-act_quant' if quantise else ''}",
        _rms_norm,
        {
            "x": "*bf16",
            "weight": "*fp32",
            "out": "*bf16",
            "rows": "i32",
            "stride": "i32",
            "eps": "fp32",
        },
        {"QUANTISE": quantise, **_blocks(columns)},
        divisible=("rows", "stride"),
    )


SIGNATURES: tuple[Signature, ...] = (
    _signature(5120, False),
    _signature(5120, True),
    _signature(1280, True),
    _signature(512, False),
    _signature(128, False),
)

"""Triton kernel of rms_norm, and the device function that normalises rows of a tile.

Knows rows; must not know where in the model they stand. A row is summed in parts of a size that
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

_CHUNK = 256  # values of a warp in one part of a row: one load of 16 bytes a lane
_MOST_PARTS = 8
_WARPS = 1  # of a program, for rows that need fewer
_MOST_WARPS = 16


@triton.jit
def inverse_root(squares, eps, COLUMNS: tl.constexpr):
    """rsqrt(mean + eps) of rows [n, columns] of float32 squares, zero past COLUMNS."""
    total = tl.sum(squares, axis=1)
    if COLUMNS & (COLUMNS - 1) == 0:
        return tl.rsqrt(total * (1.0 / COLUMNS) + eps)  # exact, and without the division's branches
    else:
        return tl.rsqrt(tl.div_rn(total, COLUMNS * 1.0) + eps)


@triton.jit
def load_rows(x, row, inside, stride, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """Rows [n, BLOCK] float32 of `x`, zero past COLUMNS; row (int64) and inside are [n, 1]."""
    column = tl.arange(0, BLOCK)[None, :]
    mask = inside & (column < COLUMNS)
    return tl.load(x + row * stride + column, mask=mask, other=0).to(tl.float32)


@triton.jit
def normalise_rounded(
    x, weight, eps,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Rows `x` [ROWS, BLOCK] of `load_rows` normalised and rounded to DTYPE, in float32."""
    # A tile of weights like that of values has the same layout: nothing passes shared memory.
    column = tl.arange(0, BLOCK)[None, :] + tl.zeros((ROWS, 1), dtype=tl.int32)
    scale = tl.load(weight + column, mask=column < COLUMNS, other=0).to(tl.float32)
    inverse = inverse_root(x * x, eps, COLUMNS)
    return formats.rounded(scale * (x * inverse[:, None]), DTYPE)


@triton.jit(do_not_specialize=["rows"])
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
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    inside = row < rows
    column = tl.arange(0, CHUNK)[None, :]
    source = x + row * stride
    target = out + row * COLUMNS
    # As in `normalise_rounded`; rows of a tile lie in different warps, so no weight comes twice.
    scales = weight + tl.zeros((ROWS, 1), dtype=tl.int32)
    squares = tl.zeros((ROWS, CHUNK), dtype=tl.float32)
    # The row stays in registers, in parts: one tile would have to be as wide as the next power of
    # two. Weights are on their way while the squares are summed.
    values = ()
    weights = ()
    for part in tl.static_range((COLUMNS + CHUNK - 1) // CHUNK):
        here = part * CHUNK + column
        mask = inside
        if COLUMNS % CHUNK != 0:
            mask = inside & (here < COLUMNS)
        values += (tl.load(source + here, mask=mask, other=0),)  # type: ignore[assignment]
        weights += (tl.load(scales + here, mask=mask, other=0),)  # type: ignore[assignment]
    for part in tl.static_range((COLUMNS + CHUNK - 1) // CHUNK):
        value = values[part].to(tl.float32)  # type: ignore[var-annotated]
        squares += value * value
    inverse = inverse_root(squares, eps, COLUMNS)[:, None]
    for part in tl.static_range((COLUMNS + CHUNK - 1) // CHUNK):
        here = part * CHUNK + column
        mask = inside
        if COLUMNS % CHUNK != 0:
            mask = inside & (here < COLUMNS)
        normed = weights[part] * (values[part].to(tl.float32) * inverse)
        if QUANTISE:
            normed = formats.rounded(normed, out.dtype.element_ty)
            groups = tl.reshape(normed, (ROWS * CHUNK // 32, 32))
            # Exact in the narrow type: nothing is rounded when it is stored.
            normed = tl.reshape(round_fp8(groups), (ROWS, CHUNK))
        tl.store(target + here, formats.narrow(normed, out.dtype.element_ty), mask=mask)


def _blocks(columns: int) -> dict[str, int]:
    """Constants of `_rms_norm` and its number of warps.

    They depend on the width alone, and with them the order of a row's sum: other rows change none
    of its bits.
    """
    chunk = max(_CHUNK, triton.next_power_of_2(triton.cdiv(columns, _MOST_PARTS)))
    chunk = min(chunk, max(triton.next_power_of_2(columns), FP8_GROUP))
    warps = min(max(_WARPS, chunk // _CHUNK), _MOST_WARPS)
    rows = max(1, warps * _CHUNK // chunk)
    return {"COLUMNS": columns, "CHUNK": chunk, "ROWS": rows, "num_warps": warps}


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
    blocks = _blocks(columns)
    warps = blocks.pop("num_warps")
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
        {"QUANTISE": quantise, **blocks},
        num_warps=warps,
        divisible=("rows", "stride"),
    )


SIGNATURES: tuple[Signature, ...] = (
    _signature(5120, False),
    _signature(5120, True),
    _signature(1280, True),
    _signature(512, False),
    _signature(128, False),
)

"""Triton kernel of fp8_quantise_wide.

Knows groups of channels; must not know which matrix consumes them. Groups never cross a program,
so every value depends on its own 128 channels alone.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels import formats
from deepinfer.kernels.signature import Signature
from deepinfer.numerics import FP8_GROUP
from deepinfer.ops.act_quant.triton import (
    flat_rows,
    fp8_scale,
    reciprocal,
    require_groups,
    round_e4m3,
)
from deepinfer.ops.fp8_linear.reference import WIDE_GROUP

GROUPS = 16  # groups of 128 channels that one program takes


@triton.jit(do_not_specialize=["rows"])
def _fp8_quantise_wide(
    x,
    codes,
    scales,
    rows,
    x_row,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """GROUPS groups of 128 channels; scales is [groups of a row, T]."""
    WIDE: tl.constexpr = (COLUMNS + 127) // 128
    first = tl.program_id(0) * GROUPS
    part = tl.arange(0, GROUPS * 4)
    number = first + part // 4
    row = (number // WIDE).to(tl.int64)
    channel = number % WIDE * 128 + part % 4 * 32
    exists = ((row < rows) & (channel < COLUMNS))[:, None]
    inside = tl.arange(0, 32)[None, :]
    value = tl.load(x + (row * x_row + channel)[:, None] + inside, mask=exists, other=0)
    value = value.to(tl.float32)
    scale = fp8_scale(tl.max(tl.abs(value), axis=1))
    # Channels that do not exist count as zeros, which have the smallest of all scales.
    grouped = tl.reshape(scale, (GROUPS, 4))
    largest = tl.max(grouped, axis=1)
    factor = tl.reshape(grouped * reciprocal(largest)[:, None], (GROUPS * 4,))
    # Codes are rounded twice, as in two passes; the first time without leaving float32, where
    # infinity, which has no code, becomes NaN.
    rounded = round_e4m3(value * reciprocal(scale)[:, None])
    moved = formats.encode_e4m3(rounded * factor[:, None])
    tl.store(codes + (row * COLUMNS + channel)[:, None] + inside, moved, mask=exists)
    number = first + tl.arange(0, GROUPS)
    row = number // WIDE
    place = (number % WIDE).to(tl.int64) * rows + row
    tl.store(scales + place, largest, mask=row < rows)


def fp8_quantise_wide(x: Tensor) -> tuple[Tensor, Tensor]:
    """See the reference. Scales of neighbouring rows lie side by side.

    Raises:
        Unsupported: see `require_groups`.
    """
    require_groups(x, FP8_GROUP)
    rows, columns = x.shape
    wide = triton.cdiv(columns, WIDE_GROUP)
    codes = torch.empty((rows, columns), dtype=torch.uint8, device=x.device)
    scales = torch.empty((wide, rows), dtype=torch.float32, device=x.device)
    assert scales.numel() < 2**31 - GROUPS, x.shape
    if codes.numel():
        x = flat_rows(x)
        grid = (triton.cdiv(rows * wide, GROUPS),)
        _fp8_quantise_wide[grid](
            x, codes, scales, rows, x.stride(0), COLUMNS=columns, GROUPS=GROUPS
        )
    return codes, scales.t()


SIGNATURES: tuple[Signature, ...] = tuple(
    Signature(
        f"fp8_quantise_wide-{columns}",
        _fp8_quantise_wide,
        {"x": "*bf16", "codes": "*u8", "scales": "*fp32", "rows": "i32", "x_row": "i32"},
        {"COLUMNS": columns, "GROUPS": GROUPS},
        divisible=("x_row",),
    )
    for columns in (1280, 5120)
)

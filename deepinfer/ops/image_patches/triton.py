"""Triton kernels around the image encoder.

Knows pixels, grids and token rows; must not know the encoder.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.errors import Unsupported
from deepinfer.kernels.formats import narrow
from deepinfer.kernels.launch import require_gpu
from deepinfer.kernels.signature import Signature
from deepinfer.ops.image_patches.reference import END, IMAGE, NEWLINE, PAD_COLOUR, START

_BLOCK = 1024
_KINDS = 1024  # kinds that are counted at a time

_PAD = tl.constexpr(PAD_COLOUR)
_START = tl.constexpr(START)
_IMAGE = tl.constexpr(IMAGE)
_NEWLINE = tl.constexpr(NEWLINE)
_END = tl.constexpr(END)


@triton.jit(do_not_specialize=["h", "w", "top", "left", "across", "patch"])
def patch_kernel(pixels, out, h, w, top, left, across, patch, BLOCK: tl.constexpr):
    """One patch; `across` patches in a row."""
    number = tl.program_id(0)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    size = 3 * patch * patch
    channel = element // (patch * patch)
    y = (number // across) * patch + element // patch % patch - top
    x = (number % across) * patch + element % patch - left
    inside = (y >= 0) & (y < h) & (x >= 0) & (x < w) & (element < size)
    place = (y.to(tl.int64) * w + x) * 3 + channel
    value = tl.load(pixels + place, mask=inside, other=_PAD).to(tl.float32)
    value = (tl.div_rn(value, tl.full((BLOCK,), 255.0, tl.float32)) - 0.5) * 2.0
    tl.store(out + number.to(tl.int64) * size + element, narrow(value, tl.bfloat16),
             mask=element < size)  # fmt: skip


@triton.jit(do_not_specialize=["rows", "columns", "D", "across"])
def cell_kernel(features, out, rows, columns, D, across, SIDE: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK elements of one cell."""
    cell = tl.program_id(0)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    size = D * SIDE * SIDE
    channel = element // (SIDE * SIDE)
    y = (cell // across) * SIDE + element // SIDE % SIDE
    x = (cell % across) * SIDE + element % SIDE
    inside = (y < rows) & (x < columns) & (element < size)
    place = (y.to(tl.int64) * columns + x) * D + channel
    # Moved as they are.
    value = tl.load(features + place, mask=inside, other=0)
    tl.store(out + cell.to(tl.int64) * size + element, value, mask=element < size)


@triton.jit(do_not_specialize=["count", "H"])
def row_kernel(
    x, row_stride, kinds, features, delimiters, first, count, H,
    KINDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of one row."""
    row = tl.program_id(0)
    kind = tl.load(kinds + row).to(tl.int32)
    if (kind < _START) | (kind > _END):
        return
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < H
    target = x + row.to(tl.int64) * row_stride + column
    if kind == _IMAGE:
        number = tl.load(first)
        start = tl.full((), 0, tl.int32)
        while start < row:
            at = start + tl.arange(0, KINDS)
            other = tl.load(kinds + at, mask=at < row, other=-1).to(tl.int32)
            number += tl.sum((other == _IMAGE).to(tl.int64), axis=0)
            start += KINDS
        usable = (number >= 0) & (number < count)
        read = inside & usable
        tl.store(target, tl.load(features + number * H + column, mask=read, other=0), mask=read)
    else:
        slot = tl.where(kind == _START, 0, tl.where(kind == _NEWLINE, 1, 2))
        tl.store(target, tl.load(delimiters + slot * H + column, mask=inside, other=0), mask=inside)


def image_patches(pixels: Tensor, height: int, width: int, patch: int = 14) -> Tensor:
    """See the reference; one launch.

    Raises:
        Unsupported: no GPU, pixels that are not uint8.
    """
    require_gpu(pixels)
    if pixels.dtype != torch.uint8:
        raise Unsupported(f"pixels of {pixels.dtype}")
    h, w, _ = pixels.shape
    number, across = height // patch * (width // patch), width // patch
    out = torch.empty((number, 3, patch, patch), dtype=torch.bfloat16, device=pixels.device)
    if number:
        block = min(_BLOCK, triton.next_power_of_2(3 * patch * patch))
        patch_kernel[(number, triton.cdiv(3 * patch * patch, block))](
            pixels.contiguous(), out, h, w, round((height - h) * 0.5), round((width - w) * 0.5),
            across, patch, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return out


def _as_words(x: Tensor) -> Tensor:
    """Integers of the same width: kernels that only move values need not know them."""
    if x.dtype not in (torch.bfloat16, torch.float32):
        raise Unsupported(f"values of {x.dtype}")
    return x.view(torch.int16 if x.dtype == torch.bfloat16 else torch.int32)


def image_cells(features: Tensor, rows: int, columns: int, side: int = 3) -> Tensor:
    """See the reference; one launch.

    Raises:
        Unsupported: no GPU, another dtype.
    """
    require_gpu(features)
    D = features.shape[1]
    words = _as_words(features.contiguous())
    down, across = triton.cdiv(rows, side), triton.cdiv(columns, side)
    shape = (down * across, D * side * side)
    out = torch.empty(shape, dtype=features.dtype, device=features.device)
    if out.numel():
        cell_kernel[(shape[0], triton.cdiv(shape[1], _BLOCK))](
            words, _as_words(out), rows, columns, D, across, SIDE=side, BLOCK=_BLOCK, num_warps=4
        )
    return out


def replace_image_rows(
    x: Tensor, kinds: Tensor, features: Tensor, delimiters: Tensor, first: Tensor
) -> None:
    """See the reference; one launch.

    Raises:
        Unsupported: no GPU, other or different dtypes, or columns of x not side by side.
    """
    require_gpu(x)
    if kinds.dtype != torch.int8 or first.dtype != torch.int64:
        raise Unsupported(f"kinds of {kinds.dtype}, first of {first.dtype}")
    if features.dtype != x.dtype or delimiters.dtype != x.dtype:
        raise Unsupported("features and rows of different dtypes")
    if x.shape[1] > 1 and x.stride(1) != 1:
        raise Unsupported("columns that do not lie side by side")
    T, H = x.shape
    if T and H:
        words = (_as_words(t.contiguous()) for t in (features, delimiters))
        row_kernel[(T, triton.cdiv(H, _BLOCK))](
            _as_words(x), x.stride(0), kinds.contiguous(), *words, first, features.shape[0], H,
            KINDS=_KINDS, BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip


SIGNATURES: tuple[Signature, ...] = (
    Signature(
        "image_patches",
        patch_kernel,
        {
            "pixels": "*u8", "out": "*bf16",
            **dict.fromkeys(("h", "w", "top", "left", "across", "patch"), "i32"),
        },
        {"BLOCK": _BLOCK},
    ),
    Signature(
        "image_cells",
        cell_kernel,
        {
            "features": "*i16", "out": "*i16",
            **dict.fromkeys(("rows", "columns", "D", "across"), "i32"),
        },
        {"SIDE": 3, "BLOCK": _BLOCK},
    ),
    Signature(
        "replace_image_rows",
        row_kernel,
        {
            **dict.fromkeys(("x", "features", "delimiters"), "*i16"),
            "kinds": "*i8", "first": "*i64",
            **dict.fromkeys(("row_stride", "count", "H"), "i32"),
        },
        {"KINDS": _KINDS, "BLOCK": _BLOCK},
        divisible=("row_stride",),
    ),
)  # fmt: skip

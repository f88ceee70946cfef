"""Triton kernel of rope, and the device functions that rotate channel pairs of a tile.

Knows rows and their rotations; must not know positions. Rows are independent of each other.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.errors import Unsupported
from deepinfer.kernels import formats
from deepinfer.kernels.launch import require_gpu
from deepinfer.kernels.signature import Signature
from deepinfer.ops.act_quant.triton import flat_rows

TILE = 4096  # values of one program
_MOST_ROWS = 64


@triton.jit
def rotate(even, odd, cosine, sine):
    """(even + i odd) * (cosine + i sine), as its real and its imaginary part, in float32."""
    return even * cosine - odd * sine, even * sine + odd * cosine


@triton.jit
def rotate_tail(
    x,
    rotations,
    row,
    inside,
    DIM: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Channel pairs of rows `x` [ROWS, BLOCK] float32 with the last TAIL of DIM channels rotated.

    Args:
        rotations: pointer to [., TAIL / 2, 2] float32; row: [ROWS, 1] int64, each row's rotation.
        inside: [ROWS, 1], which rows exist.
        DTYPE: to which the rotated channels are rounded.

    Returns:
        Even and odd channels [ROWS, BLOCK / 2] float32.
    """
    even, odd = tl.split(tl.reshape(x, (ROWS, BLOCK // 2, 2)))
    channel = tl.arange(0, BLOCK)[None, :] - (DIM - TAIL)
    rotary = inside & (channel >= 0) & (channel < TAIL)
    turn = tl.load(rotations + row * TAIL + channel, mask=rotary, other=0)
    cosine, sine = tl.split(tl.reshape(turn, (ROWS, BLOCK // 2, 2)))
    real, imaginary = rotate(even, odd, cosine, sine)
    tail = (tl.arange(0, BLOCK // 2) >= (DIM - TAIL) // 2)[None, :]
    even = tl.where(tail, formats.rounded(real, DTYPE), even)
    odd = tl.where(tail, formats.rounded(imaginary, DTYPE), odd)
    return even, odd


@triton.jit(do_not_specialize=["rows"])
def _rope(
    x,
    rotations,
    out,
    rows,
    stride,
    SHARED: tl.constexpr,
    DIM: tl.constexpr,
    TAIL: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    TAIL_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    INVERSE: tl.constexpr,
):
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    inside = row < rows
    source = x + row * stride
    target = out + row * DIM
    if TAIL < DIM:
        column = tl.arange(0, HEAD_BLOCK)[None, :]
        mask = inside & (column < DIM - TAIL)
        tl.store(target + column, tl.load(source + column, mask=mask, other=0), mask=mask)
    channel = tl.arange(0, TAIL_BLOCK)[None, :]
    mask = inside & (channel < TAIL)
    value = tl.load(source + (DIM - TAIL) + channel, mask=mask, other=0).to(tl.float32)
    turn = tl.load(rotations + (row // SHARED) * TAIL + channel, mask=mask, other=0)
    even, odd = tl.split(tl.reshape(value, (ROWS, TAIL_BLOCK // 2, 2)))
    cosine, sine = tl.split(tl.reshape(turn, (ROWS, TAIL_BLOCK // 2, 2)))
    if INVERSE:
        sine = -sine
    real, imaginary = rotate(even, odd, cosine, sine)
    turned = tl.reshape(tl.join(real, imaginary), (ROWS, TAIL_BLOCK))
    turned = formats.narrow(turned, out.dtype.element_ty)
    tl.store(target + (DIM - TAIL) + channel, turned, mask=mask)


def real_rotations(rotations: Tensor, dim: int) -> Tensor:
    """Cosines and sines [..., d/2, 2] float32, contiguous, of rotations [..., d/2].

    Raises:
        Unsupported: the rotations are not complex64, or wider than the `dim` channels.
    """
    if rotations.dtype != torch.complex64:
        raise Unsupported(f"rotations are {rotations.dtype}: takes complex64")
    if not 0 < 2 * rotations.shape[-1] <= dim:
        raise Unsupported(f"{2 * rotations.shape[-1]} rotary channels of {dim}")
    return torch.view_as_real(rotations.resolve_conj().contiguous())


def shared_rows(x: Tensor, rotations: Tensor) -> tuple[Tensor, int]:
    """Rotations of which each serves that many consecutive rows of flattened `x`.

    Rotations that are broadcast over trailing axes (heads) stay as they are; any other
    broadcasting is written out, with 1 row for each rotation.
    """
    lead = x.shape[:-1]
    own = (1,) * (len(lead) - (rotations.dim() - 1)) + tuple(rotations.shape[:-1])
    kept = len(own)
    while kept and own[kept - 1] == 1:
        kept -= 1
    if own[:kept] == tuple(lead[:kept]):
        return rotations, math.prod(lead[kept:])
    return rotations.expand(*lead, rotations.shape[-1]), 1


def rope(x: Tensor, rotations: Tensor, inverse: bool = False) -> Tensor:
    """See the reference. Rows may be strided; other strides are copied first.

    Raises:
        Unsupported: no GPU, a dtype other than bfloat16 and float32, rotations that are not
            complex64 or wider than `x`, an odd number of channels, or a gradient is wanted.
    """
    require_gpu(x)
    dim, tail = x.shape[-1], 2 * rotations.shape[-1]
    if x.dtype not in (torch.bfloat16, torch.float32):
        raise Unsupported(f"{x.dtype}: takes bfloat16 and float32")
    if x.requires_grad and torch.is_grad_enabled():
        raise Unsupported("has no gradient")
    kept, shared = shared_rows(x, rotations)
    turns = real_rotations(kept, dim)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return out
    flat = flat_rows(x)
    rows = flat.shape[0]
    blocks = _blocks(dim, tail)
    _rope[(triton.cdiv(rows, blocks["ROWS"]),)](
        flat,
        turns,
        out,
        rows,
        flat.stride(0),
        SHARED=shared,
        DIM=dim,
        TAIL=tail,
        INVERSE=inverse,
        **blocks,
    )
    return out


def _blocks(dim: int, tail: int) -> dict[str, int]:
    head = triton.next_power_of_2(max(dim - tail, 1))
    return {
        "HEAD_BLOCK": head,
        "TAIL_BLOCK": triton.next_power_of_2(tail),
        "ROWS": max(1, min(_MOST_ROWS, TILE // triton.next_power_of_2(dim))),
    }


def _signature(name: str, shared: int, inverse: bool) -> Signature:
    return Signature(
        name,
        _rope,
        {"x": "*bf16", "rotations": "*fp32", "out": "*bf16", "rows": "i32", "stride": "i32"},
        {
            "SHARED": shared,
            "DIM": 512,
            "TAIL": 64,
            "INVERSE": inverse,
            **_blocks(512, 64),
        },
        divisible=("rows", "stride"),
    )


SIGNATURES: tuple[Signature, ...] = (
    _signature("rope-heads", 64, False),
    _signature("rope-heads-inverse", 64, True),
    _signature("rope-keys", 1, False),
)

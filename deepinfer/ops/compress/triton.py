"""Triton kernels of the compressor: pooling with its norm, and keeping inputs for later steps.

Knows groups of tokens and rows of the kept state; must not know sequences or slots. A group's
latent depends on its own tokens alone.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.errors import Unsupported
from deepinfer.kernels import formats
from deepinfer.kernels.launch import require_gpu
from deepinfer.kernels.signature import Signature
from deepinfer.ops.rms_norm.triton import normalise_rounded

TILE = 512  # channels of one program
WARPS = 1  # of one program: no sum over a row has to pass shared memory


@triton.jit
def _token(
    own, own_stride, state, state_stride, place, kept, channel, inside,
):  # fmt: skip
    """Channels [n, BLOCK] of tokens at `place` [n, 1]; 0 where a place is negative."""
    old = inside & (place >= 0) & (place < kept)
    new = inside & (place >= kept)
    stored = tl.load(state + place * state_stride + channel, mask=old, other=0)
    fresh = tl.load(own + (place - kept) * own_stride + channel, mask=new, other=0)
    return tl.where(old, stored, fresh)


@triton.jit(do_not_specialize=["groups", "kept"])
def _compress_groups(
    values, gates, state, places, weight, out, groups, kept,
    value_stride, gate_stride, state_stride, eps,
    TOKENS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = out.dtype.element_ty
    group = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, BLOCK)[None, :]
    inside = (group < groups)[:, None] & (channel < DIM)
    largest = tl.full((ROWS, BLOCK), float("-inf"), dtype=tl.float32)
    token_gates = ()
    token_values = ()
    for k in tl.static_range(TOKENS):
        place = tl.load(places + group * TOKENS + k, mask=group < groups, other=-1)[:, None]
        gate = _token(gates, gate_stride, state + DIM, state_stride, place, kept, channel, inside)
        value = _token(values, value_stride, state, state_stride, place, kept, channel, inside)
        token_gates += (gate,)  # type: ignore[assignment]
        token_values += (value,)  # type: ignore[assignment]
    for k in tl.static_range(TOKENS):
        largest = tl.maximum(largest, token_gates[k])
    total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    pooled = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for k in tl.static_range(TOKENS):
        share = tl.exp(token_gates[k] - largest)
        total += share
        pooled += share * token_values[k]
    # The total lies between 1 and TOKENS: a product with its reciprocal is near enough, and exact
    # where one gate outweighs the others or two are equal.
    pooled = formats.rounded(pooled * (1.0 / total), dtype)
    latent = normalise_rounded(pooled, weight, eps, DIM, BLOCK, ROWS, dtype)
    # Rounded already: narrowing again changes nothing.
    tl.store(out + group[:, None] * DIM + channel, formats.narrow(latent, dtype), mask=inside)


@triton.jit(do_not_specialize=["count"])
def _store_groups(
    values, gates, state, rows, targets, count, value_stride, gate_stride, state_stride,
    DIM: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row = tl.load(rows + number, mask=number < count, other=0)[:, None]
    target = tl.load(targets + number, mask=number < count, other=-1)[:, None]
    channel = tl.arange(0, BLOCK)[None, :]
    mask = (target >= 0) & (channel < DIM)
    value = tl.load(values + row * value_stride + channel, mask=mask, other=0)
    gate = tl.load(gates + row * gate_stride + channel, mask=mask, other=0)
    tl.store(state + target * state_stride + channel, value, mask=mask)
    tl.store(state + target * state_stride + DIM + channel, gate, mask=mask)


def _require(values: Tensor, gates: Tensor, state: Tensor) -> None:
    require_gpu(values)
    if {values.dtype, gates.dtype, state.dtype} != {torch.float32}:
        raise Unsupported(f"takes float32, not {values.dtype}, {gates.dtype}, {state.dtype}")
    if state.dim() != 3 or state.stride(2) != 1 or state.stride(1) != state.shape[2]:
        raise Unsupported("the value and the gate of a row of the state have to be adjacent")


def _adjacent(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _blocks(dim: int) -> dict[str, int]:
    block = triton.next_power_of_2(dim)
    return {"DIM": dim, "BLOCK": block, "ROWS": max(1, TILE // block)}


def _warps(dim: int) -> int:
    return max(WARPS, min(triton.next_power_of_2(dim) // TILE, 16))


def compress_groups(
    values: Tensor,
    gates: Tensor,
    state: Tensor,
    places: Tensor,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype,
) -> Tensor:
    """See the reference. Rows of values, gates and state may be strided.

    Raises:
        Unsupported: no GPU, inputs other than float32, a dtype other than bfloat16 and float32, or
            a state whose rows are not contiguous.
    """
    _require(values, gates, state)
    if dtype not in (torch.bfloat16, torch.float32):
        raise Unsupported(f"{dtype}: gives bfloat16 and float32")
    groups, tokens = places.shape
    dim = values.shape[-1]
    out = torch.empty((groups, dim), dtype=dtype, device=values.device)
    if groups:
        values, gates, blocks = _adjacent(values), _adjacent(gates), _blocks(dim)
        _compress_groups[(triton.cdiv(groups, blocks["ROWS"]),)](
            values, gates, state, places.contiguous(), weight.contiguous(), out, groups,
            state.shape[0], values.stride(0), gates.stride(0), state.stride(0), eps,
            TOKENS=tokens, num_warps=_warps(dim), **blocks,
        )  # fmt: skip
    return out


def store_groups(
    values: Tensor, gates: Tensor, state: Tensor, rows: Tensor, targets: Tensor
) -> None:
    """See the reference. Rows of values, gates and state may be strided.

    Raises:
        Unsupported: as `compress_groups`.
    """
    _require(values, gates, state)
    count, dim = rows.numel(), values.shape[-1]
    if count:
        values, gates, blocks = _adjacent(values), _adjacent(gates), _blocks(dim)
        _store_groups[(triton.cdiv(count, blocks["ROWS"]),)](
            values, gates, state, rows.contiguous(), targets.contiguous(), count,
            values.stride(0), gates.stride(0), state.stride(0), num_warps=_warps(dim), **blocks,
        )  # fmt: skip


_POINTERS = {"values": "*fp32", "gates": "*fp32", "state": "*fp32"}
_STRIDES = {"value_stride": "i32", "gate_stride": "i32", "state_stride": "i32"}

SIGNATURES: tuple[Signature, ...] = (
    Signature(
        "compress_groups",
        _compress_groups,
        {
            **_POINTERS,
            **_STRIDES,
            "places": "*i64",
            "weight": "*fp32",
            "out": "*bf16",
            "groups": "i32",
            "kept": "i32",
            "eps": "fp32",
        },
        {"TOKENS": 2, **_blocks(512)},
        num_warps=_warps(512),
        divisible=tuple(_STRIDES),
    ),
    Signature(
        "store_groups",
        _store_groups,
        {**_POINTERS, **_STRIDES, "rows": "*i64", "targets": "*i64", "count": "i32"},
        _blocks(512),
        num_warps=_warps(512),
        divisible=tuple(_STRIDES),
    ),
)

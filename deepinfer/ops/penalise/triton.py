"""Triton kernels of count_tokens and penalise.

Knows tiles of logits and counts; must not know requests. Counts are whole numbers, so that it does
not matter in which order they are added; biases of one id are added up in the order of the list.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.errors import Unsupported
from deepinfer.kernels.launch import require_gpu
from deepinfer.kernels.signature import Signature

_BLOCK = 1024
_SIDE = 32  # biases that a program compares with each other at a time


@triton.jit(do_not_specialize=["L", "V"])
def count_kernel(ids, counts, stride, L, V, BLOCK: tl.constexpr):
    """BLOCK ids of one row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(ids + row * L + at, mask=at < L, other=-1).to(tl.int64)
    one = tl.full((BLOCK,), 1, tl.int32)
    valid = (token >= 0) & (token < V)
    tl.atomic_add(counts + row * stride + token, one, mask=valid, sem="relaxed")


@triton.jit(do_not_specialize=["V"])
def penalty_kernel(
    logits, row_stride, prompt_counts, output_counts, repetition, presence, frequency, V,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK logits of one row; only those of tokens that were seen are read and written."""
    row = tl.program_id(0).to(tl.int64)
    again = tl.load(repetition + row)
    once = tl.load(presence + row)
    each = tl.load(frequency + row)
    if (again == 1.0) & (once == 0.0) & (each == 0.0):
        return
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < V
    before = tl.load(prompt_counts + row * V + column, mask=inside, other=0)
    count = tl.load(output_counts + row * V + column, mask=inside, other=0)
    seen = inside & ((before > 0) | (count > 0))
    place = logits + row * row_stride + column
    logit = tl.load(place, mask=seen, other=0.0)
    divisor = tl.full((BLOCK,), 1.0, tl.float32) * again
    logit = tl.where(logit > 0, tl.div_rn(logit, divisor), logit * again)
    lost = once + each * count.to(tl.float32)
    tl.store(place, tl.where(count > 0, logit - lost, logit), mask=seen)


@triton.jit(do_not_specialize=["K", "V"])
def bias_kernel(logits, row_stride, bias_ids, bias_values, K, V, SIDE: tl.constexpr):
    """SIDE biases of one row; the first one of an id adds the values of all of them."""
    row = tl.program_id(0).to(tl.int64)
    mine = tl.program_id(1) * SIDE + tl.arange(0, SIDE)
    token = tl.load(bias_ids + row * K + mine, mask=mine < K, other=-1)
    bias = tl.full((SIDE,), 0.0, tl.float64)
    earlier = tl.full((SIDE,), 0, tl.int32)
    start = tl.full((), 0, tl.int32)
    while start < K:
        other = start + tl.arange(0, SIDE)
        there = tl.load(bias_ids + row * K + other, mask=other < K, other=-2)
        value = tl.load(bias_values + row * K + other, mask=other < K, other=0.0)
        same = token[:, None] == there[None, :]
        bias += tl.sum(tl.where(same, value[None, :].to(tl.float64), 0.0), axis=1)
        first = same & (other[None, :] < mine[:, None])
        earlier += tl.sum(first.to(tl.int32), axis=1)
        start += SIDE
    chosen = (token >= 0) & (token < V) & (earlier == 0)
    place = logits + row * row_stride + token
    logit = tl.load(place, mask=chosen, other=0.0)
    tl.store(place, logit + bias.to(tl.float32), mask=chosen)


def count_tokens(ids: Tensor, counts: Tensor) -> None:
    """See the reference; one launch.

    Raises:
        Unsupported: no GPU, other dtypes, or columns of the counts not side by side.
    """
    require_gpu(counts)
    if ids.dtype not in (torch.int32, torch.int64) or counts.dtype != torch.int32:
        raise Unsupported(f"ids of {ids.dtype}, counts of {counts.dtype}")
    if counts.shape[1] > 1 and counts.stride(1) != 1:
        raise Unsupported("columns that do not lie side by side")
    B, L = ids.shape
    if B and L:
        count_kernel[(B, triton.cdiv(L, _BLOCK))](
            ids.contiguous(), counts, counts.stride(0), L, counts.shape[1], BLOCK=_BLOCK,
            num_warps=4,
        )  # fmt: skip


def penalise(
    logits: Tensor,
    prompt_counts: Tensor,
    output_counts: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
    bias_ids: Tensor,
    bias_values: Tensor,
) -> None:
    """See the reference; two launches.

    Raises:
        Unsupported: no GPU, other dtypes, or columns of the logits not side by side.
    """
    require_gpu(logits)
    floats = (logits, repetition, presence, frequency, bias_values)
    if any(x.dtype != torch.float32 for x in floats):
        raise Unsupported("tensors that are not float32")
    if prompt_counts.dtype != torch.int32 or output_counts.dtype != torch.int32:
        raise Unsupported("counts that are not int32")
    if bias_ids.dtype != torch.int64:
        raise Unsupported(f"biases of {bias_ids.dtype}")
    B, V = logits.shape
    if V > 1 and logits.stride(1) != 1:
        raise Unsupported("columns that do not lie side by side")
    if B == 0 or V == 0:
        return
    penalty_kernel[(B, triton.cdiv(V, _BLOCK))](
        logits, logits.stride(0), prompt_counts.contiguous(), output_counts.contiguous(),
        repetition.contiguous(), presence.contiguous(), frequency.contiguous(), V, BLOCK=_BLOCK,
        num_warps=4,
    )  # fmt: skip
    K = bias_ids.shape[1]
    if K:
        bias_kernel[(B, triton.cdiv(K, _SIDE))](
            logits, logits.stride(0), bias_ids.contiguous(), bias_values.contiguous(), K, V,
            SIDE=_SIDE, num_warps=4,
        )  # fmt: skip


SIGNATURES: tuple[Signature, ...] = (
    Signature(
        "count_tokens",
        count_kernel,
        {"ids": "*i64", "counts": "*i32", "stride": "i32", "L": "i32", "V": "i32"},
        {"BLOCK": _BLOCK},
        divisible=("stride",),
    ),
    Signature(
        "penalties",
        penalty_kernel,
        {
            "logits": "*fp32", "row_stride": "i32", "prompt_counts": "*i32",
            "output_counts": "*i32", "V": "i32",
            **dict.fromkeys(("repetition", "presence", "frequency"), "*fp32"),
        },
        {"BLOCK": _BLOCK},
        divisible=("row_stride",),
    ),
    Signature(
        "biases",
        bias_kernel,
        {
            "logits": "*fp32", "row_stride": "i32", "bias_ids": "*i64", "bias_values": "*fp32",
            "K": "i32", "V": "i32",
        },
        {"SIDE": _SIDE},
        divisible=("row_stride",),
    ),
)  # fmt: skip

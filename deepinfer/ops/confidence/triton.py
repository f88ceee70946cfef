"""Triton kernel of confidence.

Knows rows of two tensors; must not know how drafts are verified.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.errors import Unsupported
from deepinfer.kernels.launch import require_gpu
from deepinfer.kernels.signature import Signature

_BLOCK = 1024


@triton.jit(do_not_specialize=["H", "K"])
def confidence_kernel(x, x_stride, embedded, e_stride, weight, out, H, K, BLOCK: tl.constexpr):
    """One row: partial sums of each lane, then over lanes."""
    row = tl.program_id(0).to(tl.int64)
    total = tl.full((BLOCK,), 0.0, tl.float32)
    lane = tl.arange(0, BLOCK)
    start = tl.full((), 0, tl.int32)
    while start < H:
        at = start + lane
        value = tl.load(x + row * x_stride + at, mask=at < H, other=0.0).to(tl.float32)
        total += value * tl.load(weight + at, mask=at < H, other=0.0).to(tl.float32)
        start += BLOCK
    start = tl.full((), 0, tl.int32)
    while start < K:
        at = start + lane
        value = tl.load(embedded + row * e_stride + at, mask=at < K, other=0.0).to(tl.float32)
        total += value * tl.load(weight + H + at, mask=at < K, other=0.0).to(tl.float32)
        start += BLOCK
    logit = tl.sum(total, axis=0)
    # Of the negative magnitude, so that nothing overflows.
    small = tl.exp(-tl.abs(logit))
    tl.store(out + row, tl.where(logit >= 0, 1.0, small) / (1.0 + small))


def confidence(x: Tensor, embedded: Tensor, weight: Tensor) -> Tensor:
    """See the reference; one launch. Columns that do not lie side by side are copied first.

    Raises:
        Unsupported: no GPU, or dtypes other than bfloat16 and float32.
    """
    require_gpu(x)
    if any(t.dtype not in (torch.bfloat16, torch.float32) for t in (x, embedded, weight)):
        raise Unsupported("tensors that are neither bfloat16 nor float32")
    (B, H), K = x.shape, embedded.shape[1]
    x, embedded = (t if t.stride(1) == 1 else t.contiguous() for t in (x, embedded))
    out = torch.empty(B, dtype=torch.float32, device=x.device)
    if B:
        confidence_kernel[(B,)](
            x, x.stride(0), embedded, embedded.stride(0), weight.contiguous(), out, H, K,
            BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip
    return out


SIGNATURES: tuple[Signature, ...] = (
    Signature(
        "confidence",
        confidence_kernel,
        {
            **dict.fromkeys(("x", "embedded", "weight"), "*bf16"),
            "out": "*fp32",
            **dict.fromkeys(("x_stride", "e_stride", "H", "K"), "i32"),
        },
        {"BLOCK": _BLOCK},
        divisible=("x_stride", "e_stride"),
    ),
)

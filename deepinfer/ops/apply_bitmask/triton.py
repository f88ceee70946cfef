"""Triton kernel of apply_bitmask: logits are written where they change, and never read.

Knows bits and columns; must not know grammars.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.errors import Unsupported
from deepinfer.kernels.launch import require_gpu
from deepinfer.kernels.signature import Signature

_BLOCK = 2048


@triton.jit(do_not_specialize=["B", "V"])
def mask_kernel(logits, row_stride, mask, mask_stride, rows, B, V, BLOCK: tl.constexpr):
    """BLOCK columns of the row of one mask."""
    number = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + number)
    live = (row >= 0) & (row < B) & (column < V)
    word = tl.load(mask + number * mask_stride + column // 32, mask=live, other=-1)
    forbidden = live & (((word >> (column % 32)) & 1) == 0)
    nothing = tl.full((BLOCK,), float("-inf"), tl.float32).to(logits.dtype.element_ty)
    tl.store(logits + row * row_stride + column, nothing, mask=forbidden)


def apply_bitmask(logits: Tensor, mask: Tensor, rows: Tensor) -> None:
    """See the reference; one launch.

    Raises:
        Unsupported: no GPU, other dtypes, or columns of the logits not side by side.
    """
    require_gpu(logits)
    if logits.dtype not in (torch.float32, torch.bfloat16):
        raise Unsupported(f"logits of {logits.dtype}")
    if mask.dtype != torch.int32 or rows.dtype != torch.int64:
        raise Unsupported(f"masks of {mask.dtype} for rows of {rows.dtype}")
    if logits.shape[1] > 1 and logits.stride(1) != 1:
        raise Unsupported("columns that do not lie side by side")
    B, V = logits.shape
    M = mask.shape[0]
    if B and V and M:
        mask = mask.contiguous()
        mask_kernel[(M, triton.cdiv(V, _BLOCK))](
            logits, logits.stride(0), mask, mask.stride(0), rows.contiguous(), B, V,
            BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip


SIGNATURES: tuple[Signature, ...] = (
    Signature(
        "apply_bitmask",
        mask_kernel,
        {
            "logits": "*fp32", "mask": "*i32", "rows": "*i64",
            **dict.fromkeys(("row_stride", "mask_stride", "B", "V"), "i32"),
        },
        {"BLOCK": _BLOCK},
        divisible=("row_stride",),
    ),
)  # fmt: skip

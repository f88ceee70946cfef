"""count_outliers on a GPU: one pass over the values, one atomic addition of each program.

Knows tiles of one tensor; must not know what it holds. Integer additions give the same counts in
any order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.errors import Unsupported
from deepinfer.kernels.launch import require_gpu
from deepinfer.kernels.signature import Signature

_ROWS = 16
_BLOCK = 512


@triton.jit(do_not_specialize=["T"])
def count_kernel(x, counts, limit, T, C, row_stride, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Counts of ROWS x BLOCK values."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < T)[:, None] & (column < C)[None, :]
    value = tl.load(x + row[:, None] * row_stride + column[None, :], mask=inside, other=0.0)
    magnitude = value.to(tl.float32).to(tl.uint32, bitcast=True) & 0x7FFFFFFF
    broken = (magnitude >= 0x7F800000).to(tl.int32)
    # What is outside is 0, and 0 > limit is false.
    large = (magnitude.to(tl.float32, bitcast=True) > limit).to(tl.int32)
    tl.atomic_add(counts, tl.sum(tl.sum(broken, axis=1), axis=0), sem="relaxed")
    tl.atomic_add(counts + 1, tl.sum(tl.sum(large, axis=1), axis=0), sem="relaxed")


def count_outliers(x: Tensor, limit: float) -> Tensor:
    """See the reference; a fill and one launch. Columns that are not adjacent are copied.

    Raises:
        Unsupported: no GPU, a dtype other than bfloat16, float16 and float32.
    """
    require_gpu(x)
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise Unsupported(f"values of {x.dtype}, not bfloat16, float16 or float32")
    x = x if x.stride(1) == 1 else x.contiguous()
    T, C = x.shape
    counts = torch.zeros(2, dtype=torch.int32, device=x.device)
    if x.numel():
        block = min(_BLOCK, triton.next_power_of_2(C))
        count_kernel[(triton.cdiv(T, _ROWS), triton.cdiv(C, block))](
            x, counts, limit, T, C, x.stride(0), ROWS=_ROWS, BLOCK=block, num_warps=4
        )
    return counts


SIGNATURES = (
    Signature(
        "count_outliers",
        count_kernel,
        {
            "x": "*bf16",
            "counts": "*i32",
            "limit": "fp32",
            **dict.fromkeys(("T", "C", "row_stride"), "i32"),
        },
        {"ROWS": _ROWS, "BLOCK": _BLOCK},
        divisible=("C", "row_stride"),
    ),
)

"""gather_rows on a GPU: one kernel that copies bytes.

Knows tiles of rows; must not know what they mean.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.errors import Unsupported
from deepinfer.kernels.launch import require_gpu
from deepinfer.kernels.signature import Signature

_BLOCK = 2048
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit(do_not_specialize=["R"])
def gather_kernel(table, index, out, R, row_stride, C: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK columns of one row."""
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(index + place).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = (row >= 0) & (row < R)
    value = tl.load(table + row * row_stride + column, mask=valid & (column < C), other=0)
    tl.store(out + place * C + column, value, mask=column < C)


def gather_rows(table: Tensor, index: Tensor) -> Tensor:
    """See the reference; one launch. The table may have gaps between its rows.

    Raises:
        Unsupported: no GPU, a table whose columns are not adjacent or wider than 8 bytes each.
    """
    require_gpu(index)
    word = _WORDS.get(table.element_size())
    if word is None or (table.shape[1] > 1 and table.stride(1) != 1):
        raise Unsupported("a table with gaps between its columns or of complex values")
    C = table.shape[1]
    out = torch.empty((*index.shape, C), dtype=table.dtype, device=index.device)
    if out.numel():
        block = min(_BLOCK, triton.next_power_of_2(C))
        gather_kernel[(index.numel(), triton.cdiv(C, block))](
            table.view(word), index.contiguous(), out.view(word), table.shape[0], table.stride(0),
            C=C, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return out


SIGNATURES = (
    Signature(
        "gather_rows",
        gather_kernel,
        {"table": "*i16", "index": "*i64", "out": "*i16", "R": "i32", "row_stride": "i32"},
        {"C": 5120, "BLOCK": _BLOCK},
        divisible=("row_stride",),
    ),
)

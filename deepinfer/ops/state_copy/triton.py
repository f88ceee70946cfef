"""copy_rows on a GPU: one kernel that copies bytes.

Knows tiles of rows; must not know what state they hold.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.errors import Unsupported
from deepinfer.kernels.launch import require_gpu
from deepinfer.kernels.signature import Signature

_BLOCK = 4096  # bytes
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit
def copy_kernel(source, target, from_rows, to_rows, C, from_stride, to_stride, BLOCK: tl.constexpr):
    """BLOCK columns of one pair."""
    read = tl.load(from_rows + tl.program_id(0)).to(tl.int64)
    written = tl.load(to_rows + tl.program_id(0)).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (read >= 0) & (written >= 0) & (column < C)
    value = tl.load(source + read * from_stride + column, mask=inside, other=0)
    tl.store(target + written * to_stride + column, value, mask=inside)


def _dense_rows(table: Tensor) -> bool:
    """Whether the values of each row are adjacent and in order."""
    return table.shape[0] == 0 or table[0].is_contiguous()


def copy_rows(source: Tensor, target: Tensor, from_rows: Tensor, to_rows: Tensor) -> None:
    """See the reference; one launch.

    Raises:
        Unsupported: no GPU, tables of different dtypes, of complex values, or with gaps within
            their rows.
    """
    require_gpu(target)
    word = _WORDS.get(target.element_size())
    if word is None or source.dtype != target.dtype or source.shape[1:] != target.shape[1:]:
        raise Unsupported("tables of complex values or with different rows")
    if not (_dense_rows(source) and _dense_rows(target)):
        raise Unsupported("a table with gaps within its rows")
    C = math.prod(target.shape[1:])
    if C and from_rows.shape[0] and source.shape[0] and target.shape[0]:
        block = min(_BLOCK // target.element_size(), triton.next_power_of_2(C))
        copy_kernel[(from_rows.shape[0], triton.cdiv(C, block))](
            source.view(word), target.view(word), from_rows.contiguous(), to_rows.contiguous(), C,
            source.stride(0), target.stride(0), BLOCK=block, num_warps=4,
        )  # fmt: skip


SIGNATURES = (
    Signature(
        "copy_rows",
        copy_kernel,
        {
            "source": "*u8",
            "target": "*u8",
            "from_rows": "*i64",
            "to_rows": "*i64",
            **dict.fromkeys(("C", "from_stride", "to_stride"), "i32"),
        },
        {"BLOCK": _BLOCK},
        divisible=("C", "from_stride", "to_stride"),
    ),
)

"""engram_gather on a GPU: one kernel; the table may lie in pinned host memory.

Knows tiles of table rows; must not know how row numbers were found. Only the rows asked for are
read, 256 + 8 bytes each at the released width, so reads over the bus are as few as they can be;
many programs in flight hide its latency.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.errors import Unsupported
from deepinfer.kernels import formats
from deepinfer.kernels.launch import INTERPRETED, require_gpu
from deepinfer.kernels.signature import Signature
from deepinfer.numerics import FP8_GROUP

_ROWS = 8


@triton.jit(do_not_specialize=["N", "R"])
def gather_kernel(
    codes, scales, rows, out, N, R, code_stride, scale_stride,
    GROUPS: tl.constexpr, PADDED: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """ROWS table rows of GROUPS groups of WIDTH columns, to consecutive rows of `out`."""
    at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row = tl.load(rows + at, mask=at < N, other=-1)
    valid = (row >= 0) & (row < R)
    group = tl.arange(0, PADDED)
    column = group[None, :, None] * WIDTH + tl.arange(0, WIDTH)[None, None, :]
    scaled = valid[:, None] & (group < GROUPS)[None, :]
    scale = tl.load(scales + row[:, None] * scale_stride + group[None, :], mask=scaled, other=127)
    factor = tl.where(scale == 255, float("nan"), formats.decode_e8m0(scale))
    code = tl.load(
        codes + row[:, None, None] * code_stride + column, mask=scaled[:, :, None], other=0
    )
    value = formats.narrow(formats.decode_e4m3(code) * factor[:, :, None], out.dtype.element_ty)
    there = (at < N)[:, None, None] & (group < GROUPS)[None, :, None]
    tl.store(out + at[:, None, None] * (GROUPS * WIDTH) + column, value, mask=there)


def engram_gather(codes: Tensor, scales: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """See the reference; one launch. Tables need a unit stride along their rows.

    Raises:
        Unsupported: no GPU, a table in pageable host memory, a result that is neither bfloat16 nor
            float32, tables that are not uint8 with 32 codes per scale.
    """
    require_gpu(rows)
    if dtype not in (torch.bfloat16, torch.float32):
        raise Unsupported(f"a result of {dtype}, not bfloat16 or float32")
    R, F = codes.shape
    groups = F // FP8_GROUP
    if F % FP8_GROUP or scales.shape != (R, groups):
        raise Unsupported(f"scales {list(scales.shape)} for codes {list(codes.shape)}")
    for table in (codes, scales):
        if table.dtype != torch.uint8 or table.stride(1) != 1:
            raise Unsupported("a table that is not uint8 with a unit stride along its rows")
        if not INTERPRETED and table.device.type == "cpu" and not table.is_pinned():
            raise Unsupported("a table in host memory that is not pinned")
    numbers = rows.to(torch.int64).contiguous()
    out = torch.empty((*rows.shape[:-1], rows.shape[-1] * F), dtype=dtype, device=rows.device)
    if out.numel():
        gather_kernel[(triton.cdiv(rows.numel(), _ROWS),)](
            codes, scales, numbers, out, rows.numel(), R, codes.stride(0), scales.stride(0),
            GROUPS=groups, PADDED=triton.next_power_of_2(groups), WIDTH=FP8_GROUP, ROWS=_ROWS,
            num_warps=4,
        )  # fmt: skip
    return out


SIGNATURES = (
    Signature(
        "engram_gather",
        gather_kernel,
        {
            "codes": "*u8",
            "scales": "*u8",
            "rows": "*i64",
            "out": "*bf16",
            **dict.fromkeys(("N", "R", "code_stride", "scale_stride"), "i32"),
        },
        {"GROUPS": 8, "PADDED": 8, "WIDTH": FP8_GROUP, "ROWS": _ROWS},
        divisible=("code_stride",),
    ),
)

"""Triton kernel of moe_combine.

Knows rows of experts; must not know which experts they were.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.errors import Unsupported
from deepinfer.kernels import formats
from deepinfer.kernels.launch import require_gpu
from deepinfer.kernels.signature import Signature

TILE = 512  # columns of one program


@triton.jit
def _combine(
    y, shared, out, width, SELECTED: tl.constexpr, SHARED: tl.constexpr, TILE: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < width
    rows = y + token * SELECTED * width + column
    total = tl.load(rows, mask=inside, other=0).to(tl.float32)
    for number in tl.static_range(1, SELECTED):
        total += tl.load(rows + number * width, mask=inside, other=0).to(tl.float32)
    if SHARED:
        total += tl.load(shared + token * width + column, mask=inside, other=0).to(tl.float32)
    value = formats.narrow(total, out.dtype.element_ty)
    tl.store(out + token * width + column, value, mask=inside)


def moe_combine(y: Tensor, selected: int, shared: Tensor | None = None) -> Tensor:
    """See the reference. Inputs that are not contiguous are copied first.

    Raises:
        Unsupported: no GPU, or a dtype that is neither bfloat16 nor float32.
    """
    require_gpu(y)
    if y.dtype not in (torch.bfloat16, torch.float32):
        raise Unsupported(f"{y.dtype}: takes bfloat16 and float32")
    tokens, width = len(y) // selected, y.shape[1]
    out = torch.empty((tokens, width), dtype=y.dtype, device=y.device)
    if out.numel():
        other = y if shared is None else shared.to(y.dtype).contiguous()
        grid = (tokens, triton.cdiv(width, TILE))
        constants = {"SELECTED": selected, "SHARED": shared is not None, "TILE": TILE}
        _combine[grid](y.contiguous(), other, out, width, **constants)
    return out


SIGNATURES: tuple[Signature, ...] = (
    Signature(
        "moe_combine",
        _combine,
        {"y": "*bf16", "shared": "*bf16", "out": "*bf16", "width": "i32"},
        {"SELECTED": 6, "SHARED": True, "TILE": TILE},
        divisible=("width",),
    ),
)

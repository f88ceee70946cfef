"""Triton kernel of stream_mean.

Knows tiles of streams; must not know layers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.errors import Unsupported
from deepinfer.kernels.formats import narrow
from deepinfer.kernels.launch import require_gpu
from deepinfer.kernels.signature import Signature

_BLOCK = 1024


@triton.jit(do_not_specialize=["H"])
def mean_kernel(streams, row_stride, out, out_stride, H, S: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK columns of one row, streams added from first to last."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < H
    place = streams + row * row_stride + column
    total = tl.full((BLOCK,), 0.0, tl.float32)
    for stream in tl.static_range(S):
        total += tl.load(place + stream * H, mask=inside, other=0.0).to(tl.float32)
    count = tl.full((BLOCK,), S, tl.float32)
    mean = narrow(tl.div_rn(total, count), out.dtype.element_ty)
    tl.store(out + row * out_stride + column, mean, mask=inside)


def stream_mean(streams: Tensor, out: Tensor | None = None) -> Tensor:
    """See the reference; one launch. Streams whose rows are not dense are copied first.

    Raises:
        Unsupported: no GPU, another dtype, or columns of `out` not side by side.
    """
    require_gpu(streams)
    if streams.dtype not in (torch.bfloat16, torch.float32):
        raise Unsupported(f"streams of {streams.dtype}")
    *lead, S, H = streams.shape
    if lead[1:]:
        flat = stream_mean(streams.flatten(0, -3), None if out is None else out.flatten(0, -2))
        return flat.view(*lead, H)
    (T,) = lead
    if out is None:
        out = torch.empty((T, H), dtype=streams.dtype, device=streams.device)
    elif out.dtype != streams.dtype or (H > 1 and out.stride(1) != 1):
        raise Unsupported(f"out of {out.dtype} with strides {out.stride()}")
    if streams.stride(2) != 1 or streams.stride(1) != H:
        streams = streams.contiguous()
    if T and H:
        mean_kernel[(T, triton.cdiv(H, _BLOCK))](
            streams, streams.stride(0), out, out.stride(0), H, S=S, BLOCK=_BLOCK, num_warps=4
        )
    return out


SIGNATURES: tuple[Signature, ...] = (
    Signature(
        "stream_mean",
        mean_kernel,
        {
            "streams": "*bf16", "out": "*bf16",
            **dict.fromkeys(("row_stride", "out_stride", "H"), "i32"),
        },
        {"S": 4, "BLOCK": _BLOCK},
        divisible=("row_stride", "out_stride"),
    ),
)  # fmt: skip

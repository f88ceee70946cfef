"""engram_gate on a GPU: one program per row and stream.

Knows one stream, its key and the value; must not know how the value was looked up.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.errors import Unsupported
from deepinfer.kernels import formats
from deepinfer.kernels.launch import require_gpu
from deepinfer.kernels.signature import Signature

_MOST_CHANNELS = 8192  # a stream and its key are held in registers


@triton.jit
def _sigmoid(x):
    small = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, small) / (1.0 + small)


@triton.jit
def gate_kernel(
    streams, keys, value, weight, out, eps, root,
    stream_row, stream_step, key_row, key_step, value_row,
    S: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out = x + gate * value of one stream; root is H^-0.5."""
    row = (tl.program_id(0) // S).to(tl.int64)
    stream = tl.program_id(0) % S
    h = tl.arange(0, BLOCK)
    inside = h < H
    x = tl.load(streams + row * stream_row + stream * stream_step + h, mask=inside, other=0.0)
    k = tl.load(keys + row * key_row + stream * key_step + h, mask=inside, other=0.0)
    v = tl.load(value + row * value_row + h, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + stream * H + h, mask=inside, other=0.0)
    x = x.to(tl.float32)
    k = k.to(tl.float32)
    inverse_x = tl.rsqrt(tl.sum(x * x, axis=0) / H + eps)
    inverse_k = tl.rsqrt(tl.sum(k * k, axis=0) / H + eps)
    d = tl.sum((x * w) * k, axis=0) * inverse_x * inverse_k * root
    size = tl.sqrt(tl.maximum(tl.abs(d), 1e-6))
    # The sign of -0.0 counts, and NaN, which a maximum may lose, must stay.
    negative = d.to(tl.uint32, bitcast=True) >= 0x80000000
    signed = tl.where(d == d, tl.where(negative, -size, size), d)
    result = x + _sigmoid(signed) * v
    at = out + (row * S + stream) * H + h
    tl.store(at, formats.narrow(result, out.dtype.element_ty), mask=inside)


def engram_gate(streams: Tensor, keys: Tensor, value: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See the reference; one launch. Tensors whose last axis has another stride are copied.

    Raises:
        Unsupported: no GPU, values that are not all bf16 or all float32, a weight that is not
            float32, more than 8192 channels.
    """
    require_gpu(streams)
    if streams.dtype not in (torch.bfloat16, torch.float32):
        raise Unsupported(f"streams of {streams.dtype}, not bfloat16 or float32")
    if keys.dtype != streams.dtype or value.dtype != streams.dtype:
        raise Unsupported("keys or values of another dtype than the streams'")
    if weight.dtype != torch.float32:
        raise Unsupported(f"a weight of {weight.dtype}, not float32")
    S, H = streams.shape[-2:]
    if H > _MOST_CHANNELS:
        raise Unsupported(f"{H} channels, more than {_MOST_CHANNELS}")
    x, k, v = streams.reshape(-1, S, H), keys.reshape(-1, S, H), value.reshape(-1, H)
    x, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (x, k, v))
    out = torch.empty(x.shape, dtype=streams.dtype, device=streams.device)
    if out.numel():
        gate_kernel[(x.shape[0] * S,)](
            x, k, v, weight.contiguous(), out, eps, H**-0.5, x.stride(0), x.stride(1), k.stride(0),
            k.stride(1), v.stride(0), S=S, H=H, BLOCK=triton.next_power_of_2(H), num_warps=8,
        )  # fmt: skip
    return out.view(streams.shape)


_STRIDES = ("stream_row", "stream_step", "key_row", "key_step", "value_row")
SIGNATURES = (
    Signature(
        "engram_gate",
        gate_kernel,
        {
            **dict.fromkeys(("streams", "keys", "value", "out"), "*bf16"),
            "weight": "*fp32",
            **dict.fromkeys(("eps", "root"), "fp32"),
            **dict.fromkeys(_STRIDES, "i32"),
        },
        {"S": 4, "H": 5120, "BLOCK": 8192},
        num_warps=8,
        divisible=_STRIDES,
        spills=8,  # two registers, once a row
    ),
)

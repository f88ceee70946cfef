"""Triton kernels of swiglu and swiglu_quantise.

Knows gate and up projections; must not know the expert they came from.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.errors import Unsupported
from deepinfer.kernels import formats
from deepinfer.kernels.signature import Signature
from deepinfer.ops.act_quant.triton import flat_rows, pack_fp8, require_groups

TILE = 1024  # values of one program; whole groups of 32


@triton.jit
def activate(g, u, limit):
    """silu(min(g, limit)) * clamp(u, -limit, limit) of float32; limit 0: no clamps."""
    if limit > 0:
        # NaN stays NaN, as in the reference.
        g = tl.where(g > limit, limit, g)
        u = tl.where(u > limit, limit, tl.where(u < -limit, -limit, u))
    # Below -80 the quotient is 0 for every purpose; the exponential may not overflow.
    return tl.div_rn(g, 1.0 + tl.exp(tl.minimum(-g, 80.0))) * u


@triton.jit
def _swiglu(
    gate,
    up,
    weight,
    out,
    scales,
    limit,
    width,
    gate_stride,
    up_stride,
    WEIGHTED: tl.constexpr,
    QUANTISE: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """GROUPS times 32 columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    inside = column < width
    g = tl.load(gate + row * gate_stride + column, mask=inside, other=0).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=inside, other=0).to(tl.float32)
    hidden = activate(g, u, limit)
    if WEIGHTED:
        hidden = hidden * tl.load(weight + row)
    rounded = formats.narrow(hidden, gate.dtype.element_ty)
    if QUANTISE:
        codes, scale = pack_fp8(rounded.to(tl.float32))
        tl.store(out + row * width + column, codes, mask=inside)
        tl.store(scales + row * (width // 32) + group, scale, mask=group * 32 < width)
    else:
        tl.store(out + row * width + column, rounded, mask=inside)


def _run(
    gate: Tensor, up: Tensor, limit: float, weight: Tensor | None, out: Tensor, scales: Tensor
) -> None:
    if gate.dtype != up.dtype:
        raise Unsupported(f"{gate.dtype} and {up.dtype}: takes equal dtypes")
    g, u = flat_rows(gate), flat_rows(up)
    if g.numel() == 0:
        return
    width, groups = g.shape[1], TILE // 32
    # One row's columns in one program where they fit: a power of two of groups.
    groups = min(groups, triton.next_power_of_2(triton.cdiv(width, 32)))
    route = g if weight is None else weight.to(torch.float32).contiguous()
    _swiglu[(len(g), triton.cdiv(width, 32 * groups))](
        g, u, route, out, scales, float(limit), width, g.stride(0), u.stride(0),
        WEIGHTED=weight is not None, QUANTISE=out is not scales, GROUPS=groups,
    )  # fmt: skip


def _refuse(gate: Tensor, up: Tensor, size: int) -> None:
    require_groups(gate, size)
    if torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad):
        raise Unsupported("has no gradient")


def swiglu(gate: Tensor, up: Tensor, limit: float, weight: Tensor | None = None) -> Tensor:
    """See the reference. Any strides between rows.

    Raises:
        Unsupported: no GPU, another dtype than bfloat16 and float32, a gradient is wanted.
    """
    _refuse(gate, up, 1)
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    _run(gate, up, limit, weight, out, out)
    return out


def swiglu_quantise(
    gate: Tensor, up: Tensor, limit: float, weight: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See the reference. Any strides between rows.

    Raises:
        Unsupported: see `swiglu`; a width that is no multiple of 32.
    """
    _refuse(gate, up, 32)
    codes = torch.empty(gate.shape, dtype=torch.uint8, device=gate.device)
    shape = (*gate.shape[:-1], gate.shape[-1] // 32)
    scales = torch.empty(shape, dtype=torch.float32, device=gate.device)
    _run(gate, up, limit, weight, codes, scales)
    return codes.view(torch.float8_e4m3fn), scales


_TYPES = {
    "gate": "*bf16",
    "up": "*bf16",
    "weight": "*fp32",
    "limit": "fp32",
    "width": "i32",
    "gate_stride": "i32",
    "up_stride": "i32",
}
_DIVISIBLE = ("width", "gate_stride", "up_stride")

SIGNATURES: tuple[Signature, ...] = (
    Signature(
        "swiglu",
        _swiglu,
        {**_TYPES, "out": "*bf16", "scales": "*bf16"},
        {"WEIGHTED": True, "QUANTISE": False, "GROUPS": TILE // 32},
        divisible=_DIVISIBLE,
    ),
    Signature(
        "swiglu_quantise",
        _swiglu,
        {**_TYPES, "out": "*u8", "scales": "*fp32"},
        {"WEIGHTED": False, "QUANTISE": True, "GROUPS": TILE // 32},
        divisible=_DIVISIBLE,
    ),
)

"""Reference of swiglu.

Knows gate and up projections; must not know the expert they came from.
"""

import torch
from torch import Tensor

from deepinfer.numerics import accumulate_dtype
from deepinfer.ops.act_quant.reference import fp8_quantise


def swiglu(gate: Tensor, up: Tensor, limit: float, weight: Tensor | None = None) -> Tensor:
    """w * silu(min(g, limit)) * clamp(u, -limit, limit), rounded once (model description 3.9).

    Args:
        gate: g [..., I]; up: u [..., I]; limit: 0 disables the clamps.
        weight: [...] route weights applied before the rounding, or None for 1.
    """
    wide = accumulate_dtype(gate.dtype)
    g, u = gate.to(wide), up.to(wide)
    if limit > 0:
        g, u = g.clamp_max(limit), u.clamp(-limit, limit)
    hidden = torch.nn.functional.silu(g) * u
    if weight is not None:
        hidden = hidden * weight.unsqueeze(-1)
    return hidden.to(gate.dtype)


def swiglu_quantise(
    gate: Tensor, up: Tensor, limit: float, weight: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """fp8_quantise(swiglu(gate, up, limit, weight)), for the matrix product that follows.

    Args:
        gate, up, limit, weight: see swiglu; I a multiple of 32.

    Returns:
        codes [..., I] float8_e4m3fn, scales [..., I/32] float32, powers of two.
    """
    codes, scales = fp8_quantise(swiglu(gate, up, limit, weight))
    return codes.view(torch.float8_e4m3fn), scales

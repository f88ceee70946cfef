"""Reference of rms_norm.

Knows one tensor and its weight; must not know where in the model it stands.
"""

import torch
from torch import Tensor

from deepinfer.numerics import accumulate_dtype, constant


def rms_norm(x: Tensor, weight: Tensor, eps: float, act_quant: bool = False) -> Tensor:
    """w * x * rsqrt(mean(x^2) + eps) over the last axis, rounded once (model description 3.2).

    Args:
        x: [..., C], bfloat16, float32 or float64.
        weight: [C], float32 or wider.
        eps: added to the mean square; 1e-20 keeps an all-zero row finite.
        act_quant: the result, rounded to the dtype of `x`, is then rounded to FP8 and back per 32
            channels, as `ops.act_quant` does.

    Returns:
        [..., C] in the dtype of `x`; the weight is applied before the only rounding.
    """
    wide = x.to(accumulate_dtype(x.dtype))
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + constant(eps, wide.dtype))
    normed = (weight * (wide * inverse)).to(x.dtype)
    if not act_quant:
        return normed
    from deepinfer.ops.act_quant import act_quant as round_fp8

    return round_fp8(normed)

"""Reference of rms_norm.

Knows one tensor and its weight; must not know where in the model it stands.
"""

import torch
from torch import Tensor

from deepinfer.numerics import accumulate_dtype, constant


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """w * x * rsqrt(mean(x^2) + eps) over the last axis, rounded once (model description 3.2).

    Args:
        x: [..., C], bfloat16, float32 or float64.
        weight: [C], float32 or wider.
        eps: added to the mean square; 1e-20 keeps an all-zero row finite.

    Returns:
        [..., C] in the dtype of `x`; the weight is applied before the only rounding.
    """
    wide = x.to(accumulate_dtype(x.dtype))
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + constant(eps, wide.dtype))
    return (weight * (wide * inverse)).to(x.dtype)

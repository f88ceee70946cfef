"""Reference of act_quant: what rounding an activation to FP8 does to its values.

Knows one tensor; must not know which matrix consumes it.
"""

import torch
from torch import Tensor

from deepinfer.numerics import FP8_GROUP, accumulate_dtype, fp8_scale, straight_through


def _round(x: Tensor) -> Tensor:
    groups = x.to(accumulate_dtype(x.dtype)).unflatten(-1, (-1, FP8_GROUP))
    scale = fp8_scale(groups)
    # No clamp: the scale keeps |x / s| within half a step of 448, which rounds to 448.
    codes = (groups / scale).to(torch.float32).to(torch.float8_e4m3fn)
    return (codes.to(groups.dtype) * scale).flatten(-2).to(x.dtype)


def act_quant(x: Tensor) -> Tensor:
    """`x` rounded to FP8 and back, per token over groups of 32 channels (model description 3.1).

    s = 2^ceil(log2(max(amax, 1e-4) / 448)), y = s * e4m3(clamp(x / s, -448, 448)), ties to even.

    Args:
        x: [..., C], C a multiple of 32, bfloat16, float32 or float64.

    Returns:
        [..., C] in the dtype of `x`, exactly the value an FP8 matrix product would see. Gradients
        pass straight through.
    """
    return straight_through(x, _round)

"""Reference of linear.

Knows rows and one matrix; must not know which.
"""

import torch
from torch import Tensor

from deepinfer.numerics import accumulate_dtype


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """y = x W^T, sums in float32 or wider, one rounding to the dtype of `x`.

    Args:
        x: [T, in], weight: [out, in], bfloat16 or wider.
    """
    wide = accumulate_dtype(torch.promote_types(x.dtype, weight.dtype))
    return torch.nn.functional.linear(x.to(wide), weight.to(wide)).to(x.dtype)

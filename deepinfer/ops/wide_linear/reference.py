"""Reference of wide_linear.

Knows rows and one matrix; must not know which.
"""

import torch
from torch import Tensor

from deepinfer.numerics import accumulate_dtype


def wide_linear(x: Tensor, weight: Tensor) -> Tensor:
    """y = x W^T in float32 or wider: neither operands nor results are rounded below that.

    Args:
        x: [T, in], weight: [out, in], bfloat16 or wider; products of two bfloat16 values are
            exact in float32.

    Returns:
        [T, out] float32, or float64 where an operand is.
    """
    wide = accumulate_dtype(torch.promote_types(x.dtype, weight.dtype))
    return torch.nn.functional.linear(x.to(wide), weight.to(wide))

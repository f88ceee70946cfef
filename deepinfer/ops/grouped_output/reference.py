"""Reference of grouped_output.

Knows groups of channels and their matrices; must not know what a group stands for.
"""

import torch
from torch import Tensor

from deepinfer.numerics import accumulate_dtype


def grouped_output(x: Tensor, weight: Tensor) -> Tensor:
    """y[t, g] = x[t, g] W[g]^T, sums in float32 or wider, one rounding to the dtype of `x`.

    Args:
        x: [T, G, in], bfloat16 or wider.
        weight: [G * O, in], bfloat16 or wider: O rows of group 0 first.

    Returns:
        [T, G * O] in the dtype of `x`.
    """
    wide = accumulate_dtype(torch.promote_types(x.dtype, weight.dtype))
    matrices = weight.to(wide).unflatten(0, (x.shape[1], -1))
    y = torch.matmul(x.to(wide).transpose(0, 1), matrices.mT)
    return y.transpose(0, 1).flatten(1).to(x.dtype)

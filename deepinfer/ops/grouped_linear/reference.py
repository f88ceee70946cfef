"""Reference of grouped_linear.

Knows rows, matrices and where groups end; must not know what a group stands for.
"""

import torch
from torch import Tensor


def grouped_linear(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """y[i] = x[i] W[g]^T for rows i of group g, sums in float32 or wider.

    Args:
        x: [R, in], rows of group 0 first; weights: [G, out, in] of the same dtype.
        ends: [G] int32, the row after the last of each group; groups may be empty.

    Returns:
        [R, out] in the dtype of `x`. No device sync, except for float64, which is for tests.
    """
    if x.dtype != torch.float64:
        return torch.nn.functional.grouped_mm(x, weights.transpose(1, 2), offs=ends)
    parts = torch.tensor_split(x, ends.tolist()[:-1])
    return torch.cat([part @ w.T for part, w in zip(parts, weights, strict=True)])

"""Reference of count_outliers.

Knows numbers; must not know what they are or who is told.
"""

import torch
from torch import Tensor


def count_outliers(x: Tensor, limit: float) -> Tensor:
    """Number of values that are NaN or infinite, and number of values with |x| > limit.

    An infinite value counts as both, NaN only as the first. The result stays on the device: the
    caller reads it when it has to wait anyway.

    Args:
        x: [T, C], bfloat16, float16, float32 or float64; limit: finite, at least 0, compared as
            float32 with the first three.

    Returns:
        [2] int32; more than 2^31 - 1 are not counted right.
    """
    wide = x if x.dtype == torch.float64 else x.to(torch.float32)
    counts = torch.stack([(~wide.isfinite()).sum(), (wide.abs() > limit).sum()])
    return counts.to(torch.int32)

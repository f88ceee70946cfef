"""linear by PyTorch's own product, which is cuBLAS on a GPU."""

import torch
from torch import Tensor


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """See the reference. cuBLAS picks the order of sums by the number of rows."""
    wide = torch.promote_types(x.dtype, weight.dtype)
    return torch.nn.functional.linear(x.to(wide), weight.to(wide)).to(x.dtype)

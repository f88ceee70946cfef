"""grouped_output by PyTorch's own product of batches, which is cuBLAS on a GPU."""

import torch
from torch import Tensor


def grouped_output(x: Tensor, weight: Tensor) -> Tensor:
    """See the reference. cuBLAS picks the order of sums by the number of rows."""
    wide = torch.promote_types(x.dtype, weight.dtype)
    rows, groups = x.shape[:2]
    operand = x.to(wide).transpose(0, 1)
    matrices = weight.to(wide).unflatten(0, (groups, -1)).mT
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return torch.bmm(operand, matrices).transpose(0, 1).flatten(1).to(x.dtype)
    out = torch.empty((rows, groups, matrices.shape[2]), dtype=wide, device=x.device)
    torch.bmm(operand, matrices, out=out.transpose(0, 1))
    return out.flatten(1).to(x.dtype)

"""grouped_output by the kernel of linear, with an axis of groups."""

import torch
from torch import Tensor

from deepinfer.kernels.signature import Signature
from deepinfer.ops.linear.triton import product, product_signature


def grouped_output(x: Tensor, weight: Tensor) -> Tensor:
    """See the reference.

    Raises:
        Unsupported: see `product`.
    """
    assert x.ndim == 3, x.shape
    return product(x, weight, torch.bfloat16)


SIGNATURES: tuple[Signature, ...] = tuple(
    product_signature("wo_a", 1024, 4096, rows, "bf16", groups=8) for rows in (16, 64, 4096)
)

"""wide_linear by the kernel of linear, with float32 results."""

import torch
from torch import Tensor

from deepinfer.kernels.signature import Signature
from deepinfer.ops.linear.triton import product, product_signature


def wide_linear(x: Tensor, weight: Tensor) -> Tensor:
    """See the reference.

    Raises:
        Unsupported: see `product`; float32 operands among them.
    """
    return product(x, weight, torch.float32)


SIGNATURES: tuple[Signature, ...] = (
    *(product_signature("head", 129280, 5120, rows, "fp32") for rows in (16, 32, 64, 128, 4096)),
    *(product_signature("router", 384, 5120, rows, "fp32") for rows in (16, 4096)),
)

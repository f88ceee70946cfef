"""Sinkhorn passes with a gradient through the last of them only: a third of the launches.

Knows one function of ops.hyper_connection; its value here is the same.
"""

from typing import Any

import torch
from torch import Tensor

import deepinfer.ops.hyper_connection.reference as hyper_connection

# Half passes (one division of rows or of columns) with a gradient. Passes contract: an earlier one
# hardly moves the result, so the scaling it found counts as a constant.
_WITH_GRADIENT = 4


class _Scaled(torch.autograd.Function):
    """`settled`, as a constant multiple of `kernel`: the product would be rounded once more."""

    @staticmethod
    def forward(ctx: Any, kernel: Tensor, settled: Tensor) -> Tensor:
        ctx.save_for_backward(settled / kernel)
        return settled

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * ctx.saved_tensors[0], None


def sinkhorn(logits: Tensor, count: int, iterations: int, eps: float) -> Tensor:
    """Flat [..., S * S] logits to near doubly stochastic [..., S, S] matrices."""
    rows, columns, _ = hyper_connection._constants(count, logits.dtype, logits.device)
    kernel = torch.softmax(logits.unflatten(-1, (count, count)), dim=-1).flatten(-2) + eps
    divisors = [columns, *[rows, columns] * (iterations - 1)]
    with torch.no_grad():
        settled = kernel
        for divisor in divisors[:-_WITH_GRADIENT]:
            settled = settled / (settled @ divisor + eps)
    flat = _Scaled.apply(kernel, settled)
    for divisor in divisors[-_WITH_GRADIENT:]:
        flat = flat / (flat @ divisor + eps)
    return flat.unflatten(-1, (count, count))


def install() -> None:
    """Let models built in this process use it."""
    hyper_connection._sinkhorn = sinkhorn

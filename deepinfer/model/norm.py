"""RMS normalisation with its weight.

Knows one weight; must not know what it normalises.
"""

from torch import Tensor, nn

from deepinfer.model.linear import Precision, parameter


class RMSNorm(nn.Module):
    """`rms_norm` over the last axis (model description 3.2)."""

    def __init__(self, size: int, eps: float, precision: Precision) -> None:
        super().__init__()
        self.weight = parameter(size, dtype=precision.accumulate)
        self.eps = eps
        self.operators = precision.operators

    def forward(self, x: Tensor) -> Tensor:
        """[..., C] to [..., C] in the dtype of `x`."""
        normalised: Tensor = self.operators.rms_norm(x, self.weight, self.eps)
        return normalised

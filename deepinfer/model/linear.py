"""Matrix products, embeddings and the precision in which the model runs.

Knows dtypes; must not know which matrix is which.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from deepinfer.numerics import accumulate_dtype
from deepinfer.ops.select import Operators, references


@dataclass(frozen=True)
class Precision:
    """Dtypes of a model, and the operators that compute in them.

    Attributes:
        dtype: activations and residual streams.
        matrix: storage and operands of quantised and bfloat16 matrices. Their values are exact in
            every choice; float32 is faster where the CPU has no bfloat16 arithmetic.
        act_quant: round activations to FP8 before FP8 and FP4 matrices.
        operators: the implementation of every operator; default their references.
    """

    dtype: torch.dtype
    matrix: torch.dtype
    act_quant: bool = True
    operators: Operators = field(default_factory=references, compare=False)

    @property
    def accumulate(self) -> torch.dtype:
        """Dtype of sums, statistics, router, head and mixing coefficients."""
        return accumulate_dtype(self.dtype)

    def activation(self, x: Tensor) -> Tensor:
        """`x` as an FP8 or FP4 matrix sees it."""
        quantised: Tensor = self.operators.act_quant(x) if self.act_quant else x
        return quantised


def parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """An uninitialised parameter without gradient; the loader fills it."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)


class Linear(nn.Module):
    """y = x W^T with W [out, in]; sums in float32 or wider, one rounding to the dtype of `x`."""

    def __init__(self, rows: int, columns: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = parameter(rows, columns, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out] in the dtype of `x`."""
        return nn.functional.linear(x.to(self.weight.dtype), self.weight).to(x.dtype)


class WideLinear(Linear):
    """y = x W^T in the dtype of the weight: operands and result are not rounded below float32."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out] in the dtype of the weight."""
        return nn.functional.linear(x.to(self.weight.dtype), self.weight)


class Embedding(nn.Module):
    """A table of vectors, one per token: weight [V, C]."""

    def __init__(self, rows: int, columns: int, precision: Precision) -> None:
        super().__init__()
        self.weight = parameter(rows, columns, dtype=precision.dtype)
        self.operators = precision.operators

    def forward(self, token_ids: Tensor) -> Tensor:
        """Ids [...] to rows [..., C]."""
        rows: Tensor = self.operators.gather_rows(self.weight, token_ids)
        return rows

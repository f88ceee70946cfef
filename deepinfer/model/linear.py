"""Matrix products, embeddings and the precision in which the model runs.

Knows dtypes; must not know which matrix is which.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from deepinfer.numerics import FP8_GROUP, accumulate_dtype
from deepinfer.ops.fp8_linear import fp8_widen_weight
from deepinfer.ops.fp8_linear.reference import WIDE_GROUP
from deepinfer.ops.select import Operators, references


class Codes(NamedTuple):
    """Activations as packed matrices take them: rows of e4m3 codes and of their scales.

    Attributes:
        codes: [T, C] uint8; scales: [T, C/128] or [T, C/32] float32.
        lead: leading axes that the T rows had.
    """

    codes: Tensor
    scales: Tensor
    lead: torch.Size


Activation = Tensor | Codes


@dataclass(frozen=True)
class Precision:
    """Dtypes of a model, and the operators that compute in them.

    Attributes:
        dtype: activations and residual streams.
        matrix: storage and operands of quantised and bfloat16 matrices. Their values are exact in
            every choice; float32 is faster where the CPU has no bfloat16 arithmetic.
        act_quant: round activations to FP8 before FP8 and FP4 matrices.
        packed: FP8 and FP4 matrices keep the bytes of the checkpoint, all matrices are multiplied
            by operators; for bfloat16 with act_quant. Otherwise they hold their values in `matrix`,
            and PyTorch multiplies.
        operators: the implementation of every operator; default their references.
    """

    dtype: torch.dtype
    matrix: torch.dtype
    act_quant: bool = True
    packed: bool = False
    operators: Operators = field(default_factory=references, compare=False)

    def __post_init__(self) -> None:
        assert not self.packed or (self.dtype == torch.bfloat16 and self.act_quant), self

    @property
    def accumulate(self) -> torch.dtype:
        """Dtype of sums, statistics, router, head and mixing coefficients."""
        return accumulate_dtype(self.dtype)

    @property
    def wide_scales(self) -> bool:
        """Whether FP8 products take scales per 128 channels (docs/numerics.md), not per 32."""
        return self.operators.fp8_linear.backend == "triton"

    @property
    def wide(self) -> torch.dtype:
        """Storage of the bfloat16 matrices whose products are not rounded below float32."""
        return self.dtype if self.packed else self.accumulate

    def activation(self, x: Tensor) -> Activation:
        """`x` as an FP8 or FP4 matrix sees it."""
        if self.packed:
            ops = self.operators
            quantise = ops.fp8_quantise_wide if self.wide_scales else ops.fp8_quantise
            codes, scales = quantise(x.reshape(-1, x.shape[-1]))
            return Codes(codes, scales, x.shape[:-1])
        quantised: Tensor = self.operators.act_quant(x) if self.act_quant else x
        return quantised


def parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """An uninitialised parameter without gradient; the loader fills it."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)


class Linear(nn.Module):
    """y = x W^T with W [out, in]; sums in float32 or wider, one rounding to the dtype of `x`."""

    def __init__(self, rows: int, columns: int, precision: Precision) -> None:
        super().__init__()
        self.precision = precision
        self.weight = parameter(rows, columns, dtype=precision.matrix)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out] in the dtype of `x`."""
        if self.precision.packed:
            y: Tensor = self.precision.operators.linear(x.reshape(-1, x.shape[-1]), self.weight)
            return y.view(*x.shape[:-1], y.shape[-1])
        return nn.functional.linear(x.to(self.weight.dtype), self.weight).to(x.dtype)


class WideLinear(nn.Module):
    """y = x W^T in float32 or wider: operands and result are not rounded below that."""

    def __init__(self, rows: int, columns: int, precision: Precision) -> None:
        super().__init__()
        self.precision = precision
        self.weight = parameter(rows, columns, dtype=precision.wide)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        if self.precision.packed:
            flat = x.reshape(-1, x.shape[-1])
            y: Tensor = self.precision.operators.wide_linear(flat, self.weight)
            return y.view(*x.shape[:-1], y.shape[-1])
        return nn.functional.linear(x.to(self.weight.dtype), self.weight)


class QuantisedLinear(nn.Module):
    """y = x W^T with an FP8 matrix; sums in float32 or wider, one rounding.

    Packed, `weight` holds e4m3 codes and `scale` e8m0 bytes, one for 32 rows and 32 columns, or
    after `prepare` for 128 columns.
    """

    def __init__(self, rows: int, columns: int, precision: Precision) -> None:
        super().__init__()
        self.precision = precision
        if not precision.packed:
            self.weight = parameter(rows, columns, dtype=precision.matrix)
            return
        blocks = (-(-rows // FP8_GROUP), -(-columns // FP8_GROUP))
        self.weight = parameter(rows, columns, dtype=torch.uint8)
        self.scale = parameter(*blocks, dtype=torch.uint8)

    def prepare(self) -> str:
        """Bring a packed matrix into the layout of the operators; says what was done."""
        if not self.precision.wide_scales or self.weight.shape[1] % WIDE_GROUP:
            return "FP8 matrix as stored"
        weight, scale, moved = fp8_widen_weight(self.weight, self.scale)
        self.weight, self.scale = (nn.Parameter(t, requires_grad=False) for t in (weight, scale))
        exact = "every value as it was" if not moved.any() else "values within 2^-10 of their scale"
        return f"FP8 matrix with a scale per 32 x 128, {exact}"

    def forward(self, x: Activation) -> Tensor:
        """[..., in] to [..., out] in the dtype of activations."""
        if isinstance(x, Codes):
            multiply = self.precision.operators.fp8_linear
            y: Tensor = multiply(x.codes, x.scales, self.weight, self.scale, self.precision.dtype)
            return y.view(*x.lead, y.shape[-1])
        return nn.functional.linear(x.to(self.weight.dtype), self.weight).to(x.dtype)


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

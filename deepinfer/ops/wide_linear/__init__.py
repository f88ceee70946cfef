"""Matrix products whose operands and results are not rounded below float32."""

from deepinfer.ops.wide_linear.reference import wide_linear

__all__ = ["wide_linear"]

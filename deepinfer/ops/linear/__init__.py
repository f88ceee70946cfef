"""Matrix products in bfloat16."""

from deepinfer.ops.linear.reference import linear

__all__ = ["linear"]

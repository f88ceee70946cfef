"""Sum of a token's expert outputs."""

from deepinfer.ops.moe_combine.reference import moe_combine

__all__ = ["moe_combine"]

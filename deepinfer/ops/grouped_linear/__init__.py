"""Matrix products of rows that are sorted by group, one matrix per group."""

from deepinfer.ops.grouped_linear.reference import grouped_linear

__all__ = ["grouped_linear"]

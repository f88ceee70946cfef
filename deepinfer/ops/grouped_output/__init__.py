"""Matrix products of groups of channels, each with a matrix of its own, side by side."""

from deepinfer.ops.grouped_output.reference import grouped_output

__all__ = ["grouped_output"]

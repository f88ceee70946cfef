"""Counting values that should not occur."""

from deepinfer.ops.outliers.reference import count_outliers

__all__ = ["count_outliers"]

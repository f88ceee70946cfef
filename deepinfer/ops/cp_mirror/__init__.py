"""Balanced slices of sequences for context parallelism."""

from deepinfer.ops.cp_mirror.reference import cp_mirror

__all__ = ["cp_mirror"]

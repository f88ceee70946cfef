"""Dequantised rows of an n-gram table."""

from deepinfer.ops.engram_gather.reference import engram_gather

__all__ = ["engram_gather"]

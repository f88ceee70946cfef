"""Gated addition of an n-gram value to the residual streams."""

from deepinfer.ops.engram_gate.reference import engram_gate

__all__ = ["engram_gate"]

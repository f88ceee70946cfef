"""Clamped SwiGLU with the route weight applied."""

from deepinfer.ops.swiglu.reference import swiglu

__all__ = ["swiglu"]

"""Clamped SwiGLU with the route weight applied."""

from deepinfer.ops.swiglu.reference import swiglu, swiglu_quantise

__all__ = ["swiglu", "swiglu_quantise"]

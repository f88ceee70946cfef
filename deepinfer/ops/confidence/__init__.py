"""Estimated chance that a draft is accepted."""

from deepinfer.ops.confidence.reference import confidence

__all__ = ["confidence"]

"""Root-mean-square normalisation."""

from deepinfer.ops.rms_norm.reference import rms_norm

__all__ = ["rms_norm"]

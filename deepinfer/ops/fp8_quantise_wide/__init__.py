"""FP8 activations with one scale per 128 channels, in one pass."""

from deepinfer.ops.fp8_quantise_wide.reference import fp8_quantise_wide

__all__ = ["fp8_quantise_wide"]

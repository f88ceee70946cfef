"""FP8 matrix products: e4m3 activations and weights, power-of-two scales per block."""

from deepinfer.ops.fp8_linear.reference import fp8_linear, fp8_widen, fp8_widen_weight

__all__ = ["fp8_linear", "fp8_widen", "fp8_widen_weight"]

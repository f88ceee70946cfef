"""Rounding and packing of activations: FP8 and FP4 in groups of channels."""

from deepinfer.ops.act_quant.reference import (
    act_quant,
    fp4_quantise,
    fp8_quantise,
    mxfp4_quantise,
)

__all__ = ["act_quant", "fp4_quantise", "fp8_quantise", "mxfp4_quantise"]

"""FP8 rounding of activations, groups of 32 channels."""

from deepinfer.ops.act_quant.reference import act_quant

__all__ = ["act_quant"]

"""First half of the routed experts: w1, w3 and SwiGLU, from FP8 rows to FP8 rows."""

from deepinfer.ops.expert_up.prepare import ExpertMatrices, dequantise, prepare
from deepinfer.ops.expert_up.reference import expert_up

__all__ = ["ExpertMatrices", "dequantise", "expert_up", "prepare"]

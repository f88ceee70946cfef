"""Second half of the routed experts: w2, from FP8 rows to bfloat16 rows."""

from deepinfer.ops.expert_down.reference import expert_down

__all__ = ["expert_down"]

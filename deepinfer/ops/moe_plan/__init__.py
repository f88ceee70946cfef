"""Which rows each expert multiplies, as tensors whose shapes the host knows."""

from deepinfer.ops.moe_plan.reference import moe_plan, plan_block, plan_tiles

__all__ = ["moe_plan", "plan_block", "plan_tiles"]

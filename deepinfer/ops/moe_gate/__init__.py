"""Expert choice and route weights."""

from deepinfer.ops.moe_gate.reference import moe_gate

__all__ = ["moe_gate"]

"""Rotary position embedding on adjacent channel pairs of the tail."""

from deepinfer.ops.rope.reference import rope, rope_frequencies, rotation

__all__ = ["rope", "rope_frequencies", "rotation"]

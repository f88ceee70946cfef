"""Masking of logits by bits."""

from deepinfer.ops.apply_bitmask.reference import apply_bitmask

__all__ = ["apply_bitmask"]

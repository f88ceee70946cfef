"""Lossless verification of drafted tokens."""

from deepinfer.ops.verify_drafts.reference import verify_drafts

__all__ = ["verify_drafts"]

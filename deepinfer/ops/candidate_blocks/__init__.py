"""Coarse selection of blocks of compressed entries."""

from deepinfer.ops.candidate_blocks.reference import candidate_blocks

__all__ = ["candidate_blocks"]

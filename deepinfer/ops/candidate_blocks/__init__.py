"""Coarse selection of blocks of compressed entries."""

from deepinfer.ops.candidate_blocks.reference import (
    candidate_block_list,
    candidate_blocks,
    restore_entries,
)

__all__ = ["candidate_block_list", "candidate_blocks", "restore_entries"]

"""Scores of compressed entries for a query."""

from deepinfer.ops.index_scores.reference import (
    candidate_scores,
    index_scores,
    paged_index_scores,
)

__all__ = ["candidate_scores", "index_scores", "paged_index_scores"]

"""Scores of compressed entries for a query."""

from deepinfer.ops.index_scores.reference import index_scores

__all__ = ["index_scores"]

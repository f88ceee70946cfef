"""Rows of a table by number."""

from deepinfer.ops.gather_rows.reference import gather_rows

__all__ = ["gather_rows"]

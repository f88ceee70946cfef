"""Rows copied from one table to another."""

from deepinfer.ops.state_copy.reference import copy_rows

__all__ = ["copy_rows"]

"""Selection of the highest-scoring compressed entries."""

from deepinfer.ops.topk_select.reference import topk_select

__all__ = ["topk_select"]

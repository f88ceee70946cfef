"""Attention with a sink over window and selected compressed keys."""

from deepinfer.ops.sparse_attention.reference import attention_with_sink, sparse_attention

__all__ = ["attention_with_sink", "sparse_attention"]

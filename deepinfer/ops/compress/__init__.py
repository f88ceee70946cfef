"""Softmax pooling of token groups into one latent, across steps."""

from deepinfer.ops.compress.reference import compress_groups, pool_groups, store_groups

__all__ = ["compress_groups", "pool_groups", "store_groups"]

"""Softmax pooling of token groups into one latent."""

from deepinfer.ops.compress.reference import pool_groups

__all__ = ["pool_groups"]

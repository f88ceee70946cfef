"""Seeded draws of tokens from logits."""

from deepinfer.ops.sample_tokens.reference import sample_tokens

__all__ = ["sample_tokens"]

"""Penalties for tokens that were seen, and biases of logits."""

from deepinfer.ops.penalise.reference import count_tokens, penalise

__all__ = ["count_tokens", "penalise"]

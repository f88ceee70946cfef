"""Log-probabilities under the model's own distribution."""

from deepinfer.ops.token_logprobs.reference import token_logprobs, top_logprobs

__all__ = ["token_logprobs", "top_logprobs"]

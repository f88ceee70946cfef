"""Log-probabilities of tokens under the model's own distribution, as replies report them.

Knows raw logits and token ids; must not know sampling parameters, text or requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.ops.select import Operators


@dataclass(frozen=True)
class TokenLogprobs:
    """One token under the raw distribution.

    Attributes:
        token_id: the token.
        logprob: its log-probability, natural logarithm; -inf where the model rules it out.
        rank: its place in descending order, from 1; among equals the lower id comes first.
        top: the most likely (token id, logprob) pairs in that order, none that the model rules out.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class LogprobRows:
    """Log-probabilities of one token of each of L rows, and of the most likely ones, on the device.

    Attributes:
        wanted: alternatives that each row asks for, at most k.
        tokens: [L] int64; logprobs: [L] float32; ranks: [L] int64.
        top_ids: [L, k] int64, -1 for none; top_logprobs: [L, k] float32.
    """

    wanted: tuple[int, ...]
    tokens: Tensor
    logprobs: Tensor
    ranks: Tensor
    top_ids: Tensor
    top_logprobs: Tensor

    @classmethod
    def of(
        cls, logits: Tensor, tokens: Tensor, wanted: Sequence[int], operators: Operators
    ) -> "LogprobRows":
        """log_softmax of unprocessed logits at the tokens and at the most likely ones.

        Does not wait for the device.

        Args:
            logits: [L, V] float32; tokens: [L] int64.
            wanted: alternatives of each row; more than V gives V.
        """
        assert logits.dim() == 2 and logits.dtype == torch.float32, (logits.shape, logits.dtype)
        assert tokens.shape == logits.shape[:1] and len(wanted) == len(tokens)
        logprobs, ranks = operators.token_logprobs(logits, tokens)
        most = max(wanted, default=0)
        if most:
            top_ids, top_logprobs = operators.top_logprobs(logits, most)
        else:
            top_ids, top_logprobs = tokens.new_empty(len(wanted), 0), logprobs.new_empty(
                len(wanted), 0
            )  # fmt: skip
        return cls(tuple(wanted), tokens, logprobs, ranks, top_ids, top_logprobs)

    def pack(self) -> Tensor:
        """Everything in one tensor for one copy to the host: [L, 3 + 2 k] int64."""
        bits = torch.cat([self.logprobs.unsqueeze(1), self.top_logprobs], 1).double()
        ids = torch.stack([self.tokens, self.ranks], 1)
        return torch.cat([ids, self.top_ids, bits.view(torch.int64)], 1)

    def read(self, packed: Tensor) -> list[TokenLogprobs]:
        """One entry per row, from what `pack` gave and somebody copied to the host."""
        k = self.top_ids.shape[1]
        ids, values = packed[:, : 2 + k].tolist(), packed[:, 2 + k :].contiguous()
        return [
            TokenLogprobs(
                token, own, rank, tuple(p for p in zip(top, tops, strict=True) if p[0] >= 0)[:count]
            )
            for (token, rank, *top), (own, *tops), count in zip(
                ids, values.view(torch.float64).tolist(), self.wanted, strict=True
            )
        ]

"""What is drawn for one sequence, from the definitions, a token at a time."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from deepinfer.sampling.batch import NO_TOKEN
from deepinfer.sampling.params import SamplingParams
from deepinfer.testing.draws import LogitsError, sample

EOS = 3


@dataclass
class Told:
    """A sequence as a test knows it."""

    params: SamplingParams
    seed: int = 0
    prompt: list[int] = field(default_factory=lambda: [5, 5, 9])
    output: list[int] = field(default_factory=list)
    eos: int = EOS

    @property
    def position(self) -> int:
        """Where the next token stands."""
        return len(self.prompt) + len(self.output)


def processed(row: Sequence[float], one: Told) -> Tensor:
    """Logits after penalties, biases and forbidden tokens: [1, V] float32."""
    params, out = one.params, []
    biases = dict(params.bias_pairs)
    for token, logit in enumerate(np.array(row, dtype=np.float32)):
        if token in one.prompt or token in one.output:
            by = np.float32(params.repetition_penalty)
            logit = logit / by if logit > 0 else logit * by
        if token in one.output:
            times = np.float32(one.output.count(token))
            logit -= np.float32(params.presence_penalty) + (
                np.float32(params.frequency_penalty) * times
            )
        logit += np.float32(biases.get(token, 0.0))
        early = len(one.output) < params.min_tokens and token in params.end_tokens(one.eos)
        allowed = params.allowed_token_ids is None or token in params.allowed_token_ids
        if not allowed or early or token in params.banned_token_ids:
            logit = -np.inf
        out.append(float(logit))
    return torch.tensor([out], dtype=torch.float32)


def expected_token(row: Tensor, one: Told) -> int:
    """NO_TOKEN for what is no distribution."""
    key = [one.params], [one.seed], [one.position]
    try:
        sample(row[None], *key)
        return int(sample(processed(row.tolist(), one), *key).item())
    except LogitsError:
        return NO_TOKEN

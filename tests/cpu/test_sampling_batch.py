"""Sampling of many sequences at once: as alone, as the formulas say, and without waiting.

Expected logits are worked out a token at a time from the definitions; tokens are then drawn from
them by `sample`, which test_sampling.py holds to its own definition.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deepinfer.sampling.batch import NO_TOKEN, Drawn, Masks, SamplingBatch
from deepinfer.sampling.params import SamplingParams
from deepinfer.sampling.sampler import LogitsError, sample
from deepinfer.testing.sync import forbid_sync

CPU = torch.device("cpu")
INF = float("inf")
V, EOS = 40, 3  # one word and a quarter of bits


@dataclass
class Told:
    """A sequence as a test knows it."""

    params: SamplingParams
    seed: int = 0
    prompt: list[int] = field(default_factory=lambda: [5, 5, 9])
    output: list[int] = field(default_factory=list)

    @property
    def position(self) -> int:
        return len(self.prompt) + len(self.output)


def processed(row: Sequence[float], one: Told, mask: Sequence[bool] | None = None) -> Tensor:
    """Penalties, biases and forbidden tokens, a token at a time: [1, V] float32."""
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
        early = len(one.output) < params.min_tokens and token in params.end_tokens(EOS)
        allowed = params.allowed_token_ids is None or token in params.allowed_token_ids
        if not allowed or early or token in params.banned_token_ids or (mask and not mask[token]):
            logit = -INF
        out.append(float(logit))
    return torch.tensor([out], dtype=torch.float32)


def expected_token(row: Tensor, one: Told, mask: Sequence[bool] | None = None) -> int:
    """NO_TOKEN for what is no distribution."""
    try:
        sample(row[None], [one.params], [one.seed], [one.position])
        drawn = sample(processed(row.tolist(), one, mask), [one.params], [one.seed], [one.position])
    except LogitsError:
        return NO_TOKEN
    return int(drawn.item())


class Running:
    """Sequences in the slots of a batch."""

    def __init__(self, slots: int = 8, v: int = V) -> None:
        self.batch = SamplingBatch(slots, v, EOS, CPU)
        self.by_slot: dict[int, Told] = {}

    def open(self, slot: int, one: Told) -> None:
        self.batch.open(slot, one.params, one.seed, one.prompt, one.output)
        self.by_slot[slot] = one

    def close(self, slot: int) -> None:
        self.batch.close(slot)
        del self.by_slot[slot]

    def step(self, logits: Tensor, slots: list[int], masks: Masks | None = None) -> Drawn:
        """Draw for the slots without waiting, then append what was drawn."""
        positions = [self.by_slot[slot].position for slot in slots]
        with forbid_sync():
            sampled = self.batch.sample(logits.clone(), slots, positions, masks)
            packed = sampled.pack()
        drawn = sampled.read(packed)
        assert drawn.tokens == sampled.tokens.tolist()
        assert drawn.faulty == [i for i, token in enumerate(drawn.tokens) if token == NO_TOKEN]
        for slot, token in zip(slots, drawn.tokens, strict=True):
            if token != NO_TOKEN:
                self.by_slot[slot].output.append(token)
        return drawn


TOKENS = st.lists(st.integers(0, V - 1), min_size=1, max_size=6, unique=True)


@st.composite
def params(draw: st.DrawFn) -> SamplingParams:
    """Any parameters that leave something to draw; often neutral ones."""

    def often(value: Any, other: st.SearchStrategy[Any]) -> Any:
        return draw(st.one_of(st.just(value), other))

    min_tokens = often(0, st.integers(1, 5))
    wanted = SamplingParams(
        max_tokens=50,
        min_tokens=min_tokens,
        temperature=often(0.0, st.sampled_from([0.5, 1.0, 2.0])),
        top_k=often(0, st.integers(1, 30)),
        top_p=often(1.0, st.floats(0.1, 1.0)),
        min_p=often(0.0, st.floats(0.0, 0.5)),
        repetition_penalty=often(1.0, st.sampled_from([0.5, 1.25, 2.0])),
        presence_penalty=often(0.0, st.sampled_from([-2.0, 0.5, 1.0])),
        frequency_penalty=often(0.0, st.sampled_from([-0.5, 0.25, 2.0])),
        logit_bias=often({}, st.dictionaries(st.integers(0, V - 1), st.floats(-100, 100, width=32),
                                             max_size=4)),
        banned_token_ids=often([], TOKENS),
        stop_token_ids=often([], TOKENS),
        ignore_eos=draw(st.booleans()),
        logprobs=often(None, st.integers(0, 5)),
    )  # fmt: skip
    free = sorted(set(range(V)) - wanted.end_tokens(EOS) - set(wanted.banned_token_ids))
    more = often(None, TOKENS)
    allowed = None if more is None else [*more, free[0]]
    return dataclasses.replace(wanted, allowed_token_ids=allowed)


SEQUENCES = st.builds(
    Told,
    params=params(),
    seed=st.integers(0, 2**64 - 1),
    prompt=st.lists(st.integers(0, V - 1), min_size=1, max_size=8),
    output=st.lists(st.integers(0, V - 1), max_size=8),
)


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[Told], list[list[int]], int]:
    """Sequences, and which of them have a row in each step, in any order."""
    several = draw(st.lists(SEQUENCES, min_size=1, max_size=5))
    rows = st.permutations(range(len(several))).flatmap(
        lambda order: st.integers(0, len(order)).map(lambda n: list(order[:n]))
    )
    return several, draw(st.lists(rows, min_size=1, max_size=4)), draw(st.integers(0, 1000))


def noise(seed: int, step: int, rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed * 1000 + step)
    logits = (torch.randn(rows, V, generator=generator) * 3).round(decimals=1)
    return logits.masked_fill(torch.rand(rows, V, generator=generator) < 0.1, -INF)


@settings(max_examples=60)
@given(steps())
def test_every_row_is_what_it_is_alone_and_by_definition(
    drawn: tuple[list[Told], list[list[int]], int],
) -> None:
    """Whatever runs beside it, in whatever order, at whatever step."""
    several, plan, seed = drawn
    together, alone = Running(), [Running(1) for _ in several]
    for number, one in enumerate(several):
        together.open(7 - number, dataclasses.replace(one, output=list(one.output)))
        alone[number].open(0, dataclasses.replace(one, output=list(one.output)))
    for step, rows in enumerate(plan):
        logits = noise(seed, step, len(rows))
        expected = [
            expected_token(row, together.by_slot[7 - number])
            for row, number in zip(logits, rows, strict=True)
        ]
        found = together.step(logits, [7 - number for number in rows])
        assert found.tokens == expected
        for row, number in enumerate(rows):
            own = alone[number].step(logits[row : row + 1], [0])
            assert own.tokens == [found.tokens[row]]
            assert own.logprobs.get(0) == found.logprobs.get(row)

"""Sampling of many sequences at once: as alone, as the formulas say, and without waiting.

Expected logits are worked out a token at a time from the definitions; tokens are then drawn from
them by `sample`, which test_sampling.py holds to its own definition.
"""

import dataclasses
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deepinfer.ops.select import Operators, references
from deepinfer.sampling.batch import NO_TOKEN, Drawn, Masks, SamplingBatch
from deepinfer.sampling.params import SamplingParams, sequence_seed
from deepinfer.testing.draws import sample, token_logprobs
from deepinfer.testing.sync import forbid_sync
from tests.cpu.sampling_helpers import EOS, Told, expected_token, processed

CPU = torch.device("cpu")
INF = float("inf")
V = 40  # one word and a quarter of bits


class Running:
    """Sequences in the slots of a batch."""

    def __init__(self, slots: int = 8, v: int = V, watch: bool = True) -> None:
        self.batch = SamplingBatch(slots, v, EOS, CPU)
        self._watch = forbid_sync if watch else nullcontext
        self.by_slot: dict[int, Told] = {}

    def open(self, slot: int, one: Told) -> None:
        self.batch.open(slot, one.params, one.seed, one.prompt, one.output)
        self.by_slot[slot] = one

    def close(self, slot: int) -> None:
        self.batch.close(slot)
        del self.by_slot[slot]

    def step(self, logits: Tensor, slots: list[int], masks: Masks | None = None) -> Drawn:
        """Draw for the slots, without waiting, then append what was drawn."""
        positions = [self.by_slot[slot].position for slot in slots]
        with self._watch():
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


@settings(max_examples=40)
@given(steps())
def test_every_row_is_what_it_is_alone_and_by_definition(
    drawn: tuple[list[Told], list[list[int]], int],
) -> None:
    """Whatever runs beside it, in whatever order, at whatever step."""
    several, plan, seed = drawn
    together, alone = Running(), [Running(1, watch=False) for _ in several]
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


# Penalties and what forbids tokens, by hand


def test_penalties_by_hand() -> None:
    """Prompt and output tokens for repetition, output tokens alone for the others."""
    running = Running(v=6)
    logits = torch.tensor([[2.0, 2.0, -1.0, 1.0, 0.5, 0.0]])
    known = SamplingParams(temperature=0.0, repetition_penalty=2.0, presence_penalty=0.25,
                           frequency_penalty=0.5, logit_bias={5: 0.9})  # fmt: skip
    running.open(0, Told(known, prompt=[0, 2], output=[3]))
    # 2 / 2, 2, -1 * 2, 1 / 2 - 0.25 - 0.5, 0.5, 0.9
    changed = logits.clone()
    running.batch.sample(changed, [0], [3])
    assert changed.tolist() == [[1.0, 2.0, -2.0, -0.25, 0.5, pytest.approx(0.9)]]
    # It drew token 1, which counts from now on, as token 3 does a second time.
    running.batch.sample(changed.copy_(logits), [0], [4])
    assert changed.tolist() == [[1.0, 0.25, -2.0, -0.25, 0.5, pytest.approx(0.9)]]


def test_counts_go_on_for_long_outputs() -> None:
    """Hundreds of draws later they are what counting all tokens gives."""
    running = Running(2)
    penalties = SamplingParams(max_tokens=2000, frequency_penalty=0.01, presence_penalty=0.1)
    running.open(1, Told(penalties, seed=4))
    row = torch.randn(1, V, generator=torch.Generator().manual_seed(2)).float()
    one = running.by_slot[1]
    for _ in range(400):
        sampled = running.batch.sample(row.clone(), [1], [one.position])
        one.output.append(int(sampled.tokens))
    assert len(set(one.output)) > 20
    expected = processed(row[0].tolist(), one)
    changed = row.clone()
    running.batch.sample(changed, [1], [one.position])
    torch.testing.assert_close(changed, expected)


@pytest.mark.parametrize("spare", [0, 3])
def test_a_slot_that_is_used_again_knows_nothing_of_before(spare: int) -> None:
    """Not even if the step that was under way drew for the sequence that had ended."""
    both = {"presence_penalty": 2.0, "banned_token_ids": [7]}
    first, second = (SamplingParams(temperature=0.0, **both) for _ in range(2))
    running = Running(2 + spare)
    logits = torch.zeros(1, V)
    logits[0, 20], logits[0, 7] = 1.0, 9.0
    for slot in range(2 + spare):
        running.open(slot, Told(first))
        assert running.step(logits, [slot]).tokens == [20]
    late = running.batch.sample(logits.clone(), [0], [4])
    running.close(0)
    running.open(0, Told(second))
    assert late.tokens.tolist() == [0]
    assert running.step(logits, [0]).tokens == [20]
    running.close(0)
    running.open(0, Told(SamplingParams(temperature=0.0)))
    assert running.step(logits, [0]).tokens == [7]


@settings(max_examples=25)
@given(SEQUENCES, st.integers(0, 6), st.integers(0, 1000))
def test_opened_anew_it_goes_on_as_if_undisturbed(one: Told, at: int, seed: int) -> None:
    undisturbed, preempted = Running(1, watch=False), Running(4, watch=False)
    undisturbed.open(0, dataclasses.replace(one, output=list(one.output)))
    preempted.open(0, dataclasses.replace(one, output=list(one.output)))
    for step in range(8):
        if step == at:
            same = preempted.by_slot[0]
            preempted.close(0)
            preempted.open(3, same)
        logits = noise(seed, step, 1)
        expected = undisturbed.step(logits, [0])
        found = preempted.step(logits, [3 if step >= at else 0])
        assert found == expected


def test_the_tables_have_room_for_every_slot() -> None:
    """They grow as sequences need them, to no more than was said."""
    slots = 11
    running = Running(slots)
    heavy = SamplingParams(temperature=0.0, repetition_penalty=1.5, banned_token_ids=[0])
    for _ in range(2):
        for slot in range(slots):
            running.open(slot, Told(heavy))
        logits = torch.randn(slots, V)
        expected = [expected_token(row, running.by_slot[i]) for i, row in enumerate(logits)]
        assert running.step(logits, list(range(slots))).tokens == expected
        for slot in range(slots):
            running.close(slot)
    size = sum(table.data.nbytes for table in running.batch._tables)
    assert size == SamplingBatch.bytes_for(slots, V)


def test_until_min_tokens_nothing_ends_the_text() -> None:
    running = Running(2)
    early = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=[8, EOS])
    running.open(0, Told(early))
    running.open(1, Told(dataclasses.replace(early, ignore_eos=True, stop_token_ids=[8])))
    logits = torch.zeros(2, V)
    logits[:, EOS], logits[:, 8], logits[:, 30] = 3.0, 2.0, 1.0
    drawn = [running.step(logits, [0, 1]).tokens for _ in range(3)]
    assert drawn == [[30, EOS], [30, EOS], [EOS, EOS]]


# What is drawn


def chi_square(tokens: list[int], probabilities: Tensor) -> float:
    """Sum of (found - expected)^2 / expected; what is impossible must not be there."""
    found = torch.bincount(torch.tensor(tokens), minlength=len(probabilities)).double()
    expected = probabilities * len(tokens)
    assert found[expected == 0].sum() == 0
    possible = expected > 0
    return float(((found - expected)[possible] ** 2 / expected[possible]).sum())


def distribution(row: Tensor, one: Told) -> Tensor:
    """Everything in float64, written out: penalties, bias, bans, temperature, filters."""
    params, x = one.params, row.double().clone()
    for token in set(one.prompt) | set(one.output):
        by = params.repetition_penalty
        x[token] = x[token] / by if x[token] > 0 else x[token] * by
    for token in set(one.output):
        x[token] -= params.presence_penalty + params.frequency_penalty * one.output.count(token)
    for token, bias in params.bias_pairs:
        x[token] += bias
    for token in params.banned_token_ids:
        x[token] = -INF
    if params.allowed_token_ids is not None:
        forbidden = [t for t in range(len(x)) if t not in params.allowed_token_ids]
        x[forbidden] = -INF
    p = torch.softmax(x / params.temperature, 0)
    kept, mass = torch.zeros_like(p), 0.0
    for number, token in enumerate(sorted(range(len(p)), key=lambda t: (-float(x[t]), t))):
        if (params.top_k > 0 and number >= params.top_k) or mass >= params.top_p:
            break
        kept[token] = p[token]
        mass += float(p[token])
    kept[kept < params.min_p * kept.max()] = 0
    return kept / kept.sum()


@pytest.mark.parametrize(
    "chosen",
    [
        SamplingParams(top_k=7),
        SamplingParams(top_p=0.7, temperature=1.4),
        SamplingParams(min_p=0.2),
        SamplingParams(repetition_penalty=1.7),
        SamplingParams(presence_penalty=1.2, frequency_penalty=0.4),
        SamplingParams(logit_bias={3: 2.0, 9: -1.0, 11: 100.0}, banned_token_ids=[11]),
        SamplingParams(allowed_token_ids=[1, 5, 9, 20, 21]),
        SamplingParams(temperature=0.8, top_k=12, top_p=0.9, min_p=0.02, repetition_penalty=0.7,
                       frequency_penalty=0.3, logit_bias={0: 1.5}, banned_token_ids=[2, 4]),
    ],
)  # fmt: skip
def test_draws_follow_the_distribution_in_float64(chosen: SamplingParams) -> None:
    rows = 1500
    row = torch.randn(V, generator=torch.Generator().manual_seed(8))
    one = Told(chosen, prompt=[5, 9, 9, 30], output=[9, 1, 1])
    batch = SamplingBatch(rows, V, EOS, CPU)
    for slot in range(rows):
        batch.open(slot, chosen, 1000 + slot, one.prompt, one.output)
    sampled = batch.sample(row.repeat(rows, 1), list(range(rows)), [one.position] * rows)
    probabilities = distribution(row, one)
    freedom = int((probabilities > 0).sum()) - 1
    assert chi_square(sampled.tokens.tolist(), probabilities) < freedom + 5 * (2 * freedom) ** 0.5


def test_sequences_of_one_request_draw_as_requests_with_the_next_seeds() -> None:
    assert [sequence_seed(2**64 - 2, i) for i in range(4)] == [2**64 - 2, 2**64 - 1, 0, 1]
    running = Running(3)
    for slot in range(3):
        running.open(slot, Told(SamplingParams(), seed=sequence_seed(5, slot)))
    logits = torch.zeros(3, V)
    found = running.step(logits, [0, 1, 2]).tokens
    expected = [sample(logits[:1], [SamplingParams()], [5 + i], [3]).item() for i in range(3)]
    assert found == expected


def test_greedy_is_the_first_of_the_largest() -> None:
    running = Running(3)
    for slot in range(3):
        running.open(slot, Told(SamplingParams(temperature=0.0)))
    logits = torch.full((3, V), -INF)
    logits[0, [9, 30]] = 2.0
    logits[1, V - 1] = -1e30
    logits[2, [0, V - 1]] = torch.tensor([-0.0, 0.0])
    assert running.step(logits, [2, 0, 1]).tokens == [9, V - 1, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [float("nan"), INF, -INF])
def test_faulty_rows_are_reported_and_disturb_nobody(temperature: float, bad: float) -> None:
    """Also where the fault is among tokens that are forbidden anyway."""
    plain = SamplingParams(temperature=temperature, logprobs=0)
    narrow = dataclasses.replace(plain, allowed_token_ids=[4], frequency_penalty=1.0)
    running = Running()
    for slot, params in enumerate([plain, plain, narrow, narrow]):
        running.open(slot, Told(params, seed=slot))
    logits = noise(3, 0, 4).nan_to_num(neginf=0.0)
    good = logits.clone()
    if bad == -INF:
        logits[[0, 2]] = bad
    else:
        logits[[0, 2], 17] = bad
    expected = [expected_token(row, running.by_slot[i]) for i, row in enumerate(good)]
    drawn = running.step(logits, [0, 1, 2, 3])
    assert drawn.faulty == [0, 2]
    assert drawn.tokens == [NO_TOKEN, expected[1], NO_TOKEN, 4]
    # A faulty row drew nothing, so nothing is counted.
    counted = running.batch._tables[0].data[1].sum(1).tolist()
    assert sorted(counted)[-2:] == [0, 1]


def test_nothing_left_to_draw_is_a_fault() -> None:
    running = Running()
    running.open(0, Told(SamplingParams(temperature=0.0, banned_token_ids=list(range(1, V)))))
    logits = torch.zeros(1, V)
    logits[0, 0] = -INF
    assert running.step(logits, [0]).faulty == [0]
    masks = Masks(torch.zeros(1, 2, dtype=torch.int32), [0])
    assert running.step(torch.zeros(1, V), [0], masks).faulty == [0]


def test_logprobs_are_those_of_the_model() -> None:
    """Whatever is done to the logits before the draw, and whoever else wants some."""
    running = Running()
    wild = SamplingParams(temperature=2.0, repetition_penalty=3.0, logit_bias={2: 50.0},
                          banned_token_ids=[5], top_k=3)  # fmt: skip
    for slot, k in enumerate([None, 3, 0, None, 5]):
        running.open(slot, Told(dataclasses.replace(wild, logprobs=k), seed=slot))
    logits = noise(1, 1, 5)
    drawn = running.step(logits, [4, 3, 2, 1, 0])
    assert sorted(drawn.logprobs) == [0, 2, 3]
    for row, k in ((0, 5), (2, 0), (3, 3)):
        chosen = torch.tensor([drawn.tokens[row]])
        assert [drawn.logprobs[row]] == token_logprobs(logits[row : row + 1], chosen, k)


def test_masks_allow_what_their_bits_say() -> None:
    running = Running()
    for slot in range(3):
        running.open(slot, Told(SamplingParams(temperature=1.0, frequency_penalty=0.5), seed=slot))
    bits = torch.zeros(2, 2, dtype=torch.int32)
    bits[0, 1], bits[1, 0] = 0b10, -(2**31)
    for step in range(3):
        drawn = running.step(noise(5, step, 3).nan_to_num(neginf=-9.0), [0, 1, 2],
                             Masks(bits, [2, 0]))  # fmt: skip
        assert (drawn.tokens[2], drawn.tokens[0]) == (33, 31)


class Noted(Operators):
    """References that note how many rows they were called with."""

    def __init__(self) -> None:
        super().__init__({operator.spec.name: operator for operator in references().all()})
        self.rows: dict[str, list[int]] = {}

    def __getattr__(self, name: str) -> Any:
        operator = super().__getattr__(name)

        def call(first: Tensor, *others: Any) -> Any:
            self.rows.setdefault(name, []).append(len(first))
            return operator(first, *others)

        return call


def test_rows_pay_for_what_they_ask() -> None:
    """Greedy rows alone need no operator; penalties and reports concern their rows only."""
    noted = Noted()
    batch = SamplingBatch(8, V, EOS, CPU, noted)
    for slot in range(6):
        batch.open(slot, SamplingParams(temperature=0.0), 0, [5])
    logits = torch.randn(8, V)
    batch.sample(logits[:6], list(range(6)), [1] * 6)
    assert noted.rows == {}
    batch.open(6, SamplingParams(temperature=0.0, presence_penalty=1.0, logprobs=2), 0, [5])
    batch.open(7, SamplingParams(temperature=0.0, banned_token_ids=[1]), 0, [5])
    noted.rows.clear()
    before = logits.clone()
    batch.sample(logits, list(range(8)), [1] * 8)
    assert torch.equal(logits[:6], before[:6])
    assert noted.rows == {
        "penalise": [1], "apply_bitmask": [8], "token_logprobs": [1], "top_logprobs": [1]
    }  # fmt: skip
    batch.close(6)
    batch.close(7)
    noted.rows.clear()
    batch.open(7, SamplingParams(), 0, [5])
    batch.sample(logits[:7], [0, 1, 2, 3, 4, 5, 7], [1] * 7)
    assert noted.rows == {"sample_tokens": [7]}


def test_no_rows() -> None:
    batch = SamplingBatch(2, V, EOS, CPU)
    sampled = batch.sample(torch.zeros(0, V), [], [])
    assert sampled.read(sampled.pack()) == Drawn([], [], {})

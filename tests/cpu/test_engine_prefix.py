"""Whoever takes over what others have computed gets what he would get without.

Real models in float64, where everything that a checkpoint of a prefix must restore acts: windows,
open groups, n-gram histories, index keys, candidate blocks. The logits of every row are compared
with recomputing the sequence from nothing; whatever nobody owns is NaN.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from deepinfer import LLM, SamplingParams
from deepinfer.engine.loading import Loaded
from tests.cpu.engine_helpers import (
    GREEDY,
    Asked,
    Play,
    Witness,
    assert_idle,
    audit_running,
    ids_of,
    poison,
    small_llm,
)
from tests.cpu.engine_stories import random_sizes, random_story
from tests.cpu.model_helpers import loaded, random_ids

PAGE = 16


@pytest.fixture(scope="module")
def model(small_folder: Path) -> Loaded:
    return loaded(small_folder)


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "overlapped"])
def shared_llm(small_folder: Path, request: pytest.FixtureRequest) -> LLM:
    return small_llm(small_folder, overlap=request.param, cache_tokens=320)


@dataclass
class Watched:
    """An engine that keeps nothing yet, and what is seen of it."""

    llm: LLM
    model: Loaded
    witness: Witness

    def run(self, prompt: list[int], tokens: int = 2, **params: Any) -> tuple[list[int], int]:
        """The reply to `prompt` and how many of its tokens need not be computed; all logits are
        those of a run without a cache."""
        asked = SamplingParams(max_tokens=tokens, **{**GREEDY, **params})
        (output,) = Play(self.llm).run([Asked(prompt, asked)])
        assert self.witness.check(self.model)
        return output.outputs[0].token_ids, output.usage.cached_tokens

    def ids(self, count: int, seed: int = 0) -> list[int]:
        return random_ids(self.model, count, seed).tolist()


@pytest.fixture
def watched(shared_llm: LLM, model: Loaded, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    poison(shared_llm)
    yield Watched(shared_llm, model, Witness(shared_llm, monkeypatch))
    assert_idle(shared_llm)


# Ends of the common beginning: every offset within a page and a group of two.
@pytest.mark.parametrize("shared", range(16, 33))
def test_a_hit_then_something_else(watched: Watched, shared: int) -> None:
    common, own = watched.ids(shared), watched.ids(6, seed=1)
    watched.run(common, tokens=1)
    for count, known in ((1, shared), (6, shared + 1)):
        _, cached = watched.run(common + own[:count])
        assert cached == known // PAGE * PAGE
    if shared % PAGE:  # else what it needs is a page further back than the checkpoint
        _, again = watched.run(common)
        assert again == (shared - 1) // PAGE * PAGE


def test_every_turn_of_a_conversation(watched: Watched) -> None:
    """Prompt, answer, more, answer: what was generated is taken over like the prompt."""
    history: list[int] = []
    for turn, (more, tokens) in enumerate([(9, 9), (5, 3), (1, 16), (17, 15), (2, 2), (31, 1)]):
        history += watched.ids(more, seed=turn)
        answer, cached = watched.run(history, tokens)
        before = len(history) - more
        assert cached >= (before - 1) // PAGE * PAGE
        history += answer


def test_the_second_to_branch_off_keeps_the_place_for_the_third(watched: Watched) -> None:
    common = watched.ids(41)
    found = [watched.run(common + watched.ids(29, seed=seed))[1] for seed in range(1, 5)]
    assert found == [0, 0, 32, 32]


def test_a_hit_while_the_first_still_runs(watched: Watched) -> None:
    """The same prompt, one that goes on, and one that leaves it."""
    prompt = watched.ids(37)
    play = Play(watched.llm)
    play.add(Asked(prompt, SamplingParams(max_tokens=20, **GREEDY)))
    while not play.requests[0].completions[0].count:
        play.step()
    short = SamplingParams(max_tokens=3, **GREEDY)
    for other in (prompt, [*prompt, 7, 8], [*prompt[:33], 9]):
        play.add(Asked(other, short))
    outputs = play.run([])
    assert watched.witness.check(watched.model)
    assert [output.usage.cached_tokens for output in outputs] == [0, 32, 32, 32]
    assert outputs[1].outputs[0].token_ids == outputs[0].outputs[0].token_ids[:3]


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 18, 33])
def test_forks(watched: Watched, length: int) -> None:
    """Several replies to one prompt share its pages and part in the middle of one."""
    params = SamplingParams(max_tokens=5, n=3, seed=1, ignore_eos=True)
    forked = watched.llm.engine.scheduler.counters.forked
    (output,) = Play(watched.llm).run([Asked(watched.ids(length), params)])
    assert watched.witness.check(watched.model)
    assert len({tuple(one.token_ids) for one in output.outputs}) == 3
    assert watched.llm.engine.scheduler.counters.forked == forked + 2


def test_penalties_and_reports_after_a_hit(watched: Watched) -> None:
    """Tokens that were not computed again count for penalties all the same."""
    prompt = watched.ids(40)
    params: dict[str, Any] = {
        "tokens": 6, "temperature": 1.0, "seed": 3, "repetition_penalty": 2.0,
        "presence_penalty": 1.0,
    }  # fmt: skip
    cold, none = watched.run(prompt, **params)
    hit, cached = watched.run(prompt, **params)
    assert (hit, none, cached) == (cold, 0, 32)


def test_preempted_sequences_come_back_over_what_they_had(
    small_folder: Path, model: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Again and again: three sequences that need nearly the whole cache each."""
    for overlap in (False, True):
        llm = small_llm(small_folder, overlap=overlap, cache_tokens=80, max_model_len=80)
        poison(llm)
        with monkeypatch.context() as patch:
            witness = Witness(llm, patch)
            asked = [
                Asked(random_ids(model, 20 + seed, seed).tolist(), SamplingParams(
                    max_tokens=30, seed=seed, presence_penalty=0.5, ignore_eos=True))
                for seed in range(3)
            ]  # fmt: skip
            outputs = Play(llm).run(asked)
            witness.check(model)
        assert [len(output.outputs[0].token_ids) for output in outputs] == [30] * 3
        counters, tree = llm.engine.scheduler.counters, llm.engine.manager.tree.counters
        assert min(counters.preempted, tree.hits) >= 2
        alone = [ids_of(llm.generate(one.prompt, one.params))[0] for one in asked]
        assert alone == ids_of(outputs)


def test_after_evictions(
    small_folder: Path, model: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many beginnings, room for few: hits on what is left, and never on what is gone."""
    llm = small_llm(small_folder, prefix_checkpoints=3, overlap=True)
    poison(llm)
    witness = Witness(llm, monkeypatch)
    family = [random_ids(model, 60, seed).tolist() for seed in range(4)]
    asked = []
    for turn, which in enumerate([0, 1, 0, 2, 2, 3, 1, 1, 0, 3, 3, 2, 0, 0]):
        length, own = 17 + 11 * turn % 43, random_ids(model, 1 + turn % 3, turn).tolist()
        params = SamplingParams(max_tokens=1 + turn % 3, **GREEDY)
        asked.append(Asked(family[which][:length] + own, params, at=3 * turn))
    Play(llm).run(asked)
    assert witness.check(model) >= 14
    counted = llm.engine.manager.tree.counters
    assert min(counted.hits, counted.pages_evicted, counted.checkpoints_evicted) >= 3


def test_all_layers(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine layers with outliers: n-grams twice, reused selections, candidates of a lower layer."""
    model = loaded(tiny_folder)
    llm = small_llm(tiny_folder, cache_tokens=320, max_num_batched_tokens=40, overlap=True)
    poison(llm)
    witness = Witness(llm, monkeypatch)
    prompt = random_ids(model, 75).tolist()
    short = SamplingParams(max_tokens=3, **GREEDY)
    for expected, ids in ((0, prompt), (64, prompt), (0, [*prompt[:51], 7]), (48, prompt[:50])):
        (output,) = Play(llm).run([Asked(ids, short)])
        assert output.usage.cached_tokens == expected
    assert witness.check(model)


def test_forgetting_while_sequences_run(watched: Watched) -> None:
    """What is kept may go at any time; those who have taken it over go on."""
    prompt = watched.ids(40)
    watched.run(prompt)
    play = Play(watched.llm)
    for ids in (prompt, [*prompt, 7]):
        play.add(Asked(ids, SamplingParams(max_tokens=6, **GREEDY)))
    while play.llm.engine.has_work:
        play.step()
        watched.llm.reset_prefix_cache()
        audit_running(watched.llm.engine)
    assert [output.usage.cached_tokens for output in play.outputs()] == [32, 32]
    assert watched.witness.check(watched.model)
    assert watched.run(prompt)[1] == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_random_company(small_folder: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Chunks, hits, forks, evictions and preemption all at once, in engines of random sizes."""
    model, rng = loaded(small_folder), random.Random(seed)
    sizes = {**random_sizes(rng), "page_tokens": PAGE, "max_num_batched_tokens": 4 + seed * 3}
    llm = small_llm(small_folder, overlap=bool(seed % 2), **sizes)
    poison(llm)
    witness = Witness(llm, monkeypatch)
    for _ in range(2):
        Play(llm).run(random_story(rng))
        assert witness.check(model)

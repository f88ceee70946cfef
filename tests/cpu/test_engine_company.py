"""Nobody notices what else the engine does: everybody gets, to the letter, what he gets alone.

Random requests with every sampling parameter run on the stub model in engines of random sizes, in
the plain and in the overlapped loop: batches, chunks, hits, forks, evictions, preemption, aborts.
Alone means: one request in an engine with room for everything that keeps nothing.
"""

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer import LLM, SamplingParams
from deepinfer.sampling.batch import SamplingBatch
from deepinfer.sampling.params import sequence_seed
from tests.cpu.engine_helpers import Asked, Play, Reply, played, reply
from tests.cpu.engine_stories import random_params, random_prompt, random_sizes, random_story
from tests.cpu.engine_stub import hashed_logits, stub_llm


@dataclass
class Alone:
    """What requests get alone, each worked out once."""

    llm: LLM
    known: dict[Any, Reply]

    def __call__(self, asked: Asked) -> Reply:
        key = tuple(asked.prompt), asked.params
        if key not in self.known:
            (self.known[key],) = played(self.llm, [replace(asked, at=0, priority=0)])
        return self.known[key]


@pytest.fixture(scope="module")
def alone(stub_folder: Path) -> Alone:
    llm = stub_llm(stub_folder, prefix_checkpoints=0, max_num_batched_tokens=96)
    return Alone(llm, {})


def check(folder: Path, alone: Alone, seed: int, stories: int) -> None:
    """Some stories in one engine of random size, each without and with aborts."""
    rng = random.Random(seed)
    sizes = random_sizes(rng)
    told = [random_story(rng) for _ in range(stories)]
    aborts = [(rng.randrange(40), rng.randrange(10)) for _ in range(3)]
    for overlap in (False, True):
        llm = stub_llm(folder, overlap=overlap, **sizes)
        for story in told:
            expected = [alone(one) for one in story]
            assert played(llm, story) == expected, (seed, overlap)
            for found, whole in zip(with_aborts(llm, story, aborts), expected, strict=True):
                assert found == whole or cut_short(found, whole), (seed, overlap)


def with_aborts(llm: LLM, story: list[Asked], aborts: list[tuple[int, int]]) -> list[Reply]:
    """The same with (step, number of the request) to abort."""
    play = Play(llm)

    def between(step: int) -> None:
        for when, victim in aborts:
            if when == step:
                play.abort(victim)

    return [reply(output) for output in play.run(story, between=between)]


def cut_short(found: Reply, whole: Reply) -> bool:
    """Whether replies are what there was of them when they were aborted."""
    for one, all_of_it in zip(found.outputs, whole.outputs, strict=True):
        count = len(one.token_ids)
        if one.finish_reason == "abort":
            logprobs = None if one.logprobs is None else (all_of_it.logprobs or [])[:count]
            if (one.token_ids, one.logprobs) != (all_of_it.token_ids[:count], logprobs):
                return False
        elif one != all_of_it:
            return False
    return any(one.finish_reason == "abort" for one in found.outputs)


@pytest.mark.parametrize("seed", range(8))
def test_random_company(stub_folder: Path, alone: Alone, seed: int) -> None:
    check(stub_folder, alone, seed, stories=3)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 200))
def test_more_random_company(stub_folder: Path, alone: Alone, seed: int) -> None:
    check(stub_folder, alone, seed, stories=6)


def test_the_walk_goes_where_it_is_to_go(stub_folder: Path) -> None:
    """Stories like those of `check` hit, fork, preempt and evict; not each of them does."""
    rng = random.Random(5)
    llm = stub_llm(stub_folder, page_tokens=2, max_model_len=80, cache_tokens=96, max_num_seqs=4)
    for _ in range(12):
        played(llm, random_story(rng))
    counters, tree = llm.engine.scheduler.counters, llm.engine.manager.tree.counters
    assert min(counters.preempted, counters.forked) > 5
    assert min(tree.hits, tree.pages_evicted, tree.checkpoints_evicted) > 5


def by_hand(asked: Asked, index: int, llm: LLM) -> list[int]:
    """Tokens of one reply, drawn one after the other without an engine; no stop strings."""
    params, prompt, out = asked.params, list(asked.prompt), []
    vocabulary, end = llm.model_config.vocab_size, llm.model_config.eos_token_id
    batch = SamplingBatch(1, vocabulary, end, torch.device("cpu"))
    batch.open(0, params, sequence_seed(params.seed or 0, index), prompt)
    while len(out) < params.budget and (not out or out[-1] not in params.end_tokens(end)):
        ids = prompt + out
        drawn = batch.sample(hashed_logits(ids, vocabulary).unsqueeze(0), [0], [len(ids)])
        out.append(int(drawn.tokens[0]))
    return out


def test_alone_is_what_model_and_sampler_give(alone: Alone) -> None:
    """Positions, seeds, counts and budgets reach the sampler as they should."""
    rng = random.Random(3)
    for _ in range(40):
        asked = Asked(random_prompt(rng), replace(random_params(rng), stop=()))
        for reply_ in alone(asked).outputs:
            assert reply_.token_ids == by_hand(asked, reply_.index, alone.llm)


FORMS: list[dict[str, Any]] = [
    {"choice": ["yes", "no", "perhaps", "not at all"]},
    {"regex": "[a-f]{2,9}( [0-9]{1,3})?"},
    {"json_schema": {"type": "array", "items": {"enum": [1, "two", None]}, "maxItems": 3}},
    {"ebnf": 'root ::= "a" root "b" | "."'},
]


@pytest.mark.parametrize("overlap", [False, True])
def test_structured_output_in_company(stub_folder: Path, alone: Alone, overlap: bool) -> None:
    """Masks follow each text wherever it runs, after preemption and in forks too."""
    rng = random.Random(4)
    story = [
        Asked(random_prompt(rng)[:25], SamplingParams(
            max_tokens=12, seed=seed, n=1 + seed % 2, structured=FORMS[seed % 4], logprobs=1),
            at=seed)
        for seed in range(8)
    ]  # fmt: skip
    story += [replace(one, at=one.at + 2) for one in random_story(rng)]
    llm = stub_llm(stub_folder, overlap=overlap, max_model_len=80, cache_tokens=80, max_num_seqs=4)
    assert played(llm, story) == [alone(one) for one in sorted(story, key=lambda one: one.at)]
    assert llm.engine.scheduler.counters.preempted
    assert llm.engine.scheduler.counters.forked


STORY = [
    Asked([20 + i for i in range(23)], SamplingParams(max_tokens=9, seed=1, ignore_eos=True)),
    Asked([20 + i for i in range(30)], SamplingParams(max_tokens=4, seed=2, n=2), at=1),
    Asked([5, 6], SamplingParams(max_tokens=12, seed=3, logprobs=1, ignore_eos=True), at=2),
    Asked([20 + i for i in range(27)], SamplingParams(max_tokens=3, prompt_logprobs=1, seed=4), 4),
]


@pytest.mark.parametrize("overlap", [False, True])
def test_an_abort_at_every_step(stub_folder: Path, alone: Alone, overlap: bool) -> None:
    """Of each request in turn; the others never notice."""
    llm = stub_llm(stub_folder, overlap=overlap, max_model_len=40, cache_tokens=64)
    expected = [alone(one) for one in STORY]
    aborted = set()
    for victim in range(len(STORY)):
        for step in range(STORY[victim].at, 22):
            replies = with_aborts(llm, STORY, [(step, victim)])
            for number, pair in enumerate(zip(replies, expected, strict=True)):
                assert pair[0] == pair[1] or (number == victim and cut_short(*pair)), (victim, step)
            ends = [output.finish_reason for output in replies[victim].outputs]
            aborted.add((victim, "abort" in ends))
    assert aborted == {(victim, cut) for victim in range(4) for cut in (False, True)}


@pytest.mark.parametrize("overlap", [False, True])
def test_n_replies_are_n_requests(stub_folder: Path, overlap: bool) -> None:
    """Reply number i draws with seed + i, around 2^64 too, whether it forks or has to wait."""
    llm = stub_llm(stub_folder, overlap=overlap)
    for length in (1, 3, 4, 5, 16, 17, 40):
        for seed in (3, 2**64 - 2):
            prompt = [20 + i for i in range(length)]
            base = SamplingParams(max_tokens=6, presence_penalty=0.4, logprobs=1, ignore_eos=True)
            (together,) = played(llm, [Asked(prompt, replace(base, n=5, seed=seed))])
            own = [replace(base, seed=sequence_seed(seed, index)) for index in range(5)]
            apart = played(llm, [Asked(prompt, one) for one in own])
            assert [o.index for o in together.outputs] == list(range(5))
            for one, separate in zip(together.outputs, apart, strict=True):
                assert replace(one, index=0) == separate.outputs[0]
    assert llm.engine.scheduler.counters.forked

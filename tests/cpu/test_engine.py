"""The engine's loop: batching, queues and budgets change nothing in what a request gets.

Everything is scarce here (3 sequences, 16 tokens a step, a cache for one long or a few short
sequences), and generation is compared with recomputing every token from scratch, in float64, where
logits do not depend on the batch.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import deepinfer.engine.runner as runner_module
from deepinfer import LLM, SamplingParams
from deepinfer.engine.loading import Loaded
from deepinfer.engine.output import StreamChunk
from deepinfer.model.step import StepLayout
from tests.cpu.engine_helpers import (
    GREEDY,
    assert_idle,
    audit_running,
    ids_of,
    poison,
    slow_ids,
    small_llm,
)
from tests.cpu.model_helpers import loaded, random_ids, truncated_recomputed


@pytest.fixture(scope="module")
def model(small_folder: Path) -> Loaded:
    return loaded(small_folder)


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "overlapped"])
def shared_llm(small_folder: Path, request: pytest.FixtureRequest) -> LLM:
    return small_llm(small_folder, overlap=request.param)


@pytest.fixture
def llm(shared_llm: LLM) -> Iterator[LLM]:
    """The engine, which every test must leave idle; its cache starts full of NaN."""
    poison(shared_llm)
    yield shared_llm
    assert_idle(shared_llm)


@pytest.fixture
def layouts(monkeypatch: pytest.MonkeyPatch) -> list[StepLayout]:
    """Row layouts of all forwards that the engine runs, in order."""
    seen: list[StepLayout] = []
    run = runner_module.run

    def spy(model: Any, pool: Any, layout: StepLayout, *args: Any, **kwargs: Any) -> Any:
        seen.append(layout)
        return run(model, pool, layout, *args, **kwargs)

    monkeypatch.setattr(runner_module, "run", spy)
    return seen


@pytest.fixture
def kept_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows of each forward went through all layers."""
    seen: list[int] = []
    run = runner_module.run

    def spy(*args: Any, **kwargs: Any) -> Any:
        output = run(*args, **kwargs)
        seen.append(len(output.hidden.x))
        return output

    monkeypatch.setattr(runner_module, "run", spy)
    return seen


# Seven requests of which three run at a time; lengths around chunks, windows and pages.
REQUESTS = [(1, 9), (40, 5), (16, 7), (17, 1), (75, 6), (2, 12), (33, 8)]


def requests(model: Loaded) -> list[tuple[list[int], SamplingParams]]:
    return [
        (
            random_ids(model, length, seed).tolist(),
            SamplingParams(max_tokens=tokens, temperature=0.8, seed=seed, ignore_eos=True),
        )
        for seed, (length, tokens) in enumerate(REQUESTS)
    ]


@pytest.fixture(scope="module")
def alone(model: Loaded) -> list[list[int]]:
    """What each of the requests gets without an engine."""
    return [slow_ids(model, prompt, params) for prompt, params in requests(model)]


def test_batched_equals_alone(llm: LLM, model: Loaded, alone: list[list[int]]) -> None:
    prompts, params = zip(*requests(model), strict=True)
    assert ids_of(llm.generate(prompts, params)) == alone


def test_order_of_requests_does_not_matter(llm: LLM, model: Loaded, alone: list[list[int]]) -> None:
    prompts, params = zip(*requests(model)[::-1], strict=True)
    assert ids_of(llm.generate(prompts, params)) == alone[::-1]


@pytest.mark.parametrize("tokens", [3, 512])
def test_budgets_do_not_matter(
    small_folder: Path, model: Loaded, alone: list[list[int]], tokens: int
) -> None:
    """3 tokens a step: prompts in many small chunks next to decoding requests."""
    llm = small_llm(small_folder, max_num_batched_tokens=tokens, cache_tokens=1000, page_tokens=64)
    poison(llm)
    prompts, params = zip(*requests(model), strict=True)
    assert ids_of(llm.generate(prompts, params)) == alone
    assert_idle(llm)


def test_steps_keep_their_budgets(llm: LLM, model: Loaded, layouts: list[StepLayout]) -> None:
    """Rows, sequences and pages of every step; decoding requests are in every step."""
    prompts, params = zip(*requests(model), strict=True)
    llm.generate(prompts, params)
    assert any(layout.total == 16 for layout in layouts)
    assert any(len(layout.rows) == 3 for layout in layouts)
    for layout in layouts:
        assert 0 < layout.total <= 16
        assert len(layout.rows) <= 3
        slots = [rows.slot for rows in layout.rows]
        pages = [page for rows in layout.rows for page in rows.pages]
        assert len(set(slots)) == len(slots)
        assert len(set(pages)) == len(pages) <= 10
    assert max(len(layout.rows) for layout in layouts if layout.total > 3) == 3  # mixed steps


def test_a_decoding_request_gets_a_token_every_step(
    llm: LLM, model: Loaded, layouts: list[StepLayout]
) -> None:
    """A long prompt next to it may slow it down but never stops it."""
    stream = llm.stream([5, 6], SamplingParams(max_tokens=12, **GREEDY))
    next(stream)
    long = llm.stream(random_ids(model, 70).tolist(), SamplingParams(max_tokens=2, **GREEDY))
    del layouts[:]
    next(long)
    # The overlapped loop is one step ahead of the tokens.
    assert [sorted(rows.count for rows in layout.rows) for layout in layouts[:5]] == [
        *[[1, 15]] * 4,
        [1, 10],
    ]
    assert len(layouts) == 5 + llm.config.overlap
    assert len(list(stream)) == 11
    long.close()


def test_a_request_is_not_overtaken(llm: LLM, model: Loaded) -> None:
    """Of 10 pages the first takes 8; the third would fit next to it, the second would not."""
    params = SamplingParams(max_tokens=3, **GREEDY)
    prompts = [random_ids(model, length).tolist() for length in (120, 60, 3)]
    engine = llm.engine
    everybody = first, second, third = [llm.request(prompt, params) for prompt in prompts]
    for request in everybody:
        engine.add(request)
    while not first.ended:
        engine.step()
        assert third.completions[0].started <= second.completions[0].started
    while engine.has_work:
        engine.step()
    assert [r.completions[0].finish_reason for r in everybody] == ["length"] * 3
    assert [r.completions[0].generated for r in everybody] == [
        slow_ids(model, prompt, params) for prompt in prompts
    ]


@settings(max_examples=8)
@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(1, 6)), min_size=1, max_size=6),
    st.lists(st.integers(0, 9), max_size=8),
)
def test_pages_and_slots_are_never_lost(
    shared_llm: LLM, model: Loaded, shapes: list[tuple[int, int]], aborts: list[int]
) -> None:
    """Requests of any size, some of them aborted at any time: free and owned always add up."""
    engine = shared_llm.engine
    ids = []
    for length, tokens in shapes:
        prompt = random_ids(model, length, length).tolist()
        request = shared_llm.request(prompt, SamplingParams(max_tokens=tokens, **GREEDY))
        engine.add(request)
        ids.append(request.request_id)
    for victim in [*aborts, *[None] * 200]:
        if not engine.has_work:
            break
        engine.step()
        if victim is not None and victim < len(ids):
            engine.abort(ids[victim])
        audit_running(engine)
    assert_idle(shared_llm)


def chunks_until(step: Callable[[], list[StreamChunk]], count: int) -> list[StreamChunk]:
    """Chunks of steps until there are `count` of them."""
    chunks: list[StreamChunk] = []
    while len(chunks) < count:
        chunks += step()
    return chunks


def test_abort(llm: LLM) -> None:
    """While it runs, while it waits, in the middle of a prompt, and when nobody knows it."""
    engine = llm.engine
    params = SamplingParams(max_tokens=20, **GREEDY)
    running, waiting, long = (
        llm.request(prompt, params) for prompt in ([5, 6], [7, 8], list(range(20, 80)))
    )
    for request in (running, long):
        engine.add(request)
    chunks_until(engine.step, 2)
    assert 0 < long.completions[0].sequence.computed < 60
    engine.add(waiting)
    for request in (waiting, running, long):
        (chunk,) = engine.abort(request.request_id)
        assert (chunk.finish_reason, chunk.request_id) == ("abort", request.request_id)
        assert engine.abort(request.request_id) == []
    assert running.output().outputs[0].token_ids == running.completions[0].generated != []
    assert waiting.output().usage.completion_tokens == 0
    assert engine.step() == []


def test_an_aborted_request_leaves_nothing_behind(llm: LLM, model: Loaded) -> None:
    """Its pages and slot go to the next request, which cannot tell."""
    stream = llm.stream(random_ids(model, 100, 7).tolist(), SamplingParams(max_tokens=9, seed=1))
    next(stream)
    stream.close()
    prompt, params = requests(model)[1]
    assert ids_of(llm.generate(prompt, params)) == [slow_ids(model, prompt, params)]


POISON = 300  # a token whose embedding is NaN


@pytest.fixture
def poisoned(llm: LLM) -> Iterator[LLM]:
    weight = llm.model.embed.weight
    before = weight[POISON].clone()
    with torch.no_grad():
        weight[POISON] = float("nan")
    yield llm
    with torch.no_grad():
        weight[POISON] = before


def test_nan_ends_one_request_only(poisoned: LLM, model: Loaded, alone: list[list[int]]) -> None:
    """Its neighbours in the batch and those who get its pages and slot later are not touched."""
    healthy = requests(model)
    assert all(POISON not in prompt for prompt, _ in healthy)
    sick = ([20, POISON, *range(21, 50), POISON], SamplingParams(max_tokens=5, logprobs=2, seed=0))
    everybody = [sick, *healthy[:3], sick, *healthy[3:], sick]
    prompts, params = zip(*everybody, strict=True)
    replies = poisoned.generate(prompts, params)
    for reply in (replies[0], replies[4], replies[9]):
        output = reply.outputs[0]
        assert (output.finish_reason, output.token_ids, output.text) == ("error", [], "")
    assert ids_of(replies[1:4] + replies[5:9]) == alone
    again = poisoned.generate([prompt for prompt, _ in healthy], [p for _, p in healthy])
    assert ids_of(again) == alone


def test_a_fault_that_has_passed_leaves_nothing_behind(poisoned: LLM, model: Loaded) -> None:
    """Whatever its requests computed and kept for others before the fault was noticed is gone."""
    prompt = random_ids(model, 45).tolist()
    prompt[20] = POISON
    params = SamplingParams(max_tokens=4, **GREEDY)
    (sick,) = poisoned.generate(prompt, params)
    assert sick.outputs[0].finish_reason == "error"
    with torch.no_grad():
        poisoned.model.embed.weight[POISON] = model.model.embed.weight[POISON]
    for cached in (0, 32):
        (well,) = poisoned.generate(prompt, params)
        assert ids_of([well]) == [slow_ids(model, prompt, params)]
        assert well.usage.cached_tokens == cached


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_distribution(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, bad: float, temperature: float
) -> None:
    """From the third token on, in one of two requests that decode together."""
    logits = llm.model.logits
    calls = 0

    def spoilt(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        result = logits(x).clone()
        if calls >= 3 and len(result) == 2:
            result[1, 7 if bad > 0 or bad != bad else slice(None)] = bad
        return result

    monkeypatch.setattr(llm.model, "logits", spoilt)
    params = SamplingParams(max_tokens=6, temperature=temperature, seed=3, ignore_eos=True)
    first, second = (reply.outputs[0] for reply in llm.generate([[5, 6], [7, 8]], params))
    assert (first.finish_reason, len(first.token_ids)) == ("length", 6)
    assert (second.finish_reason, len(second.token_ids)) == ("error", 2)


def test_a_step_that_raises_ends_only_who_cannot_run(
    llm: LLM, model: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three requests in the step one makes it fail; the others never notice."""
    prompt, params = requests(model)[5]
    stream = llm.stream(prompt, params)
    first = [next(stream), next(stream)]
    run = runner_module.run

    def broken(
        model: Any, pool: Any, layout: StepLayout, ids: Tensor, *args: Any, **kw: Any
    ) -> Any:
        if POISON in ids:
            raise RuntimeError("out of memory")
        return run(model, pool, layout, ids, *args, **kw)

    with monkeypatch.context() as patch:
        patch.setattr(runner_module, "run", broken)
        healthy, sick = llm.generate([[5, 6], [POISON]], SamplingParams(max_tokens=3, **GREEDY))
    assert (sick.outputs[0].finish_reason, sick.outputs[0].token_ids) == ("error", [])
    assert sick.outputs[0].error == "RuntimeError: out of memory"
    assert healthy.outputs[0].error is None
    assert ids_of([healthy]) == [slow_ids(model, [5, 6], SamplingParams(max_tokens=3, **GREEDY))]
    ids = [token for chunk in [*first, *stream] for token in chunk.token_ids]
    assert ids == slow_ids(model, prompt, params)


def test_a_step_that_is_interrupted_is_done_again(
    llm: LLM, model: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the middle of a step: generate takes its requests back, a stream goes on."""
    prompt, params = requests(model)[4]
    stream = llm.stream(prompt, params)
    first = [next(stream), next(stream)]

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(runner_module, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[5, 6], [7]], SamplingParams(max_tokens=3))
    ids = [token for chunk in [*first, *stream] for token in chunk.token_ids]
    assert ids == slow_ids(model, prompt, params)


@pytest.mark.parametrize("mode", ["mask", "compact"])
def test_truncated_prefill_of_short_prompts_is_exact(tiny_folder: Path, mode: str) -> None:
    """Up to yoco_keep_tokens prompt tokens nothing is left out."""
    whole = loaded(tiny_folder)
    llm = small_llm(tiny_folder, yoco_prefill=mode, yoco_keep_tokens=40)
    prompts = [random_ids(whole, length).tolist() for length in (40, 33)]
    params = SamplingParams(max_tokens=3, **GREEDY)
    expected = [slow_ids(whole, prompt, params) for prompt in prompts]
    assert ids_of(llm.generate(prompts, params)) == expected
    assert_idle(llm)


KEEP = 25
TRUNCATIONS = [("mask", 16), ("compact", 16), ("compact", 512)]


@pytest.mark.parametrize(("mode", "budget"), TRUNCATIONS)
@pytest.mark.parametrize("name", ["tiny", "oracle"])
def test_truncated_prefill(
    tiny_folder: Path, oracle_folder: Path, kept_rows: list[int], mode: str, budget: int, name: str
) -> None:
    """The log-probabilities of a dense mask, chunks that are left out as a whole included.

    One of the checkpoints taps the boundary layer itself for the drafter.
    """
    folder = tiny_folder if name == "tiny" else oracle_folder
    whole = loaded(folder)
    llm = small_llm(folder, yoco_prefill=mode, yoco_keep_tokens=KEEP,
                    max_num_batched_tokens=budget)  # fmt: skip
    poison(llm)
    prompts = [random_ids(whole, length, length).tolist() for length in (70, 27)]
    replies = llm.generate(prompts, SamplingParams(max_tokens=4, logprobs=0, **GREEDY))
    for prompt, reply in zip(prompts, replies, strict=True):
        output = reply.outputs[0]
        ids = torch.tensor(prompt + output.token_ids)
        exact = truncated_recomputed(whole, ids, len(prompt) - KEEP).logits[KEEP - 1 : -1]
        expected = torch.log_softmax(exact, -1).gather(-1, ids[len(prompt) :].unsqueeze(-1))
        found = [entry.logprob for entry in output.logprobs or ()]
        assert found == pytest.approx(expected.flatten().tolist(), abs=1e-5)
        assert output.token_ids == exact.argmax(-1).tolist()
    assert sum(kept_rows) == (97 if mode == "mask" else 2 * KEEP) + 2 * 3
    assert_idle(llm)

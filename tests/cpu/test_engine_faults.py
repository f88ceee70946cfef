"""Whatever fails ends those whom it concerns; everybody else gets what he gets alone.

The model is the stub of `engine_stub`: its forward fails after it has written everything, the worst
moment, and a row that reads what a failed forward has left behind gives other tokens or raises.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer import LLM, SamplingParams
from deepinfer.engine import page_table
from deepinfer.engine.flight import Flight
from deepinfer.engine.page_table import PageTable
from deepinfer.kv.blocks import SequenceBlocks
from deepinfer.sampling.batch import Masks
from tests.cpu.engine_helpers import Asked, Play, Reply, played
from tests.cpu.engine_stub import StubRunner, stub_llm

BAD = 300  # a token that makes something fail
LONG = [20 + 7 * i % 200 for i in range(60)]


def params(seed: int, tokens: int = 6, **others: Any) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, seed=seed, ignore_eos=True, **others)


# Long prompts in chunks beside decoding, two that begin alike, several replies to one prompt.
ASKED = [
    Asked([5, 6, 7], params(1, 12, logprobs=1)),
    Asked(LONG, params(2, presence_penalty=0.5)),
    Asked([*LONG[:30], 9], params(3, n=2, prompt_logprobs=1), at=2),
    Asked([8] * 17, params(4, 9), at=3),
    Asked([*LONG[:50], 11, 12], params(5, repetition_penalty=1.2), at=9),
    Asked([*LONG[:50], 11, 13], params(6), at=12),
]


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "overlapped"])
def shared_llm(stub_folder: Path, request: pytest.FixtureRequest) -> LLM:
    return stub_llm(stub_folder, overlap=request.param, cache_tokens=384, max_num_seqs=5)


@pytest.fixture
def llm(shared_llm: LLM) -> Iterator[LLM]:
    """The engine without anything kept from before."""
    shared_llm.reset_prefix_cache()
    yield shared_llm
    runner = stub(shared_llm)
    runner.before = lambda rows: None
    runner.logits = lambda logits, rows: None


@pytest.fixture(scope="module")
def alone(stub_folder: Path) -> list[Reply]:
    """What each of ASKED gets without any company."""
    llm = stub_llm(stub_folder, prefix_checkpoints=0, max_num_batched_tokens=96)
    return [played(llm, [replace(one, at=0)])[0] for one in ASKED]


def stub(llm: LLM) -> StubRunner:
    runner = llm.engine.runner
    assert isinstance(runner, StubRunner)
    return runner


def crowds(wrong: Callable[[int], bool]) -> Callable[[list[list[int]]], None]:
    """Raises in forwards of several sequences, counted from 0, that `wrong` says."""
    calls = count()

    def fail(rows: list[list[int]]) -> None:
        if len(rows) > 1 and wrong(next(calls)):
            raise RuntimeError("out of memory")

    return fail


def errors(replies: list[Reply]) -> list[bool]:
    """Which requests have a reply that ended with an error."""
    return [any(o.finish_reason == "error" for o in one.outputs) for one in replies]


def assert_healthy(llm: LLM, alone: list[Reply]) -> None:
    """Nothing wrong was kept: the same requests once more, hits included."""
    assert played(llm, ASKED) == alone


def test_a_forward_that_fails_once_ends_nobody(llm: LLM, alone: list[Reply]) -> None:
    """At each of the first forwards: among them chunks that a second run would find overwritten."""
    for number in range(0, 20, 2):
        llm.reset_prefix_cache()
        stub(llm).before = crowds(lambda call, number=number: call == number)
        assert played(llm, ASKED) == alone, number


def test_a_forward_that_fails_for_several_at_once_ends_nobody(llm: LLM, alone: list[Reply]) -> None:
    """As when memory suffices for one sequence only."""
    stub(llm).before = crowds(lambda call: True)
    assert played(llm, ASKED) == alone


@pytest.mark.parametrize("place", [0, 16, 17, 40, 59])
def test_a_token_that_fails_ends_who_has_it(llm: LLM, alone: list[Reply], place: int) -> None:
    """Its neighbours go on, wherever it stands in a prompt, and whoever comes later too."""

    def broken(rows: list[list[int]]) -> None:
        if any(BAD in row for row in rows):
            raise RuntimeError("bad token")

    stub(llm).before = broken
    sick = [Asked([*LONG[:place], BAD, *LONG[place + 1 :]], params(7, n=2), at=at) for at in (1, 8)]
    replies = played(llm, [*ASKED, *sick])
    order = sorted([*ASKED, *sick], key=lambda one: one.at)
    assert errors(replies) == [one in sick for one in order]
    assert [reply for reply, bad in zip(replies, errors(replies), strict=True) if not bad] == alone
    error = next(reply for reply in replies if errors([reply])[0]).outputs[0]
    assert (error.error, error.token_ids) == ("RuntimeError: bad token", [])
    assert_healthy(llm, alone)


def once(monkeypatch: pytest.MonkeyPatch, where: Any, name: str, number: int) -> None:
    """Call `number` of a method, from 0, fails after it has done its work."""
    method, calls = getattr(where, name), count()

    def failing(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        if next(calls) == number:
            raise RuntimeError(f"{name} failed")
        return result

    monkeypatch.setattr(where, name, failing)


@pytest.mark.parametrize("name", ["sample", "open"])
def test_a_sampler_that_fails_once_ends_nobody(
    llm: LLM, alone: list[Reply], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Though it has changed logits and counted tokens by then."""
    for number in range(0, 12, 3):
        llm.reset_prefix_cache()
        with monkeypatch.context() as patch:
            once(patch, llm.engine.drawing.sampler, name, number)
            assert played(llm, ASKED) == alone, number


def test_a_sampler_that_fails_for_one_ends_that_one(
    llm: LLM, alone: list[Reply], monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = llm.engine.drawing.sampler
    sick = Asked([9, 9], params(7, 5, logprobs=3, top_k=7), at=1)
    sample = sampler.sample

    def failing(logits: Any, slots: Any, *args: Any) -> Any:
        drawn = sample(logits, slots, *args)
        if any(sampler._open[slot].params.top_k == 7 for slot in slots):
            raise RuntimeError("no draw")
        return drawn

    with monkeypatch.context() as patch:
        patch.setattr(sampler, "sample", failing)
        replies = played(llm, [*ASKED[:2], sick, *ASKED[2:]])
    ended = replies.pop(2).outputs[0]
    assert (ended.error, ended.token_ids) == ("RuntimeError: no draw", [])
    assert replies == alone
    assert_healthy(llm, alone)


@pytest.mark.parametrize("name", ["copy_slot", "copy_page"])
def test_a_copy_that_fails_ends_at_most_who_needs_it(
    llm: LLM, alone: list[Reply], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Whether it makes a checkpoint, a hit or a fork; before it has begun, or in its middle."""
    ended = 0
    for number in range(6):
        llm.reset_prefix_cache()
        with monkeypatch.context() as patch:
            copy, calls = getattr(stub(llm).pool, name), count()

            def failing(source: int, target: int, copy: Any = copy, calls: Any = calls) -> None:
                if next(calls) != number:  # noqa: B023
                    copy(source, target)
                    return
                half = stub(llm).cache.slots if name == "copy_slot" else stub(llm).cache.pages
                half[target] = [(-1, -1) if name == "copy_slot" else -1] * len(half[target])
                raise RuntimeError("no copy")

            patch.setattr(stub(llm).pool, name, failing)
            replies = played(llm, ASKED)
        bad = [(i, o) for i, r in enumerate(replies) for o in r.outputs if o.error is not None]
        assert all(o.error == "RuntimeError: no copy" for _, o in bad)
        assert len(bad) <= 1
        ended += len(bad)
        for i, reply in enumerate(replies):
            if all(i != j for j, _ in bad):
                assert reply == alone[i]
        assert_healthy(llm, alone)
    assert ended


@pytest.mark.parametrize("name", ["push", "finish"])
def test_text_that_cannot_be_decoded_ends_that_reply(
    llm: LLM, alone: list[Reply], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """At any token, and even where the rest cannot be shown any more."""
    for tokens in range(4):
        play = Play(llm)
        sick = play.add(Asked([9, 9], params(7, 8)))
        once(monkeypatch, sick.completions[0].text, "push", tokens)
        if name == "finish":
            once(monkeypatch, sick.completions[0].text, "finish", 0)
        output, *others = play.run(ASKED)
        (completion,) = output.outputs
        assert (completion.finish_reason, len(completion.token_ids)) == ("error", tokens + 1)
        assert completion.error == "RuntimeError: push failed"
        assert [Reply(o.outputs, o.prompt_logprobs) for o in others] == alone


def test_a_step_whose_tokens_never_arrive_ends_who_was_in_it(
    llm: LLM, alone: list[Reply], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the device reports what went wrong in a kernel."""
    for number in range(2, 12, 3):
        with monkeypatch.context() as patch:
            once(patch, Flight, "receive", number)
            replies = played(llm, ASKED)
        bad = errors(replies)
        assert any(bad)
        assert not all(bad)
        assert [r for r, b in zip(replies, bad, strict=True) if not b] == [
            r for r, b in zip(alone, bad, strict=True) if not b
        ]
        assert_healthy(llm, alone)


def test_pages_that_could_not_be_sent_are_sent_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that was replayed with a stale table would read another sequence's pages."""
    table = PageTable(3, 4, torch.device("cpu"))
    first = SequenceBlocks(1, [7, 5])
    table.row(first)

    def failing(*_: Any) -> None:
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(page_table, "to_device", failing)
        with pytest.raises(RuntimeError, match="no memory"):
            table.send()
    first.pages.append(9)
    for blocks in (SequenceBlocks(2, [8, 8, 8]), SequenceBlocks(2, [6]), first):
        table.row(blocks)
    table.send()
    assert table.device.tolist() == [[0, 0, 0, 0], [7, 5, 9, 0], [6, 0, 0, 0]]


def test_a_table_that_nobody_asks_for_does_not_grow() -> None:
    """Where no graphs are replayed, as on a CPU, nothing is ever sent."""
    table = PageTable(3, 4, torch.device("cpu"))
    for number in range(100):
        table.row(SequenceBlocks(number % 3, [number]))
    assert len(table._unsent) == 3


class Grammar:
    """Stands for the state of a grammar: `fails` says where it does."""

    thinking = False

    def __init__(self, fails: str, after: int) -> None:
        self._fails, self._left = fails, after

    def fill(self, bits: torch.Tensor, row: int) -> None:
        bits[row] = -1
        if self._fails == "fill" and self._left == 0:
            raise RuntimeError("no mask")

    def accept(self, token: int) -> bool:
        self._left -= 1
        if self._fails == "accept" and self._left < 0:
            raise RuntimeError("no way")
        return self._fails != "refuse" or self._left >= 0


@pytest.mark.parametrize(
    ("fails", "error", "tokens"),
    [("fill", "RuntimeError: no mask", 2), ("accept", "RuntimeError: no way", 3),
     ("refuse", "the grammar does not allow", 3)],
)  # fmt: skip
def test_a_grammar_that_fails_ends_who_follows_it(
    llm: LLM, alone: list[Reply], monkeypatch: pytest.MonkeyPatch, fails: str, error: str,
    tokens: int,
) -> None:  # fmt: skip
    """Beside one that does not fail."""

    def masks(states: dict[int, Grammar], pinned: bool = False) -> Masks:
        bits = torch.zeros(len(states), 16, dtype=torch.int32)
        for number, state in enumerate(states.values()):
            state.fill(bits, number)
        return Masks(bits, list(states))

    monkeypatch.setattr(llm.engine._grammars, "masks", masks)
    play = Play(llm)
    for kind in (fails, "never"):
        request = play.add(Asked([9, 9], params(7, 8)))
        request.completions[0].grammar = Grammar(kind, 2)  # type: ignore[assignment]
    sick, well, *others = play.run(ASKED)
    assert (sick.outputs[0].error or "").startswith(error)
    assert len(sick.outputs[0].token_ids) == tokens
    assert well.outputs[0].token_ids[:tokens] == sick.outputs[0].token_ids
    assert (well.outputs[0].finish_reason, len(well.outputs[0].token_ids)) == ("length", 8)
    assert [Reply(o.outputs, o.prompt_logprobs) for o in others] == alone

"""What readers of streams do, or leave undone, is nobody else's business, and nothing is left over.

Streams run on the stub model; whoever asks for a chunk drives the loop for everybody.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deepinfer import LLM, SamplingParams
from deepinfer.engine.output import StreamChunk
from deepinfer.engine.request import Request
from deepinfer.errors import RequestError
from tests.cpu.engine_helpers import (
    GREEDY,
    Asked,
    Play,
    assert_idle,
    audit_running,
    ids_of,
    played,
)
from tests.cpu.engine_stub import stub_llm

PROMPT = [20 + 7 * i % 200 for i in range(21)]
TEN = SamplingParams(max_tokens=10, seed=1, ignore_eos=True)


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "overlapped"])
def shared_llm(stub_folder: Path, request: pytest.FixtureRequest) -> LLM:
    return stub_llm(stub_folder, overlap=request.param)


@pytest.fixture
def llm(shared_llm: LLM) -> Iterator[LLM]:
    """The engine, which every test must leave idle."""
    yield shared_llm
    assert_idle(shared_llm)


@pytest.fixture(scope="module")
def ten(shared_llm: LLM) -> list[int]:
    """The ten tokens of TEN."""
    return ids_of(shared_llm.generate(PROMPT, TEN))[0]


def ids(chunks: list[StreamChunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


def test_a_stream_that_is_not_read_waits_for_nobody(llm: LLM, ten: list[int]) -> None:
    """Others are served meanwhile, and what it missed is there when it is read at last."""
    stream = llm.stream(PROMPT, TEN)
    first = next(stream)
    assert ids_of(llm.generate([[5, 6]] * 5, SamplingParams(max_tokens=20, **GREEDY)))
    assert ids([first, *stream]) == ten


@pytest.mark.parametrize("read", range(11))
def test_a_stream_may_be_closed_anywhere(llm: LLM, ten: list[int], read: int) -> None:
    """Before it began, after any chunk, after the last; its neighbour gets its tokens."""
    neighbour = llm.stream(PROMPT, TEN)
    first = next(neighbour)
    stream = llm.stream([*PROMPT[:9], 5], TEN)
    for _ in range(read):
        next(stream)
    stream.close()  # type: ignore[attr-defined]
    audit_running(llm.engine)
    assert ids([first, *neighbour]) == ten


def test_requests_may_come_between_two_chunks(llm: LLM, ten: list[int]) -> None:
    """By a stream's reader, to the engine itself too, where nobody takes their chunks."""
    direct = []
    for _ in llm.stream([5, 6], SamplingParams(max_tokens=6, **GREEDY)):
        request = llm.request(PROMPT, TEN)
        llm.engine.add(request)
        direct.append(request)
        assert ids_of(llm.generate(PROMPT, TEN)) == [ten]
    while llm.engine.has_work:
        llm.engine.step()
    assert [request.completions[0].generated for request in direct] == [ten] * 6


@pytest.mark.parametrize("queued", [False, True])
def test_ctrl_c_while_a_request_queues_up(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, queued: bool
) -> None:
    """Whether it was queued by then or not, it is gone, and so are those of the same call."""
    add, calls = llm.engine.add, iter(range(9))

    def interrupted(request: Request) -> None:
        if next(calls) < 2:
            add(request)
            return
        if queued:
            add(request)
        raise KeyboardInterrupt

    monkeypatch.setattr(llm.engine, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([PROMPT] * 3, TEN)
    assert_idle(llm)


def test_a_full_queue_takes_nothing_of_a_call(stub_folder: Path) -> None:
    llm = stub_llm(stub_folder, max_queue=2)
    with pytest.raises(RequestError, match="queue is full"):
        llm.generate([PROMPT] * 3, TEN)
    assert_idle(llm)
    assert len(llm.generate([PROMPT] * 2, TEN)) == 2


def test_closing_the_engine_ends_its_streams(stub_folder: Path) -> None:
    """In the middle of everything, twice, and with readers that come back later."""
    with stub_llm(stub_folder) as llm:
        streams = [llm.stream(PROMPT, TEN) for _ in range(2)]
        first = [next(stream) for stream in streams]
        next(streams[0])
        llm.close()
        llm.close()
    for stream, chunk in zip(streams, first, strict=True):
        chunks = [chunk, *stream]
        assert [c.finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["abort"]
        assert list(stream) == []


def test_a_storm_of_10_000_requests_and_aborts(shared_llm: LLM) -> None:
    """Most are gone before they run, some while they do; whoever is left gets what is his."""
    rng = random.Random(1)
    llm, engine = shared_llm, shared_llm.engine
    prompts = [PROMPT[: rng.randint(1, 21)] for _ in range(20)]
    params: list[SamplingParams] = [
        SamplingParams(max_tokens=3, n=n, **kind)
        for n in (1, 1, 1, 3)
        for kind in ({"temperature": 0.0}, {"seed": 1, "presence_penalty": 0.5})
    ]
    asked = [Asked(prompt, one) for prompt in prompts for one in params]
    requests = []
    left: list[tuple[Asked, Request]] = []
    for number in range(10_000):
        one = rng.choice(asked)
        request = llm.request(one.prompt, one.params)
        engine.add(request)
        requests.append(request)
        victim = rng.choice([number, number, number - 1, rng.randrange(number + 1)])
        engine.abort(requests[victim].request_id)
        if number % 500 == 0:
            keep = rng.choice(asked)
            request = llm.request(keep.prompt, keep.params, priority=-1)
            engine.add(request)
            left.append((keep, request))
        if rng.random() < 0.05:
            engine.step()
            audit_running(engine)
    for request in requests:
        engine.abort(request.request_id)
    while engine.has_work:
        engine.step()
    assert all(request.ended for request in requests)
    for keep, request in left:
        whole: Any = played(llm, [keep])[0]
        assert [o.token_ids for o in request.output().outputs] == [
            o.token_ids for o in whole.outputs
        ]
    assert_idle(llm)


def test_a_deadline_may_pass_anywhere(stub_folder: Path) -> None:
    """While it waits, in its prompt, between its tokens: the later, the more tokens there are."""
    llm = stub_llm(stub_folder, max_num_seqs=2)
    counts = []
    for seconds in range(1, 20):
        play = Play(llm)
        llm.engine.clock = llm.engine.scheduler.clock = lambda play=play: float(play.steps)
        late = Asked(PROMPT, SamplingParams(max_tokens=8, **GREEDY), timeout=float(seconds))
        free = Asked([*PROMPT, 5], TEN)
        outputs = play.run([free, late, free, late])
        assert [o.outputs[0].finish_reason for o in outputs[::2]] == ["length"] * 2
        whole = ids_of(llm.generate(PROMPT, late.params))[0]
        for output in outputs[1::2]:
            one = output.outputs[0]
            assert one.token_ids == whole[: len(one.token_ids)]
            assert one.finish_reason == ("length" if len(one.token_ids) == 8 else "deadline")
        counts.append([len(output.outputs[0].token_ids) for output in outputs[1::2]])
    for one in zip(*counts, strict=True):
        assert sorted(one) == list(one)
        assert (one[0], one[-1]) == (0, 8)

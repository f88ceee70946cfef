"""Ctrl-C at any line of the engine: nobody is lost, nothing wrong is kept, the engine goes on.

A trace function raises KeyboardInterrupt at one line of engine, books or sampler while requests of
every kind run on the stub model, and the loop is driven on as a caller may who has caught it.
"""

import random
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import deepinfer
from deepinfer import LLM, SamplingParams
from deepinfer.engine.output import RequestOutput
from deepinfer.engine.request import Request
from tests.cpu.engine_helpers import Asked, Play, Reply, played, reply
from tests.cpu.engine_stub import stub_llm

Place = tuple[str, int]
PACKAGE = Path(deepinfer.__file__).parent
TRACED = tuple(f"{PACKAGE / name}/" for name in ("engine", "kv", "sampling"))

INTERRUPTED = "it was interrupted while its text was written"
LONG = [20 + 7 * i % 200 for i in range(21)]


def params(seed: int, tokens: int, **others: Any) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, seed=seed, ignore_eos=True, **others)


# Chunks, hits, a fork, preemption, penalties, reports, a stop string, a deadline that passes.
ASKED = [
    Asked([5, 6, 7], params(1, 12, logprobs=1)),
    Asked(LONG, params(2, 9, presence_penalty=0.5)),
    Asked([*LONG[:9], 9], params(3, 4, n=2, prompt_logprobs=1, stop=["e", "a"]), at=1),
    Asked([*LONG[:18], 11, 12], params(5, 9), at=3, priority=-1),
    Asked([7, 7], params(6, 30), at=4, timeout=6.0),
    Asked([*LONG[:18], 11, 13], params(7, 2), at=6),
]


class Interrupter:
    """Raises KeyboardInterrupt at line event number `at`, or counts the events of each line."""

    def __init__(self, at: int | None = None) -> None:
        self.at = at
        self.events = 0
        self.places: dict[Place, list[int]] = defaultdict(list)
        self.struck: Place | None = None

    def __call__(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        file = frame.f_code.co_filename
        if not file.startswith(TRACED) or file.endswith("audit.py"):
            return None
        if event == "line":
            place = file, frame.f_lineno
            if self.at is None:
                self.places[place].append(self.events)
            elif self.events == self.at and self.struck is None:
                self.struck = place
                raise KeyboardInterrupt
            self.events += 1
        return self

    def run(self, call: Callable[[], Any]) -> Any:
        sys.settrace(self)
        try:
            return call()
        finally:
            sys.settrace(None)


class InterruptedPlay(Play):
    """A play that goes on after an interrupt.

    Attributes:
        lossy: whether the interrupt came when a step had been completed, and its chunks with it.
    """

    def __init__(self, llm: LLM, interrupter: Interrupter) -> None:
        super().__init__(llm)
        self.interrupter = interrupter
        self.lossy = False

    def queue(self, request: Request) -> None:
        try:
            self.interrupter.run(lambda: super(InterruptedPlay, self).queue(request))
        except KeyboardInterrupt:
            self.llm.engine.abort(request.request_id)  # it may or may not have been queued
            raise

    def add(self, asked: Asked) -> Request:
        while True:
            with suppress(KeyboardInterrupt):
                return super().add(asked)

    def step(self) -> None:
        try:
            self.interrupter.run(super().step)
        except KeyboardInterrupt:
            self.lossy = not self.llm.engine._torn
            self.steps += 1

    def abort(self, number: int) -> None:
        try:
            self.interrupter.run(lambda: super(InterruptedPlay, self).abort(number))
        except KeyboardInterrupt:
            self.lossy = not self.llm.engine._torn
            super().abort(number)

    def _compare(self, whole: Any, chunks: Sequence[Any]) -> None:
        """All of it was streamed, except where chunks were lost or that chunk was being made."""
        if not self.lossy and whole.error != INTERRUPTED:
            super()._compare(whole, chunks)

    def outputs(self) -> list[RequestOutput]:
        for request in self.requests:
            for completion in request.completions:
                self._chunks.setdefault((request.request_id, completion.index), [])
        return super().outputs()


class World:
    """An engine whose clock is the number of its steps."""

    def __init__(self, folder: Path, overlap: bool) -> None:
        self.llm = stub_llm(folder, overlap=overlap, cache_tokens=40, max_model_len=40,
                            prefix_checkpoints=2, max_num_seqs=4)  # fmt: skip
        self.play = InterruptedPlay(self.llm, Interrupter())
        self.llm.engine.clock = self.llm.engine.scheduler.clock = lambda: float(self.play.steps)

    def run(self, at: int | None) -> list[Reply]:
        """ASKED from the beginning, with an interrupt at line event `at`."""
        self.llm.engine.scheduler.restart([])
        self.play = InterruptedPlay(self.llm, Interrupter(at))
        outputs = self.play.run(ASKED, between=self.between)
        return [reply(output) for output in outputs]

    def between(self, step: int) -> None:
        if step == 12:
            self.play.abort(1)


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "overlapped"])
def world(stub_folder: Path, request: pytest.FixtureRequest) -> World:
    return World(stub_folder, request.param)


@pytest.fixture(scope="module")
def alone(stub_folder: Path) -> list[Reply]:
    llm = stub_llm(stub_folder, prefix_checkpoints=0, max_num_batched_tokens=96)
    return [played(llm, [replace(one, at=0, timeout=None)])[0] for one in ASKED]


def check(world: World, alone: list[Reply], at: int) -> bool:
    """Interrupt at one event; whether that ended a reply."""
    replies = world.run(at)
    interrupted = 0
    for number, (ours, theirs) in enumerate(zip(replies, alone, strict=True)):
        for one, whole in zip(ours.outputs, theirs.outputs, strict=True):
            ids = one.token_ids
            assert ids == whole.token_ids[: len(ids)], (at, number)
            reason = one.finish_reason
            if reason == "error":
                assert one.error == INTERRUPTED
                interrupted += 1
            elif reason in ("abort", "deadline"):
                assert number == {"abort": 1, "deadline": 4}[reason]
            else:
                assert one == whole
        if ours.prompt_logprobs is not None and ours.outputs[0].finish_reason != "error":
            assert ours.prompt_logprobs == theirs.prompt_logprobs
    assert interrupted <= 1
    return bool(interrupted)


def sweep(world: World, alone: list[Reply], share: int, seed: int) -> None:
    """One event of one in `share` of all lines that run."""
    world.run(None)
    places = world.play.interrupter.places
    rng = random.Random(seed)
    chosen = [rng.choice(places[place]) for place in sorted(places)[seed % share :: share]]
    struck = ended = 0
    for event in chosen:
        ended += check(world, alone, event)
        struck += world.play.interrupter.struck is not None
    assert struck >= len(chosen) * 0.9
    assert ended <= struck * 0.2
    assert world.run(10**9) == world.run(10**9)


def test_at_some_lines(world: World, alone: list[Reply]) -> None:
    sweep(world, alone, share=30, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_at_every_line(world: World, alone: list[Reply], seed: int) -> None:
    sweep(world, alone, share=8, seed=seed)

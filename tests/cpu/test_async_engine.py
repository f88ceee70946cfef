"""Requests by asyncio: same replies, and no request, reader or shutdown is left waiting."""

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deepinfer import LLM, SamplingParams
from deepinfer.engine.async_engine import AsyncEngine, EngineClosed
from deepinfer.engine.output import StreamChunk
from deepinfer.errors import RequestError
from tests.cpu.engine_helpers import GREEDY, ids_of, poison, small_llm

PROMPTS = [[5, 6, 7], [8], list(range(20, 57)), [9, 10], list(range(30, 49))]
PARAMS = SamplingParams(max_tokens=9, seed=4, temperature=0.7, logprobs=1)


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "overlapped"])
def llm(small_folder: Path, request: pytest.FixtureRequest) -> LLM:
    return small_llm(small_folder, overlap=request.param)


def served(llm: LLM, use: Callable[[AsyncEngine], Awaitable[Any]]) -> Any:
    """The result of `use`; afterwards nothing is left of any request."""

    async def run() -> Any:
        async with AsyncEngine(llm) as engine:
            return await asyncio.wait_for(use(engine), 60)

    poison(llm)
    result = asyncio.run(run())
    assert not llm.engine.has_work
    assert not llm.engine._completions
    return result


def joined(chunks: list[StreamChunk]) -> tuple[str, list[int]]:
    return "".join(c.text for c in chunks), [t for c in chunks for t in c.token_ids]


def test_replies_are_those_of_the_plain_engine(llm: LLM) -> None:
    async def all_at_once(engine: AsyncEngine) -> Any:
        return await asyncio.gather(*(engine.generate(p, PARAMS) for p in PROMPTS))

    replies = served(llm, all_at_once)
    expected = llm.generate(PROMPTS, PARAMS)
    assert ids_of(replies) == ids_of(expected)
    assert [r.outputs[0].logprobs for r in replies] == [r.outputs[0].logprobs for r in expected]


def test_chunks_add_up_to_the_reply(llm: LLM) -> None:
    """Read at once, or only when everything is there; several replies to one prompt as well."""

    async def read(engine: AsyncEngine) -> Any:
        params = SamplingParams(max_tokens=7, seed=1, n=2, ignore_eos=True)
        prompt, late = [await engine.add(PROMPTS[0], params) for _ in range(2)]
        chunks = [chunk async for chunk in engine.stream(prompt)]
        while not late.ended:
            await asyncio.sleep(0)
        await engine.abort("nobody")  # what was sent before it has arrived after it
        unread = [chunk async for chunk in engine.stream(late)]
        return prompt.output(), late.output(), chunks, unread

    output, late, chunks, unread = served(llm, read)
    for reply in output.outputs:
        own = [c for c in chunks if c.index == reply.index]
        assert joined(own) == (reply.text, reply.token_ids)
        assert [c.finish_reason for c in own[:-1]] == [None] * (len(own) - 1)
    assert [(c.index, joined([c])) for c in unread] == [
        (r.index, (r.text, r.token_ids)) for r in late.outputs
    ]


def test_leaving_a_stream_aborts(llm: LLM) -> None:
    async def leave(engine: AsyncEngine) -> Any:
        request = await engine.add([5], SamplingParams(max_tokens=100, **GREEDY))
        stream = engine.stream(request)
        async for _ in stream:
            break
        await stream.aclose()  # type: ignore[attr-defined]
        while not request.ended:
            await asyncio.sleep(0)
        return request.completions[0].finish_reason

    assert served(llm, leave) == "abort"


def test_cancelling_a_call_aborts(llm: LLM) -> None:
    async def cancel(engine: AsyncEngine) -> Any:
        task = asyncio.create_task(engine.generate([5], SamplingParams(max_tokens=150, **GREEDY)))
        while not engine.metrics.running:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while llm.engine.has_work:
            await asyncio.sleep(0)
        return (await engine.generate([6], SamplingParams(max_tokens=2, **GREEDY))).outputs

    assert len(served(llm, cancel)) == 1


def test_abort_by_id(llm: LLM) -> None:
    async def abort(engine: AsyncEngine) -> Any:
        request = await engine.add([5], SamplingParams(max_tokens=100, **GREEDY))
        await engine.abort(request.request_id)
        await engine.abort("nobody")
        return [chunk.finish_reason async for chunk in engine.stream(request)][-1]

    assert served(llm, abort) == "abort"


def test_refusals_reach_the_caller(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = llm.engine.scheduler

    async def refuse(engine: AsyncEngine) -> Any:
        with pytest.raises(RequestError, match="empty"):
            await engine.add([])
        with monkeypatch.context() as patch:
            patch.setattr(scheduler, "limits", replace(scheduler.limits, max_queue=0))
            with pytest.raises(RequestError, match="the queue is full"):
                await engine.add([5])
        request = await engine.add([5], SamplingParams(max_tokens=1, **GREEDY))
        assert [c async for c in engine.stream(request)]
        with pytest.raises(RequestError, match="not being served"):
            await anext(engine.stream(request))
        return True

    assert served(llm, refuse)


def test_shutdown_in_mid_work(llm: LLM) -> None:
    """What runs is aborted, readers get their end, later calls are refused."""

    async def stop(engine: AsyncEngine) -> Any:
        requests = [await engine.add(p, SamplingParams(max_tokens=100, **GREEDY)) for p in PROMPTS]
        await engine.close()
        for request in requests:
            assert [c async for c in engine.stream(request)][-1].finish_reason == "abort"
        with pytest.raises(EngineClosed):
            await engine.add([5])
        with pytest.raises(EngineClosed):
            await engine.abort("1")
        return [request.completions[0].finish_reason for request in requests]

    assert served(llm, stop) == ["abort"] * 5


def test_shutdown_waits_for_what_ends_in_time(llm: LLM) -> None:
    async def stop(engine: AsyncEngine) -> Any:
        requests = [await engine.add(p, PARAMS) for p in PROMPTS]
        await engine.close(drain_seconds=50)
        return [request.completions[0].finish_reason for request in requests]

    assert set(served(llm, stop)) <= {"length", "stop"}


def test_a_breakdown_reaches_everybody(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error outside of any request: readers and callers hear of it, nobody waits for ever."""

    async def run() -> None:
        engine = AsyncEngine(llm)
        request = await engine.add([5], SamplingParams(max_tokens=100, **GREEDY))
        monkeypatch.setattr(llm.engine.scheduler, "plan", broken)
        with pytest.raises(EngineClosed, match="RuntimeError: no plan"):
            [chunk async for chunk in engine.stream(request)]
        with pytest.raises(EngineClosed):
            await engine.add([6])
        await engine.close()
        llm.engine.abort(request.request_id)

    def broken() -> None:
        raise RuntimeError("no plan")

    asyncio.run(run())
    monkeypatch.undo()
    assert not llm.engine.has_work


def test_a_breakdown_in_which_nothing_works_reaches_everybody(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Aborting fails as well, in the middle of other commands: no reader and no caller waits."""

    def broken(*args: Any) -> Any:
        raise RuntimeError("nothing works")

    async def run() -> None:
        engine = AsyncEngine(llm)
        left, read = [
            await engine.add([5], SamplingParams(max_tokens=100, **GREEDY)) for _ in range(2)
        ]
        stream = engine.stream(left)
        await anext(stream)
        monkeypatch.setattr(llm.engine, "abort", broken)
        monkeypatch.setattr(llm.engine, "add", broken)
        with engine._wake:  # so that both commands are there at once
            closing = asyncio.create_task(stream.aclose())  # type: ignore[attr-defined]
            adding = asyncio.create_task(engine.add([6]))
            while not engine._commands:
                await asyncio.sleep(0)
        with pytest.raises((EngineClosed, RuntimeError)):
            await asyncio.wait_for(adding, 20)
        await closing
        with pytest.raises(EngineClosed, match="nothing works"):
            [chunk async for chunk in engine.stream(read)]
        monkeypatch.undo()
        await engine.close()
        for request in (left, read):
            llm.engine.abort(request.request_id)

    asyncio.run(run())
    assert not llm.engine.has_work


def test_one_reader_a_stream(llm: LLM) -> None:
    async def twice(engine: AsyncEngine) -> Any:
        request = await engine.add(PROMPTS[0], PARAMS)
        first = engine.stream(request)
        await anext(first)
        with pytest.raises(RequestError, match="is read already"):
            await anext(engine.stream(request))
        return [chunk async for chunk in first][-1].finish_reason

    assert served(llm, twice) == "length"


def test_another_event_loop_is_refused(llm: LLM) -> None:
    async def elsewhere(engine: AsyncEngine) -> None:
        request = await engine.add(PROMPTS[0], PARAMS)

        async def use() -> None:
            for ask in (engine.generate([5]), engine.abort("1"), anext(engine.stream(request))):
                with pytest.raises(RequestError, match="belongs to another event loop"):
                    await ask

        await asyncio.to_thread(asyncio.run, use())
        assert (await engine.generate([5, 6], PARAMS)).outputs[0].finish_reason == "length"

    served(llm, elsewhere)


def test_the_thread_ends_with_its_loop(llm: LLM) -> None:
    """Somebody forgot to close the engine, with a request running."""

    async def forget() -> AsyncEngine:
        engine = AsyncEngine(llm)
        await engine.add([5, 6], SamplingParams(max_tokens=150, ignore_eos=True, seed=1))
        return engine

    engine = asyncio.run(forget())
    engine._thread.join(60)
    assert not engine._thread.is_alive()
    assert not llm.engine.has_work
    assert llm.generate([5, 6], PARAMS)[0].outputs[0].finish_reason == "length"


def test_a_forgotten_engine_does_not_take_the_process_down(small_folder: Path) -> None:
    """Python ends the thread of one that computes by force, which C++ does not bear."""
    program = (
        "import asyncio\nfrom deepinfer import LLM, SamplingParams\n"
        "from deepinfer.engine.async_engine import AsyncEngine\n"
        "async def forget():\n"
        f"    engine = AsyncEngine(LLM({str(small_folder)!r}, device='cpu', threads=1))\n"
        "    await engine.add([5, 6], SamplingParams(max_tokens=1000, ignore_eos=True))\n"
        "asyncio.run(forget())\nprint('ended')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                          timeout=120, check=False)  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr


@pytest.mark.parametrize("by_id", [False, True])
def test_a_request_is_aborted_by_itself_or_its_id(llm: LLM, by_id: bool) -> None:
    async def cut(engine: AsyncEngine) -> Any:
        request = await engine.add([5, 6], SamplingParams(max_tokens=150, ignore_eos=True, seed=1))
        stream = engine.stream(request)
        await anext(stream)
        await engine.abort(request.request_id if by_id else request)
        with pytest.raises(RequestError, match="expected a request or its id"):
            await engine.abort(None)  # type: ignore[arg-type]
        return [chunk async for chunk in stream][-1].finish_reason

    assert served(llm, cut) == "abort"

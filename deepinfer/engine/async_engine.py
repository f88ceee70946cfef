"""The engine for asyncio: requests come and go while a thread of its own runs the steps.

Knows the loop's commands and who listens to which request; must not know how a step works. Only the
thread touches the engine. A listener that never reads costs the memory of its reply and nobody else
anything: what it has not read is merged into one chunk.
"""

import asyncio
import atexit
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from deepinfer.engine.intake import Prompt
from deepinfer.engine.llm import LLM
from deepinfer.engine.metrics import Metrics
from deepinfer.engine.output import RequestOutput, StreamChunk
from deepinfer.engine.request import Request
from deepinfer.errors import DeepInferError, RequestError
from deepinfer.log import logger
from deepinfer.sampling.params import SamplingParams


class EngineClosed(DeepInferError):
    """The engine is shutting down, or has broken down; it takes no requests any more."""


class _Listener:
    """What one request has got and its reader has not, by completion.

    Lives in the event loop's thread.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self._unread: dict[int, StreamChunk] = {}
        self._news = asyncio.Event()
        self.left = len(request.completions)  # replies that have not ended
        self.read = False  # whether somebody reads it
        self.failure: DeepInferError | None = None

    def put(self, chunk: StreamChunk) -> None:
        """One more chunk, merged with what is unread."""
        before = self._unread.pop(chunk.index, None)
        self._unread[chunk.index] = chunk if before is None else _merged(before, chunk)
        self.left -= chunk.finish_reason is not None
        self._news.set()

    def fail(self, failure: DeepInferError) -> None:
        """Nothing will come any more; whoever has got everything need not know."""
        if self.left:
            self.failure = failure
            self._news.set()

    async def chunks(self) -> AsyncIterator[StreamChunk]:
        """Chunks until every completion has ended."""
        while True:
            while self._unread:
                yield self._unread.pop(next(iter(self._unread)))
            if self.failure is not None:
                raise self.failure
            if not self.left:
                return
            self._news.clear()
            await self._news.wait()


class AsyncEngine:
    """Requests by asyncio, steps by a thread.

    Made and used within one running event loop; `async with` closes it.

    Args:
        llm: loaded; the engine owns it from now on.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._loop = asyncio.get_running_loop()
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._listeners: dict[str, _Listener] = {}
        self._closing = False
        self._ended = False  # the thread takes no commands any more
        self._idle = asyncio.Event()
        self._idle.set()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        # A thread that computes when the interpreter ends would take the process down with it.
        atexit.register(self._leave)
        self._thread.start()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def metrics(self) -> Metrics:
        """What was done so far; read it, do not keep it."""
        return self._llm.metrics

    async def add(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, priority: int = 0,
        timeout: float | None = None,
    ) -> Request:  # fmt: skip
        """Queue a prompt; its id is `request_id`, `stream` gives its chunks.

        Raises:
            RequestError: it cannot be served, or the queue is full. EngineClosed: no more requests.
        """
        self._check_loop()
        params = SamplingParams() if sampling_params is None else sampling_params
        # Encoding a long text or compiling a grammar must not hold up the event loop.
        request = await asyncio.to_thread(
            self._llm.request, prompt, params, priority=priority, timeout=timeout
        )
        if self._closing:
            raise EngineClosed("the engine is shutting down; send the request to another one")
        self._listeners[request.request_id] = _Listener(request)
        self._idle.clear()
        try:
            await self._call(lambda: self._llm.engine.add(request))
        except BaseException:
            self._forget(request.request_id)
            self._abandon(request)  # a cancelled call may have queued it
            raise
        return request

    async def stream(self, request: Request) -> AsyncIterator[StreamChunk]:
        """Chunks of a queued request; leaving the loop aborts it.

        What came since the last chunk was read arrives as one. A stream that was closed before its
        first chunk was asked for aborts nothing.

        Raises:
            RequestError: the request is unknown, or somebody reads it, or has read it to its end.
            EngineClosed: the engine broke down before the end.
        """
        self._check_loop()
        listener = self._listeners.get(request.request_id)
        if listener is None or listener.read:
            what = "is read already" if listener else "is not being served; add it first"
            raise RequestError(f"request {request.request_id} {what}")
        listener.read = True
        try:
            async for chunk in listener.chunks():
                yield chunk
        finally:
            self._forget(request.request_id)
            self._abandon(request)

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, priority: int = 0,
        timeout: float | None = None,
    ) -> RequestOutput:  # fmt: skip
        """The complete reply to one prompt; cancelling the call aborts it.

        Raises:
            RequestError, EngineClosed: as `add` and `stream`.
        """
        request = await self.add(prompt, sampling_params, priority=priority, timeout=timeout)
        async for _ in self.stream(request):
            pass
        return request.output()

    async def abort(self, request: Request | str) -> None:
        """End a request, or the one with this id; its stream gets a last chunk with finish_reason
        abort. One that has ended, or is unknown, is none of ours any more, and is ignored.

        Raises:
            RequestError: this is neither.
        """
        request_id = request.request_id if isinstance(request, Request) else request
        if not isinstance(request_id, str):
            raise RequestError(f"abort of {request!r:.60}; expected a request or its id")
        await self._call(lambda: self._abort(request_id))

    async def profile(self, file: Path, steps: int) -> None:
        """See LLM.profile."""
        await self._call(lambda: self._llm.profile(file, steps))

    async def close(self, *, drain_seconds: float = 0.0) -> None:
        """Take no more requests, wait for those that are running, abort the rest, end the thread.

        Args:
            drain_seconds: longest wait for requests to end by themselves.
        """
        self._closing = True
        if drain_seconds and self._thread.is_alive():
            try:
                await asyncio.wait_for(self._idle.wait(), drain_seconds)
            except TimeoutError:
                logger.warning(f"{len(self._listeners)} requests are aborted by the shutdown")
        for listener in self._listeners.values():
            self._abandon(listener.request)
        with self._wake:
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)
        atexit.unregister(self._leave)
        for listener in self._listeners.values():
            listener.fail(EngineClosed("the engine was shut down"))

    def _check_loop(self) -> None:
        if asyncio.get_running_loop() is not self._loop:
            raise RequestError(
                "this AsyncEngine belongs to another event loop; make and use it within one"
            )

    # In the event loop's thread.

    def _forget(self, request_id: str) -> None:
        self._listeners.pop(request_id, None)
        self._note_idle()

    def _note_idle(self) -> None:
        if not any(listener.left for listener in self._listeners.values()):
            self._idle.set()

    def _deliver(self, chunks: list[StreamChunk]) -> None:
        for chunk in chunks:
            listener = self._listeners.get(chunk.request_id)
            if listener is not None:
                listener.put(chunk)
        self._note_idle()

    def _broken(self, failure: DeepInferError) -> None:
        self._closing = True
        for listener in self._listeners.values():
            listener.fail(failure)

    def _command(self, command: Callable[[], None]) -> bool:
        """Let the thread do something before its next step; False when it has ended."""
        with self._wake:
            if not self._ended:
                self._commands.append(command)
                self._wake.notify()
            return not self._ended

    def _abandon(self, request: Request) -> None:
        """Nobody wants the rest of a request."""
        if not request.ended:
            self._command(lambda: self._abort(request.request_id))

    async def _call(self, command: Callable[[], None]) -> None:
        """The same, and wait for it; its exception is raised here."""
        self._check_loop()
        done: asyncio.Future[None] = self._loop.create_future()

        def settle(error: BaseException | None) -> None:
            if not done.cancelled():
                done.set_result(None) if error is None else done.set_exception(error)

        def run() -> None:
            error: BaseException | None = None
            try:
                command()
            except BaseException as raised:
                error = raised
            self._tell(settle, error)

        if not self._command(run):
            raise EngineClosed("the engine has ended; start a new one")
        await done

    # At the end of the interpreter.

    def _leave(self) -> None:
        """Have the thread end after its step, whatever still runs."""
        self._closing = True
        for listener in list(self._listeners.values()):
            self._abandon(listener.request)
        with self._wake:
            self._wake.notify()
        self._thread.join()

    # In the thread.

    def _abort(self, request_id: str) -> None:
        self._send(self._llm.engine.abort(request_id))

    def _send(self, chunks: list[StreamChunk]) -> None:
        if chunks:
            self._tell(self._deliver, chunks)

    def _tell(self, call: Callable[..., None], *args: Any) -> None:
        """Have the event loop do something. Once it is closed there is nobody to work for."""
        try:
            self._loop.call_soon_threadsafe(call, *args)
        except RuntimeError:
            self._closing = True
            for request_id in list(self._listeners):
                self._llm.engine.abort(request_id)

    def _run(self) -> None:
        engine = self._llm.engine
        try:
            while True:
                with self._wake:
                    while not (self._commands or engine.has_work or self._closing):
                        self._wake.wait()
                    if not (self._commands or engine.has_work):
                        self._ended = True
                        return
                # One that raises leaves the others in the queue.
                while self._commands:
                    self._commands.popleft()()
                if engine.has_work:
                    self._send(engine.step())
        except BaseException as error:
            logger.exception("the engine broke down")
            failure = EngineClosed(f"the engine broke down: {type(error).__name__}: {error}")
            self._tell(self._broken, failure)
            with self._wake:
                self._ended = True
            while self._commands:  # whoever waits for one must hear of it
                with suppress(Exception):
                    self._commands.popleft()()


def _merged(before: StreamChunk, after: StreamChunk) -> StreamChunk:
    """Two chunks of one completion as one."""
    logprobs: Any = None
    if before.logprobs is not None and after.logprobs is not None:
        logprobs = before.logprobs + after.logprobs
    return replace(
        after, text=before.text + after.text, token_ids=before.token_ids + after.token_ids,
        logprobs=logprobs,
    )  # fmt: skip

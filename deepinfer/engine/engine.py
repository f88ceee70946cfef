"""The loop: plan a step, launch it, sample, take what came of it.

Knows how scheduler, runner and sampler work together; must not know prompts' text, the command line
or how any of them does its part. In the overlapped loop the host takes the tokens of one step while
the device runs the next, which was planned and launched before they were known; both loops give the
same tokens.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from deepinfer.config import EngineConfig
from deepinfer.engine.drawing import Drawing, PromptRows
from deepinfer.engine.flight import Flight, Launched, SampledRow
from deepinfer.engine.metrics import Metrics, StepLog
from deepinfer.engine.output import StreamChunk
from deepinfer.engine.recording import Recording
from deepinfer.engine.request import Completion, Request
from deepinfer.engine.rows import ForwardRows
from deepinfer.engine.runner import Runner
from deepinfer.engine.scheduler import PlannedRows, Scheduler, SchedulerLimits, StepPlan
from deepinfer.engine.sequence import Sequence
from deepinfer.errors import ConfigError, RequestError
from deepinfer.kv.blocks import PageCopy, SlotCopy
from deepinfer.kv.manager import KVManager
from deepinfer.log import logger
from deepinfer.model.transformer import Transformer
from deepinfer.sampling.batch import Drawn
from deepinfer.sampling.grammar import GrammarCompiler
from deepinfer.sampling.logprobs import TokenLogprobs

# Tokens of a long prompt between the checkpoints that a hit can go on from.
CHECKPOINT_INTERVAL = 2048


class Engine:
    """Continuous batching of requests on one device.

    Args:
        model: loaded model; token_map: [V] int64 n-gram classes, None without n-gram layers.
        grammars: gave the requests their grammars; clock: seconds, never going back.

    Attributes:
        metrics: what was done so far.
    """

    def __init__(
        self, config: EngineConfig, model: Transformer, token_map: Tensor | None,
        grammars: GrammarCompiler, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.config = config
        self.clock = clock
        self.runner = Runner(config, model, token_map, config.state_slots)
        self.manager = KVManager(
            self.runner.pages, config.state_slots, config.page_tokens, config.prefix_checkpoints
        )
        limits = SchedulerLimits(config.max_num_seqs, config.max_num_batched_tokens,
                                 config.max_queue, CHECKPOINT_INTERVAL)  # fmt: skip
        self.scheduler = Scheduler(limits, self.manager, clock)
        self._grammars = grammars
        self.drawing = Drawing(self.config, self.runner, grammars)
        self.metrics = Metrics()
        if config.log_interval:
            logger.setLevel(logging.INFO)
        self._log = StepLog(config.log_interval, clock())
        self._eos = model.config.eos_token_id
        self._completions: dict[Sequence, Completion] = {}
        self._in_flight: list[Flight] = []
        self._outbox: list[StreamChunk] = []  # what the step under way has to tell
        self._torn = False
        self._recording: Recording | None = None

    @property
    def has_work(self) -> bool:
        """Whether any request has not ended, or a step is under way."""
        return bool(self._completions or self._in_flight or self._outbox)

    def add(self, request: Request) -> None:
        """Queue a checked request.

        Raises:
            RequestError: the queue is full, or the request can never fit; nothing is queued then.
        """
        try:
            with self._whole():
                self.scheduler.add(*(completion.sequence for completion in request.completions))
                request.arrival_s = self.clock()
                self._completions.update({c.sequence: c for c in request.completions})
        except RequestError:
            self._torn = False  # it was refused before anything was changed
            raise

    def abort(self, request_id: str) -> list[StreamChunk]:
        """End a request now; the last chunks of its replies that had not ended."""
        with self._whole():
            for sequence in self.scheduler.abort(request_id):
                self._ended(sequence)
            self._settle()
        chunks = [chunk for chunk in self._outbox if chunk.request_id == request_id]
        self._outbox = [chunk for chunk in self._outbox if chunk.request_id != request_id]
        return chunks

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """A change that is known not to have come to its end if an exception, such as Ctrl-C,
        leaves it; whoever wants something next mends that first."""
        self._mend()
        self._torn = True
        yield
        self._torn = False

    def _mend(self) -> None:
        """Put everything in order after a change that did not come to its end.

        Nothing is believed of the cache and its books: every sequence that has not ended goes back
        to the queue and computes its tokens again. Only a reply that was just being written ends.
        """
        if not self._torn:
            return
        self._in_flight.clear()
        self.drawing = Drawing(self.config, self.runner, self._grammars)
        told = {(chunk.request_id, chunk.index) for chunk in self._outbox if chunk.finish_reason}
        for sequence, completion in list(self._completions.items()):
            completion.slot = None
            del completion.logprobs[completion.count :]
            if (completion.request.request_id, completion.index) in told:
                del self._completions[sequence]
            elif completion.finish_reason is not None:
                self._forget(completion)
            elif sequence.ended_by is not None:
                self._ended(sequence)
            elif completion.sent != completion.count:
                completion.fail("it was interrupted while its text was written")
                self._forget(completion)
        self.scheduler.restart(self._completions)
        self._torn = False

    def _settle(self) -> None:
        """Without any sequence, nobody wants what the last step brings."""
        if not self.scheduler.has_work:
            self._in_flight.clear()

    def profile(self, file: Path, steps: int) -> None:
        """Record the next steps with PyTorch's profiler and write a Chrome trace.

        Raises:
            ConfigError: steps < 1, no such folder, or a recording is under way.
        """
        if self._recording is not None and not self._recording.done:
            raise ConfigError("a profile is being recorded; wait for its end")
        self._recording = Recording(file, steps)

    def step(self) -> list[StreamChunk]:
        """Run one step; the chunks of all replies that got tokens or ended.

        An exception that leaves it, such as Ctrl-C, costs no request more than a reply that was
        just being written: the next call begins with computing anew what was under way.
        """
        with self._whole():
            recording = self._recording
            with nullcontext() if recording is None or recording.done else recording.step():
                self._step()
        chunks, self._outbox = self._outbox, []
        return chunks

    def _step(self) -> None:
        plan = self.scheduler.plan()
        for sequence in plan.ended:
            self._ended(sequence)
        for sequence in plan.preempted:
            self.drawing.close(self._completions[sequence])
        launched = self._launch(plan)
        if not self.config.overlap:
            self._collect(self._sample(launched))
        else:
            earlier, self._in_flight = self._in_flight, []
            self._collect(earlier)
            self._in_flight = self._sample(launched)
            self._settle()
        self._measure(plan)

    # Launching.

    def _launch(self, plan: StepPlan) -> list[Launched]:
        """Run the copies and the forward of a plan; who cannot run has ended afterwards."""
        rows = self._copied(plan)
        launched = []
        if rows:
            try:
                launched = [self._forward(rows)]
            except Exception as error:
                launched = self._one_by_one(rows, error)
        self.scheduler.commit(plan)
        return launched

    def _copied(self, plan: StepPlan) -> list[PlannedRows]:
        """Run a plan's copies; the rows of sequences that have got what they wait for."""
        pool, done = self.runner.pool, 0
        try:
            for order in plan.copies:
                copy = pool.copy_slot if isinstance(order, SlotCopy) else pool.copy_page
                copy(order.source, order.target)
                done += 1
        except Exception as error:
            missing = {(type(order), order.target) for order in plan.copies[done:]}
            self.manager.tree.clear()  # checkpoints may be among what is missing
            for row in plan.rows:
                blocks = row.sequence.blocks
                assert blocks is not None
                own = {(PageCopy, page) for page in blocks.pages} | {(SlotCopy, blocks.slot)}
                if own & missing:
                    self._fail(row.sequence, error)
        return [row for row in plan.rows if row.sequence in self._completions]

    def _one_by_one(self, rows: list[PlannedRows], error: Exception) -> list[Launched]:
        """Run each sequence by itself after they have failed together, so that only those end that
        cannot run."""
        if len(rows) == 1:
            self._fail(rows[0].sequence, error)
            return []
        logger.warning(f"a step failed and is run sequence by sequence: {error}")
        launched = []
        slack = self.runner.geometry.rollback_tokens
        for row in rows:
            if row.start and row.count > slack:
                # The failed forward may have written over what the first of its rows read.
                self.scheduler.repeat(row.sequence, slack)
                continue
            try:
                launched.append(self._forward([row]).kept())
            except Exception as own:
                self._fail(row.sequence, own)
        return launched

    def _forward(self, rows: list[PlannedRows]) -> Launched:
        forward = []
        for row in rows:
            sequence, end = row.sequence, row.start + row.count
            assert sequence.blocks is not None
            completion = self._completions[sequence]
            floor = 0
            if self.config.yoco_prefill != "off":
                kept = self.config.yoco_keep_tokens
                floor = max(0, len(completion.request.prompt_ids) - kept)
            ids = [] if row.from_device else sequence.tokens[row.start : end]
            wanted = row.count if completion.reports_prompt(row.start) else row.samples
            forward.append(ForwardRows(sequence.blocks, ids, row.start, floor, int(wanted)))
        logits, places = self.runner.forward(forward)
        return Launched(rows, logits, places)

    def _fail(self, sequence: Sequence, error: Exception) -> None:
        logger.error(f"request {sequence.request_id} failed: {error!r}")
        completion = self._completions[sequence]
        self._end(completion, f"{type(error).__name__}: {error}")

    # Sampling.

    def _sample(self, launched: list[Launched]) -> list[Flight]:
        """Draw the next token of every sequence that is at its end and still wanted."""
        flights = []
        for part in launched:
            rows, prompts = [], []
            for row, place in zip(part.rows, part.places, strict=True):
                completion = self._completions.get(row.sequence)
                if completion is None:
                    continue  # it ended while its step ran
                if completion.reports_prompt(row.start):
                    prompts.append(PromptRows(completion, row.start, place))
                if row.samples:
                    rows.append(SampledRow(completion, place.stop - 1, row.start + row.count))
            if not rows and not prompts:
                continue
            try:
                flights.append(self.drawing.draw(part, rows, prompts))
            except Exception as error:
                logger.warning(f"drawing failed and is done sequence by sequence: {error}")
                # Prompts first: the logits of a step are valid until the next forward.
                flights += [self._draw_alone(part, [], [prompt]) for prompt in prompts]
                flights += [self._draw_alone(part, [row], []) for row in rows]
        return flights

    def _draw_alone(
        self, part: Launched, rows: list[SampledRow],
        prompts: list[PromptRows],
    ) -> Flight:  # fmt: skip
        """Draw for one sequence, from new logits, as the old ones may have been changed."""
        completion = rows[0].completion if rows else prompts[0].completion
        try:
            if rows:
                self.drawing.close(completion)  # it may have been told more than has happened
                again = PlannedRows(completion.sequence, rows[0].position - 1, 1, True, False)
                part, rows = self._forward([again]), [replace(rows[0], place=0)]
            return self.drawing.draw(part, rows, prompts)
        except Exception as error:
            return Flight([], [(completion, error)])

    # What came of it.

    def _collect(self, flights: list[Flight]) -> None:
        """Wait for the tokens of a step and give them to their sequences."""
        for flight in flights:
            failed = list(flight.failed)
            try:
                drawn = flight.receive()
            except Exception as lost:
                failed += [(completion, lost) for completion in flight.completions]
                drawn = Drawn([], [], {})
            for completion, reason in failed:
                if completion.finish_reason is None:
                    self._fail(completion.sequence, reason)
            for number, row in enumerate(flight.rows):
                completion = row.completion
                if completion.finish_reason is not None:
                    continue  # aborted, or out of time
                if number in drawn.faulty:
                    why = "the logits are no distribution: NaN, +inf, or nothing may be drawn"
                    self._end(completion, why)
                    continue
                try:
                    self._take(completion, drawn.tokens[number], drawn.logprobs.get(number))
                except Exception as error:
                    self._fail(completion.sequence, error)

    def _take(self, completion: Completion, token: int, logprobs: TokenLogprobs | None) -> None:
        if logprobs is not None:
            completion.logprobs.append(logprobs)
        self.scheduler.append(completion.sequence, token)
        self.metrics.count_token(completion, self.clock())
        grammar = completion.grammar
        if grammar is not None and not grammar.accept(token):
            error = f"the grammar does not allow token {token}, which its mask let through"
            self._end(completion, error)
            return
        completion.take(token, self._eos)
        if completion.finish_reason is not None:
            self._end(completion)
            return
        self._outbox.append(completion.chunk())
        completion.mark_sent()

    def _end(self, completion: Completion, error: str | None = None) -> None:
        """Forget a reply that has ended or ends with an error; its cache stays for others unless it
        failed."""
        if error is not None:
            completion.fail(error)
        self.scheduler.finish(completion.sequence, keep=error is None)
        self._forget(completion)

    def _ended(self, sequence: Sequence) -> None:
        """The same for a reply that the scheduler has ended."""
        assert sequence.ended_by is not None
        completion = self._completions[sequence]
        completion.finish(sequence.ended_by)
        self._forget(completion)

    def _forget(self, completion: Completion) -> None:
        assert completion.finish_reason is not None
        self.drawing.close(completion)
        self._outbox.append(completion.chunk())
        del self._completions[completion.sequence]
        self.metrics.ended(completion.finish_reason)

    def _measure(self, plan: StepPlan) -> None:
        metrics, now = self.metrics, self.clock()
        metrics.count_step(sum(row.count for row in plan.rows), plan.decodes, len(plan.rows))
        for row in plan.rows:
            completion = self._completions.get(row.sequence)
            if completion is not None and not completion.started:
                completion.started = True
                metrics.queue_s.add(now - completion.request.arrival_s)
        metrics.look(self.scheduler)
        line = self._log.line(metrics, now)
        if line is not None:
            logger.info(line)

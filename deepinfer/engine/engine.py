"""The loop: plan a step, launch it, sample, take what came of it.

Knows how scheduler, runner and sampler work together; must not know prompts' text, the command line
or how any of them does its part. In the overlapped loop the host takes the tokens of one step while
the device runs the next, which was planned and launched before they were known; both loops give the
same tokens.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from torch import Tensor

from deepinfer.config import EngineConfig
from deepinfer.engine.flight import Flight, Launched, SampledRow
from deepinfer.engine.metrics import Metrics, StepLog
from deepinfer.engine.output import StreamChunk
from deepinfer.engine.recording import Recording
from deepinfer.engine.request import Completion, Request
from deepinfer.engine.runner import ForwardRows, Runner
from deepinfer.engine.scheduler import PlannedRows, Scheduler, SchedulerLimits, StepPlan
from deepinfer.engine.sequence import Sequence
from deepinfer.errors import ConfigError, RequestError
from deepinfer.kv.blocks import PageCopy, SlotCopy
from deepinfer.kv.manager import KVManager
from deepinfer.log import logger
from deepinfer.model.transformer import Transformer
from deepinfer.sampling.batch import Drawn, Masks, SamplingBatch
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
        self._grammars = grammars
        self.runner = Runner(config, model, token_map, config.state_slots)
        self.manager = KVManager(
            self.runner.pages, config.state_slots, config.page_tokens, config.prefix_checkpoints
        )
        limits = SchedulerLimits(config.max_num_seqs, config.max_num_batched_tokens,
                                 config.max_queue, CHECKPOINT_INTERVAL)  # fmt: skip
        self.scheduler = Scheduler(limits, self.manager, clock)
        self.sampler = self._new_sampler()
        self.metrics = Metrics()
        self._log = StepLog(config.log_interval, clock())
        self._eos = model.config.eos_token_id
        self._completions: dict[Sequence, Completion] = {}
        self._open: dict[int, Completion] = {}  # whom the sampler knows by slot
        self._in_flight: list[Flight] = []
        self._outbox: list[StreamChunk] = []  # what the step under way has to tell
        self._torn = False
        self._recording: Recording | None = None

    @property
    def has_work(self) -> bool:
        """Whether any request has not ended, or a step is under way."""
        return bool(self._completions or self._in_flight or self._outbox)

    def _new_sampler(self) -> SamplingBatch:
        model = self.runner.model
        return SamplingBatch(
            self.config.state_slots, model.config.vocab_size, model.config.eos_token_id,
            self.runner.device, model.precision.operators,
        )  # fmt: skip

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
        self.sampler, self._open = self._new_sampler(), {}
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
            ConfigError: steps < 1, or a recording is under way.
        """
        if type(steps) is not int or steps < 1:
            raise ConfigError(f"profile of {steps!r} steps; expected a whole number of at least 1")
        if self._recording is not None:
            raise ConfigError("a profile is being recorded; wait for its end")
        self._recording = Recording(file, steps)

    def step(self) -> list[StreamChunk]:
        """Run one step; the chunks of all replies that got tokens or ended.

        An exception that leaves it, such as Ctrl-C, costs no request more than a reply that was
        just being written: the next call begins with computing anew what was under way.
        """
        with self._whole():
            if self._recording is None:
                self._step()
            else:
                with self._recording.step():
                    self._step()
                if self._recording.done:
                    self._recording = None
        chunks, self._outbox = self._outbox, []
        return chunks

    def _step(self) -> None:
        plan = self.scheduler.plan()
        for sequence in plan.ended:
            self._ended(sequence)
        for sequence in plan.preempted:
            self._close(self._completions[sequence])
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
            request = self._completions[sequence].request
            floor = 0
            if self.config.yoco_prefill != "off":
                floor = max(0, len(request.prompt_ids) - self.config.yoco_keep_tokens)
            ids = [] if row.from_device else sequence.tokens[row.start : end]
            wanted = row.count if _wants_prompt(self._completions[sequence], row) else row.samples
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
                if _wants_prompt(completion, row):
                    prompts.append((completion, row, place))
                if row.samples:
                    rows.append(SampledRow(completion, place.stop - 1, row.start + row.count))
            if not rows and not prompts:
                continue
            try:
                flights.append(self._draw(part, rows, prompts))
            except Exception as error:
                logger.warning(f"drawing failed and is done sequence by sequence: {error}")
                # Prompts first: the logits of a step are valid until the next forward.
                flights += [self._draw_alone(part, [], [prompt]) for prompt in prompts]
                flights += [self._draw_alone(part, [row], []) for row in rows]
        return flights

    def _draw_alone(
        self, part: Launched, rows: list[SampledRow],
        prompts: list[tuple[Completion, PlannedRows, slice]],
    ) -> Flight:  # fmt: skip
        """Draw for one sequence, from new logits, as the old ones may have been changed."""
        completion = rows[0].completion if rows else prompts[0][0]
        try:
            if rows:
                self._close(completion)  # it may have been told more than has happened
                again = PlannedRows(completion.sequence, rows[0].position - 1, 1, True, False)
                part, rows = self._forward([again]), [replace(rows[0], place=0)]
            return self._draw(part, rows, prompts)
        except Exception as error:
            return Flight([], [(completion, error)])

    def _draw(
        self, part: Launched, rows: list[SampledRow],
        prompts: list[tuple[Completion, PlannedRows, slice]],
    ) -> Flight:  # fmt: skip
        rows, masks, failed = self._masked(rows)
        flight = Flight(rows, failed)
        operators = self.runner.model.precision.operators
        for completion, row, place in prompts:
            flight.report_prompt(completion, row.start, part.logits[place], operators)
        if rows:
            slots = [self._slot(row.completion) for row in rows]
            with self.runner.guarded():
                logits = part.select([row.place for row in rows])
                positions = [row.position for row in rows]
                sampled = self.sampler.sample(logits, slots, positions, masks)
                self.runner.keep_sampled(slots, sampled.tokens)
            flight.sampled = sampled
        flight.send()
        return flight

    def _masked(
        self, rows: list[SampledRow]
    ) -> tuple[list[SampledRow], Masks | None, list[tuple[Completion, Exception]]]:
        """What grammars allow in these rows; rows whose grammar fails are left out."""
        states = {i: row.completion.grammar for i, row in enumerate(rows) if row.completion.grammar}
        if not states:
            return rows, None, []
        pinned = self.runner.device.type == "cuda"
        try:
            return rows, self._grammars.masks(states, pinned), []
        except Exception as together:
            failed = []
            for number, state in states.items():
                try:
                    self._grammars.masks({number: state})
                except Exception as own:
                    failed.append((rows[number].completion, own))
            if not failed:
                raise RuntimeError("grammars fail together, though none does alone") from together
            gone = {completion for completion, _ in failed}
            left, masks, more = self._masked([row for row in rows if row.completion not in gone])
            return left, masks, failed + more

    def _slot(self, completion: Completion) -> int:
        """State slot of a running sequence, which the sampler knows from now on."""
        blocks = completion.sequence.blocks
        assert blocks is not None, "sampled without a slot"
        if self._open.get(blocks.slot) is not completion:
            request = completion.request
            self._open[blocks.slot], completion.slot = completion, blocks.slot
            self.sampler.open(blocks.slot, request.params, completion.seed, request.prompt_ids,
                              completion.generated)  # fmt: skip
        return blocks.slot

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
        self._time(completion)
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
        self._close(completion)
        self._outbox.append(completion.chunk())
        del self._completions[completion.sequence]
        self.metrics.ended(completion.finish_reason)

    def _close(self, completion: Completion) -> None:
        """The sampler need not know it any more."""
        slot, completion.slot = completion.slot, None
        if slot is not None:
            del self._open[slot]
            self.sampler.close(slot)

    # Figures.

    def _time(self, completion: Completion) -> None:
        now, metrics = self.clock(), self.metrics
        if completion.last_token_s is None:
            metrics.first_token_s.add(now - completion.request.arrival_s)
        else:
            metrics.token_s.add(now - completion.last_token_s)
        completion.last_token_s = now
        metrics.generated_tokens += 1

    def _measure(self, plan: StepPlan) -> None:
        metrics, now = self.metrics, self.clock()
        rows = sum(row.count for row in plan.rows)
        if rows:
            metrics.steps += 1
            metrics.decode_steps += rows == plan.decodes
            metrics.prompt_tokens += rows - plan.decodes
            metrics.rows.add(rows)
            metrics.sequences.add(len(plan.rows))
            for row in plan.rows:
                completion = self._completions.get(row.sequence)
                if completion is not None and not completion.started:
                    completion.started = True
                    metrics.queue_s.add(now - completion.request.arrival_s)
        allocator = self.manager.allocator
        metrics.running = len(self.scheduler.running)
        metrics.waiting = len(self.scheduler.waiting)
        metrics.preemptions = self.scheduler.counters.preempted
        metrics.cache_use = 1 - allocator.free_pages / max(1, allocator.pages)
        metrics.prefix = asdict(self.manager.tree.counters)
        line = self._log.line(metrics, now)
        if line is not None:
            logger.info(line)


def _wants_prompt(completion: Completion, row: PlannedRows) -> bool:
    """Whether the rows' logits are needed for log-probabilities of the prompt."""
    request = completion.request
    wanted = request.params.prompt_logprobs is not None and completion.index == 0
    return wanted and row.start + 1 < len(request.prompt_ids)

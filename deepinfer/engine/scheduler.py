"""Which sequences run in the next step, with how many tokens each.

Knows sequences, budgets, deadlines and the cache's books; must not know torch, the model, sampling
or text. A step is planned, launched, committed; its tokens are told later. So the next step can be
planned while the device still works on this one: lengths are numbers, and a token that is not known
yet is a row that takes its input `from_device`.

Nobody waits for ever. Of all sequences that run, the one with the smallest rank never has to make
way and can take the pages of all others, so it advances in every step; when it ends, the next one
is the smallest. Nobody overtakes the head of the queue, which comes in at the latest when nobody
runs.
"""

import time
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from deepinfer.engine.sequence import Rank, Sequence, State
from deepinfer.errors import OutOfPages, RequestError
from deepinfer.kv.blocks import Copy, SequenceBlocks
from deepinfer.kv.manager import KVManager, Opened


@dataclass(frozen=True)
class SchedulerLimits:
    """Budgets.

    Attributes:
        max_num_seqs: most sequences that run at a time, at most the manager's slots for them.
        max_num_batched_tokens: most rows of a step, at least max_num_seqs.
        max_queue: most requests that wait; a request whose first sequence runs does not.
        checkpoint_interval: tokens of a long prompt between checkpoints in its middle.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_queue: int
    checkpoint_interval: int


@dataclass(slots=True)
class PlannedRows:
    """Rows of one sequence in one step.

    Attributes:
        start, count: the tokens start..start + count - 1 are computed.
        samples: whether the last row's logits give the next token.
        from_device: whether the row's input is the token that the step before gives.
    """

    sequence: Sequence
    start: int
    count: int
    samples: bool
    from_device: bool


@dataclass(slots=True)
class StepPlan:
    """One step.

    Attributes:
        rows: what to compute; the first `decodes` of them are single rows, chunks come after.
        copies: what to copy before, one after the other.
        ended: sequences whose deadline has passed; they have no rows any more.
        preempted: sequences that went back to the queue to make room.
    """

    rows: list[PlannedRows] = field(default_factory=list)
    decodes: int = 0
    copies: list[Copy] = field(default_factory=list)
    ended: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)


@dataclass
class SchedulerCounters:
    """Sequences since the start: what became of them on the way."""

    added: int = 0
    refused: int = 0
    aborted: int = 0
    expired: int = 0
    preempted: int = 0
    forked: int = 0


def _rank(sequence: Sequence) -> Rank:
    return sequence.rank


class Scheduler:
    """Continuous batching over one cache.

    Between `plan` and `commit` belongs the launch and nothing else; sequences that end in between,
    because the launch failed, leave nothing for others.

    Args:
        manager: the cache's books; no other user of it may take pages while sequences run.
        clock: seconds, never going back.

    Attributes:
        running: sequences with a slot, in the order of their admission (a dict as an ordered set).
        waiting: sequences that want one, smallest rank first.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        manager: KVManager,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert limits.max_num_batched_tokens >= limits.max_num_seqs, "a token for each sequence"
        self.limits = limits
        self.manager = manager
        self.clock = clock
        self.running: dict[Sequence, None] = {}
        self.waiting: list[Sequence] = []
        self.counters = SchedulerCounters()
        self._requests: dict[str, list[Sequence]] = {}
        self._arrivals = 0
        self._next_expiry = float("inf")
        self._launching: StepPlan | None = None
        self._due: list[tuple[Sequence, int, bool]] = []  # checkpoints to make: depth, replace
        self._leaders: list[Sequence] = []  # whose prompts are complete and who are to be forked
        self._held: set[Sequence] = set()
        # Sequence at the head that did not fit, pages that were available, sequences that ran.
        self._refused: tuple[Sequence, int, int] | None = None

    @property
    def has_work(self) -> bool:
        """Whether any sequence has not ended."""
        return bool(self._requests)

    def add(self, *group: Sequence) -> None:
        """Queue the new sequences of one request, which have the same prompt.

        The first one computes the prompt; the others branch off when that is done.

        Raises:
            RequestError: the queue is full, the sequence can never fit, or the id is in use;
                nothing is queued then.
        """
        first = group[0]
        self._check(first, len(group))
        self._arrivals += 1
        for sequence in group:
            assert sequence.state is State.NEW and sequence.tokens == first.tokens
            sequence.rank = (sequence.priority, self._arrivals, sequence.index)
            if sequence.deadline_s is not None:
                sequence.expires = self.clock() + sequence.deadline_s
                self._next_expiry = min(self._next_expiry, sequence.expires)
            sequence.state = State.HELD
        self._held.update(group)
        self._requests[first.request_id] = list(group)
        self.counters.added += len(group)
        self._queue(first)

    def abort(self, request_id: str) -> list[Sequence]:
        """End all sequences of a request now; those that had not ended before."""
        gone = list(self._requests.get(request_id, []))
        for sequence in gone:
            sequence.ended_by = "abort"
            self.finish(sequence)
        self.counters.aborted += len(gone)
        return gone

    def finish(self, sequence: Sequence, *, keep: bool = True) -> None:
        """End one sequence, for whatever reason its owner has.

        Args:
            keep: whether others may reuse what it computed; not after an error, which takes back
                what was kept before, too.
        """
        state, sequence.state = sequence.state, State.ENDED
        assert state not in (State.NEW, State.ENDED), f"{state.name} sequence ended"
        group = self._requests[sequence.request_id]
        group.remove(sequence)
        if not group:
            del self._requests[sequence.request_id]
        if state is State.HELD:
            self._held.discard(sequence)
            return
        if not keep:
            self.manager.tree.forget(sequence.tokens, sequence.extra_keys, sequence.cached_tokens)
        if state is State.RUNNING:
            # A step that is being launched may have overwritten what was computed before.
            self._release(sequence, keep and self._launching is None)
        else:
            del self.waiting[bisect_left(self.waiting, sequence.rank, key=_rank)]
        # Whoever still waits for this one's prompt has to compute it.
        for sibling in group:
            if sibling.state is State.HELD:
                self._queue(sibling)

    def append(self, sequence: Sequence, token: int) -> None:
        """Tell the oldest token that a launched step brought and that was not known yet.

        The sequence may have been preempted since, but not ended: tokens of rows whose sequence has
        ended are dropped by the caller.
        """
        assert sequence.pending > 0, "no launched row brings this token"
        assert sequence.state is not State.ENDED, "token for a sequence that has ended"
        sequence.pending -= 1
        sequence.tokens.append(token)

    def plan(self) -> StepPlan:
        """The next step: single rows of running sequences, then prefill chunks, then new ones."""
        assert self._launching is None, "the step before was not committed"
        plan = StepPlan()
        self._expire(plan)
        self._make_checkpoints(plan)
        self._fork(plan)
        prompts = self._plan_decodes(plan)
        plan.decodes = len(plan.rows)
        budget = self.limits.max_num_batched_tokens - plan.decodes
        for sequence in sorted(prompts, key=_rank):
            budget -= self._plan_chunk(sequence, budget, plan)
        if plan.preempted:
            # Nobody comes in at once where somebody has just had to go.
            plan.rows = [row for row in plan.rows if row.sequence.state is State.RUNNING]
            plan.decodes = sum(row.count == 1 for row in plan.rows[: plan.decodes])
        elif self.waiting:
            self._admit(plan, budget, prompts)
        self._launching = plan
        return plan

    def commit(self, plan: StepPlan) -> None:
        """The step was launched: what it computes counts as computed from now on."""
        assert plan is self._launching, "another step than the one that was planned last"
        self._launching = None
        for row in plan.rows:
            sequence = row.sequence
            if sequence.state is State.RUNNING:
                sequence.computed = row.start + row.count
                if row.samples:
                    sequence.pending += 1
                if row.start < sequence.prompt_end:
                    self._prompt_advanced(sequence)

    def repeat(self, sequence: Sequence, most_rows: int) -> None:
        """Let a sequence of the step that is being launched compute everything again, in chunks of
        at most `most_rows` tokens from now on; what it has in the cache may be half overwritten."""
        assert self._launching is not None, "nothing is being launched"
        sequence.most_rows = most_rows
        self._requeue(sequence, keep=False)

    def restart(self, sequences: Iterable[Sequence]) -> None:
        """Begin anew with these, which are all that have not ended; everybody queues up again.

        After a step that did not come to its end, nothing is believed of what the cache holds or
        what the books say.
        """
        self.manager.reset()
        self._launching = self._refused = None
        for lost in (self.running, self._requests, self._due, self._leaders, self._held):
            lost.clear()
        self.waiting = sorted(sequences, key=_rank)
        for sequence in self.waiting:
            if sequence.state is State.RUNNING:
                sequence.preemptions += 1
                self.counters.preempted += 1
            sequence.state, sequence.blocks = State.WAITING, None
            sequence.computed = sequence.pending = sequence.cut = sequence.kept = 0
            self._requests.setdefault(sequence.request_id, []).append(sequence)
        ends = (s.expires for s in self.waiting if s.expires is not None)
        self._next_expiry = min(ends, default=float("inf"))

    def _check(self, first: Sequence, count: int) -> None:
        limits, pages = self.limits, self.manager.pages
        problem = None
        if first.request_id in self._requests:
            problem = f"request id {first.request_id!r} is in use; expected a new one"
        elif self.manager.pages_for(first.most_tokens) > pages:
            problem = (
                f"prompt and max_tokens make {first.most_tokens} tokens, the cache holds"
                f" {pages * self.manager.page_tokens}; ask for less or raise cache_tokens"
            )
        elif len(self.waiting) >= limits.max_queue:
            problem = (
                f"the queue is full: {len(self.waiting)} requests wait, max_queue ="
                f" {limits.max_queue}; try again later or raise it"
            )
        if problem is not None:
            self.counters.refused += count
            raise RequestError(problem)

    def _queue(self, sequence: Sequence) -> None:
        self._held.discard(sequence)
        sequence.state = State.WAITING
        insort(self.waiting, sequence, key=_rank)

    def _release(self, sequence: Sequence, keep: bool) -> None:
        """Take a running sequence's slot and pages away."""
        blocks, sequence.blocks = sequence.blocks, None
        assert blocks is not None, "running without blocks"
        del self.running[sequence]
        if keep:
            self.manager.retire(blocks, sequence.tokens, sequence.computed, sequence.extra_keys)
        else:
            self.manager.free(blocks)
        sequence.computed = 0

    def _requeue(self, sequence: Sequence, keep: bool) -> None:
        self._release(sequence, keep)
        sequence.preemptions += 1
        self.counters.preempted += 1
        self._queue(sequence)

    def _expire(self, plan: StepPlan) -> None:
        if self._next_expiry == float("inf"):
            return
        now = self.clock()
        if now < self._next_expiry:
            return
        live = [s for group in self._requests.values() for s in group if s.expires is not None]
        gone = [s for s in live if s.expires is not None and s.expires <= now]
        for sequence in gone:
            sequence.ended_by = "deadline"
            self.finish(sequence)
        plan.ended = gone
        self.counters.expired += len(gone)
        left = (s.expires for s in live if s.expires is not None and s.expires > now)
        self._next_expiry = min(left, default=float("inf"))

    def _prompt_advanced(self, sequence: Sequence) -> None:
        """Note down the checkpoints and forks that follow from a committed chunk.

        The checkpoint of a complete prompt leaves out its last token, which has to be computed
        whenever the same prompt comes again.
        """
        computed, size = sequence.computed, self.manager.page_tokens
        complete = computed >= sequence.prompt_end
        depth = (computed - complete) // size * size
        wanted = complete or computed == sequence.cut
        gained = depth - sequence.kept
        if gained > 0 and (wanted or gained >= self.limits.checkpoint_interval):
            self._due.append((sequence, depth, wanted))
            sequence.kept = depth
        if complete and self._held:
            self._leaders.append(sequence)

    def _make_checkpoints(self, plan: StepPlan) -> None:
        for sequence, depth, replace in self._due:
            blocks = sequence.blocks
            if blocks is not None:
                order = self.manager.checkpoint(
                    blocks, sequence.tokens, depth, sequence.extra_keys, replace=replace
                )
                plan.copies.extend([order] if order is not None else [])
        self._due.clear()

    def _fork(self, plan: StepPlan) -> None:
        """Branch off the sequences whose prompt has just been computed by another one."""
        for leader in self._leaders:
            for sibling in self._requests.get(leader.request_id, []):
                if sibling.state is State.HELD and not self._branch_off(leader, sibling, plan):
                    self._queue(sibling)
        self._leaders.clear()

    def _branch_off(self, leader: Sequence, sibling: Sequence, plan: StepPlan) -> bool:
        """Let `sibling` run from the last token of the prompt on; False when it has to queue up."""
        overtakes = self.waiting and self.waiting[0].rank < sibling.rank
        if overtakes or len(self.running) >= self.limits.max_num_seqs:
            return False
        prompt = len(sibling.tokens)
        assert leader.blocks is not None and leader.computed == prompt, "forked too late"
        try:
            # The last token's row is computed again: its logits are those of the first draw.
            blocks, copies = self.manager.fork(leader.blocks, prompt - 1)
        except OutOfPages:
            return False
        self._held.discard(sibling)
        self._run(sibling, blocks, prompt - 1)
        plan.copies.extend(copies)
        self.counters.forked += 1
        return True

    def _run(self, sequence: Sequence, blocks: SequenceBlocks, computed: int) -> None:
        sequence.state = State.RUNNING
        sequence.blocks = blocks
        sequence.computed = sequence.kept = computed
        sequence.prompt_end = len(sequence.tokens)
        self.running[sequence] = None

    def _plan_decodes(self, plan: StepPlan) -> list[Sequence]:
        """A row for each sequence with one token to compute; the sequences that have more."""
        rows, size = plan.rows, self.manager.page_tokens
        prompts: list[Sequence] = []
        needy: list[Sequence] = []
        for sequence in self.running:
            start, known = sequence.computed, len(sequence.tokens)
            if known + sequence.pending - start > 1:
                prompts.append(sequence)
            elif start + 1 < sequence.most_tokens:  # else its last token is on its way
                blocks = sequence.blocks
                assert blocks is not None
                if start < len(blocks.pages) * size:
                    rows.append(PlannedRows(sequence, start, 1, True, start >= known))
                else:
                    needy.append(sequence)
        for sequence in needy:
            start, known = sequence.computed, len(sequence.tokens)
            if self._make_room(sequence, start + 1, plan):
                rows.append(PlannedRows(sequence, start, 1, True, start >= known))
        return prompts

    def _plan_chunk(self, sequence: Sequence, budget: int, plan: StepPlan) -> int:
        """Prefill as much as the budget allows; returns the number of rows."""
        start, known = sequence.computed, len(sequence.tokens)
        end = min(known, start + budget, start + (sequence.most_rows or budget))
        if start < sequence.cut:
            end = min(end, sequence.cut)
        if end <= start or not self._make_room(sequence, end, plan):
            return 0
        plan.rows.append(PlannedRows(sequence, start, end - start, end == known, False))
        return end - start

    def _make_room(self, sequence: Sequence, tokens: int, plan: StepPlan) -> bool:
        """Reserve pages for a running sequence; False when it has had to make way itself."""
        while sequence.blocks is not None:
            try:
                self.manager.reserve(sequence.blocks, tokens)
                return True
            except OutOfPages:
                victim = max(self.running, key=_rank)
                self._requeue(victim, keep=True)
                plan.preempted.append(victim)
        return False

    def _admit(self, plan: StepPlan, budget: int, prompts: list[Sequence]) -> None:
        """Start waiting sequences, in their order, as long as they fit."""
        owed = sum(map(self._missing_pages, prompts))
        while self.waiting and budget > 0 and len(self.running) < self.limits.max_num_seqs:
            sequence = self.waiting[0]
            if sequence.pending:
                return  # a step that was launched before it was preempted brings a token
            opened = self._open(sequence, owed)
            if opened is None:
                return
            del self.waiting[0]
            self._run(sequence, opened.blocks, opened.cached_tokens)
            sequence.cut = opened.known_tokens
            if not sequence.preemptions:
                sequence.cached_tokens = opened.cached_tokens
            plan.copies.extend(opened.copies)
            budget -= self._plan_chunk(sequence, budget, plan)
            owed += self._missing_pages(sequence)

    def _missing_pages(self, sequence: Sequence) -> int:
        """Pages that a sequence still has to reserve for the tokens that it has."""
        held = 0 if sequence.blocks is None else len(sequence.blocks.pages)
        return self.manager.pages_for(len(sequence.tokens)) - held

    def _open(self, sequence: Sequence, owed: int) -> Opened | None:
        """Blocks for a waiting sequence, if all of its tokens fit besides what others are owed.

        One that has had to make way before comes back only when everybody else could also take a
        page more: otherwise it would have to go again soon. Where nobody runs, anybody fits.
        """
        running, available = len(self.running), self.manager.available_pages
        if self._refused is not None:
            head, then, ran = self._refused
            if sequence is head and available <= then and running >= ran > 0:
                return None
        spare = owed + (running if sequence.preemptions else 0)
        try:
            opened = self.manager.open(
                sequence.tokens, sequence.extra_keys, reuse=sequence.reuse, spare=spare
            )
        except OutOfPages:
            assert running, "a sequence does not fit an empty cache"
            self._refused = (sequence, available, running)
            return None
        self._refused = None
        return opened

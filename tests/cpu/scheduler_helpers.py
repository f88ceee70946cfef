"""A loop around the scheduler with a made-up model, and audits after every step."""

from dataclasses import dataclass, field
from typing import Any

from deepinfer.engine.scheduler import Scheduler, SchedulerLimits, StepPlan
from deepinfer.engine.sequence import Sequence, State
from deepinfer.kv.audit import audit
from deepinfer.kv.manager import KVManager
from tests.cpu.kv_helpers import FakeDevice, next_token

VOCABULARY = 3


@dataclass
class Setting:
    """Sizes of one world."""

    pages: int = 16
    page_tokens: int = 4
    window: int = 3
    max_num_seqs: int = 4
    checkpoints: int = 4
    tokens: int = 16
    queue: int = 1000
    interval: int = 100
    spare_slots: int = 0
    overlap: bool = False


@dataclass
class World:
    """Scheduler, books and a device of lists.

    Attributes:
        now: the clock; steps: how many were launched.
        prompts: of all sequences that were let in; ended: those with an outcome.
    """

    setting: Setting
    now: float = 0.0
    prompts: dict[Sequence, list[int]] = field(default_factory=dict)
    steps: int = 0
    ended: list[Sequence] = field(default_factory=list)
    preempted: int = 0

    def __post_init__(self) -> None:
        s = self.setting
        slots = s.max_num_seqs + s.checkpoints + s.spare_slots
        self.manager = KVManager(s.pages, slots, s.page_tokens, s.checkpoints)
        limits = SchedulerLimits(s.max_num_seqs, s.tokens, s.queue, s.interval)
        self.scheduler = Scheduler(limits, self.manager, lambda: self.now)
        self.device = FakeDevice(self.manager, s.window, slack=s.page_tokens)
        self.sampled: dict[Sequence, int] = {}
        self.launched: list[tuple[StepPlan, dict[Sequence, int]]] = []

    def audit(self) -> None:
        running = self.scheduler.running
        audit(self.manager, [(s.blocks, s.computed) for s in running if s.blocks is not None])
        waiting = self.scheduler.waiting
        assert [s.rank for s in waiting] == sorted(s.rank for s in waiting)
        assert all(s.state is State.WAITING and s.blocks is None for s in waiting)
        assert not any(s.computed for s in waiting)
        assert all(s.state is State.RUNNING for s in running)
        assert len(running) <= self.setting.max_num_seqs
        live = [s for group in self.scheduler._requests.values() for s in group]
        assert self.scheduler._held == {s for s in live if s.state is State.HELD}

    def step(self) -> StepPlan:
        """Plan and launch a step, then read the oldest one that is due."""
        waiting = list(self.scheduler.waiting)
        plan = self.scheduler.plan()
        came_in = any(sequence.state is State.RUNNING for sequence in waiting)
        assert not (came_in and plan.preempted), "in and out at once"
        self.ended += plan.ended
        self.preempted += len(plan.preempted)
        self.launch(plan)
        self.scheduler.commit(plan)
        self.steps += 1
        while len(self.launched) > int(self.setting.overlap) or (self.launched and not plan.rows):
            self.read()
        self.audit()
        return plan

    def launch(self, plan: StepPlan) -> None:
        assert sum(row.count for row in plan.rows) <= self.setting.tokens
        assert all(row.count == 1 for row in plan.rows[: plan.decodes])
        self.device.copy(plan.copies)
        tokens = {}
        for row in plan.rows:
            sequence = row.sequence
            assert sequence.state is State.RUNNING
            assert sequence.blocks is not None
            assert self.device.read(sequence.blocks, row.start) == self.all(sequence)[: row.start]
            if row.from_device:
                assert row.count == 1
                assert row.start == len(sequence.tokens)
                ids = [self.sampled[sequence]]
            else:
                ids = sequence.tokens[row.start : row.start + row.count]
            assert len(ids) == row.count > 0
            self.device.write(sequence.blocks, row.start, ids)
            if row.samples:
                end = row.start + row.count
                seen = self.device.read(sequence.blocks, end)
                tokens[sequence] = next_token(seen, sequence.index, VOCABULARY)
                self.sampled[sequence] = tokens[sequence]
        self.launched.append((plan, tokens))
        self.device.poison()

    def all(self, sequence: Sequence) -> list[int]:
        """Known tokens and the one that is on its way."""
        return sequence.tokens + ([self.sampled[sequence]] if sequence.pending else [])

    def read(self) -> None:
        """Tokens of the oldest launched step become known; sequences that are complete end."""
        plan, tokens = self.launched.pop(0)
        for row in plan.rows:
            sequence = row.sequence
            if row.samples and sequence.state is not State.ENDED:
                self.scheduler.append(sequence, tokens[sequence])
                if len(sequence.tokens) == sequence.most_tokens:
                    self.scheduler.finish(sequence)
                    self.ended.append(sequence)

    def add(self, name: str, prompt: list[int], generated: int, **fields: Any) -> Sequence:
        """Queue a request of one sequence."""
        sequence = Sequence(name, list(prompt), len(prompt) + generated, **fields)
        self.scheduler.add(sequence)
        return sequence

    def add_group(self, name: str, prompt: list[int], generated: int, n: int) -> list[Sequence]:
        """Queue a request of `n` sequences."""
        most = len(prompt) + generated
        group = [Sequence(name, list(prompt), most, index=i) for i in range(n)]
        self.scheduler.add(*group)
        return group

    def abort(self, request_id: str) -> list[Sequence]:
        gone = self.scheduler.abort(request_id)
        self.ended += gone
        return gone

    def begin_anew(self) -> None:
        """A step broke off: what is under way is lost, and so is what the device holds."""
        self.launched.clear()
        groups = list(self.scheduler._requests.values())
        self.scheduler.restart([sequence for group in groups for sequence in group])
        self.device.poison()
        self.audit()

    def drain(self, most: int = 10_000) -> None:
        """Run until everything has ended."""
        for _ in range(most):
            if not self.scheduler.has_work:
                break
            self.step()
        assert not self.scheduler.has_work, f"not done after {most} steps"
        while self.launched:
            self.read()
        self.audit()
        assert not self.scheduler.running
        assert not self.scheduler.waiting


def planned(plan: StepPlan) -> list[tuple[str, int, int]]:
    """(request, start, count) of the rows of a step."""
    return [(row.sequence.request_id, row.start, row.count) for row in plan.rows]


def expected(prompt: list[int], index: int, count: int) -> list[int]:
    """Prompt and `count` tokens as a sequence gets them that runs alone."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, index, VOCABULARY))
    return tokens

"""Child processes, several at a time, with limits on time and memory; what each of them found.

Knows processes and the file that events go to; must not know what a case is about. A child that
crashes, hangs or loses its GPU costs the case it was at; another one goes on with the next. The
file makes a run resumable: what it holds is not done again.
"""

import json
import math
import multiprocessing
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from deepinfer.screening.cases import Case
from deepinfer.screening.child import LOST, Job, main
from deepinfer.screening.trial import Result

Event = dict[str, Any]
_TICK = 0.1  # seconds between two looks at clocks and memory
_QUIET = "ignore:resource_tracker"
_PRELOADED = ["deepinfer.screening.child"]


@dataclass(frozen=True)
class Limits:
    """What a child may take.

    Attributes:
        case_seconds: for one case; operator_seconds: for all of one operator's.
        loading_seconds: until a library is imported.
        memory: bytes of main memory, and of GPU memory.
        losses: children that may die on one operator before the rest of its cases is given up.
    """

    case_seconds: float = 30.0
    operator_seconds: float = 180.0
    loading_seconds: float = 180.0
    memory: int = 16 << 30
    losses: int = 3


@dataclass
class Task:
    """A job and what has come of it.

    Attributes:
        left: cases that are not finished; lost: children that died.
        events: the finished ones' reports. refused: why nothing was tried, "" if it was.
        given_up: why the cases in `left` were not tried.
    """

    job: Job
    left: list[Case]
    events: list[Event] = field(default_factory=list)
    lost: int = 0
    refused: str = ""
    given_up: str = ""
    seconds: float = 0.0


class Journal:
    """The file of events: one JSON object a line."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def read(self) -> list[Event]:
        """Everything that was written; a last line that broke off is left out."""
        if not self.file.exists():
            return []
        lines = self.file.read_text(encoding="utf-8").splitlines()
        events = []
        for number, line in enumerate(lines):
            try:
                events.append(json.loads(line))
            except ValueError:
                if number < len(lines) - 1:
                    raise
        return events

    def add(self, event: Mapping[str, Any]) -> None:
        """Write one."""
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(event) + "\n")


def resume(tasks: Iterable[Task], journal: Journal) -> None:
    """Give tasks the events that a run before has left, so that their cases are not run again."""
    by_name = {(task.job.phase, task.job.operator): task for task in tasks}
    for event in journal.read():
        task = by_name.get((event["phase"], event["operator"]))
        if task is not None:
            _take(task, event)


def _take(task: Task, event: Event) -> None:
    """Note a finished case, or that there is nothing to finish."""
    kind = event["event"]
    if kind in ("result", "invalid", "speed"):
        name = event["case"]
        if all(case.name != name for case in task.left):
            return
        task.left = [case for case in task.left if case.name != name]
        task.events.append(event)
    elif kind == "table":
        task.events.append(event)
    elif kind == "refused":
        task.refused, task.left = event["reason"], []


class Probe:
    """Runs tasks.

    Args:
        workers: children at a time.
        progress: called with a task after each of its finished cases.
        deadline: time.monotonic() at which everything that is not finished is given up.
    """

    def __init__(
        self, limits: Limits, workers: int, journal: Journal,
        progress: Callable[[Task], None] = lambda _: None, deadline: float = math.inf,
    ) -> None:  # fmt: skip
        self.deadline = deadline
        self.limits = limits
        self.workers = workers
        self.journal = journal
        self.progress = progress
        # Libraries make locks, which children that are killed leave behind. Python's tracker
        # removes them at the end and would write a line about each.
        if _QUIET not in sys.warnoptions:
            sys.warnoptions.append(_QUIET)
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(_PRELOADED)

    def run(self, tasks: Iterable[Task]) -> None:
        """Run all of them to their ends."""
        queue = [task for task in tasks if task.left or task.job.phase == "table"]
        running: list[_Running] = []
        try:
            while queue or running:
                if time.monotonic() > self.deadline:
                    for task in (*queue, *(child.task for child in running)):
                        task.given_up = task.given_up or "there was no time left"
                    break
                while queue and len(running) < self.workers:
                    running.append(self._start(queue.pop(0)))
                for child in self._ready(running):
                    if self._look(child):
                        continue
                    running.remove(child)
                    if self._goes_on(child.task):
                        queue.insert(0, child.task)
        finally:
            for child in running:
                child.kill()

    def _goes_on(self, task: Task) -> bool:
        if not task.left or task.refused:
            return False
        if not task.given_up and task.lost >= self.limits.losses:
            task.given_up = f"{task.lost} processes were lost on this operator"
        return not task.given_up

    def _start(self, task: Task) -> "_Running":
        ours, theirs = self.context.Pipe(duplex=False)
        job = replace(task.job, cases=tuple(task.left))
        process = self.context.Process(target=main, args=(job, theirs), daemon=True)
        process.start()
        theirs.close()
        return _Running(task, process, ours, self.limits, self.workers)

    def _ready(self, running: list["_Running"]) -> list["_Running"]:
        wait([child.connection for child in running], _TICK)
        return list(running)

    def _look(self, child: "_Running") -> bool:
        """Take what a child has to say; False once it has ended, of itself or by a limit."""
        for event in child.heard():
            event |= {"phase": child.task.job.phase, "operator": child.task.job.operator}
            if event["event"] in ("result", "invalid", "speed", "table", "refused"):
                self.journal.add(event)
                _take(child.task, event)
                self.progress(child.task)
        task = child.task
        reason = child.over_limit()
        seconds = task.seconds + time.monotonic() - child.began
        if task.job.phase == "cold" and seconds > self.limits.operator_seconds:
            task.given_up = f"the operator took more than {self.limits.operator_seconds:g} s"
        elif reason is None and not (child.ended or child.finished):
            return True
        child.kill()
        task.seconds = seconds
        if reason is not None or not (child.finished or task.refused or task.given_up):
            self._lose(child, reason or child.death())
        return False

    def _lose(self, child: "_Running", reason: str) -> None:
        """Note what a dead child was at; the case is decided by it."""
        task = child.task
        # What PyTorch itself cannot do says nothing of the library.
        task.lost += child.step != "pytorch"
        phase, operator = task.job.phase, task.job.operator
        if child.case is None:
            event: Event = {"event": "refused", "reason": f"while loading the library: {reason}"}
        elif child.step == "pytorch":
            event = {"event": "invalid", "case": child.case}
        else:
            event = {"event": "result", **asdict(Result(child.case, "fail", reason))}
            if phase == "warm":
                event["event"] = "lost"
                task.given_up = reason
        event |= {"phase": phase, "operator": operator}
        self.journal.add(event)
        _take(task, event)
        self.progress(task)


class _Running:
    """A child at work, one of `together` at most."""

    def __init__(
        self, task: Task, process: ForkServerProcess, connection: Connection, limits: Limits,
        together: int,
    ) -> None:  # fmt: skip
        self.together = together
        self.task = task
        self.process = process
        self.connection = connection
        self.limits = limits
        self.began = self.since = time.monotonic()
        self.case: str | None = None
        self.step = "loading"
        self.ended = self.finished = False
        self.last_words = ""

    def heard(self) -> list[Event]:
        """Everything it has said since the last time."""
        events = []
        try:
            while self.connection.poll():
                event = json.loads(self.connection.recv_bytes())
                if event["event"] == "start":
                    self.case, self.step = event["case"], event["step"]
                elif event["event"] == "done":
                    self.finished = True
                elif event["event"] == "lost":
                    self.last_words = event["reason"]
                self.since = time.monotonic()
                events.append(event)
        except (EOFError, OSError, ValueError):  # it ended, perhaps in the middle of a word
            self.ended = True
        return events

    def over_limit(self) -> str | None:
        """Which limit it is over, None if none."""
        now = time.monotonic()
        loading = self.step == "loading"
        most = self.limits.loading_seconds if loading else self.limits.case_seconds
        if now - self.since > most:
            together = f", as one of {self.together} processes" if self.together > 1 else ""
            return f"takes longer than {most:g} s{together}"
        used = resident_bytes(self.process.pid)
        if used > self.limits.memory:
            return f"takes more than {self.limits.memory / 2**30:.3g} GiB of main memory"
        return None

    def death(self) -> str:
        """How it ended, in words."""
        status = self.process.exitcode
        if status == LOST:
            return f"loses the GPU: {self.last_words}"
        if status is not None and status < 0:
            return f"crashes with {signal.Signals(-status).name}"
        return f"ends its process with status {status}"

    def kill(self) -> None:
        """End it; one that has said everything would only tidy up."""
        if not self.ended or self.finished:
            self.process.kill()
        self.process.join()
        self.connection.close()


def resident_bytes(process: int | None) -> int:
    """Main memory that a process has, 0 where the system does not say."""
    try:
        pages = Path(f"/proc/{process}/statm").read_text(encoding="ascii").split()[1]
    except (OSError, IndexError):
        return 0
    return int(pages) * 4096

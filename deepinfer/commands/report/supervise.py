"""Processes that work on one thing together: started, watched, and never waited for without end.

Knows exit statuses, time limits and logs; must not know what the processes do.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from deepinfer.commands.report.records import Job, RankResult

RANK_MODULE = "deepinfer.commands.report.rank"
TAIL_LINES = 20
_POLL_S = 0.1
_GRACE_S = 10.0  # for the others to end by themselves once one has broken off
_TRACE_S = 1.0  # for a stuck process to say where it is


class Process(Protocol):
    """A process that was started."""

    def poll(self) -> int | None:
        """Its exit status, negative for a signal, None while it runs."""

    def stop(self) -> None:
        """End it, whatever it is doing."""


@dataclass(frozen=True)
class Ending:
    """How a process ended.

    Attributes:
        kind: done; crashed = by itself with another status; timeout = it did not; stopped = another
            one had broken off.
        order: the first one to end has 0; those that had to be ended come last, together.
    """

    rank: int
    kind: Literal["done", "crashed", "timeout", "stopped"]
    text: str
    order: int = 0


@dataclass(frozen=True)
class Ended:
    """A job afterwards.

    Attributes:
        result: None if it left none; at: what it was last doing; tail: the end of its log.
    """

    ending: Ending
    result: RankResult | None
    at: str
    tail: str


class LocalProcess:
    """A process of this machine with everything it says in a file.

    It leads a group of its own, so that what it started ends with it. Its standard input is open as
    long as this process lives, and nothing is ever written to it.
    """

    def __init__(self, command: Sequence[str], log: Path) -> None:
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=out, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip

    def poll(self) -> int | None:
        """See Process."""
        status = self._process.poll()
        if status is not None:
            self._close()
        return status

    def stop(self) -> None:
        """See Process. A rank writes the stack of every thread to its log first."""
        self._signal(signal.SIGUSR1)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_TRACE_S)
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._close()

    def _close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def start_rank(job: Job) -> Process:
    """Start the process of a job."""
    job.write()
    return LocalProcess([sys.executable, "-m", RANK_MODULE, str(job.file)], job.log)


def supervise(
    processes: Sequence[Process],
    seconds: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    wait: Callable[[float], None] = time.sleep,
    look: Callable[[], None] = lambda: None,
) -> list[Ending]:
    """Wait until all have ended, `seconds` at most; none runs afterwards, whatever happens here.

    Once one has ended with another status than 0, the others have ten seconds: they may wait for
    it.

    Args:
        look: called between polls.

    Returns:
        How each ended, in their order.
    """
    endings: dict[int, Ending] = {}
    limit = clock() + seconds
    broken: Ending | None = None
    try:
        while True:
            for rank, process in enumerate(processes):
                status = None if rank in endings else process.poll()
                if status is None:
                    continue
                kind, text = _own_ending(status)
                endings[rank] = Ending(rank, kind, text, len(endings))
                if status != 0 and broken is None:
                    broken = endings[rank]
                    limit = min(limit, clock() + _GRACE_S)
            look()
            if len(endings) == len(processes) or clock() >= limit:
                break
            wait(_POLL_S)
    finally:
        for process in processes:
            if process.poll() is None:
                process.stop()
    return [
        endings.get(rank) or _late(rank, len(endings), broken, seconds)
        for rank in range(len(processes))
    ]


def _late(rank: int, order: int, broken: Ending | None, seconds: float) -> Ending:
    if broken is None:
        return Ending(rank, "timeout", f"had not ended after {seconds:g} s", order)
    return Ending(rank, "stopped", f"because rank {broken.rank} had broken off", order)


def _own_ending(status: int) -> tuple[Literal["done", "crashed"], str]:
    if status == 0:
        return "done", "ended by itself"
    if status < 0:
        known = {number.value for number in signal.Signals}
        name = signal.Signals(-status).name if -status in known else f"signal {-status}"
        return "crashed", f"ended by {name}"
    return "crashed", f"ended with exit status {status}"


def run_jobs(
    jobs: Sequence[Job], seconds: float, start: Callable[[Job], Process] = start_rank,
    look: Callable[[str], None] = lambda text: None,
) -> list[Ended]:  # fmt: skip
    """Do jobs side by side, each in a process.

    Args:
        look: told between polls what they are doing.
    """
    for job in jobs:
        Path(job.folder).mkdir(parents=True, exist_ok=True)
        for file in (job.result, job.progress, job.log, Path(job.store or job.result)):
            file.unlink(missing_ok=True)
    processes: list[Process] = []
    try:
        for job in jobs:
            processes.append(start(job))
    except BaseException:
        for process in processes:
            process.stop()
        raise
    endings = supervise(processes, seconds, look=lambda: look(doing(jobs)))
    return [
        Ended(ending, RankResult.read(job), _at(job), log_tail(job.log))
        for ending, job in zip(endings, jobs, strict=True)
    ]


def doing(jobs: Sequence[Job]) -> str:
    """What the processes are at, like "loading" or "rank 0 measuring, ranks 1 2 loading"."""
    at: dict[str, list[str]] = {}
    for job in jobs:
        at.setdefault(_at(job), []).append(str(job.rank))
    if len(at) == 1:
        return next(iter(at))
    return ", ".join(
        f"rank{'s' * (len(ranks) > 1)} {' '.join(ranks)} {line}" for line, ranks in at.items()
    )


def _at(job: Job) -> str:
    if not job.progress.exists():
        return "starting"
    return job.progress.read_text(encoding="utf-8", errors="replace").strip() or "starting"


def log_tail(file: Path, lines: int = TAIL_LINES) -> str:
    """The last lines of a log, "" without one."""
    if not file.exists():
        return ""
    text = file.read_bytes()[-200 * lines :].decode("utf-8", errors="replace")
    return "\n".join(text.splitlines()[-lines:])

"""What a child process does: all cases of one operator, reported one by one.

Knows the order: PyTorch's answers first, then the library's; must not know limits, which the parent
enforces from outside. Everything it has to say it says at once, so that what was finished before a
crash is known.
"""

import fcntl
import json
import multiprocessing
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from typing import Any

import torch

from deepinfer.env import export
from deepinfer.errors import ConfigError
from deepinfer.libraries.host import versions
from deepinfer.libraries.replace import overload
from deepinfer.screening.cases import Case
from deepinfer.screening.library import load_library
from deepinfer.screening.rules import Rule, rule_of
from deepinfer.screening.speed import measure
from deepinfer.screening.trial import (
    Reference,
    Result,
    arguments_of,
    attempt,
    is_device_error,
    refer,
    size_in_bytes,
    tidy,
    wait,
)

LOST = 3  # exit status of a child whose GPU is of no more use to it
Say = Callable[[str, Mapping[str, Any]], None]


@dataclass(frozen=True)
class Job:
    """What one child is asked for.

    Attributes:
        phase: "table" (what the library has), "cold" (judge all cases) or "warm" (see whether a
            second process gives the same bits, and measure speed).
        cases: to run, in this order. digests: of the cold answers, by case.
        memory: bytes of GPU memory that it may take.
        environment: variables to set before anything is imported.
        log: file for what libraries print; lock: file to lock for what must run alone.
    """

    phase: str
    library: str
    device: str
    operator: str
    cases: tuple[Case, ...]
    digests: Mapping[str, str]
    memory: int
    environment: Mapping[str, str]
    log: str
    lock: str


def main(job: Job, connection: Connection) -> None:
    """Do a job; every report is JSON with the key "event"."""

    def say(event: str, content: Mapping[str, Any]) -> None:
        connection.send_bytes(json.dumps({"event": event, **content}).encode())

    _end_with_parent()
    _prepare(job)
    work = {"table": _describe, "cold": _judge_all, "warm": _again_and_speed}[job.phase]
    try:
        with torch.inference_mode():  # as the engine runs
            work(job, say)
        say("done", {})
    except ConfigError as error:
        say("refused", {"reason": str(error)})
    except Exception as error:
        if not is_device_error(error):
            say("refused", {"reason": tidy(f"{type(error).__name__}: {error}")})
            raise
        # The parent has been told which case was running.
        say("lost", {"reason": tidy(str(error))})
        sys.stdout.flush()
        os._exit(LOST)  # an ordinary end would wait for the GPU


def _end_with_parent() -> None:
    """End this process, wherever it hangs, once the screening is gone."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait_for([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _prepare(job: Job) -> None:
    log = os.open(job.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    for name, value in job.environment.items():
        export(name, value, replace=True)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if job.device == "cuda":
        total = torch.cuda.get_device_properties().total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, job.memory / total))


def _describe(job: Job, say: Say) -> None:
    library = load_library(job.library, job.device)
    table = library.table()
    say("table", {
        "table": None if table is None else dict(table),
        "versions": versions(job.device, library.package),
    })  # fmt: skip


@contextmanager
def alone(lock: str, needed: bool) -> Iterator[None]:
    """No two children inside at a time, where that is needed."""
    if not needed:
        yield
        return
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _case(job: Job, case: Case, say: Say, step: str) -> Iterator[None]:
    """Tell which case is running; the clock of one that needs much memory starts when it may."""
    far = case.kind == "past 2^31"
    with alone(job.lock, far):
        say("start", {"case": case.name, "step": step})
        yield
        if far and job.device == "cuda":
            torch.cuda.empty_cache()


def _judge_all(job: Job, say: Say) -> None:
    from deepinfer.screening.own import Backends, is_own, own_attempt

    device = torch.device(job.device)
    if is_own(job.operator):
        own = load_library(job.library, job.device)
        assert isinstance(own, Backends), own
        for case in job.cases:
            with _case(job, case, say, "library"):
                say("result", asdict(own_attempt(own, job.operator, case, device)))
        return
    rule = rule_of(job.operator)
    if rule is None:
        for case in job.cases:
            say("result", asdict(Result(case.name, "skip", "its values mean nothing: there is"
                                        " nothing to compare")))  # fmt: skip
        return
    references: list[tuple[Case, Reference]] = []
    for case in job.cases:
        with _case(job, case, say, "pytorch"):
            reference = refer(job.operator, rule, case, device)
        if reference is None:
            say("invalid", {"case": case.name})
        else:
            references.append((case, reference))
    _answers(job, rule, references, say)


def _answers(job: Job, rule: Rule, references: list[tuple[Case, Reference]], say: Say) -> None:
    device = torch.device(job.device)
    say("start", {"case": None, "step": "loading"})
    session = load_library(job.library, job.device).open(job.operator)
    for case, reference in references:
        with _case(job, case, say, "library"):
            result = attempt(session, job.operator, rule, case, reference, device)
        say("result", asdict(result))
    session.close()


def _again_and_speed(job: Job, say: Say) -> None:
    """Answers of a second process beside those of the first, and times beside PyTorch's."""
    device = torch.device(job.device)
    rule = rule_of(job.operator)
    assert rule is not None, job.operator
    function = overload(job.operator)
    expected, times = {}, {}
    for case in job.cases:
        with alone(job.lock, case.kind == "engine"), _case(job, case, say, "pytorch"):
            expected[case.name] = refer(job.operator, rule, case, device)
            args, kwargs = arguments_of(case, device)
            times[case.name] = measure(partial(function, *args, **kwargs), device)
    say("start", {"case": None, "step": "loading"})
    session = load_library(job.library, job.device).open(job.operator)
    for case in job.cases:
        reference = expected[case.name]
        if reference is None:
            continue
        with alone(job.lock, case.kind == "engine"), _case(job, case, say, "library"):
            result = attempt(session, job.operator, rule, case, reference, device)
            same = result.digest == job.digests.get(case.name) or not reference.repeats
            args, kwargs = arguments_of(case, device)
            timing = measure(partial(session.call, args, kwargs), device)
            wait(device)
        say("speed", {
            "case": case.name, "calls": case.calls, "same": same,
            "verdict": result.verdict, "reason": result.reason,
            "pytorch": asdict(times[case.name]), "library": asdict(timing),
            "bytes": size_in_bytes(case, device), "first_seconds": result.first_seconds,
        })  # fmt: skip
    session.close()

"""A whole screening: from operators to their reports, in two rounds of child processes.

Knows the order and what a later run may take over; must not know how results are shown. The first
round judges every case with empty caches; the second asks what passed again in another process,
with the caches that the first has left, and measures it, one call at a time on the whole machine.
"""

import json
import math
import platform
import subprocess
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from deepinfer import __version__
from deepinfer.errors import ConfigError
from deepinfer.libraries.names import Table, bare, nearest, resolve
from deepinfer.screening.arguments import show
from deepinfer.screening.cases import Case, cases_of
from deepinfer.screening.catalog import Catalog, Operator, summary, to_data
from deepinfer.screening.child import Job
from deepinfer.screening.own import is_own, own_cases
from deepinfer.screening.probe import Journal, Limits, Probe, Task, resume
from deepinfer.screening.verdict import OperatorReport, add_speed, operator_report, skipped

FORMAT = 1
JOURNAL, IDENTITY = "journal.jsonl", "identity.json"
_JUDGING = 0.75  # part of the time that the first round may take, if there is a second


@dataclass(frozen=True)
class Settings:
    """How a screening is run.

    Attributes:
        out: folder for everything; a folder of an earlier run of the same is continued.
        operators: names to screen in any spelling; None for all of the catalog.
        workers: child processes at a time.
        seconds: after which what is not finished is reported as not tried; a later run goes on.
        hostile, speed: whether to try more than the engine's own calls, and to measure.
    """

    library: str
    device: str
    out: Path
    operators: Sequence[str] | None = None
    workers: int = 1
    limits: Limits = field(default_factory=Limits)
    hostile: bool = True
    speed: bool = True
    seconds: float = math.inf


@dataclass
class Screening:
    """All that is known at the end.

    Attributes:
        head: versions, machine, revision, date and what was traced; plain data.
        unknown: names that were asked for and stand for nothing, with what comes nearest.
    """

    head: dict[str, Any]
    reports: list[OperatorReport]
    unknown: dict[str, list[str]]

    def to_data(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "format": FORMAT, **self.head, "unknown": self.unknown,
            "operators": [report.to_data() for report in self.reports],
        }  # fmt: skip


@dataclass
class _Plan:
    """One operator on its way."""

    operator: Operator
    name: str
    cases: list[Case]
    task: Task


Progress = Callable[[str, int, int], None]


def screen(
    catalog: Catalog | Callable[[], Catalog], settings: Settings, progress: Progress
) -> Screening:
    """Screen the operators of a catalog; with an empty one, all that the library has.

    Args:
        catalog: or what makes it, which is called once the library is known to work here.
        progress: called with what is being done, how many cases are finished, and of how many.

    Raises:
        ConfigError: the library cannot be used here, or the folder holds another screening.
    """
    _make_folders(settings.out)
    journal = Journal(settings.out / JOURNAL)
    table, versions = _look(settings, journal)
    _refuse_unknown(settings, table)
    catalog = catalog() if callable(catalog) else catalog
    _check_same(settings, catalog, versions)
    known: Table = dict.fromkeys(catalog, settings.library) if table is None else table
    chosen, unknown = _choose(catalog, settings, known)
    if not chosen:
        raise _nothing(unknown)
    plans, reports = _plans(chosen, settings, known)
    began = time.monotonic()
    rounds = _Rounds(settings, journal, progress)
    first = _JUDGING if settings.speed else 1.0
    rounds.run("judging", [plan.task for plan in plans], began + first * settings.seconds)
    for plan in plans:
        reports[plan.operator.name] = _report(plan)
    if settings.speed:
        _measure(plans, reports, rounds, began + settings.seconds)
    head = {**_head(settings, versions), "traced": dict(summary(catalog))}
    return Screening(head, [reports[name] for name in chosen], unknown)


def _refuse_unknown(settings: Settings, table: Table | None) -> None:
    """Before a trace: names that neither the library nor PyTorch has, if there are no others."""
    if settings.operators is None or table is None:
        return
    unknown = resolve(settings.operators, table).unknown
    pytorchs = [n for n in unknown if hasattr(torch.ops.aten, bare(n).partition(".")[0])]
    if len(unknown) == len(settings.operators) and not pytorchs:
        raise _nothing(unknown)


def _nothing(unknown: Mapping[str, Sequence[str]]) -> ConfigError:
    near = {name: ", ".join(nearest) or "nothing" for name, nearest in unknown.items()}
    told = "; ".join(f"{name} (nearest: {nearest})" for name, nearest in near.items())
    return ConfigError(f"no operator to screen: {told or 'the traced run calls none'}")


def _make_folders(out: Path) -> None:
    try:
        for folder in (out, out / "logs", out / "caches"):
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be written ({error})") from None


def _job(settings: Settings, phase: str, operator: str = "") -> Job:
    safe = operator.replace("::", ".") or phase
    cache = (settings.out / "caches" / safe).absolute()
    return Job(
        phase=phase, library=settings.library, device=settings.device, operator=operator,
        cases=(), digests={}, memory=settings.limits.memory,
        environment={
            "FLAGGEMS_CACHE_DIR": str(cache / "flaggems"),
            "TRITON_CACHE_DIR": str(cache / "triton"),
            "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        },
        log=str(settings.out / "logs" / f"{safe}.log"), lock=str(settings.out / "alone.lock"),
    )  # fmt: skip


def _look(settings: Settings, journal: Journal) -> tuple[Table | None, Mapping[str, str]]:
    """What the library has, and versions: asked in a child, because asking may import much."""
    task = Task(_job(settings, "table"), [])
    Probe(settings.limits, 1, journal).run([task])
    if task.refused:
        raise ConfigError(task.refused)
    (event,) = task.events
    return event["table"], event["versions"]


def _check_same(settings: Settings, catalog: Catalog, versions: Mapping[str, str]) -> None:
    """Refuse to go on with what was made with something else."""
    text = json.dumps(to_data(catalog), sort_keys=True)
    mine = {"library": settings.library, "device": settings.device, **versions,
            "traced": f"{zlib.crc32(text.encode()):08x}", "hostile": settings.hostile}  # fmt: skip
    file = settings.out / IDENTITY
    if file.exists():
        theirs = json.loads(file.read_text(encoding="utf-8"))
        differing = [f"{k} {theirs.get(k)} there, {v} now" for k, v in mine.items()
                     if theirs.get(k) != v]  # fmt: skip
        if differing:
            raise ConfigError(
                f"--out {settings.out} holds another screening ({', '.join(differing)}); name"
                " another folder, or remove that one"
            )
    file.write_text(json.dumps(mine) + "\n", encoding="utf-8")


def _choose(
    catalog: Catalog, settings: Settings, known: Table
) -> tuple[dict[str, Operator], dict[str, list[str]]]:
    """Operators to screen, and names that stand for none."""
    everything = dict(catalog) or {name: Operator(name) for name in known}
    if settings.operators is None:
        return everything, {}
    table = {**dict.fromkeys(everything, ""), **known}
    resolved = resolve(settings.operators, table)
    chosen = {name: everything.get(name) or Operator(name) for name in resolved.operators}
    return chosen, {name: list(near) for name, near in resolved.unknown.items()}


def _cases(operator: Operator, settings: Settings) -> list[Case]:
    if is_own(operator.name):
        return own_cases(operator.name, settings.device)
    cases = cases_of(operator, settings.hostile)
    return sorted(cases, key=lambda case: not case.in_scope)  # those that decide come first


def _plans(
    chosen: Mapping[str, Operator], settings: Settings, known: Table
) -> tuple[list[_Plan], dict[str, OperatorReport]]:
    """Operators that can be tried, and reports of the others."""
    plans: list[_Plan] = []
    reports: dict[str, OperatorReport] = {}
    for name, operator in chosen.items():
        if name not in known:
            near = nearest(name, known)
            told = f"; nearest: {', '.join(near)}" if near else ""
            reports[name] = skipped(operator, "", f"not registered by {settings.library}{told}")
            continue
        cases = _cases(operator, settings)
        if cases:
            task = Task(_job(settings, "cold", name), list(cases))
            plans.append(_Plan(operator, known[name], cases, task))
        else:
            why = "the traced run does not call it: there is nothing to try it with"
            reports[name] = skipped(operator, known[name], why)
    return plans, reports


def _report(plan: _Plan) -> OperatorReport:
    if plan.task.refused:
        return skipped(plan.operator, plan.name, plan.task.refused)
    shown = {case.name: show(case.args) for case in plan.cases}
    return operator_report(
        plan.operator, plan.name, plan.cases, plan.task.events, plan.task.given_up, shown
    )


@dataclass(frozen=True)
class _Rounds:
    """Rounds of child processes with one journal."""

    settings: Settings
    journal: Journal
    progress: Progress

    def run(self, what: str, tasks: list[Task], deadline: float) -> None:
        """Run what the journal does not have yet."""
        resume(tasks, self.journal)
        left = {id(task): len(task.left) for task in tasks}
        total = sum(left.values())

        def moved(task: Task) -> None:
            left[id(task)] = 0 if task.given_up else len(task.left)
            self.progress(f"{what} {task.job.operator}", total - sum(left.values()), total)

        workers = self.settings.workers
        Probe(self.settings.limits, workers, self.journal, moved, deadline).run(tasks)


def _measure(
    plans: Sequence[_Plan], reports: Mapping[str, OperatorReport], rounds: _Rounds, deadline: float
) -> None:
    """The second round, for operators that passed."""
    second: dict[str, Task] = {}
    for plan in plans:
        name = plan.operator.name
        if reports[name].verdict != "pass" or is_own(name):
            continue
        digests = {
            event["case"]: event["digest"] for event in plan.task.events
            if event["event"] == "result" and event["verdict"] == "pass"
        }  # fmt: skip
        cases = [c for c in plan.cases if c.kind == "engine" and c.name in digests]
        job = replace(_job(rounds.settings, "warm", name), digests=digests)
        second[name] = Task(job, cases)
    rounds.run("measuring", list(second.values()), deadline)
    for name, task in second.items():
        speeds = [event for event in task.events if event["event"] == "speed"]
        add_speed(reports[name], speeds, task.refused or (task.given_up if task.lost else ""))


def _head(settings: Settings, versions: Mapping[str, str]) -> dict[str, Any]:
    here = Path(__file__).parent
    return {
        "library": settings.library,
        "device": settings.device,
        "made_with": dict(versions),
        "machine": {
            "python": platform.python_version(), "system": platform.platform(),
            "driver": _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        },
        "made_by": f"deepinfer {__version__}",
        "revision": _said("git", "-C", str(here), "rev-parse", "HEAD"),
        "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip


def _said(*command: str) -> str:
    """First line that a program prints, "none" where it cannot."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "none"
    return done.stdout.partition("\n")[0].strip() or "none"

"""The report as a whole: which jobs are done, in which order, and everything that came of them.

Knows jobs and verdicts; must not know how a job is done or how results are shown.
"""

import math
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deepinfer import __version__
from deepinfer.commands.report.configurations import Configuration, parse
from deepinfer.commands.report.explain import Explanation, explain
from deepinfer.commands.report.plan import Machine, Plan, ReportOptions, why_impossible
from deepinfer.commands.report.questions import QUESTIONS_FILE, load_questions
from deepinfer.commands.report.records import Job
from deepinfer.commands.report.supervise import Ended, Process, run_jobs, start_rank
from deepinfer.commands.report.verdict import Distance, Outcome, distance, exit_status, judge
from deepinfer.config import EngineOptions
from deepinfer.errors import ConfigError

DEFAULT_CONFIGS = "ref,triton,speculation"

Start = Callable[[Job], Process]
Look = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Report:
    """Everything that was found out.

    Attributes:
        distances: from the first configuration that ran to each of the others.
    """

    model: str
    version: str
    ranks: int
    transport: str | None
    outcomes: list[Outcome]
    distances: list[Distance]
    explanation: Explanation | None = None

    @property
    def exit_status(self) -> int:
        """0 if everything is right, and what was to be compared was, else 1."""
        told = self.explanation
        unclear = told is not None and (told.failures or told.lacking)
        return 1 if unclear else exit_status(self.outcomes)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, which has no infinity: None stands for what is not finite."""
        plain: dict[str, Any] = _finite({**asdict(self), "exit_status": self.exit_status})
        return plain


def report(
    options: EngineOptions, wanted: ReportOptions, *, start: Start = start_rank,
    machine: Machine | None = None, look: Look = lambda text, done, total: None,
) -> Report:  # fmt: skip
    """Run every configuration in processes of its own, one after the other, then compare them.

    Args:
        start: starts the process of a job; machine: default this one.
        look: told several times a second what is being done, and how much of all that is.

    Raises:
        ConfigError, CheckpointError: a wrong option or checkpoint, or no questions.
    """
    configurations = _configurations(wanted)
    questions = load_questions(
        wanted.questions or Path(options.model) / QUESTIONS_FILE, wanted.limit
    )
    plan = Plan.make(options, wanted, machine or Machine.this())
    reasons = [why_impossible(plan, configuration) for configuration in configurations]
    total = len(configurations) + (wanted.compare is not None)

    def work(name: str, done: int) -> Callable[[list[Job]], list[Ended]]:
        def do(jobs: list[Job]) -> list[Ended]:
            return run_jobs(jobs, plan.seconds, start,
                            lambda text: look(f"{name}: {text}", done, total))  # fmt: skip

        return do

    with _folder(wanted.out) as folder:
        outcomes = []
        for number, (configuration, reason) in enumerate(
            zip(configurations, reasons, strict=True)
        ):  # fmt: skip
            if reason is not None:
                outcomes.append(Outcome(configuration, "impossible", reason))
                continue
            place = folder / _file_name(configuration.name)
            jobs = plan.answers(configuration, questions, place)
            outcomes.append(judge(configuration, questions, work(configuration.name, number)(jobs)))
        ran = [outcome for outcome in outcomes if outcome.first is not None]
        distances = [d for other in ran[1:] if (d := distance(ran[0], other)) is not None]
        explanation = None
        if wanted.compare is not None:
            one, other = (_named(outcomes, name) for name in wanted.compare)
            explanation = explain(plan, one, other, questions, wanted.tolerance,
                                  folder / "compare", work("compare", total - 1))  # fmt: skip
    return Report(
        options.model, __version__, plan.ranks, plan.transport, outcomes, distances, explanation
    )


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    return [_finite(part) for part in value] if isinstance(value, list | tuple) else value


def _configurations(wanted: ReportOptions) -> list[Configuration]:
    """What was asked for, and what is to be compared."""
    asked = wanted.configs
    pair = [] if wanted.compare is None else list(wanted.compare)
    if asked is None:
        asked = ",".join(pair) or DEFAULT_CONFIGS
    found = parse(asked)
    if wanted.compare is None:
        return found
    one, other = parse(",".join(pair))
    return found + [c for c in (one, other) if c.name not in [known.name for known in found]]


def _named(outcomes: list[Outcome], name: str) -> Outcome:
    return next(outcome for outcome in outcomes if outcome.configuration.name == name)


def _file_name(name: str) -> str:
    return re.sub(r"[^\w.+=-]", "_", name)


@contextmanager
def _folder(out: Path | None) -> Iterator[Path]:
    """Where processes write: the user's folder, or one that vanishes.

    Raises:
        ConfigError: it cannot be made.
    """
    if out is None:
        with tempfile.TemporaryDirectory(prefix="deepinfer-report-") as name:
            yield Path(name)
        return
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be made ({error})") from None
    yield out

"""Ranks that need no model: their results are written down in the test."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deepinfer.commands.report.questions import Question
from deepinfer.commands.report.records import (
    Answer,
    Job,
    OperatorUse,
    RankResult,
    Run,
)

QUESTIONS = [
    Question("What is the capital of France?", "<f>", "Paris"),
    Question("What is 7 * 8?", "<p>", "56"),
]


def answer(text: str, *token_ids: int, **fields: Any) -> Answer:
    """A reply that ended by itself, with a margin of 1 nat everywhere."""
    margins = [1.0] * len(token_ids)
    logprobs = [-0.1] * len(token_ids)
    given = {"finish_reason": "stop", "logprobs": logprobs, "margins": margins, **fields}
    return Answer(list(token_ids), text, **given)


def good_run() -> Run:
    """The right answers."""
    return Run([answer("Paris", 5, 1), answer("56", 6, 7, 1)], ["aa", "bb", "cc"])


def good_result(rank: int = 0, **fields: Any) -> RankResult:
    """A rank with which everything is well."""
    given: dict[str, Any] = {
        "host": {"torch": "1"},
        "runs": [good_run(), good_run()],
        "operators": [OperatorUse("rope", "ref", "first", 4, 0)],
        "seconds": {"loading": 1.0, "first_token": 0.01},
        "rates": {"prefill": 100.0, "decode": 10.0, "questions": 20.0},
        "memory": {"host_peak": 2**30},
        "agreed": True,
    }
    return RankResult(rank, "done", **{**given, **fields})


class FakeProcess:
    """A process that has ended, or with None never does."""

    def __init__(self, status: int | None) -> None:
        self.status = status
        self.stopped = False

    def poll(self) -> int | None:
        return -9 if self.stopped else self.status

    def stop(self) -> None:
        self.stopped = True


Ranks = Callable[[Job], tuple[int | None, RankResult | None]]


class FakeStart:
    """Starts processes that have done their job at once.

    Args:
        ranks: exit status and result of a job.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.jobs: list[Job] = []
        self.processes: list[FakeProcess] = []

    def __call__(self, job: Job) -> FakeProcess:
        self.jobs.append(job)
        status, result = self.ranks(job)
        job.log.write_text(f"rank {job.rank} says something\n", encoding="utf-8")
        if result is not None:
            result.write(job)
        self.processes.append(FakeProcess(status))
        return self.processes[-1]


def write_questions(folder: Path, questions: list[Question]) -> Path:
    """A file of questions."""
    file = folder / "questions.json"
    file.write_text(json.dumps([vars(question) for question in questions]), encoding="utf-8")
    return file

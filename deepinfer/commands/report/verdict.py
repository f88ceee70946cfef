"""From what ranks found out to what is right: answers, agreement, equality, failures, distances.

Knows results and endings of processes; must not know torch, or how anything was run.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from deepinfer.commands.report.configurations import Configuration
from deepinfer.commands.report.questions import Question, is_right
from deepinfer.commands.report.records import Answer, RankResult, Run
from deepinfer.commands.report.supervise import Ended


@dataclass(frozen=True)
class Failure:
    """Something that must not happen; `rank` is None when it concerns several."""

    rank: int | None
    what: str
    log_tail: str = ""


@dataclass(frozen=True)
class Judged:
    """One question and the reply of rank 0; right is None where nothing is known to be right."""

    question: str
    expected: str | None
    found: str
    right: bool | None


@dataclass(frozen=True)
class Outcome:
    """One configuration.

    Attributes:
        status: right; wrong = an answer is wrong; failed = there are hard failures; impossible =
            it cannot run here.
        reason: why it cannot.
        results: of the ranks that got to one, in their order.
        ranks_agree: tokens and logits of all ranks are the same; None for one rank alone.
        runs_equal: those of every rank's two runs are; None without any.
    """

    configuration: Configuration
    status: Literal["right", "wrong", "failed", "impossible"]
    reason: str = ""
    failures: list[Failure] = field(default_factory=list)
    answers: list[Judged] = field(default_factory=list)
    results: list[RankResult] = field(default_factory=list)
    ranks_agree: bool | None = None
    runs_equal: bool | None = None

    @property
    def first(self) -> RankResult | None:
        """The first result that is complete."""
        return next((result for result in self.results if result.status == "done"), None)

    @property
    def fallbacks(self) -> int:
        """How often a reference stepped in, over all ranks."""
        return sum(use.fallbacks for result in self.results for use in result.operators)


def judge(
    configuration: Configuration,
    questions: Sequence[Question],
    ranks: Sequence[Ended],
) -> Outcome:
    """The verdict on one configuration, from what became of each rank."""
    found = [rank.result for rank in ranks if rank.result is not None]
    refused = [result for result in found if result.status == "impossible"]
    if refused and len(refused) == len(ranks):
        return Outcome(configuration, "impossible", refused[0].reason)
    failures = broken(ranks)
    done = [result for result in found if result.status == "done"]
    agree = _agreement(done, failures) if len(done) == len(ranks) > 1 else None
    equal = _equality(done, failures) if done else None
    for result in done:
        failures += _errors(result, questions)
        if configuration.settings.get("ops_strict"):
            failures += [
                Failure(result.rank, f"{use.operator} fell back {use.fallbacks} times in strict"
                                     f" mode")
                for use in result.operators if use.fallbacks
            ]  # fmt: skip
    answers = _judged(questions, done[0].runs[0]) if done else []
    status: Literal["right", "wrong", "failed"] = "failed" if failures else "right"
    if not failures and any(answer.right is False for answer in answers):
        status = "wrong"
    return Outcome(configuration, status, "", failures, answers, found, agree, equal)


def broken(ranks: Sequence[Ended]) -> list[Failure]:
    """Ranks that crashed, hung, broke off, were stopped or left nothing; the first one first."""
    failures = []
    for rank in sorted(ranks, key=lambda rank: rank.ending.order):
        ending, result = rank.ending, rank.result
        if result is not None and result.status != "done":
            what = f"{result.status}: {result.reason}"
        elif ending.kind != "done":
            what = f"{ending.kind} while {rank.at}: {ending.text}"
        elif result is None:
            what = "ended without a result"
        else:
            continue
        failures.append(Failure(ending.rank, what, rank.tail))
    return failures


def _judged(questions: Sequence[Question], run: Run) -> list[Judged]:
    return [
        Judged(question.question, question.answer, answer.text, is_right(question, answer.text))
        for question, answer in zip(questions, run.answers, strict=True)
    ]


def _errors(result: RankResult, questions: Sequence[Question]) -> list[Failure]:
    """Replies that broke off, in any run."""
    return [
        Failure(result.rank, f"run {number}, {question.question!r} ended with"
                             f" {answer.finish_reason}: {answer.error}")
        for number, run in enumerate(result.runs, 1)
        for question, answer in zip(questions, run.answers, strict=True)
        if answer.finish_reason not in ("stop", "length")
    ]  # fmt: skip


def _agreement(done: Sequence[RankResult], failures: list[Failure]) -> bool:
    """Whether every rank's first run is that of the first rank, bit for bit."""
    agree = True
    for result in done[1:]:
        found = unlike(done[0].runs[0], result.runs[0])
        if found is not None:
            agree = False
            failures.append(Failure(result.rank, f"disagrees with rank {done[0].rank}: {found}"))
    if agree and any(result.agreed is False for result in done):
        agree = False
        failures.append(Failure(None, "the ranks told each other different digests"))
    return agree


def _equality(done: Sequence[RankResult], failures: list[Failure]) -> bool:
    """Whether each rank's runs are equal, bit for bit."""
    equal = True
    for result in done:
        for number, run in enumerate(result.runs[1:], 2):
            found = unlike(result.runs[0], run)
            if found is not None:
                equal = False
                failures.append(Failure(result.rank, f"run {number} is not run 1: {found}"))
    return equal


def unlike(one: Run, other: Run) -> str | None:
    """The first thing in which two runs differ, or None."""
    for number, (a, b) in enumerate(zip(one.answers, other.answers, strict=True)):
        if a.token_ids != b.token_ids:
            position = common_tokens(a, b)
            return f"question {number}, token {position}: {_at(a, position)} and {_at(b, position)}"
    for number, (mine, theirs) in enumerate(zip(one.steps, other.steps, strict=False)):
        if mine != theirs:
            return f"the same tokens, but other logits in step {number} of {len(one.steps)}"
    if len(one.steps) != len(other.steps):
        return f"the same tokens in {len(one.steps)} and {len(other.steps)} steps"
    return None


def common_tokens(one: Answer, other: Answer) -> int:
    """How many tokens two replies begin with alike."""
    count = 0
    for a, b in zip(one.token_ids, other.token_ids, strict=False):
        if a != b:
            break
        count += 1
    return count


def _at(answer: Answer, position: int) -> str:
    """The token there, in words."""
    if position < len(answer.token_ids):
        return f"token id {answer.token_ids[position]}"
    return "the end"


@dataclass(frozen=True)
class Parting:
    """Where two configurations give different tokens.

    Attributes:
        question: its number; position: of the first differing token.
        tokens: of both, in words; margins: how far the two most likely tokens were apart there, in
            nats, None where it was not reported.
    """

    question: int
    position: int
    tokens: tuple[str, str]
    margins: tuple[float | None, float | None]


@dataclass(frozen=True)
class Distance:
    """How far the answers of two configurations are apart, by the first run of each.

    Attributes:
        same: replies with the same tokens, of `total`.
        partings: of the others, in the order of the questions.
        logprob: largest difference of log-probabilities of tokens that both chose; None where
            they were not reported.
        steady: whether both runs of the first, and of the second, were equal.
    """

    names: tuple[str, str]
    same: int
    total: int
    partings: list[Parting]
    logprob: float | None
    steady: tuple[bool | None, bool | None]


def distance(one: Outcome, other: Outcome) -> Distance | None:
    """How far two configurations are apart; None unless both have answers."""
    a, b = one.first, other.first
    if a is None or b is None:
        return None
    partings: list[Parting] = []
    gaps: list[float] = []
    pairs = list(zip(a.runs[0].answers, b.runs[0].answers, strict=True))
    for number, (mine, theirs) in enumerate(pairs):
        count = common_tokens(mine, theirs)
        values = zip(mine.logprobs[:count], theirs.logprobs[:count], strict=False)
        gaps += [abs(x - y) for x, y in values]
        if mine.token_ids != theirs.token_ids:
            margins = tuple(
                answer.margins[count] if count < len(answer.margins) else None
                for answer in (mine, theirs)
            )
            partings.append(
                Parting(number, count, (_at(mine, count), _at(theirs, count)),
                        (margins[0], margins[1]))
            )  # fmt: skip
    return Distance(
        (one.configuration.name, other.configuration.name), len(pairs) - len(partings), len(pairs),
        partings, max(gaps, default=None), (one.runs_equal, other.runs_equal),
    )  # fmt: skip


def exit_status(outcomes: Sequence[Outcome]) -> int:
    """0 if something ran and everything that ran is right, else 1."""
    ran = [outcome for outcome in outcomes if outcome.status != "impossible"]
    return 0 if ran and all(outcome.status == "right" for outcome in ran) else 1

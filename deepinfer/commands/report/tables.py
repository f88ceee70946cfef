"""A report as tables and lines, for a terminal and as Markdown.

Knows wording; must not know how anything was found out.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from deepinfer.commands.report.explain import Explanation
from deepinfer.commands.report.records import Difference
from deepinfer.commands.report.run import Report
from deepinfer.commands.report.verdict import Distance, Parting

GIB = 2**30
_MOST = 20  # rows of what may be long
_MEASURED = (
    "load: checkpoint, kernels and graphs; first: to the first token of a question, alone, median",
    "prefill, decode: of one long prompt and after it, alone",
    "asked: generated tokens of all questions at once; all: the sum over ranks",
    "round: tokens that a round of speculation gave after the long prompt",
)


@dataclass(frozen=True)
class Table:
    """A table with a title; `detail` is what a terminal can do without."""

    title: str
    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    detail: bool = False


@dataclass(frozen=True)
class Lines:
    """A few lines with a title; blocks are shown as they are, like the ends of logs."""

    title: str
    lines: list[str]
    blocks: list[tuple[str, str]]


Part = Table | Lines


def parts(report: Report) -> Iterator[Part]:
    """Everything that a report says, the most important first."""
    yield _verdicts(report)
    lacking = [f"{o.configuration.name}: {o.reason}" for o in report.outcomes if o.reason]
    if lacking:
        yield Lines("Not possible here", lacking, [])
    yield _failures(report)
    if wrong := _answers(report, wrong_only=True).rows:
        yield Table("Wrong answers", ("configuration", "question", "expected", "found"), wrong)
    if any(outcome.first for outcome in report.outcomes):
        yield _speed(report)
        yield _memory(report)
        yield Lines("How it was measured", list(_MEASURED), [])
    if report.distances:
        yield _distances(report.distances)
        partings = [_parting_row(d, p) for d in report.distances for p in d.partings[:_MOST]]
        if partings:
            yield Table("First differing tokens",
                        ("configurations", "question", "token", "one", "other", "margins there"),
                        partings)  # fmt: skip
    if report.explanation is not None:
        yield from _explanation(report.explanation)
    yield _fallbacks(report)
    for table in (_backends(report), _operators(report), _answers(report, False), _hosts(report)):
        if table.rows:
            yield table


def headline(report: Report) -> str:
    """One line about the whole."""
    how = f"over {report.transport}" if report.transport else "alone"
    ranks = f"{report.ranks} rank{'s' * (report.ranks > 1)} {how}"
    return f"DeepInfer {report.version}, {report.model}, {ranks}: exit status {report.exit_status}"


def _verdicts(report: Report) -> Table:
    header = ("configuration", "verdict", "right", "ranks agree", "runs equal", "fell back",
              "failures")  # fmt: skip
    rows = []
    for outcome in report.outcomes:
        name = outcome.configuration.name
        if outcome.status == "impossible":
            rows.append((name, "not possible", *[""] * 5))
            continue
        judged = [answer for answer in outcome.answers if answer.right is not None]
        right = sum(answer.right is True for answer in judged)
        score = f"{right} of {len(judged)}" if judged else "–"
        rows.append(
            (name, outcome.status, score, _yes(outcome.ranks_agree),
             _yes(outcome.runs_equal), str(outcome.fallbacks), str(len(outcome.failures) or "none"))
        )  # fmt: skip
    return Table("Verdicts", header, rows)


def _failures(report: Report) -> Lines:
    lines: list[str] = []
    blocks: list[tuple[str, str]] = []
    found = [(o.configuration.name, failure) for o in report.outcomes for failure in o.failures]
    if report.explanation is not None:
        found += [("compare", failure) for failure in report.explanation.failures]
    for name, failure in found:
        who = f"{name}, rank {failure.rank}" if failure.rank is not None else name
        lines.append(f"{who}: {failure.what}")
        if failure.log_tail:
            blocks.append((f"{who}, end of its log", failure.log_tail))
    return Lines("Hard failures", lines or ["none"], blocks)


def _answers(report: Report, wrong_only: bool) -> Table:
    rows = [
        (outcome.configuration.name, answer.question, answer.expected or "", answer.found)
        + (() if wrong_only else (_yes(answer.right),))
        for outcome in report.outcomes
        for answer in outcome.answers
        if not wrong_only or answer.right is False
    ]
    header = ("configuration", "question", "expected", "found", "right")
    return Table("Answers", header, rows, detail=True)


def _speed(report: Report) -> Table:
    header = ("configuration", "load s", "first ms", "prefill", "decode", "asked", "all", "round")
    rows = []
    for outcome in report.outcomes:
        done = [result for result in outcome.results if result.status == "done"]
        if not done:
            continue
        seconds, rates = done[0].seconds, done[0].rates
        total = sum(result.rates.get("questions", 0.0) for result in done)
        rows.append(
            (outcome.configuration.name, _number(seconds.get("loading")),
             _number(seconds.get("first_token"), 1000), _number(rates.get("prefill")),
             _number(rates.get("decode")), _number(rates.get("questions")),
             _number(total or None), _number(rates.get("tokens_per_round")))
        )  # fmt: skip
    return Table("Speed of rank 0, tokens per second", header, rows)


def _memory(report: Report) -> Table:
    names = {"host_peak": "host", "gpu_allocated_peak": "GPU used",
               "gpu_reserved_peak": "GPU reserved", "gpu_free": "GPU free at the end",
               "gpu_total": "GPU in all"}  # fmt: skip
    results = [result for outcome in report.outcomes for result in outcome.results]
    known = {name for result in results for name in result.memory}
    columns = {name: label for name, label in names.items() if name in known}
    rows = []
    for outcome in report.outcomes:
        for result in outcome.results:
            memory = (result.memory.get(name) for name in columns)
            cells = ("–" if size is None else f"{size / GIB:.2f}" for size in memory)
            rows.append((outcome.configuration.name, str(result.rank), *cells))
    return Table("Memory, peaks in GiB", ("configuration", "rank", *columns.values()), rows)


def _distances(distances: list[Distance]) -> Table:
    header = ("configurations", "replies equal", "largest log-probability gap",
              "own runs equal")  # fmt: skip
    rows = [
        (_pair(d.names), f"{d.same} of {d.total}",
         "not reported" if d.logprob is None else f"{d.logprob:.3g}",
         ", ".join(_yes(steady) for steady in d.steady))
        for d in distances
    ]  # fmt: skip
    return Table("Distance between configurations", header, rows)


def _parting_row(apart: Distance, parting: Parting) -> tuple[str, ...]:
    margins = ", ".join("not reported" if m is None else f"{m:.3g}" for m in parting.margins)
    return (_pair(apart.names), str(parting.question), str(parting.position), *parting.tokens,
            margins)  # fmt: skip


def _explanation(found: Explanation) -> Iterator[Part]:
    title = f"Why {_pair(found.names)}"
    if found.lacking:
        yield Lines(title, [f"nothing to look at: {found.lacking}"], [])
        return
    layer, operator = found.first_layer, found.first_operator
    lines = [f"{found.tokens} tokens: {found.about}"]
    lines.append(
        "no state is farther apart than the tolerance" if layer is None
        else f"first over the tolerance: {layer.maker}, which made the {layer.state}, token"
             f" {layer.token}: 1 - cosine is {layer.distance:.3g}"
    )  # fmt: skip
    if found.hosts is None:
        lines.append("both run the same operators: look at what else their settings change")
    else:
        host, guest = found.hosts
        lines.append(f"{host} runs, and the operators of {guest} are given the same inputs")
        lines.append(
            "no operator is over its tolerance" if operator is None
            else f"first over its tolerance: {operator.operator} in {operator.place}, call"
                 f" {operator.call} {operator.output}: {operator.complaint}"
        )  # fmt: skip
    yield Lines(title, lines, [])
    rows = [(e.state, f"{e.distance:.3g}", f"{e.difference:.3g}", str(e.token))
            for e in found.layers]  # fmt: skip
    if rows:
        yield Table("States", ("state", "1 - cosine", "largest difference", "at token"), rows)
    if found.operators:
        yield _unequal(found)


def _unequal(found: Explanation) -> Table:
    """Worst call of each operator's output, the farthest first."""
    worst: dict[tuple[str, str], Difference] = {}
    calls: dict[tuple[str, str], int] = defaultdict(int)
    for entry in found.operators:
        key = (entry.operator, entry.output)
        calls[key] += 1
        known = worst.get(key)
        if known is None or (entry.complaint is not None, entry.distance) > (
            known.complaint is not None, known.distance
        ):  # fmt: skip
            worst[key] = entry
    ordered = sorted(worst.values(), key=lambda e: (e.complaint is None, -e.distance))
    rows = [
        (f"{e.operator} {e.output}", " / ".join(e.backends), f"{calls[e.operator, e.output]}",
         f"{e.distance:.3g}", e.place, e.complaint or "within")
        for e in ordered[:_MOST]
    ]  # fmt: skip
    header = ("operator, output", "backends", "unequal calls", "distance", "worst at", "tolerance")
    return Table("Operators that are not equal", header, rows)


def _backends(report: Report) -> Table:
    rows = []
    for outcome in report.outcomes:
        result = outcome.first
        if result is None:
            continue
        backends: dict[str, list[int]] = {}
        for use in result.operators:
            counted = backends.setdefault(use.backend, [0, 0, 0])
            counted[0] += 1
            counted[1] += use.calls > 0
            counted[2] += use.calls
        rows += [
            (outcome.configuration.name, backend, str(count), str(called), f"{calls:,}")
            for backend, (count, called, calls) in sorted(backends.items())
        ]
    header = ("configuration", "backend", "operators", "called", "calls")
    return Table("Operators by backend (rank 0)", header, rows)


def _fallbacks(report: Report) -> Lines:
    lines = []
    for outcome in report.outcomes:
        for result in outcome.results:
            lines += [
                f"{outcome.configuration.name}, rank {result.rank}: {use.operator} {use.fallbacks}"
                " times"
                for use in result.operators if use.fallbacks
            ]  # fmt: skip
        if outcome.first is not None:
            lines += [f"{outcome.configuration.name}, note: {n}" for n in outcome.first.notes]
    return Lines("Kernel fallbacks and notes", lines or ["none"], [])


def _operators(report: Report) -> Table:
    rows = [
        (outcome.configuration.name, use.operator, use.backend, str(use.calls), str(use.fallbacks),
         use.reason)
        for outcome in report.outcomes
        if outcome.first is not None
        for use in outcome.first.operators
        if use.calls
    ]  # fmt: skip
    header = ("configuration", "operator", "backend", "calls", "fallbacks", "why")
    return Table("Operators that were called (rank 0)", header, rows, detail=True)


def _hosts(report: Report) -> Table:
    rows = []
    for outcome in report.outcomes:
        for result in outcome.results:
            known = ", ".join(f"{name} {value}" for name, value in result.host.items())
            rows.append((outcome.configuration.name, str(result.rank), known))
    return Table("Ranks", ("configuration", "rank", "what it ran on"), rows, detail=True)


def _pair(names: tuple[str, str]) -> str:
    return " and ".join(names)


def _yes(value: bool | None) -> str:
    return "–" if value is None else "yes" if value else "no"


def _number(value: float | None, factor: float = 1.0) -> str:
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value * factor:,.{1 if value * factor < 1000 else 0}f}"

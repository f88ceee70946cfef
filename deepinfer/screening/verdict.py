"""An operator's verdict from its cases', and everything that a report says of it.

Knows results; must not know how they came about, nor how they are shown.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from deepinfer.libraries.allowlist import Entry
from deepinfer.screening.arguments import kinds
from deepinfer.screening.cases import Case
from deepinfer.screening.catalog import Operator
from deepinfer.screening.judge import Verdict
from deepinfer.screening.own import is_own
from deepinfer.screening.probe import Event

_UNTRIED = "not tried"


@dataclass
class CaseReport:
    """A case and its result.

    Attributes:
        shown: its arguments, for people; args: as data, where the case failed.
    """

    case: str
    kind: str
    in_scope: bool
    calls: int
    shown: str
    verdict: Verdict
    reason: str = ""
    error_library: float | None = None
    error_pytorch: float | None = None
    nearer: str = ""
    remark: str = ""
    first_seconds: float | None = None
    args: Any = None


@dataclass
class Speed:
    """Times of the engine's calls, each counted as often as the engine makes it.

    Attributes:
        part: of PyTorch's time. pytorch, library: seconds of all calls together.
        graph: whether the library's calls can be captured where PyTorch's can.
        first_seconds: the longest first call of the cold process.
    """

    part: float
    pytorch: float
    library: float
    graph: bool
    first_seconds: float


@dataclass
class OperatorReport:
    """What is known of one operator.

    Attributes:
        operator: PyTorch's name; name: the library's, "" where it has none.
        kinds: signatures of arguments for which a case passed, or of the engine's calls where
            nothing was tried.
        limits: what is wrong outside of what the engine calls.
        nearer: cases in which the library, or PyTorch, is nearer to float64.
    """

    operator: str
    name: str
    verdict: Verdict
    reason: str
    calls: int
    sites: list[str]
    kinds: list[list[str]] = field(default_factory=list)
    limits: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    nearer: dict[str, int] = field(default_factory=dict)
    speed: Speed | None = None
    cases: list[CaseReport] = field(default_factory=list)

    def to_data(self) -> dict[str, Any]:
        """As JSON; what a case does not have is left out."""
        data = asdict(self)
        data["cases"] = [
            {k: v for k, v in case.items() if v not in (None, "", 0) or k == "in_scope"}
            for case in data["cases"]
        ]
        return data


def skipped(operator: Operator, name: str, reason: str) -> OperatorReport:
    """An operator that nothing was tried of."""
    return OperatorReport(operator.name, name, "skip", reason, operator.count,
                          sorted(operator.sites), sorted(map(list, operator.kinds)))  # fmt: skip


def operator_report(
    operator: Operator, name: str, cases: Sequence[Case], events: Sequence[Event], given_up: str,
    shown: Mapping[str, str],
) -> OperatorReport:  # fmt: skip
    """Verdict and details from the events of a cold run.

    fail: a case in scope is wrong. skip: none of the engine's calls is shown to be right, or some
    cases were not tried. Cases that PyTorch refuses are left out.

    Args:
        given_up: why cases without an event were not tried.
        shown: arguments of the cases, for people.
    """
    found = {event["case"]: event for event in events if event["event"] == "result"}
    invalid = {event["case"] for event in events if event["event"] == "invalid"}
    reports = [
        _case_report(case, found.get(case.name), given_up, shown.get(case.name, ""))
        for case in cases if case.name not in invalid
    ]  # fmt: skip
    report = skipped(operator, name, "")
    report.cases = reports
    report.verdict, report.reason = _verdict(reports)
    shown_right = {case.case for case in reports if case.verdict == "pass"}
    if not is_own(operator.name):
        right = [c for c in cases if c.name in shown_right and c.in_scope]
        report.kinds = sorted(map(list, {kinds(operator.name, case.args) for case in right}))
    report.limits = sorted({
        f"{case.kind}: {case.reason}" for case in reports
        if case.verdict == "fail" and not case.in_scope
    })  # fmt: skip
    report.remarks = sorted({f"{case.kind}: {case.remark}" for case in reports if case.remark})
    for who in ("library", "pytorch"):
        report.nearer[who] = sum(case.nearer == who for case in reports)
    return report


def _case_report(case: Case, event: Event | None, given_up: str, shown: str) -> CaseReport:
    report = CaseReport(case.name, case.kind, case.in_scope, case.calls, shown, "skip", _UNTRIED)
    if event is None:
        report.reason += f": {given_up}" if given_up else ""
        return report
    for name in ("verdict", "reason", "error_library", "error_pytorch", "nearer", "remark",
                 "first_seconds"):  # fmt: skip
        setattr(report, name, event.get(name))
    if report.verdict == "fail":
        report.args = case.args
    return report


def _verdict(cases: Sequence[CaseReport]) -> tuple[Verdict, str]:
    scope = [case for case in cases if case.in_scope]
    wrong = [case for case in scope if case.verdict == "fail"]
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        return "fail", f"{wrong[0].case}: {wrong[0].reason}{more}"
    missing = [case for case in scope if case.reason.startswith(_UNTRIED)]
    if missing:
        return "skip", f"{len(missing)} cases {missing[0].reason}"
    calls = [case for case in scope if case.kind == "engine"] or scope
    if not any(case.verdict == "pass" for case in calls):
        return "skip", calls[0].reason if calls else "PyTorch refuses every call of it"
    return "pass", ""


def add_speed(report: OperatorReport, events: Sequence[Event], lost: str) -> None:
    """Times and bits of a second process; other bits, or its death, make an operator fail."""
    if lost:
        report.verdict, report.reason = "fail", f"in a second process: {lost}"
        return
    for event in events:
        if event["verdict"] == "fail" or not event["same"]:
            what = event["reason"] or "the same call gives other bits"
            report.verdict, report.reason = "fail", f"in a second process, {event['case']}: {what}"
            return
    counted = [event for event in events if event["calls"]]
    if not counted:
        return
    pytorch = sum(event["calls"] * event["pytorch"]["seconds"] for event in counted)
    library = sum(event["calls"] * event["library"]["seconds"] for event in counted)
    graph = all(e["library"]["graph"] or not e["pytorch"]["graph"] for e in counted)
    first = max((case.first_seconds or 0.0 for case in report.cases), default=0.0)
    report.speed = Speed(library / pytorch, pytorch, library, graph, first)


def entries(reports: Sequence[OperatorReport]) -> dict[str, Entry]:
    """Entries of an allow-list: the operators that passed."""
    return {
        report.operator: Entry(
            name=report.name,
            kinds=tuple(tuple(found) for found in report.kinds),
            time=round(report.speed.part, 4) if report.speed else None,
            graph=report.speed.graph if report.speed else True,
            calls=report.calls,
            sites=len(report.sites),
        )
        for report in reports
        if report.verdict == "pass"
    }

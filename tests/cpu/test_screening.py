"""A screening of a library in which every kind of fault is planted: each is caught, and named.

One run of everything, in child processes as always; the tests look at what it found.
"""

import contextlib
import io
import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer.errors import ConfigError
from deepinfer.libraries.allowlist import read
from deepinfer.screening.catalog import Catalog, trace
from deepinfer.screening.defects import defects_page
from deepinfer.screening.files import ALLOWED, DATA, MARKDOWN, PAGE, write_files
from deepinfer.screening.probe import Limits
from deepinfer.screening.reproducer import LINES, reproducer
from deepinfer.screening.run import JOURNAL, Screening, Settings, screen
from deepinfer.screening.verdict import OperatorReport

FAULTS = Path(__file__).with_name("screening_faults.py")
LIMITS = Limits(case_seconds=5, memory=3 << 28)


def traced_run() -> None:
    """Stands for the engine: calls of every operator that the library has, and of another."""
    x, y = torch.rand(5, 7) - 0.5, torch.rand(5, 7)
    whole = torch.arange(35).view(5, 7)
    x.abs(), x.clone().abs_(), y.bfloat16().cumsum(1), torch.neg(x, out=torch.zeros(5, 7))
    (
        x + y,
        x - y,
        x.exp(),
        x.sigmoid(),
        x.tanh(),
        x.cos(),
        y.log2(),
        y.sqrt(),
        y.rsqrt(),
        (9 * x).round(),
    )
    torch.cat([x, y]), torch.cat([x]), x.sum(1), whole.int().sum(1), x.mean(1), x.topk(3)
    x.floor(), x.double().floor()
    torch.maximum(x, y), x[torch.tensor([0, 2])], whole == 3, x == 1.0, x.sin()


@dataclass
class Found:
    """The screening, its folder, and reports by operator."""

    screening: Screening
    folder: Path
    catalog: Catalog
    settings: Settings

    def report(self, operator: str) -> OperatorReport:
        return next(r for r in self.screening.reports if r.operator == operator)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("screening")
    torch.manual_seed(3)
    catalog = trace(traced_run, "cpu")
    settings = Settings(str(FAULTS), "cpu", folder, workers=2, limits=LIMITS)
    return Found(screen(catalog, settings, lambda *_: None), folder, catalog, settings)


@pytest.mark.parametrize("operator", ["abs", "abs_", "cumsum"])
def test_right_operators_pass(found: Found, operator: str) -> None:
    report = found.report(operator)
    assert (report.verdict, report.reason) == ("pass", "")
    in_scope = [case for case in report.cases if case.in_scope]
    assert len(in_scope) > 8
    assert all(case.verdict == "pass" for case in in_scope)
    assert report.speed is not None
    assert report.speed.part > 0


@pytest.mark.parametrize(("operator", "case", "reason"), [
    ("add.Tensor", "broadcast", "shape is [3, 1], PyTorch's [3, 4]"),
    ("exp", "infinities and NaN", "instead of 0"),
    ("sigmoid", "one element", "takes longer than 5 s, as one of 2 processes"),
    ("tanh", "infinities and NaN", "ends its process with status 7"),
    ("cos", "no elements", "crashes with SIGSEGV"),
    ("log2", "infinities and NaN", "takes more than 0.75 GiB of main memory"),
    ("cat", "engine", "the result is memory of argument 1, PyTorch's is its own"),
    ("round", "engine", "a second call differs"),
    ("sum.dim_IntList", "engine", "dtype is torch.int32, PyTorch's torch.int64"),
    ("neg.out", "engine", "the result is a copy, PyTorch's is memory of its argument"),
    ("rsqrt", "engine", "changes its argument 1"),
    ("maximum", "strides", "values differ"),
    ("index.Tensor", "negative places", "values differ"),
    ("topk", "-inf", "a place is picked twice"),
    ("eq.Scalar", "large whole numbers", "values differ"),
    ("sub.Tensor", "engine", "strides are [(1, 5)], PyTorch's [(7, 1)]"),
    ("floor", "engine", "values differ"),
    ("mean.dim", "engine", "the same call gives other bits"),
])  # fmt: skip
def test_every_fault_is_caught_by_its_case(
    found: Found, operator: str, case: str, reason: str
) -> None:
    report = found.report(operator)
    assert report.verdict == "fail"
    if operator == "mean.dim":  # what only a second process shows
        assert report.reason == f"in a second process, engine 1: {reason}"
        return
    wrong = [c for c in report.cases if c.verdict == "fail" and c.kind == case and c.in_scope]
    assert any(reason in c.reason for c in wrong), report.cases


def test_a_lost_process_costs_one_case(found: Found) -> None:
    for operator in ("sigmoid", "tanh", "cos"):
        verdicts = {case.verdict for case in found.report(operator).cases}
        assert verdicts == {"pass", "fail"}, operator


def test_what_the_library_does_not_answer_is_skipped(found: Found) -> None:
    sine = found.report("sin")
    assert sine.verdict == "skip"
    assert sine.reason.startswith(f"not registered by {FAULTS}")
    root = found.report("sqrt")
    assert (root.verdict, root.reason) == ("skip", "its function hands the call back to PyTorch")
    assert {case.verdict for case in root.cases} == {"skip"}


def test_who_is_nearer_to_float64_is_said(found: Found) -> None:
    report = found.report("cumsum")
    assert report.nearer["library"] + report.nearer["pytorch"] == 0  # both round once
    tangent = found.report("mean.dim")
    assert any(case.error_pytorch is not None for case in tangent.cases)


def test_only_what_passed_is_allowed(found: Found, tmp_path: Path) -> None:
    write_files(found.screening, tmp_path)
    allowed = read(tmp_path / ALLOWED)
    assert set(allowed.operators) == {"abs", "abs_", "cumsum"}
    assert allowed.operators["abs"].name == "right_abs"
    assert allowed.operators["abs"].kinds == (("float32",),)
    assert allowed.made_with["torch"] == torch.__version__


def test_reports_say_what_was_found(found: Found, tmp_path: Path) -> None:
    write_files(found.screening, tmp_path)
    data = json.loads((tmp_path / DATA).read_text())
    assert data["made_with"]["torch"] == torch.__version__
    assert {"revision", "date", "made_by", "machine", "traced"} <= set(data)
    for name in (MARKDOWN, PAGE):
        text = (tmp_path / name).read_text()
        for report in found.screening.reports:
            assert report.operator in text
        assert "3 are right" in text
        assert "crashes with SIGSEGV" in text


def test_defects_are_shown_by_a_few_lines_that_run(found: Found, tmp_path: Path) -> None:
    """The lines print PyTorch's result and the library's, and these differ."""
    (tmp_path / "results" / "faults").mkdir(parents=True)
    write_files(found.screening, tmp_path / "results" / "faults")
    page = defects_page(tmp_path / "results")
    for operator, kind in (("add.Tensor", "broadcast"), ("exp", "-inf"), ("topk", "-inf"),
                           ("maximum", "strides"), ("eq.Scalar", "large whole numbers"),
                           ("index.Tensor", "negative places")):  # fmt: skip
        report = found.report(operator)
        case = next(c for c in report.cases if c.kind == kind and c.verdict == "fail")
        lines = reproducer(str(FAULTS), report.name, operator, case.case, case.args, "cpu")
        assert len(lines.splitlines()) <= LINES
        printed = io.StringIO()
        names: dict[str, Any] = {}
        with contextlib.redirect_stdout(printed):
            exec(compile(lines, "reproducer", "exec"), names)
        names["session"].close()
        half = len(printed.getvalue()) // 2
        assert printed.getvalue()[:half] != printed.getvalue()[half:], lines
        assert f"### {operator}" in page
    assert "### sqrt" not in page


def test_a_finished_case_is_not_run_again(found: Found, tmp_path: Path) -> None:
    """A journal decides what is left: its verdicts are believed, a broken last line is not."""
    folder = tmp_path / "again"
    shutil.copytree(found.folder, folder)
    journal = folder / JOURNAL
    events = [json.loads(line) for line in journal.read_text().splitlines()]
    kept = [e for e in events if e["operator"] in ("abs", "abs_", "exp")]
    (marked,) = (e for e in kept if (e["operator"], e.get("case")) == ("abs", "engine 1")
                 and e["event"] == "result")  # fmt: skip
    marked |= {"verdict": "fail", "reason": "as the journal says"}
    exps = [e for e in kept if e["operator"] == "exp"]
    kept = [e for e in kept if e["operator"] != "exp"] + exps[: len(exps) // 2]
    lines = [json.dumps(event) for event in kept]
    journal.write_text("\n".join([*lines, '{"event": "resu']))
    settings = replace(found.settings, out=folder, operators=["abs", "exp"], speed=False)
    again = screen(found.catalog, settings, lambda *_: None)
    first, second = again.reports
    assert first.reason == "engine 1: as the journal says"
    assert second.reason == found.report("exp").reason
    assert len(second.cases) == len(found.report("exp").cases)


def test_another_screening_in_the_folder_is_refused(found: Found) -> None:
    other = {name: found.catalog[name] for name in ("abs", "exp")}
    with pytest.raises(ConfigError, match="holds another screening"):
        screen(other, found.settings, lambda *_: None)


def test_names_in_any_spelling_and_unknown_ones(found: Found, tmp_path: Path) -> None:
    names = ["aten::abs.default", "right_abs_", "eq", "tanhh"]
    settings = replace(found.settings, out=tmp_path, operators=names, hostile=False, speed=False)
    some = screen(found.catalog, settings, lambda *_: None)
    assert [report.operator for report in some.reports] == ["abs", "abs_", "eq.Scalar"]
    assert some.unknown == {"tanhh": ["tanh"]}
    assert {case.kind for report in some.reports for case in report.cases} == {"engine"}


def test_an_operator_has_a_limit_of_its_own(tmp_path: Path) -> None:
    """What was not tried is no pass, and nothing is wrong with it either."""
    catalog = trace(lambda: torch.rand(3, 4).erf(), "cpu")
    limits = replace(LIMITS, operator_seconds=2)
    settings = Settings(str(FAULTS), "cpu", tmp_path, limits=limits, speed=False)
    report = next(r for r in screen(catalog, settings, lambda *_: None).reports if r.name)
    assert report.verdict == "skip"
    assert "cases not tried: the operator took more than 2 s" in report.reason
    assert not [case for case in report.cases if case.verdict == "fail"]


def test_no_time_left_is_said_and_a_later_run_goes_on(tmp_path: Path) -> None:
    catalog = trace(lambda: torch.rand(3, 4).abs(), "cpu")
    settings = Settings(str(FAULTS), "cpu", tmp_path, limits=LIMITS, seconds=1e-3)
    report = next(r for r in screen(catalog, settings, lambda *_: None).reports if r.name)
    assert report.verdict == "skip"
    assert report.reason.endswith("cases not tried: there was no time left")
    later = screen(catalog, replace(settings, seconds=300), lambda *_: None)
    report = next(r for r in later.reports if r.name == "right_abs")
    assert report.verdict == "pass"
    assert report.speed is not None

"""The parts of a screening: arguments as data, hostile calls, the trace, and the judge."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from deepinfer.commands import screen as screen_command
from deepinfer.commands.screen import screen_library
from deepinfer.config import EngineOptions
from deepinfer.errors import ConfigError
from deepinfer.libraries.replace import overload, signature
from deepinfer.screening.arguments import (
    Fill,
    TensorData,
    build,
    contiguous,
    describe,
    kinds,
    show,
    tensor_data,
    tensors,
)
from deepinfer.screening.cases import Case, cases_of
from deepinfer.screening.catalog import Catalog, from_data, merge, to_data, trace
from deepinfer.screening.child import Job
from deepinfer.screening.judge import (
    Expected,
    Finding,
    Outcome,
    copies,
    identical,
    judge,
    observe,
    selects_alike,
)
from deepinfer.screening.library import Functions, Library, load_library
from deepinfer.screening.options import ScreenOptions
from deepinfer.screening.own import Backends, own_attempt, own_cases
from deepinfer.screening.places import left_open, written_twice
from deepinfer.screening.probe import Limits, Task
from deepinfer.screening.rules import rule_of
from deepinfer.screening.trial import attempt, digest, refer

CPU = torch.device("cpu")

# ---------------------------------------------------------------- arguments

_DTYPES = st.sampled_from(["float32", "bfloat16", "float64", "int64", "int32", "uint8", "bool",
                           "float8_e4m3fn", "float8_e8m0fnu", "complex64"])  # fmt: skip
_FILLS = st.builds(
    Fill, st.sampled_from(["normal", "whole", "rising", "specials", "low_rows", "big"]),
    st.sampled_from([-3, 0, 1]), st.sampled_from([1, 5, 9]),
)  # fmt: skip
_SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
_TENSORS = st.builds(
    lambda shape, dtype, fill, turned: TensorData(
        shape,
        tuple(reversed(contiguous(tuple(reversed(shape))))) if turned else contiguous(shape),
        dtype, fill,
    ),
    _SHAPES, _DTYPES, _FILLS, st.booleans(),
)  # fmt: skip
_ITEMS = st.one_of(
    _TENSORS.map(lambda t: t.to_data()), st.none(), st.booleans(), st.integers(-9, 9),
    st.floats(allow_nan=False).map(lambda v: describe(v, "cpu")),
    st.sampled_from([describe(torch.int32, "cpu"), describe(CPU, "cpu"), [1, 2]]),
)  # fmt: skip
_ARGS = st.fixed_dictionaries({
    "args": st.lists(
        _ITEMS | st.lists(_TENSORS.map(lambda t: t.to_data()), max_size=2), max_size=3
    ),
    "kwargs": st.dictionaries(st.sampled_from(["dtype", "out"]), _ITEMS, max_size=2),
})  # fmt: skip


@given(_ARGS)
def test_arguments_are_what_their_data_says(data: Any) -> None:
    """Through JSON and back: shapes, strides, dtypes and numbers; and the same values twice."""
    read = json.loads(json.dumps(data))
    assert read == data
    args, kwargs = build(read, CPU, 1)
    again, named = build(read, CPU, 1)
    for made, same, item in zip(args, again, data["args"], strict=True):
        if isinstance(made, Tensor):
            spec = tensor_data(item)
            assert (tuple(made.shape), made.stride()) == (spec.shape, spec.stride)
            assert str(made.dtype) == f"torch.{spec.dtype}"
            assert identical(made, same)
        else:
            assert repr(made) == repr(same)
    assert kwargs.keys() == named.keys() == data["kwargs"].keys()
    assert show(read) == show(data)


@given(_TENSORS)
def test_a_described_tensor_is_built_alike(spec: TensorData) -> None:
    made = build({"args": [spec.to_data()], "kwargs": {}}, CPU, 5)[0][0]
    described = tensor_data(describe(made, "cpu"))
    assert (described.shape, described.stride, described.dtype) == (
        spec.shape, spec.stride, spec.dtype,
    )  # fmt: skip
    again = build({"args": [described.to_data()], "kwargs": {}}, CPU, 6)[0][0]
    if made.dtype in (torch.int64, torch.int32, torch.uint8) and made.numel():
        assert made.min() <= again.min()
        assert again.max() <= made.max()
    if made.dtype == torch.float32:
        assert bool(made.isneginf().any()) <= bool(again.isneginf().any() | (made.numel() < 13))


def test_expanded_and_far_tensors_need_little_memory() -> None:
    far = TensorData((3, 4), (2**30 + 8, 1), "uint8", Fill("whole", 0, 9))
    wide = TensorData((1000, 1000, 1000), (0, 0, 1), "float32")
    for spec in (far, wide):
        made = build({"args": [spec.to_data()], "kwargs": {}}, CPU, 1)[0][0]
        assert (tuple(made.shape), made.stride()) == (spec.shape, spec.stride)


# ---------------------------------------------------------------- trace and cases


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    torch.manual_seed(5)
    x, places = torch.randn(6, 8), torch.tensor([0, 3, 5])

    @torch.inference_mode()
    def run() -> None:
        x @ x.t(), x[places], x.masked_fill(x > 0, -math.inf).softmax(-1), x.mul(2.5)
        torch.zeros(3), x.t().contiguous(), torch.cat([x, x], 1), x.clone().add_(x)
        torch.nn.functional.linear(x, x), torch.sort(x), places + 1, x.to(torch.bfloat16)

    return trace(run, "cpu")


def test_the_trace_sees_into_composites_and_kernels(catalog: Catalog) -> None:
    assert {"linear", "mm", "add.Tensor", "add_.Tensor", "_softmax"} <= catalog.keys()
    assert {"copy_", "zero_"} <= catalog.keys()  # only kernels call these
    assert all(call.nested for call in catalog["zero_"].calls.values())
    assert catalog["mm"].count == 2
    assert ("float32", "float") in catalog["mul.Tensor"].kinds
    assert ("bfloat16", "float32") in catalog["_to_copy"].kinds | catalog["copy_"].kinds


def test_the_trace_keeps_what_values_are_like(catalog: Catalog) -> None:
    (softmax,) = catalog["_softmax"].calls.values()
    assert next(tensors(softmax.args)).fill.kind == "low_rows"
    (index,) = catalog["index.Tensor"].calls.values()
    places = list(tensors(index.args))[1].fill
    assert (places.kind, places.low, places.high) == ("rising", 0, 5)


def test_catalogs_merge_and_are_read_as_written(catalog: Catalog) -> None:
    data = json.loads(json.dumps(to_data(catalog)))
    again = from_data(data)
    assert json.dumps(to_data(again)) == json.dumps(data)
    twice = merge([catalog, again])
    assert twice.keys() == catalog.keys()
    assert twice["mm"].count == 2 * catalog["mm"].count


def test_kinds_of_data_are_kinds_of_arguments(catalog: Catalog) -> None:
    """What is proven of cases has to be recognised in calls."""
    checked = 0
    for operator in catalog.values():
        for case in cases_of(operator):
            if case.kind == "past 2^31":
                continue
            args, kwargs = build(case.args, CPU, 1)
            assert signature(operator.name, args, kwargs, "cpu") == kinds(
                operator.name, case.args
            ) or any(t.where == "cpu" for t in tensors(case.args))
            checked += 1
    assert checked > 300


def test_most_hostile_calls_are_valid(catalog: Catalog) -> None:
    """What PyTorch refuses shows nothing, so there must not be much of it."""
    kinds_seen: dict[str, list[bool]] = {}
    for operator in catalog.values():
        for case in cases_of(operator):
            args, kwargs = build(case.args, CPU, 1)
            try:
                overload(operator.name)(*args, **kwargs)
                kinds_seen.setdefault(case.kind, []).append(True)
            except (RuntimeError, IndexError, NotImplementedError, TypeError):
                kinds_seen.setdefault(case.kind, []).append(False)
    for kind in ("engine", "tiny", "broadcast", "no elements", "one element", "no dimensions",
                 "strides", "expanded", "past 2^31", "infinities and NaN", "-inf",
                 "large whole numbers", "negative places", "dimensions from the end",
                 "another dimension", "aliasing", "promotion", "float8",
                 "host scalar"):  # fmt: skip
        assert any(kinds_seen[kind]), kind
    everything = [valid for found in kinds_seen.values() for valid in found]
    assert sum(everything) > 0.8 * len(everything)


# ---------------------------------------------------------------- judging


def outcome(result: Any, *args: Tensor, operator: str = "mul.Tensor") -> Outcome:
    return observe(operator, result, args, copies(args))


def found(operator: str, got: Any, pytorch: Any, exact: Any = None) -> Finding:
    rule = rule_of(operator)
    assert rule is not None
    wide = None if exact is None else [exact]
    return judge(rule, outcome(got), Expected(outcome(pytorch), wide))


@given(st.integers(0, 6), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_a_few_units_in_the_last_place_are_right_and_more_are_not(
    steps: int, dtype: torch.dtype
) -> None:
    exact = torch.tensor([1.3, -2.7, 1e-3], dtype=torch.float64)
    pytorch = exact.to(dtype)
    off = pytorch
    for _ in range(4 * steps):
        off = torch.nextafter(off, off + off.sign())
    verdict = found("exp", off, pytorch, exact).verdict
    assert verdict == ("pass" if steps == 0 else "fail" if steps > 2 else verdict)


def test_distances_and_who_is_nearer() -> None:
    exact = torch.full((4,), 100.0, dtype=torch.float64)
    got, pytorch = torch.full((4,), 100.125), torch.full((4,), 100.92)
    finding = found("cumsum", got, pytorch, exact)
    assert (finding.verdict, finding.nearer) == ("pass", "library")
    assert finding.error_library == pytest.approx(0.125)
    assert finding.error_pytorch == pytest.approx(0.92, rel=1e-3)
    other = found("cumsum", pytorch, got, exact)
    assert (other.verdict, other.nearer) == ("fail", "pytorch")
    assert "0.92 off float64, PyTorch 0.125" in other.reason


def test_parts_of_complex_values_are_judged_by_the_whole() -> None:
    """(3 + 4i)(4 + 3.0001i): what nearly cancels is rounded as what it is a difference of."""
    exact = torch.complex(torch.tensor([-4e-4]), torch.tensor([25.0003])).to(torch.complex128)
    pytorch = exact.to(torch.complex64)
    near = torch.complex(torch.tensor([-4e-4 + 2e-6]), torch.tensor([25.0003]))
    far = torch.complex(torch.tensor([-4e-4 + 2e-5]), torch.tensor([25.0003]))
    assert found("mul.Tensor", near, pytorch, exact).verdict == "pass"
    assert found("mul.Tensor", far, pytorch, exact).verdict == "fail"


def test_one_element_of_any_stride_has_its_bytes() -> None:
    """Such a tensor counts as contiguous, but its bytes cannot be looked at as they lie."""
    one = torch.arange(4).as_strided((1,), (2,))
    assert digest([one]) == digest([torch.tensor([0])]) != digest([torch.tensor([1])])
    assert identical(one, torch.tensor([0]))


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(("operator", "got", "pytorch", "says"), [
    ("exp", [1.0, NAN], [1.0, 2.0], "1 of 2 values differ, the first at [1]: nan instead of 2"),
    ("exp", [1.0, INF], [1.0, -INF], "inf instead of -inf"),
    ("exp", [1.0, 3e38], [1.0, INF], "3.00000001e+38 instead of inf"),
    ("abs", [0.0], [-0.0], "0 instead of -0"),
    ("relu", [1.0000001], [1.0], "1.00000012 instead of 1"),
    ("eq.Scalar", [True, False], [True, True], "1 of 2 values differ"),
])  # fmt: skip
def test_values_that_are_wrong(operator: str, got: Any, pytorch: Any, says: str) -> None:
    finding = found(operator, torch.tensor(got), torch.tensor(pytorch))
    assert finding.verdict == "fail"
    assert says in finding.reason


def test_nan_is_nan_and_infinities_are_equal() -> None:
    values = torch.tensor([NAN, INF, -INF, 0.0, -0.0])
    for operator in ("abs", "exp", "cumsum"):
        assert found(operator, values.clone(), values).verdict == "pass"


def test_forms_that_are_wrong() -> None:
    x = torch.ones(2, 3)
    assert "shape is [3, 2]" in found("abs", x.t(), x).reason
    assert "dtype is torch.float64" in found("abs", x.double(), x).reason
    assert "2 results, PyTorch gives 1" in found("abs", (x, x), x).reason
    assert "result is 3, PyTorch's 4" in found("item", 3, 4).reason
    turned = x.t().contiguous().t()
    rule = rule_of("abs")
    assert rule is not None
    lax = judge(rule, outcome(turned), Expected(outcome(x)))
    assert (lax.verdict, lax.remark) == ("pass", "strides are [(1, 2)], PyTorch's [(3, 1)]")
    assert judge(rule, outcome(turned), Expected(outcome(x), strides=True)).verdict == "fail"


def test_memory_that_is_shared_or_changed() -> None:
    rule = rule_of("abs")
    assert rule is not None
    x = torch.ones(3)
    alias, copy = outcome(x, x), outcome(x.clone(), x)
    assert "memory of argument 1" in judge(rule, alias, Expected(copy)).reason
    assert "is a copy" in judge(rule, copy, Expected(alias)).reason
    before = copies([x])
    x[0] = 5
    changed = observe("mul.Tensor", copy.values[0], [x], before)
    assert judge(rule, changed, Expected(copy)).reason == "changes its argument 1"
    in_place = observe("abs_", x, [x], before)
    assert in_place.changed == []
    assert len(in_place.values) == 2


def test_places_of_equal_values_may_differ() -> None:
    values = torch.tensor([[3.0, 1.0, 3.0, 2.0]])
    theirs = torch.tensor([[0, 2]])
    assert selects_alike(values, 1, torch.tensor([[2, 0]]), theirs) is None
    assert selects_alike(values, 1, torch.tensor([[0, 0]]), theirs) == "a place is picked twice"
    assert "other values" in str(selects_alike(values, 1, torch.tensor([[0, 3]]), theirs))
    assert "place 4" in str(selects_alike(values, 1, torch.tensor([[0, 4]]), theirs))


def test_uninitialised_and_random_results_have_no_rule() -> None:
    assert rule_of("empty.memory_format") is None
    assert rule_of("randn") is None
    assert rule_of("bernoulli_.float") is None


def test_a_call_that_the_dispatcher_keeps_to_itself_is_no_proof() -> None:
    """A registration that is never asked shows nothing, though the results are right."""
    library = Functions("nothing", {"exp": lambda x: x}, "cpu")
    session = library.open("exp")
    session.replacement.library._destroy()  # type: ignore[attr-defined]
    case = Case("engine 1", "engine", {"args": [TensorData((2,), (1,), "float32").to_data()],
                                       "kwargs": {}}, True)  # fmt: skip
    rule = rule_of("exp")
    assert rule is not None
    reference = refer("exp", rule, case, CPU)
    assert reference is not None
    result = attempt(session, "exp", rule, case, reference, CPU)
    assert (result.verdict, result.reason) == ("skip", "PyTorch's dispatcher did not call it")


def _lying_sub(a: Any, b: Any, *, alpha: float = 1) -> Tensor:
    """Zeros: a judge that subtracted with it would see no distance."""
    return torch.zeros_like(torch.add(a, b))


def _nothing(x: Any, *_: Any, **__: Any) -> Tensor:
    return torch.zeros_like(x, dtype=torch.bool)


LIARS: list[tuple[str, Any, list[TensorData]]] = [
    ("sub.Tensor", _lying_sub, [TensorData((4, 5), (5, 1), "float32")] * 2),
    ("sub.Tensor", _lying_sub, [TensorData((4, 5), (5, 1), "int64", Fill("whole", 0, 9))] * 2),
    ("abs", torch.zeros_like, [TensorData((4, 5), (5, 1), "float32")]),
    ("gt.Tensor", _nothing, [TensorData((4, 5), (5, 1), "float32")] * 2),
    ("ne.Tensor", _nothing, [TensorData((4, 5), (5, 1), "int64", Fill("whole", 0, 9))] * 2),
    ("isnan", _nothing, [TensorData((4, 5), (5, 1), "float32", Fill("specials"))]),
    ("maximum", lambda x, y: torch.zeros_like(x), [TensorData((4, 5), (5, 1), "float32")] * 2),
    ("max", lambda x: x.new_zeros(()), [TensorData((4, 5), (5, 1), "float32")]),
    ("mul.Tensor", lambda x, y: torch.zeros_like(x), [TensorData((4, 5), (5, 1), "float32")] * 2),
    ("bitwise_not", _nothing, [TensorData((4, 5), (5, 1), "bool")]),
]


@pytest.mark.parametrize(("operator", "lie", "data"), LIARS)
def test_nobody_is_judged_by_its_own_answers(
    operator: str, lie: Any, data: list[TensorData]
) -> None:
    """Arguments are made, and answers judged, by PyTorch's operators: the library is asked twice
    and no more."""
    calls = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return lie(*args, **kwargs)

    case = Case("engine 1", "engine", {"args": [d.to_data() for d in data], "kwargs": {}}, True)
    rule = rule_of(operator)
    assert rule is not None
    reference = refer(operator, rule, case, CPU)
    assert reference is not None
    session = Functions("liar", {operator: counted}, "cpu").open(operator)
    try:
        result = attempt(session, operator, rule, case, reference, CPU)
    finally:
        session.close()
    assert calls == 2
    assert result.verdict == "fail"
    assert "differ" in result.reason


# ---------------------------------------------------------------- libraries


def test_libraries_for_gpus_say_so(small_folder: Any, tmp_path: Any) -> None:
    options = EngineOptions(str(small_folder), device="cpu")
    for name in ("flaggems", "tile_kernels"):
        with pytest.raises(ConfigError, match=f"library {name} has kernels for GPUs only"):
            screen_library(options, ScreenOptions(library=name, out=str(tmp_path)))


@pytest.mark.parametrize(("name", "says"), [
    ("no_such_module", "cannot be imported"), ("missing.py", "cannot be imported"),
    ("json:loads", "has no loads that is a dict"), ("json", "has no OPERATORS"),
    ("backend:none", "no operator of deepinfer has a backend 'none'; there are"),
])  # fmt: skip
def test_what_is_no_library_is_refused(name: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_library(name, "cpu")
    assert says in str(caught.value)


def test_names_of_a_users_functions(tmp_path: Path) -> None:
    """With or without the namespace; what is no function is refused by its name."""
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\nA = {'aten::exp': torch.exp}\nB = {'neg': 3}\nC = {3: torch.exp}\n"
        "D = {'frobnicate': torch.exp}\nE = {'bitwise_and': torch.exp}\nF = {'softmx': torch.exp}\n"
    )
    assert load_library(f"{file}:A", "cpu").table() == {"exp": "exp"}
    for name, says in (
        ("B", "'neg': 3; expected a function"), ("C", "3: <built-in"),
        ("D", "'frobnicate' is no operator of PyTorch; nearest: "),
        ("E", "nearest: bitwise_and.Tensor"), ("F", "nearest: softmax"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=says):
            load_library(f"{file}:{name}", "cpu")


def test_backends_of_own_operators_are_screened_by_their_specs() -> None:
    library = load_library("backend:torch", "cpu")
    assert isinstance(library, Backends)
    assert isinstance(library, Library)
    assert "deepinfer::linear" in library.table()
    cases = own_cases("deepinfer::linear", "cpu")
    results = [own_attempt(library, "deepinfer::linear", case, CPU) for case in cases[:3]]
    assert {result.verdict for result in results} <= {"pass", "skip"}
    assert any(result.verdict == "pass" for result in results)


def test_limits_are_generous_by_default() -> None:
    assert Limits().case_seconds < Limits().operator_seconds
    task = Task(Job("cold", "x", "cpu", "abs", (), {}, 1, {}, "log", "lock"), [])
    assert (task.left, task.refused) == ([], "")


SIGMOID = (
    "import torch\n"
    "OPERATORS = {'sigmoid': lambda x: (1 / (1 + torch.exp(-x.double()))).to(x.dtype)}\n"
)


def wanted(folder: Path) -> ScreenOptions:
    """One operator, of functions in a file of its own."""
    library = folder / "mine.py"
    library.write_text(SIGMOID)
    return ScreenOptions(str(library), str(folder / "out"), operators="sigmoid,sigmoidal", jobs=1,
                         hostile=False)  # fmt: skip


def test_a_screening_from_the_options_to_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(options: EngineOptions, device: str, brief: bool = False) -> None:
        assert device == options.device == "cpu"
        torch.rand(3, 5).sigmoid()

    monkeypatch.setattr(screen_command, "_run", run)
    options = EngineOptions("somewhere", device="cpu")
    screening, files = screen_library(options, wanted(tmp_path), progress=False)
    assert [file.name for file in files if file.exists()] == [
        "screening.json", "report.md", "report.html", "allowlist.json",
    ]  # fmt: skip
    (report,) = screening.reports
    assert (report.operator, report.verdict, report.calls) == ("sigmoid", "pass", 1)
    assert list(screening.unknown) == ["sigmoidal"]
    again, _ = screen_library(options, wanted(tmp_path), progress=False)
    assert again.reports[0].cases == report.cases
    with pytest.raises(ConfigError, match="screening of another run"):
        screen_library(EngineOptions("other", device="cpu"), wanted(tmp_path), progress=False)


def test_names_of_nothing_are_refused_before_the_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trace takes a minute; a name that PyTorch has may turn out to be called."""
    traced = []
    monkeypatch.setattr(screen_command, "_run", lambda *_, **__: traced.append(True))
    options = EngineOptions("x", device="cpu")
    with pytest.raises(ConfigError, match=r"sigmoidal \(nearest: sigmoid\)"):
        screen_library(options, replace(wanted(tmp_path), operators="sigmoidal"), progress=False)
    assert not traced
    with pytest.raises(ConfigError, match="no operator to screen: tanh"):
        screen_library(options, replace(wanted(tmp_path), operators="tanh"), progress=False)
    assert traced


@pytest.mark.parametrize(("option", "value"), [
    ("jobs", 0), ("case_seconds", 0.0), ("operator_seconds", -1.0), ("memory_gib", 0.0),
    ("seconds", 0.0), ("case_seconds", math.nan), ("operator_seconds", math.inf),
])  # fmt: skip
def test_limits_that_cannot_work_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, value: float
) -> None:
    monkeypatch.setattr(screen_command, "_run", lambda *_, **__: torch.zeros(1).sigmoid())
    options = replace(wanted(tmp_path), **{option: value})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"{option} = {value}; expected"):
        screen_library(EngineOptions("x", device="cpu"), options, progress=False)


@pytest.mark.slow
def test_a_whole_checkpoint_is_traced_and_screened(
    small_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(screen_command, "_LONG", {"cpu": 8})
    options = EngineOptions(str(small_folder), threads=1, device="cpu", max_model_len=64)
    screening, _ = screen_library(options, wanted(tmp_path), progress=False)
    (report,) = screening.reports
    assert (report.operator, report.verdict) == ("sigmoid", "pass")
    assert report.calls > 0
    assert all(":" in site for site in report.sites)
    assert screening.head["traced"]["operators"] > 100


@pytest.mark.parametrize(("operator", "args", "twice"), [
    ("index_put_", (torch.zeros(4), [torch.tensor([0, 3, 1])], torch.ones(3)), False),
    # -1 is place 3.
    ("index_put_", (torch.zeros(4), [torch.tensor([0, 3, -1])], torch.ones(3)), True),
    ("index_put_", (torch.zeros(4), [torch.tensor([0, 0])], torch.ones(2), True), False),
    ("index_put_", (torch.zeros(4, 4), [torch.tensor([0, 0]), torch.tensor([1, 2])],
                    torch.ones(2)), False),
    ("index_put_", (torch.zeros(4, 4), [torch.tensor([0, 0]), torch.tensor([1, 1])],
                    torch.ones(2)), True),
    ("index_put_", (torch.zeros(4, 4), [None, torch.tensor([1, 1])], torch.ones(4, 2)), True),
    ("index_copy_", (torch.zeros(4), 0, torch.tensor([1, 1]), torch.ones(2)), True),
    ("scatter.src", (torch.zeros(2, 3), 1, torch.tensor([[0, 1], [0, 1]]), torch.ones(2, 2)),
     False),
    ("scatter.src", (torch.zeros(2, 3), 0, torch.tensor([[0, 1], [0, 1]]), torch.ones(2, 2)), True),
    ("gather", (torch.zeros(2, 3), 1, torch.tensor([[0, 0], [0, 1]])), False),
])  # fmt: skip
def test_places_that_are_written_twice(operator: str, args: tuple[Any, ...], twice: bool) -> None:
    """Of two values for one place either may stay, so such calls cannot be judged."""
    assert written_twice(operator, args, {}) == twice


@pytest.mark.parametrize(("source", "dtype", "fits"), [
    ([0.0, 255.9], torch.uint8, True), ([-0.9], torch.uint8, True), ([-1.0], torch.uint8, False),
    ([256.0], torch.uint8, False), ([NAN], torch.int64, False), ([INF], torch.int64, False),
    ([2.0**63], torch.int64, False), ([-(2.0**63)], torch.int64, True), ([], torch.int8, True),
    ([1e30], torch.float16, True), ([-5.0], torch.bool, True),
])  # fmt: skip
def test_numbers_that_whole_numbers_cannot_hold(
    source: list[float], dtype: torch.dtype, fits: bool
) -> None:
    """C leaves open what they become, and so does PyTorch."""
    given = torch.tensor(source, dtype=torch.float64)
    assert (left_open("_to_copy", [given], {"dtype": dtype}) == "") == fits
    assert (left_open("copy_", [torch.zeros(len(source), dtype=dtype), given], {}) == "") == fits


def test_locks_that_killed_children_leave_are_not_reported(tmp_path: Path) -> None:
    """FlagGems makes hundreds of them in each process."""
    library = tmp_path / "locking.py"
    library.write_text(
        "import multiprocessing\nimport os\n"
        "locks = [multiprocessing.get_context('spawn').Lock() for _ in range(3)]\n"
        "def sine(x):\n    os.kill(os.getpid(), 9)\n"
        "OPERATORS = {'sin': sine}\n"
    )
    script = (
        "import torch\nfrom pathlib import Path\n"
        "from deepinfer.screening.catalog import trace\n"
        "from deepinfer.screening.run import Settings, screen\n"
        "if __name__ == '__main__':\n"
        "    catalog = trace(lambda: torch.rand(3).sin(), 'cpu')\n"
        f"    settings = Settings({str(library)!r}, 'cpu', Path({str(tmp_path)!r}), ['sin'],\n"
        "                        hostile=False, speed=False)\n"
        "    print(screen(catalog, settings, lambda *_: None).reports[0].verdict)\n"
    )
    file = tmp_path / "run.py"
    file.write_text(script)
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, check=False,
                          timeout=200)  # fmt: skip
    assert (done.stdout, done.returncode) == ("fail\n", 0), done.stderr
    assert done.stderr == ""


def test_a_lost_gpu_is_not_taken_for_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """What PyTorch breaks would be blamed on the library that is asked next."""
    data = {"args": [TensorData((3,), (1,), "float32").to_data()], "kwargs": {}}
    case = Case("tiny", "tiny", data, in_scope=True)
    rule = rule_of("abs")
    assert rule is not None

    def broken(*args: Any) -> Any:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr("deepinfer.screening.trial._run", broken)
    with pytest.raises(RuntimeError, match="device-side assert"):
        refer("abs", rule, case, torch.device("cpu"))

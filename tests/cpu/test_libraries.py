"""Other functions in the place of PyTorch's operators: only where allowed, counted, and undone."""

import importlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.config import EngineOptions
from deepinfer.engine import loading
from deepinfer.errors import ConfigError
from deepinfer.libraries import flaggems
from deepinfer.libraries import switch as switches
from deepinfer.libraries.allowlist import SHIPPED, AllowList, Entry, Mode, find, read
from deepinfer.libraries.host import versions
from deepinfer.libraries.names import expand, nearest, resolve
from deepinfer.libraries.replace import Replacement, Use, signature
from deepinfer.libraries.switch import active, disable, switch
from deepinfer.numerics import fp8_scale, round_e2m1

CPU = torch.device("cpu")
# FlagGems' interface: a table of registrations, a registrar, and functions of any names.
FAKE = {
    "__init__.py": '''
import torch
from flag_gems.runtime.register import Register

__version__ = "5.0.2"
device = "cpu"
imported_on = torch.cuda.current_device()


def abs(x):
    return x.copysign(1.0)


def true_divide(a, b):
    return torch.mul(a, 1 / b)


def copy_(a, b, non_blocking=False):
    raise AssertionError("its condition does not hold")


_FULL_CONFIG = (
    ("copysign", abs), ("abs", abs), ("div.Tensor", true_divide),
    ("true_divide.Tensor", true_divide), ("copy_", copy_, lambda: False),
)
FULL_CONFIG_BY_FUNC = {}
for _item in _FULL_CONFIG:
    FULL_CONFIG_BY_FUNC.setdefault(_item[1].__name__, []).append(_item)


def enable(*args, **kwargs):
    raise AssertionError("never enable everything")


def only_enable(lib=None, include=None, registrar=Register):
    registrar([item for name in include for item in FULL_CONFIG_BY_FUNC.get(name, ())], lib)
''',
    "runtime/__init__.py": "",
    "runtime/register.py": '''
class Register:
    def __init__(self, config, lib):
        self.lib, self.all_ops, self.all_keys = lib, [], []
        for key, function, *_ in config:
            self.register_impl(key, function)

    def register_impl(self, key, fn):
        raise AssertionError("the registrar that was passed decides")
''',
}  # fmt: skip


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A package flag_gems 5.0.2 for a CPU, and a process whose GPU can be set."""
    for name, text in FAKE.items():
        file = tmp_path / "flag_gems" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    info = tmp_path / "flag_gems-5.0.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flag_gems\nVersion: 5.0.2\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    gpu = SimpleNamespace(number=0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: gpu.number)
    monkeypatch.setattr(torch.cuda, "set_device", lambda number: setattr(gpu, "number", number))
    monkeypatch.setattr(switches, "_process", switches._Process())
    yield gpu
    disable()
    _forget()


def _forget() -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "flag_gems"]:
        del sys.modules[name]


def entry(name: str, *kinds: tuple[str, ...], time: float | None = 0.5) -> Entry:
    return Entry(name, kinds, time, True, calls=3, sites=2)


def allowed(folder: Path, **operators: Entry) -> Path:
    """An allow-list that holds here."""
    file = folder / "list.json"
    named = {name.replace("__", "."): found for name, found in operators.items()}
    here = versions("cpu", flaggems.PACKAGE)
    AllowList(flaggems.NAME, here, "a test", named).write(file)
    return file


def dumps() -> list[str]:
    """What is registered for every operator that the fake library knows."""
    names = ("abs", "div.Tensor", "true_divide.Tensor", "copy_", "mul.Tensor")
    return [torch._C._dispatch_dump(f"aten::{name}") for name in names]


ABS = entry("abs", ("float32",))
DIVIDE = entry("true_divide", ("float32", "float32"), time=1.5)


def test_registrations_before_and_after_are_equal(fake: SimpleNamespace, tmp_path: Path) -> None:
    before = dumps()
    file = allowed(tmp_path, abs=ABS, div__Tensor=DIVIDE)
    enabled = switch("right", file, CPU)
    assert enabled is not None
    assert active() is enabled
    assert dumps() != before
    disable()
    assert dumps() == before
    assert active() is None


def test_only_allowed_operators_and_kinds_are_dispatched(
    fake: SimpleNamespace, tmp_path: Path
) -> None:
    enabled = switch("right", allowed(tmp_path, abs=ABS, div__Tensor=DIVIDE), CPU)
    assert enabled is not None
    uses = enabled.replacement.uses
    assert set(uses) == {"abs", "div.Tensor"}  # true_divide.Tensor has the same name
    x = torch.tensor([-1.0, 2.0])
    assert torch.equal(x.abs(), torch.tensor([1.0, 2.0]))
    assert torch.equal(x / x, torch.ones(2))
    assert x.double().abs().dtype == torch.float64
    assert torch.equal(torch.tensor([3, -4]) / 2, torch.tensor([1.5, -2.0]))
    assert (uses["abs"].calls, uses["abs"].kept) == (1, 1)
    assert (uses["div.Tensor"].calls, uses["div.Tensor"].kept) == (1, 1)


@pytest.mark.parametrize(
    ("mode", "operators"), [("fast", {"abs"}), ("right", {"abs", "div.Tensor"})]
)
def test_fast_leaves_out_what_is_slower(
    fake: SimpleNamespace, tmp_path: Path, mode: Mode, operators: set[str]
) -> None:
    enabled = switch(mode, allowed(tmp_path, abs=ABS, div__Tensor=DIVIDE), CPU)
    assert enabled is not None
    assert set(enabled.replacement.uses) == operators


def test_what_was_not_measured_or_breaks_graphs_is_not_fast() -> None:
    assert entry("abs").fast
    assert not entry("abs", time=None).fast
    breaking = Entry("abs", (), 0.5, False, 1, 1)
    assert not breaking.fast
    slow = entry("slow", time=2.0)
    found = AllowList("flaggems", {}, "", {"abs": breaking, "slow": slow, "exp": entry("exp")})
    assert set(found.chosen("right")) == {"slow", "exp"}
    assert set(found.chosen("fast")) == {"exp"}
    assert found.chosen("off") == {}


def test_the_line_counts_what_was_dispatched(
    fake: SimpleNamespace, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    enabled = switch("right", allowed(tmp_path, abs=ABS), CPU)
    assert enabled is not None
    assert enabled.line() == "0 operators from 1 names on 0 call sites with 1 registrations"
    torch.tensor([-1.0]).abs()
    assert enabled.line() == "1 operators from 1 names on 0 call sites with 1 registrations"
    for _ in range(3):
        round_e2m1(torch.tensor([-1.0, 2.5]))
        fp8_scale(torch.rand(2, 32))
    assert enabled.line() == "1 operators from 1 names on 2 call sites with 1 registrations"
    sites = enabled.replacement.uses["abs"].sites
    assert all(site.startswith("numerics.py:") for site in sites)
    with caplog.at_level(logging.WARNING):
        disable()
    assert "FlagGems: 1 operators from 1 names on 2 call sites with 1 registrations" in caplog.text


def test_a_name_that_is_gone_is_warned_of(
    fake: SimpleNamespace, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = allowed(tmp_path, abs=ABS, abs_=entry("abs_", ("float32",)))
    with caplog.at_level(logging.WARNING):
        enabled = switch("fast", file, CPU)
    assert "FlagGems has no abs_ (name abs_); nearest: abs" in caplog.text
    assert "1 registrations from 1 names (abs)" in caplog.text
    assert enabled is not None
    assert enabled.names == ("abs",)


def test_an_operator_that_nothing_could_take_back_is_refused(
    fake: SimpleNamespace, tmp_path: Path
) -> None:
    before = dumps()
    with pytest.raises(ConfigError, match="copysign: "):
        switch("right", allowed(tmp_path, abs=ABS, copysign=entry("abs")), CPU)
    assert dumps() == before
    assert active() is None


def test_off_restores_what_an_older_model_switched_on(
    fake: SimpleNamespace, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = dumps()
    switch("right", allowed(tmp_path, abs=ABS), CPU)
    with caplog.at_level(logging.WARNING):
        assert switch("off", None, CPU) is None
    assert dumps() == before
    assert "switched off for the whole process" in caplog.text


@pytest.mark.parametrize("rank", [0, 3])
def test_the_import_sees_the_ranks_own_device(
    fake: SimpleNamespace, tmp_path: Path, rank: int
) -> None:
    """Fails when flag_gems is imported before the rank's device is set."""
    file = allowed(tmp_path, abs=ABS)
    torch.cuda.set_device(rank)
    enabled = switch("right", file, CPU)
    assert sys.modules["flag_gems"].imported_on == rank
    assert enabled is not None


def test_an_import_before_the_engines_is_refused(fake: SimpleNamespace, tmp_path: Path) -> None:
    file = allowed(tmp_path, abs=ABS)
    importlib.import_module("flag_gems")
    torch.cuda.set_device(1)
    with pytest.raises(ConfigError, match="imported before the engine had set its device"):
        switch("right", file, CPU)


def test_another_gpu_than_the_models_is_refused(fake: SimpleNamespace) -> None:
    torch.cuda.set_device(1)
    with pytest.raises(ConfigError, match="on GPU 1, the model is for GPU 2"):
        switch("right", None, torch.device("cuda:2"))
    switches._process.devices.add(0)
    with pytest.raises(ConfigError, match="on GPU 0, the model is for GPU 1; use one process"):
        switch("right", None, torch.device("cuda"))


def test_loading_throws_the_switch_before_anything_is_on_the_device(
    small_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def noted(name: str) -> None:
        real = getattr(loading, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            order.append(name)
            return real(*args, **kwargs)

        monkeypatch.setattr(loading, name, call)

    for name in ("resolve", "switch", "checked_token_map", "load_model"):
        noted(name)
    loading.load(EngineOptions(str(small_folder), threads=1))
    assert order == ["resolve", "switch", "checked_token_map", "load_model"]


def test_a_list_for_other_versions_is_refused_with_what_to_run(tmp_path: Path) -> None:
    file = tmp_path / "list.json"
    AllowList("flaggems", {"torch": "2.11.0", "gpu": "NVIDIA H200"}, "a test", {}).write(file)
    with pytest.raises(ConfigError) as caught:
        find("flaggems", {"torch": "2.13.0", "gpu": "NVIDIA H200"}, file)
    assert "torch 2.11.0 there, 2.13.0 here" in str(caught.value)
    assert "run `deepinfer screen MODEL --library flaggems --out FOLDER`" in str(caught.value)
    assert find("flaggems", {"torch": "2.11.0", "gpu": "NVIDIA H200"}, file).operators == {}
    with pytest.raises(ConfigError, match="no allow-list"):
        find("flaggems", {"torch": "0"}, None)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 0}', '{"format": 1, "operators": 3}'])
def test_what_is_no_allow_list_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "list.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match="make one with `deepinfer screen`"):
        read(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        read(tmp_path / "missing.json")


def test_shipped_lists_are_lists_of_right_operators() -> None:
    for file in SHIPPED.glob("*.json"):
        shipped = read(file)
        assert shipped.library == "flaggems", file
        assert {"flag_gems", "torch", "triton", "gpu"} <= shipped.made_with.keys(), file
        assert all(entry.kinds and entry.calls for entry in shipped.operators.values()), file


_NAMES = st.text("abc._", min_size=1, max_size=5)
_KINDS = st.lists(st.lists(_NAMES, max_size=3).map(tuple), max_size=3).map(tuple)
_ENTRIES = st.builds(
    Entry, _NAMES, _KINDS, st.none() | st.floats(0, 9), st.booleans(), st.integers(0, 9),
    st.integers(0, 9),
)  # fmt: skip


@given(st.builds(AllowList, _NAMES, st.dictionaries(_NAMES, _NAMES), _NAMES,
                 st.dictionaries(_NAMES, _ENTRIES)))  # fmt: skip
def test_a_list_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, written: AllowList
) -> None:
    file = tmp_path_factory.mktemp("lists") / "list.json"
    written.write(file)
    assert read(file) == written


# ---------------------------------------------------------------- names

TABLE = {
    "add.Tensor": "add", "eq.Scalar": "eq_scalar", "eq.Tensor": "eq", "where.self": "where_self",
    "repeat_interleave.self_int": "repeat_interleave_self_int", "_softmax": "softmax",
    "div.Tensor": "true_divide", "div.Scalar": "true_divide",
}  # fmt: skip


@pytest.mark.parametrize(("name", "operators"), [
    ("add", ["add.Tensor"]), ("eq.Scalar", ["eq.Scalar"]), ("where.self", ["where.self"]),
    ("repeat_interleave.self_int", ["repeat_interleave.self_int"]), ("_softmax", ["_softmax"]),
    ("div.true_divide", ["div.Tensor", "div.Scalar"]), ("softmax", ["_softmax"]),
    ("aten::add.Tensor", ["add.Tensor"]), ("torch.ops.aten._softmax.default", ["_softmax"]),
    ("div", ["div.Tensor", "div.Scalar"]), ("eq", ["eq.Tensor"]), ("sub", []), ("add.Scalar", []),
])  # fmt: skip
def test_names_in_every_spelling(name: str, operators: list[str]) -> None:
    assert list(expand(name, TABLE)) == operators


def test_unknown_names_come_with_the_nearest() -> None:
    found = resolve(["add", "_softmx", "eq_scalr"], TABLE)
    assert found.operators == ("add.Tensor",)
    assert found.unknown["_softmx"][0] == "_softmax"
    assert found.unknown["eq_scalr"][0] == "eq_scalar"
    assert nearest("xyz", TABLE) == ()


# ---------------------------------------------------------------- replacing


@pytest.fixture
def replacement() -> Iterator[Replacement]:
    made = Replacement("cpu")
    yield made
    made.close()


def refuse(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError(f"called with {args}, {kwargs}")


@pytest.mark.parametrize(("operator", "call"), [
    ("mul.Tensor", lambda: torch.tensor([1, 2], dtype=torch.int32) * 2),
    ("mul.Tensor", lambda: torch.tensor([1, 2], dtype=torch.int32) * (2**31 + 5)),
    ("mul.Tensor", lambda: torch.tensor(3, dtype=torch.int32) * 2.5),
    ("mul.Tensor", lambda: torch.rand(3).bfloat16() * 0.1),
    ("mul.Tensor", lambda: torch.rand(3).double() * 0.1),
    ("add.Tensor", lambda: torch.add(torch.tensor([True, False]), 1, alpha=3)),
    ("zeros", lambda: torch.zeros(2, 3, dtype=torch.int16)),
    ("cat", lambda: torch.cat([torch.tensor([1]), torch.tensor([2.5])])),
    ("_to_copy", lambda: torch.tensor([1.5]).to(torch.float16)),
    ("where.self", lambda: torch.where(torch.tensor([True, False]), 1.0, torch.zeros(2))),
    ("index.Tensor", lambda: torch.arange(6).view(3, 2)[torch.tensor([-1])]),
])  # fmt: skip
def test_what_is_not_proven_is_pytorchs(replacement: Replacement, operator: str, call: Any) -> None:
    torch.manual_seed(1)
    expected = call()
    replacement.add(operator, refuse, proven=frozenset())
    torch.manual_seed(1)
    found = call()
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)
    assert replacement.uses[operator].kept >= 1
    assert replacement.uses[operator].calls == 0


def test_a_function_gets_pytorchs_operators_inside(replacement: Replacement) -> None:
    """What was shown of one operator alone stays true when others are replaced too."""
    replacement.add("exp", lambda x: torch.abs(x) + torch.exp(x))
    replacement.add("abs", refuse)
    assert torch.equal(torch.zeros(2).exp(), torch.ones(2))
    assert replacement.uses["exp"] == Use(calls=1, kept=1, nested=1)
    assert replacement.uses["abs"] == Use(kept=1)


def test_an_error_inside_leaves_the_operator_usable(replacement: Replacement) -> None:
    replacement.add("exp", refuse)
    for _ in range(2):
        with pytest.raises(AssertionError, match="called with"):
            torch.zeros(2).exp()
    assert replacement.stack == []


def test_an_operator_that_is_none_is_refused(replacement: Replacement) -> None:
    with pytest.raises(AttributeError):
        replacement.add("bitwise_left_shift", refuse)  # it has overloads only


def test_kinds_of_arguments() -> None:
    x, y = torch.zeros(2), torch.zeros((), dtype=torch.float64)
    assert signature("add.Tensor", (x, 2.5), {}, "cpu") == ("float32", "float")
    assert signature("add.Tensor", (x, y), {}, "cuda") == ("float32@cpu", "float64@cpu")
    assert signature("cat", ([x, y],), {}, "cpu") == ("float32", "float64")
    assert signature("index.Tensor", (x, [None, y.long()]), {}, "cpu") == ("float32", "-", "int64")
    assert signature("sum.dim_IntList", (x, [0]), {"dtype": torch.int32}, "cpu") == (
        "float32", "int32",
    )  # fmt: skip

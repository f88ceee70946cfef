"""Adapters of TileKernels against the references, by a package that does what its kernels promise.

The kernels themselves are compared by `make gpu` where the package is installed.
"""

import importlib.machinery
import sys
from collections.abc import Iterator

import pytest
import torch

from deepinfer.errors import Unsupported
from deepinfer.ops import select as selection
from deepinfer.ops.registry import specs
from deepinfer.ops.select import Wishes, installed, select
from deepinfer.ops.spec import Backend, Case, OpSpec
from deepinfer.screening.own import Backends, own_attempt, own_cases
from deepinfer.testing.operators import check_case, load_backend
from tests.ops.tile_kernels_contract import package

CPU = torch.device("cpu")
WITH = [
    (spec, backend) for spec in specs().values() for backend in spec.backends
    if backend.name == "tilelang"
]  # fmt: skip
SMALL = [
    pytest.param(spec, backend, case, id=f"{spec.name}-{case.name}")
    for spec, backend in WITH
    for case in spec.cases()
    if case.kind in ("tiny", "hostile")
]


@pytest.fixture
def tile_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The contract in the library's place, and no adapter that has seen it afterwards."""
    modules = package()
    for name, module in modules.items():
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    yield
    for name in [n for n in sys.modules if n.endswith(".tilelang")]:
        del sys.modules[name]


def smallest_released(spec: OpSpec) -> Case:
    return next(case for case in spec.cases() if case.kind == "released")


def test_operators_of_the_library_have_the_backend() -> None:
    """All that stand for calls of TileKernels but the expert matrix and the fused sampler."""
    calling = {
        spec.name for spec in specs().values()
        if any(call.startswith("tile_kernels.") for call in spec.stands_for)
    }  # fmt: skip
    assert {spec.name for spec, _ in WITH} == calling - {"expert_up"} | {"fp4_quantise"}


@pytest.mark.parametrize(("spec", "backend", "case"), SMALL)
@pytest.mark.usefixtures("tile_kernels")
def test_small_cases(spec: OpSpec, backend: Backend, case: Case) -> None:
    """Right, or refused with a reason."""
    function = load_backend(backend)
    try:
        check_case(spec, function, case, CPU)
    except Unsupported as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(("spec", "backend"), WITH, ids=[spec.name for spec, _ in WITH])
@pytest.mark.usefixtures("tile_kernels")
def test_released_sizes_are_taken(spec: OpSpec, backend: Backend) -> None:
    check_case(spec, load_backend(backend), smallest_released(spec), CPU)


@pytest.mark.usefixtures("tile_kernels")
def test_gates_of_logits_that_are_no_numbers_end_no_process() -> None:
    """The library's kernel would take the GPU from the process."""
    spec = specs()["moe_gate"]
    arguments = smallest_released(spec).arguments(CPU)
    arguments["logits"][0, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    ids, weights = load_backend(spec.backends[-1])(**arguments)
    assert bool(((ids >= 0) & (ids < arguments["logits"].shape[1])).all())
    assert bool(weights.isfinite().all())


@pytest.mark.usefixtures("tile_kernels")
def test_the_backend_is_chosen_where_the_library_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert installed("tilelang")
    said: list[str] = []
    monkeypatch.setattr(selection, "warn_once", said.append)
    chosen = select(Wishes(device="cuda", backend="tilelang"))
    by = {operator.spec.name: operator.backend for operator in chosen.all()}
    assert {name for name, backend in by.items() if backend == "tilelang"} == {
        spec.name for spec, _ in WITH
    }
    assert len(said) == 1  # one line for all that TileKernels does not do
    assert f"{len(by) - len(WITH)} operators: backend tilelang does not implement it" in said[0]
    with pytest.raises(selection.ConfigError, match="rope: backend tilelang needs a CUDA GPU"):
        select(Wishes(device="cpu", operators={"rope": "tilelang"}))


@pytest.mark.usefixtures("tile_kernels")
def test_the_library_is_screened_as_any_other() -> None:
    library = Backends("tile_kernels")
    assert set(library.table()) == {f"deepinfer::{spec.name}" for spec, _ in WITH}
    for operator in ("deepinfer::rope", "deepinfer::act_quant"):
        found = [own_attempt(library, operator, case, CPU) for case in own_cases(operator, "cpu")]
        assert {result.verdict for result in found} <= {"pass", "skip"}, found
        assert any(result.verdict == "pass" or "refuses" in result.reason for result in found)


def test_without_the_library_nothing_changes() -> None:
    if installed("tilelang"):
        pytest.skip("the library is installed here")
    chosen = select(Wishes(device="cpu")).all()
    assert {operator.backend for operator in chosen} == {"ref"}

"""Every operator's small cases through Triton's interpreter, against the reference.

The interpreter must be switched on before kernels are imported: run by `tests/ops/conftest.py`.
"""

import pytest
import torch

from deepinfer.ops.registry import specs
from deepinfer.ops.spec import Case, OpSpec
from deepinfer.testing.operators import check_case, load_backend

PAIRS = [
    pytest.param(spec, case, id=f"{spec.name}-{case.name}")
    for spec in specs().values()
    for case in spec.cases()
    if case.kind != "released"
]


@pytest.mark.parametrize(("spec", "case"), PAIRS)
def test_triton_equals_reference(spec: OpSpec, case: Case) -> None:
    for backend in spec.backends:
        if backend.name == "triton":
            check_case(spec, load_backend(backend), case, torch.device("cpu"))

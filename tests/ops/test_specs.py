"""Every operator's small cases on every backend, against the reference.

Without a GPU kernels run in Triton's interpreter, which tests/conftest.py switches on.
"""

import pytest
import torch

from deepinfer.ops.registry import specs
from deepinfer.ops.spec import Backend, Case, OpSpec
from deepinfer.testing.operators import check_case, load_backend

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CASES = [
    pytest.param(spec, backend, case, id=f"{spec.name}-{backend.name}-{case.name}")
    for spec in specs().values()
    for backend in spec.backends
    for case in spec.cases()
    if case.kind in ("tiny", "hostile") and not backend.narrow
]


@pytest.mark.parametrize(("spec", "backend", "case"), CASES)
def test_backend_equals_reference(spec: OpSpec, backend: Backend, case: Case) -> None:
    check_case(spec, load_backend(backend), case, DEVICE)

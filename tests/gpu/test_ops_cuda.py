"""Every operator on the GPU, released sizes too: equal bits when run twice, and no waiting."""

import pytest
import torch

from deepinfer.errors import Unsupported
from deepinfer.ops.registry import specs
from deepinfer.ops.select import installed
from deepinfer.ops.spec import BYTES, Backend, Case, OpSpec
from deepinfer.testing.operators import (
    check_case,
    complaint,
    copies_of,
    load_backend,
    results,
)
from deepinfer.testing.sync import forbid_sync

DEVICE = torch.device("cuda")
CASES = [
    pytest.param(spec, backend, case, id=f"{spec.name}-{backend.name}-{case.name}")
    for spec in specs().values()
    for backend in spec.backends
    if installed(backend.name)
    for case in spec.cases()
    if case.kind != "large"
]


@pytest.mark.parametrize(("spec", "backend", "case"), CASES)
def test_backend_equals_reference(spec: OpSpec, backend: Backend, case: Case) -> None:
    function = load_backend(backend)
    if backend.narrow:
        try:
            function(**case.arguments(DEVICE))
        except Unsupported as error:
            pytest.skip(str(error))
    check_case(spec, function, case, DEVICE)
    arguments = copies_of(case, DEVICE, 2)
    with forbid_sync():
        first, again = (results(spec, function, given) for given in arguments)
    assert not [name for name in first if complaint(again[name], first[name], BYTES)]

"""engram_gate: float32, float64, rows by themselves, refusals."""

from dataclasses import replace
from types import ModuleType

import pytest
import torch

from deepinfer.errors import Unsupported
from deepinfer.ops.engram_gate import engram_gate
from deepinfer.ops.engram_gate.spec import SPECS, draw
from deepinfer.ops.spec import Case, Tolerance
from deepinfer.testing.operators import check_case

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    from deepinfer.ops.engram_gate import triton

    return triton


@pytest.mark.parametrize("form", ["", "zeros", "opposite"])
def test_float32(kernels: ModuleType, form: str) -> None:
    close = replace(SPECS[0], tolerance={"new": Tolerance("close", 2e-6)})
    case = Case("float32", "tiny", lambda g, d: draw(g, d, 3, 4, 40, torch.float32, form=form))
    check_case(close, kernels.engram_gate, case, DEVICE)


def test_float64_is_near(kernels: ModuleType) -> None:
    a = draw(torch.Generator().manual_seed(1), DEVICE, 3, 2, 48, torch.float32)
    wide = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in a.items()}
    found = kernels.engram_gate(**a).double()
    torch.testing.assert_close(found, engram_gate(**wide), rtol=1e-5, atol=1e-6)


def test_row_alone_equals_row_in_batch(kernels: ModuleType) -> None:
    a = draw(torch.Generator().manual_seed(2), DEVICE, 5, 3, 40)
    together = kernels.engram_gate(**a)
    alone = {k: v[3] if k in ("streams", "keys", "value") else v for k, v in a.items()}
    assert torch.equal(kernels.engram_gate(**alone), together[3])


def test_inputs_stay(kernels: ModuleType) -> None:
    a = draw(torch.Generator().manual_seed(3), DEVICE, 2, 4, 32)
    before = a["streams"].clone()
    kernels.engram_gate(**a)
    assert torch.equal(a["streams"], before)


def test_refuses_what_it_cannot_do(kernels: ModuleType) -> None:
    a = draw(torch.Generator(), DEVICE, 2, 4, 32)
    with pytest.raises(Unsupported, match="float64"):
        kernels.engram_gate(**{**a, "streams": a["streams"].double()})
    with pytest.raises(Unsupported, match="another dtype"):
        kernels.engram_gate(**{**a, "value": a["value"].float()})
    with pytest.raises(Unsupported, match="weight"):
        kernels.engram_gate(**{**a, "weight": a["weight"].double()})

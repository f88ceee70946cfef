"""engram_gather: values by the formula, numbers outside of the table, refusals."""

from types import ModuleType

import pytest
import torch
from torch import Tensor

from deepinfer.errors import Unsupported
from deepinfer.ops.engram_gather import engram_gather
from deepinfer.ops.engram_gather.spec import draw

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    from deepinfer.ops.engram_gather import triton

    return triton


def both(kernels: ModuleType, codes: Tensor, scales: Tensor, rows: Tensor) -> list[Tensor]:
    functions = (engram_gather, kernels.engram_gather)
    return [f(codes, scales, rows, torch.bfloat16) for f in functions]


def test_values_by_formula(kernels: ModuleType) -> None:
    a = draw(torch.Generator().manual_seed(1), DEVICE, 3, 4, 64, 20)
    scale = torch.exp2(a["scales"].float() - 127).repeat_interleave(32, dim=-1)
    table = (a["codes"].view(torch.float8_e4m3fn).float() * scale).to(torch.bfloat16)
    expected = torch.stack([torch.cat([table[r] for r in rows]) for rows in a["rows"].tolist()])
    for found in both(kernels, a["codes"], a["scales"], a["rows"]):
        assert torch.equal(found, expected)


def test_nothing_is_read_for_numbers_outside_of_the_table(kernels: ModuleType) -> None:
    codes = torch.full((3, 32), 0xFF, dtype=torch.uint8, device=DEVICE)
    scales = torch.full((3, 1), 0xFF, dtype=torch.uint8, device=DEVICE)
    rows = torch.tensor([[-1, 3], [-(2**62), 2**62]], device=DEVICE)
    for found in both(kernels, codes, scales, rows):
        assert torch.equal(found, torch.zeros_like(found))


def test_token_alone_equals_token_in_batch(kernels: ModuleType) -> None:
    a = draw(torch.Generator().manual_seed(2), DEVICE, 5, 3, 96, 20)
    together = kernels.engram_gather(**a)
    assert torch.equal(kernels.engram_gather(**{**a, "rows": a["rows"][4]}), together[4])


def test_refuses_what_it_cannot_do(kernels: ModuleType) -> None:
    a = draw(torch.Generator(), DEVICE, 2, 3, 64, 9)
    with pytest.raises(Unsupported, match="float64"):
        kernels.engram_gather(**{**a, "dtype": torch.float64})
    with pytest.raises(Unsupported, match="scales"):
        kernels.engram_gather(**{**a, "scales": a["scales"][:, :1]})
    if DEVICE.type == "cuda":
        with pytest.raises(Unsupported, match="not pinned"):
            kernels.engram_gather(**{**a, "codes": a["codes"].cpu()})

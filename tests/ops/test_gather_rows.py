"""gather_rows: bits are kept, numbers outside of the table read nothing, shapes of the index."""

from types import ModuleType

import pytest
import torch

from deepinfer.errors import Unsupported
from deepinfer.ops.gather_rows import gather_rows

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    from deepinfer.ops.gather_rows import triton

    return triton


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.int64]
)
def test_bits_are_kept(kernels: ModuleType, dtype: torch.dtype) -> None:
    bits = torch.randint(0, 256, (6, 16), dtype=torch.uint8).to(DEVICE)
    bits[2] = 0xFF
    index = torch.tensor([2, 5, 2, 0], device=DEVICE)
    found = kernels.gather_rows(bits.view(dtype), index)
    assert torch.equal(found.view(torch.uint8), bits[index])


def test_nothing_is_read_for_numbers_outside_of_the_table(kernels: ModuleType) -> None:
    table = torch.full((3, 8), torch.nan, device=DEVICE)
    index = torch.tensor([-1, 3, 2**62, -(2**62)], device=DEVICE)
    for function in (gather_rows, kernels.gather_rows):
        assert torch.equal(function(table, index), torch.zeros(4, 8, device=DEVICE))


def test_the_empty_table(kernels: ModuleType) -> None:
    table, index = torch.empty(0, 4, device=DEVICE), torch.tensor([0, -1], device=DEVICE)
    for function in (gather_rows, kernels.gather_rows):
        assert torch.equal(function(table, index), torch.zeros(2, 4, device=DEVICE))


def test_shape_of_the_index(kernels: ModuleType) -> None:
    table = torch.randn(5, 3).to(DEVICE)
    index = torch.tensor([[4, 0, 1], [2, 2, -1]], device=DEVICE)
    for chosen in (index, index.T, index[0, 0]):
        assert torch.equal(kernels.gather_rows(table, chosen), gather_rows(table, chosen))


def test_refuses_gaps_between_columns(kernels: ModuleType) -> None:
    with pytest.raises(Unsupported, match="gaps"):
        kernels.gather_rows(torch.zeros(4, 4, device=DEVICE).T, torch.zeros(1, device=DEVICE).int())

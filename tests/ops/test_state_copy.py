"""copy_rows: what is not named stays, bits are kept, refusals."""

from types import ModuleType
from typing import Any

import pytest
import torch

from deepinfer.errors import Unsupported
from deepinfer.ops import state_copy as reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="module", params=["reference", "triton"])
def functions(request: pytest.FixtureRequest) -> Any:
    if request.param == "reference":
        return reference
    from deepinfer.ops.state_copy import triton

    return triton


def rows(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, device=DEVICE)


def test_gaps_and_other_rows_stay(functions: Any) -> None:
    room = torch.full((5, 20), 0x5A, dtype=torch.uint8, device=DEVICE)
    source = torch.randint(0, 256, (4, 11), dtype=torch.uint8).to(DEVICE)
    expected = room.clone()
    expected[1, 4:15], expected[4, 4:15] = source[3], source[0]
    functions.copy_rows(source, room[:, 4:15], rows(3, -1, 0, 2), rows(1, 0, 4, -1))
    assert torch.equal(room, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64])
def test_bits_are_kept(functions: Any, dtype: torch.dtype) -> None:
    source = torch.randint(0, 256, (3, 2, 16), dtype=torch.uint8).to(DEVICE)
    source[1] = 0xFF
    target = torch.zeros_like(source)
    functions.copy_rows(source.view(dtype), target.view(dtype), rows(1, 2), rows(0, 1))
    assert torch.equal(target[:2], source[1:])
    assert not target[2].any()


def test_slots_of_one_pool(functions: Any) -> None:
    pool = torch.randn(6, 3, 4).to(DEVICE)
    before = pool.clone()
    functions.copy_rows(pool, pool, rows(0, 5), rows(2, 4))
    assert torch.equal(pool[[2, 4]], before[[0, 5]])
    assert torch.equal(pool[[0, 1, 3, 5]], before[[0, 1, 3, 5]])


def test_refuses_what_it_cannot_do() -> None:
    from deepinfer.ops.state_copy import triton

    functions: ModuleType = triton
    square = torch.zeros(4, 4, device=DEVICE)
    with pytest.raises(Unsupported, match="different rows"):
        functions.copy_rows(square, square[:, :2], rows(0), rows(1))
    with pytest.raises(Unsupported, match="gaps within"):
        functions.copy_rows(square, square.T, rows(0), rows(1))

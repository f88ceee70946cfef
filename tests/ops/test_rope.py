"""rope: against float64, back and forth, alone and in a batch, and broadcasting."""

import pytest
import torch
from torch import Tensor

from deepinfer.errors import Unsupported
from deepinfer.ops.rope import rope
from deepinfer.ops.rope import triton as kernels
from deepinfer.ops.rope.spec import rotations_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def turns(*shape: int, dim: int) -> Tensor:
    return rotations_of(torch.Generator().manual_seed(3), shape, dim).to(DEVICE)


@pytest.mark.parametrize("inverse", [False, True])
def test_float32_against_float64(inverse: bool) -> None:
    x, rotations = torch.randn(5, 3, 64, device=DEVICE), turns(5, 1, dim=32)
    expected = rope(x.double(), rotations.to(torch.complex128), inverse)
    actual = kernels.rope(x, rotations, inverse)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(actual[..., :32], x[..., :32])


def test_there_and_back() -> None:
    x, rotations = torch.randn(4, 64, device=DEVICE), turns(4, dim=64)
    back = kernels.rope(kernels.rope(x, rotations), rotations, inverse=True)
    torch.testing.assert_close(back, x, rtol=1e-5, atol=1e-6)


def test_conjugated_rotations_are_the_inverse() -> None:
    x, rotations = torch.randn(4, 64, device=DEVICE), turns(4, dim=64)
    expected = kernels.rope(x, rotations, inverse=True)
    # A compiler may fuse either product of a sum with it, and not the same one in both.
    torch.testing.assert_close(kernels.rope(x, rotations.conj()), expected, rtol=1e-6, atol=1e-6)


def test_a_row_alone_gives_what_it_gives_among_others() -> None:
    x = torch.randn(19, 4, 64).to(torch.bfloat16).to(DEVICE)
    x[0] = float("nan")
    rotations = turns(19, 1, dim=32)
    together = kernels.rope(x, rotations)
    for row in (1, 8, 18):
        alone = kernels.rope(x[row : row + 1, 2:3], rotations[row : row + 1])
        assert torch.equal(together[row : row + 1, 2:3], alone)


@pytest.mark.parametrize(
    ("lead", "shape", "shared"),
    [
        ((5,), (5,), 1),
        ((5, 3), (5, 1), 3),
        ((2, 5, 3), (2, 5, 1), 3),
        ((2, 5, 3), (2, 1, 1), 15),
        ((5, 3), (1, 1), 15),
        ((5, 3), (3,), 1),
        ((2, 5, 3), (1, 5, 1), 1),
    ],
)
def test_broadcasting(lead: tuple[int, ...], shape: tuple[int, ...], shared: int) -> None:
    x, rotations = torch.randn(*lead, 32, device=DEVICE), turns(*shape, dim=16)
    assert kernels.shared_rows(x, rotations)[1] == shared
    torch.testing.assert_close(kernels.rope(x, rotations), rope(x, rotations), rtol=1e-6, atol=1e-6)


def test_refusals() -> None:
    x, rotations = torch.zeros(2, 32, device=DEVICE), turns(2, dim=64)
    with pytest.raises(Unsupported, match="64 rotary channels of 32"):
        kernels.rope(x, rotations)
    with pytest.raises(Unsupported, match="complex128"):
        kernels.rope(x, rotations.to(torch.complex128))
    with pytest.raises(Unsupported, match="float64"):
        kernels.rope(x.double(), turns(2, dim=16))

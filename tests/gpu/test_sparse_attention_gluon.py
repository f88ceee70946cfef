"""Gluon's sparse attention on a Hopper GPU: lists with holes, few heads, rows alone."""

import pytest
import torch

from deepinfer.errors import Unsupported
from deepinfer.ops.sparse_attention.gluon import sparse_attention, sparse_attention_halves
from deepinfer.ops.sparse_attention.reference import sparse_attention as reference
from deepinfer.ops.sparse_attention.spec import SPECS, make_arguments, moved
from deepinfer.ops.spec import BYTES, Arguments, Tolerance
from deepinfer.testing.operators import complaint

DEVICE = torch.device("cuda")
BOTH = pytest.mark.parametrize("function", [sparse_attention, sparse_attention_halves])
TOLERANCE = SPECS[0].tolerance


def _arguments(T: int, seed: int = 0, **sizes: int | float | None) -> Arguments:
    generator = torch.Generator().manual_seed(seed)
    sizes = {"N": 64, "W": 128, "K": 512, "ring": 300, "own": T, "entries": 2000} | sizes
    return moved(make_arguments(generator, T, D=512, **sizes), DEVICE)  # type: ignore[arg-type]


def _hopper() -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")


@BOTH
@pytest.mark.parametrize(
    "sizes",
    [
        {"T": 1}, {"T": 133}, {"T": 700, "share": 0.6}, {"T": 9, "share": 0.05},
        {"T": 5, "K": None}, {"T": 5, "K": 0}, {"T": 5, "W": 0}, {"T": 5, "W": 0, "K": 0},
        {"T": 7, "N": 1},
        {"T": 3, "N": 130, "K": 64, "W": 192}, {"T": 2, "own": 0, "ring": 64}, {"T": 0},
    ],
    ids=str,
)  # fmt: skip
def test_agrees_with_the_reference(function, sizes) -> None:  # type: ignore[no-untyped-def]
    _hopper()
    arguments = _arguments(**sizes)
    for name, actual, expected in zip(
        ("out", "lse"), function(**arguments), reference(**arguments), strict=True
    ):
        assert complaint(actual, expected, TOLERANCE[name]) is None, name


@BOTH
def test_trailing_entries_and_empty_rows(function) -> None:  # type: ignore[no-untyped-def]
    _hopper()
    a = _arguments(300, seed=3)
    place = torch.arange(512, device=DEVICE)
    length = torch.arange(300, device=DEVICE)[:, None] * 2 - 40
    a["compressed_index"] = a["compressed_index"].masked_fill(place >= length, -1)
    a["window_index"] = a["window_index"].masked_fill(place[:128] >= length + 30, -1)
    out, lse = function(**a)
    expected_out, expected_lse = reference(**a)
    # Most rows have few keys or none, and the scale of errors is the mean over all of them.
    assert complaint(out, expected_out, Tolerance("close", 2.0**-5)) is None
    assert complaint(lse, expected_lse, TOLERANCE["lse"]) is None
    assert bool((out[:5] == 0).all())
    assert bool((lse[:5] == -torch.inf).all())


@BOTH
def test_a_row_alone_is_the_row_in_a_batch(function) -> None:  # type: ignore[no-untyped-def]
    _hopper()
    a = _arguments(200, seed=4, share=0.7)
    out, lse = function(**a)
    again, _ = function(**a)
    assert complaint(again, out, BYTES) is None
    for row in (0, 131, 132, 199):
        one = slice(row, row + 1)
        alone = {n: a[n][one] for n in ("queries", "window_index", "compressed_index")}
        single, single_lse = function(**{**a, **alone})
        assert complaint(single, out[one], BYTES) is None
        assert complaint(single_lse, lse[one], BYTES) is None


def test_what_it_refuses() -> None:
    _hopper()
    a = _arguments(2)
    for changed in (
        {"queries": a["queries"].float()},
        {"window_index": a["window_index"][:, :100]},
        {"own": torch.zeros(3 * 528 + 1, dtype=torch.uint8, device=DEVICE)[1:].view(3, 528)},
    ):
        with pytest.raises(Unsupported):
            sparse_attention(**{**a, **changed})

"""Top-k selection by kernels: against sorting in Python, at the edges of chunks and levels."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer.errors import Unsupported
from deepinfer.ops.topk_select import topk_select
from deepinfer.ops.topk_select import triton as kernels

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
INF = math.inf


def slow(row: list[float], k: int) -> list[int]:
    usable = [i for i, score in enumerate(row) if score > -INF]
    best = sorted(sorted(usable, key=lambda i: (-row[i], i))[:k])
    return best + [-1] * (min(k, len(row)) - len(best))


def few_values(rows: int, entries: int) -> Tensor:
    values = torch.tensor([0.0, -0.0, 1.0, -1.0, 0.5, 3e38, -3e38, 1e-45, INF, -INF, math.nan])
    return values[torch.randint(0, len(values), (rows, entries))].to(DEVICE)


def normal(rows: int, entries: int) -> Tensor:
    return torch.randn(rows, entries).to(DEVICE)


@pytest.mark.parametrize("entries", [1, 5, 127, 128, 129, 700])
@pytest.mark.parametrize("k", [1, 4, 100])
@pytest.mark.parametrize("draw", [few_values, normal])
def test_against_sorting(entries: int, k: int, draw: Any) -> None:
    scores = draw(2, entries)
    found = kernels.topk_select(scores, k)
    assert found.dtype == torch.int64
    assert found.tolist() == [slow(row, k) for row in scores.tolist()]


@pytest.mark.parametrize("entries", [4095, 4096, 4097, 8193, 33000])
@pytest.mark.parametrize("draw", [few_values, normal])
def test_chunks_and_levels(entries: int, draw: Any) -> None:
    scores = draw(1, entries)
    assert torch.equal(kernels.topk_select(scores, 512), topk_select(scores, 512))


def test_every_level_gets_smaller() -> None:
    for k in (1, 2, 511, 512, 513, 1024, 2048, kernels.MAX_SELECTED):
        width = 1 << 20
        while width > kernels.chunk_of(width, k):
            smaller = -(-width // kernels.chunk_of(width, k)) * k
            assert smaller < width
            width = smaller


def test_one_large_score_far_behind() -> None:
    """A whole chunk ties, and the only larger score is the last one of the row."""
    scores = torch.zeros(1, 9000, device=DEVICE)
    scores[0, -1] = 1.0
    assert kernels.topk_select(scores, 4).tolist() == [[0, 1, 2, 8999]]
    scores[0, :8998] = -INF
    assert kernels.topk_select(scores, 4).tolist() == [[8998, 8999, -1, -1]]


@pytest.mark.parametrize("entries", [300, 5000])
def test_a_row_alone(entries: int) -> None:
    scores = normal(5, entries)
    together = kernels.topk_select(scores, 64)
    for row in range(5):
        assert torch.equal(kernels.topk_select(scores[row : row + 1], 64)[0], together[row])


def test_one_row_without_a_row_axis() -> None:
    scores = normal(1, 50)[0]
    assert torch.equal(kernels.topk_select(scores, 7), topk_select(scores, 7))


def test_keys_order_as_scores_do() -> None:
    values = [-INF, -3e38, -1.0, -1e-38, -1e-45, 0.0, 1e-45, 1e-38, 1.0, 3e38, INF]
    scores = torch.tensor([values], device=DEVICE)
    for k in range(1, len(values)):
        expected = list(range(len(values) - k, len(values)))
        assert kernels.topk_select(scores, k)[0].tolist() == expected


@pytest.mark.parametrize("entries", [200, 5000])
def test_nothing_is_written_beside_the_result(
    monkeypatch: pytest.MonkeyPatch, entries: int
) -> None:
    rooms = []

    def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        room = torch.full((math.prod(shape) + 64,), 77, dtype=dtype, device=device)
        rooms.append(room)
        return room[32:-32].view(shape)

    scores = normal(3, entries)
    expected = topk_select(scores, 50)
    monkeypatch.setattr(torch, "empty", empty)
    found = kernels.topk_select(scores, 50)
    monkeypatch.undo()
    assert torch.equal(found, expected)
    assert rooms
    for room in rooms:
        assert bool((room[:32] == 77).all())
        assert bool((room[-32:] == 77).all())


def test_unsupported() -> None:
    with pytest.raises(Unsupported, match="float64"):
        kernels.topk_select(torch.zeros(1, 5, dtype=torch.float64, device=DEVICE), 2)
    with pytest.raises(Unsupported, match="5000 columns"):
        kernels.topk_select(torch.zeros(1, 6000, device=DEVICE), 5000)

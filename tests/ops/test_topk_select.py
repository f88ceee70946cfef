"""Top-k selection by kernels: against sorting in Python, at the edges of tiles and levels."""

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


@pytest.mark.parametrize("entries", [4095, 8192, 8193, 16401, 150000])
@pytest.mark.parametrize("draw", [few_values, normal])
def test_tiles_and_levels(entries: int, draw: Any) -> None:
    scores = draw(1, entries)
    assert torch.equal(kernels.topk_select(scores, 512), topk_select(scores, 512))


SMALL = {
    "direct": kernels._Plan(tile=4096, whole=0, each=16, chunk=4096),
    "stored": kernels._Plan(tile=256, whole=0, each=16, chunk=512),
    "whole": kernels._Plan(tile=256, whole=2048, each=8, chunk=1024),
}


def hostile() -> dict[str, Tensor]:
    """Rows of 3000 scores, narrow and wide, sorted, tied, or hardly any of them valid."""
    n = 3000
    climb = torch.arange(n, dtype=torch.float32)
    ordered = torch.arange(n, dtype=torch.int32)
    zeros = torch.where(climb.long() % 2 == 0, 0.0, -0.0)
    outlier = torch.randn(n)
    outlier[1234] = 3e38
    tail = torch.randn(n)
    tail[70:] = -INF
    sparse = torch.full((n,), -INF)
    sparse[::41] = torch.randn(len(sparse[::41]))
    return {
        "all equal": torch.full((n,), 2.5),
        "two values": (climb.long() % 7 == 0).float(),
        "two values, few of the larger": (climb > n - 20).float() - 3,
        "neighbours": (ordered[torch.randperm(n)] + 0x3F800000).view(torch.float32),
        "subnormal": ordered[torch.randperm(n)].view(torch.float32),
        "both signs of zero": zeros,
        "zeros and subnormal": torch.where(climb.long() % 5 == 0, 1e-45, zeros),
        "ascending": climb,
        "descending": -climb,
        "clustered": -(climb - 1000).abs(),
        "outlier": outlier,
        "largest and smallest": torch.where(climb.long() % 3 == 0, 3.4e38, -3.4e38),
        "infinite": torch.where(climb.long() % 3 == 0, INF, climb),
        "every magnitude": torch.randn(n).double().mul(40).exp().float() * torch.randn(n).sign(),
        "tail": tail,
        "sparse": sparse,
        "nothing": torch.full((n,), -INF),
        "nan": torch.where(climb.long() % 2 == 0, math.nan, torch.randn(n)),
        "only nan": torch.full((n,), math.nan),
    }


@pytest.mark.parametrize("plan", SMALL.values(), ids=SMALL.keys())
@pytest.mark.parametrize("k", [1, 37, 64])
def test_hostile_rows(plan: kernels._Plan, k: int) -> None:
    rows = hostile()
    scores = torch.stack(list(rows.values())).to(DEVICE)
    found = kernels._launch(plan, scores, k, torch.int64)
    for name, one, expected in zip(rows, found, topk_select(scores, k), strict=True):
        assert torch.equal(one, expected), name


@pytest.mark.parametrize("plan", [kernels._FEW, kernels._MANY])
def test_sizes_fit(plan: kernels._Plan) -> None:
    """No count overflows, no level is wider than its tile, and chunks hold whole groups."""
    for k in (1, 2, 511, 512, 513, 1024, 2048, kernels.MAX_SELECTED):
        for entries in (1, 100, 8193, 16385, 131072, 1 << 20, kernels.MAX_ENTRIES):
            shape = kernels._shape(plan, entries, min(k, entries))
            assert shape.k_pad >= min(k, entries)
            assert max(shape.top, shape.k_pad * (shape.fan if shape.levels else 1)) <= 16384
            assert shape.chunk <= 16384
            assert shape.chunk % (16 * shape.fan**shape.stored) == 0
            assert shape.warps.bit_count() == 1


@pytest.mark.parametrize("k", [64, 700])
def test_many_rows_as_few(monkeypatch: pytest.MonkeyPatch, k: int) -> None:
    scores = normal(3, 9000)
    expected = kernels.topk_select(scores, k)
    monkeypatch.setattr(kernels, "MANY_ROWS", 1)
    assert torch.equal(kernels.topk_select(scores, k), expected)
    assert torch.equal(topk_select(scores, k), expected)


def test_one_large_score_far_behind() -> None:
    """A whole tile ties, and the only larger score is the last one of the row."""
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


@pytest.mark.parametrize("entries", [200, 9000, 40000])
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
    wide = torch.zeros(1, 1, device=DEVICE).expand(1, kernels.MAX_ENTRIES + 1)
    with pytest.raises(Unsupported, match="rows of"):
        kernels.topk_select(wide, 5)

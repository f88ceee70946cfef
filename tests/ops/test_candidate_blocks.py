"""Lists of candidate blocks: the same blocks as the mask, and the way back to entries."""

import pytest
import torch
from torch import Tensor

from deepinfer.errors import Unsupported
from deepinfer.ops.candidate_blocks import (
    candidate_block_list,
    candidate_blocks,
    restore_entries,
)
from deepinfer.ops.candidate_blocks import triton as kernels
from deepinfer.ops.entry_places import entry_places
from deepinfer.ops.entry_places.triton import entry_places as entry_places_kernel
from deepinfer.ops.registry import specs
from deepinfer.ops.topk_select import topk_select

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
INF = float("inf")


def draw(rows: int, entries: int, values: int) -> tuple[Tensor, Tensor]:
    scores = torch.randint(0, values, (rows, entries)).float()
    visible = torch.randint(0, entries + 1, (rows,))
    scores.masked_fill_(torch.arange(entries) >= visible.unsqueeze(-1), -INF)
    return scores.to(DEVICE), visible.to(DEVICE)


def as_mask(blocks: Tensor, block_size: int, entries: int) -> Tensor:
    numbers = torch.arange(entries, device=blocks.device) // block_size
    return (blocks.unsqueeze(-1) == numbers).any(1)


@pytest.mark.parametrize("function", [candidate_block_list, kernels.candidate_block_list])
@pytest.mark.parametrize("values", [3, 10**6])
def test_the_list_is_the_mask(function, values: int) -> None:  # type: ignore[no-untyped-def]
    for entries, size, count in ((1, 8, 2), (64, 8, 3), (67, 8, 3), (67, 5, 40), (300, 4, 20)):
        scores, visible = draw(4, entries, values)
        found = function(scores, visible, size, count)
        assert found.dtype == torch.int32
        assert found.shape == (4, min(count, -(-entries // size)))
        expected = candidate_blocks(scores, visible, size, count)
        expected &= scores > -INF
        assert torch.equal(as_mask(found, size, entries) & (scores > -INF), expected)
        assert torch.equal(found, found.where(found >= 0, 10**6).sort(-1).values.where(
            found >= 0, -1).to(torch.int32))  # fmt: skip


def test_nan_hides_nothing_else() -> None:
    scores = torch.full((1, 16), float("nan"), device=DEVICE)
    scores[0, 3] = 1.0
    visible = torch.tensor([16], device=DEVICE)
    for function in (candidate_block_list, kernels.candidate_block_list):
        assert function(scores, visible, 4, 3).tolist() == [[0, 3, -1]]


def test_selecting_among_candidates() -> None:
    """Columns of the listed blocks, restored, are what a mask over all entries selects."""
    scores, visible = draw(5, 203, 50)
    blocks = kernels.candidate_block_list(scores, visible, 8, 6)
    entries = (blocks.long().unsqueeze(-1) * 8 + torch.arange(8, device=DEVICE)).flatten(1)
    padded = torch.nn.functional.pad(scores, (0, 8), value=-INF)
    compact = padded.gather(1, entries.clamp_min(0)).masked_fill(entries < 0, -INF)
    kept = candidate_blocks(scores, visible, 8, 6)
    expected = topk_select(scores.masked_fill(~kept, -INF), 20)
    for function in (restore_entries, kernels.restore_entries):
        assert torch.equal(function(topk_select(compact, 20), blocks, 8), expected)


def test_a_row_alone() -> None:
    scores, visible = draw(5, 203, 50)
    together = kernels.candidate_block_list(scores, visible, 8, 6)
    for row in range(5):
        rows = slice(row, row + 1)
        alone = kernels.candidate_block_list(scores[rows], visible[rows], 8, 6)
        assert torch.equal(alone, together[rows])


def test_unsupported() -> None:
    visible = torch.ones(1, dtype=torch.int64, device=DEVICE)
    with pytest.raises(Unsupported, match="float64"):
        kernels.candidate_block_list(
            torch.zeros(1, 5, dtype=torch.float64, device=DEVICE), visible, 8, 2
        )
    with pytest.raises(Unsupported, match="2000 entries"):
        kernels.candidate_block_list(torch.zeros(1, 5, device=DEVICE), visible, 2000, 2)


# Places of entries


@pytest.mark.parametrize("function", [entry_places, entry_places_kernel])
def test_entry_places_by_hand(function) -> None:  # type: ignore[no-untyped-def]
    table = torch.tensor([[7, 2, 5], [1, 9, 0]], device=DEVICE)
    entries = torch.tensor([[0, 3, 4, 11, -1], [5, -1, -1, -1, 9]], device=DEVICE)
    sequence = torch.tensor([0, 1], device=DEVICE)
    found = function(entries, sequence, table, 4)
    assert found.dtype == torch.int32
    assert found.tolist() == [[28, 31, 8, 23, -1], [37, -1, -1, -1, 1]]


def test_missing_entries_read_nothing() -> None:
    """The row of the table may be anything when a row has no entries."""
    arguments = {c.name: c for c in specs()["entry_places"].cases()}["5x20"].arguments(DEVICE)
    arguments["entries"] = torch.full_like(arguments["entries"], -1)
    arguments["sequence"] = torch.full_like(arguments["sequence"], 10**9)
    assert bool((entry_places_kernel(**arguments) == -1).all())

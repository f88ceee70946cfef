"""Step metadata against a row-by-row account of a step, and the fix-ups by example."""

from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from deepinfer.errors import Unsupported
from deepinfer.ops import step_metadata as reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
RING, RINGS, WINDOW = 7, 6, 5


class Sequence(NamedTuple):
    slot: int
    start: int
    count: int
    floor: int = 0


SEQUENCES = [Sequence(4, 0, 3), Sequence(1, 9, 1), Sequence(5, 2, 11, 6), Sequence(0, 30, 4)]


@pytest.fixture(scope="module", params=["reference", "triton"])
def functions(request: pytest.FixtureRequest) -> Any:
    if request.param == "reference":
        return reference
    from deepinfer.ops.step_metadata import triton

    return triton


def numbers(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def account() -> list[dict[str, Any]]:
    """Every row of the step, with its window and its target token by token."""
    rows: list[dict[str, Any]] = []
    for slot, start, count, floor in SEQUENCES:
        first = len(rows)
        for p in range(start, start + count):
            window = []
            for earlier in range(p - WINDOW + 1, p + 1):
                if earlier < max(floor, 0):
                    window.append(-1)
                elif earlier < start:
                    window.append(slot * RING + earlier % RING)
                else:
                    window.append(RINGS * RING + first + earlier - start)
            left = start + count - p
            target = slot * RING + p % RING if left <= RING else -1
            rows.append(
                {"positions": p, "starts": start, "slots": slot, "first_row": first,
                 "floors": floor, "left": left, "window": window, "target": target}
            )  # fmt: skip
    return rows


def column(name: str) -> Tensor:
    return numbers(*(row[name] for row in account()), dtype=torch.int64)


def window_rows() -> list[Tensor]:
    return [column(n) for n in ("positions", "starts", "slots", "first_row", "floors")]


def test_windows_by_account(functions: Any) -> None:
    found = functions.window_index(*window_rows(), WINDOW, RING, RINGS)
    assert found.dtype == torch.int32
    assert found.tolist() == [row["window"] for row in account()]


def test_row_alone_equals_row_in_batch(functions: Any) -> None:
    together = functions.window_index(*window_rows(), WINDOW, RING, RINGS)
    alone = functions.window_index(*(r[17:18] for r in window_rows()), WINDOW, RING, RINGS)
    assert torch.equal(alone[0], together[17])


def test_targets_by_account(functions: Any) -> None:
    found = functions.ring_targets(column("positions"), column("slots"), column("left"), RING)
    assert found.tolist() == [row["target"] for row in account()]
    kept = [place for place in found.tolist() if place >= 0]
    assert len(kept) == len(set(kept))


def test_lengths_lose_rejected_drafts(functions: Any) -> None:
    lengths, planned = numbers(106, 50, 77, 1), numbers(5, 5, 3, 5)
    functions.fix_lengths(lengths, planned, numbers(5, 0, 2), numbers(1, -1, 2, 0))
    assert lengths.tolist() == [101, 50, 76, 1]


def test_nothing_was_accepted_before_the_first_step(functions: Any) -> None:
    lengths, none = numbers(3, 4), numbers()
    functions.fix_lengths(lengths, numbers(5, 5), none, numbers(-1, -1))
    assert lengths.tolist() == [3, 4]
    ids = numbers(7, 8, dtype=torch.int64)
    functions.fix_token_ids(ids, numbers(-1, -1), none, none.view(0, 2), numbers(0, 1))
    assert ids.tolist() == [7, 8]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_tokens_of_the_step_before(functions: Any, dtype: torch.dtype) -> None:
    ids = numbers(1, 2, 3, 4, 5, 6, 7, dtype=dtype)
    source, steps = numbers(1, 1, 1, -1, -1, 0, 0), numbers(0, 1, 2, 0, 1, 0, 3)
    sampled = numbers(100, 200, dtype=torch.int64)
    drafts = numbers(110, 120, 210, 220, dtype=torch.int64).view(2, 2)
    functions.fix_token_ids(ids, source, sampled, drafts, steps)
    assert ids.tolist() == [200, 210, 220, 4, 5, 100, 7]


def test_only_named_rows_are_written() -> None:
    from deepinfer.ops.step_metadata import triton

    room = numbers(*range(12), dtype=torch.int64)
    triton.fix_token_ids(
        room[4:7], numbers(0, -1, 0), numbers(90), numbers(91).view(1, 1), numbers(0, 0, 1)
    )
    assert room.tolist() == [0, 1, 2, 3, 90, 5, 91, 7, 8, 9, 10, 11]


def test_refuses_other_integers_and_gaps() -> None:
    from deepinfer.ops.step_metadata import triton

    functions: ModuleType = triton
    with pytest.raises(Unsupported, match="int64"):
        functions.ring_targets(numbers(1), numbers(1).long(), numbers(1).long(), 3)
    with pytest.raises(Unsupported, match="contiguous"):
        functions.fix_lengths(numbers(1, 2, 3, 4)[::2], numbers(1), numbers(1), numbers(1))

"""Row layout of one cached forward: which row is which token of which sequence.

Knows positions, slots and pages; must not know tensors of the model. All index tensors that layers
share are built here once per forward.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from deepinfer.kv.geometry import CacheGeometry

Numbers = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


@dataclass(frozen=True)
class SequenceRows:
    """The rows of one sequence in a forward: tokens `start` to `start + count` of it.

    Attributes:
        slot: state slot; pages: cache pages, enough for start + count tokens.
        start: tokens already in the cache.
        count: tokens of this forward.
        window_floor: no layer at or past the truncation boundary sees window keys before this
            position (0 without truncated prefill).
    """

    slot: int
    pages: "Sequence[int] | Numbers"
    start: int
    count: int
    window_floor: int = 0


class StepLayout:
    """Index tensors of one forward over T rows of B sequences, rows of a sequence in order.

    Everything that depends on the step goes to the device in one copy, which the host does not
    wait for.

    Args:
        extra: int64 arrays that travel in the same copy.

    Attributes:
        positions: [T] int64; sequence: [T] index of each row's sequence in the page table.
        starts, first_row, slots: [T] position and number of the first row of the row's sequence,
            and its state slot; left: [T] rows from here to the sequence's last, both included.
        floors: [T] first position whose window key each row sees past the truncation boundary.
        page_table: [B, most pages] page numbers, padded with 0.
        longest: most rows of one sequence.
        extra: the arrays that came along, as tensors.
    """

    def __init__(
        self, rows: Sequence[SequenceRows], geometry: CacheGeometry, device: torch.device,
        extra: Sequence[Numbers] = (),
    ) -> None:  # fmt: skip
        self.rows = rows
        self.geometry = geometry
        self.device = device
        counts = np.array([r.count for r in rows], dtype=np.int64)
        starts = np.array([r.start for r in rows], dtype=np.int64)
        first = np.cumsum(counts) - counts
        sequence = np.repeat(np.arange(len(rows)), counts)
        self.total = int(counts.sum())
        self.longest = int(counts.max(initial=0))
        self.host_positions = np.arange(self.total) - first[sequence] + starts[sequence]
        self._host_floors = np.array([r.window_floor for r in rows], dtype=np.int64)[sequence]
        slots = np.array([r.slot for r in rows], dtype=np.int64)
        left = (starts + counts)[sequence] - self.host_positions
        self._ratios = sorted({geometry.page_tokens // e for e in geometry.entries.values()})
        completing = [np.flatnonzero((self.host_positions + 1) % r == 0) for r in self._ratios]
        table = _page_table(rows)
        tensors = to_device(
            [self.host_positions, sequence, starts[sequence], first[sequence], slots[sequence],
             left, self._host_floors, table, *completing, *extra],
            device,
        )  # fmt: skip
        self.positions, self.sequence, self.starts, self.first_row, self.slots = tensors[:5]
        self.left, self.floors, pages = tensors[5:8]
        self.page_table = pages.view(table.shape)
        self._completing = tensors[8 : 8 + len(self._ratios)]
        self.extra = tensors[8 + len(self._ratios) :]

    def sequence_slices(self) -> list[slice]:
        """Row range of each sequence."""
        ends = np.cumsum([r.count for r in self.rows]).tolist()
        return [slice(end - r.count, end) for end, r in zip(ends, self.rows, strict=True)]

    @cached_property
    def row_numbers(self) -> Tensor:
        """[T] 0 .. T - 1."""
        return torch.arange(self.total, device=self.device)

    @property
    def window_length(self) -> int:
        """Columns of window places: on a CPU no more than there are positions.

        On a GPU always the window: kernels are compiled for the length.
        """
        window = self.geometry.ring_tokens - self.geometry.rollback_tokens
        if self.device.type == "cuda":
            return window
        return min(window, int(self.host_positions.max(initial=0)) + 1)

    @property
    def may_store_first(self) -> bool:
        """Whether rows may go into the window rings before attention reads them.

        A row at p overwrites the one at p - ring; the first row of its sequence still reads back to
        start - window + 1. With at most ring - window + 1 rows nothing that is read is lost.
        """
        return self.longest <= self.geometry.rollback_tokens + 1

    def visible(self, ratio: int) -> Tensor:
        """Complete groups of `ratio` tokens at each row [T]."""
        return (self.positions + 1) // ratio

    def most_visible(self, ratio: int) -> int:
        """The largest of them; on a GPU the next multiple of 64, so that kernels stay the same."""
        most = (int(self.host_positions.max(initial=-1)) + 1) // ratio
        return max(1, -(-most // 64)) * 64 if self.device.type == "cuda" else most

    @property
    def has_floors(self) -> bool:
        """Whether any window floor is past position 0."""
        return any(r.window_floor for r in self.rows)

    @property
    def drops_rows(self) -> bool:
        """Whether rows lie below their sequence's window floor."""
        return any(r.window_floor > r.start for r in self.rows)

    @cached_property
    def no_floors(self) -> Tensor:
        """[T] zeros."""
        return torch.zeros_like(self.positions)

    def keep_above_floor(self) -> "tuple[Tensor, StepLayout]":
        """Rows at or past their sequence's window floor, and the layout of those rows alone."""
        kept = np.flatnonzero(self.host_positions >= self._host_floors)
        rows = []
        for r in self.rows:
            dropped = max(0, r.window_floor - r.start)
            if dropped < r.count:
                rows.append(replace(r, start=r.start + dropped, count=r.count - dropped))
        layout = StepLayout(rows, self.geometry, self.device, [kept])
        return layout.extra[0], layout

    def completing(self, ratio: int) -> tuple[Tensor, Tensor]:
        """Rows that complete a group of `ratio` tokens, and the numbers of their entries."""
        rows = self._completing[self._ratios.index(ratio)]
        return rows, self.positions[rows] // ratio


class FixedLayout:
    """The same of a step of a fixed number of rows, for a CUDA graph.

    Shapes depend on the number of rows and on `longest_sequence` alone; what changes from step to
    step lies in tensors that keep their addresses. A row at position -1 is padding: it sees and
    stores nothing.

    Args:
        rows: [5, T] int64, positions, slots, starts, first_row and left as in StepLayout, written
            before each replay. Of padding, `left` is larger than any ring.
        page_table: [slots, most pages] int64 page numbers by state slot.
        longest_sequence: no position reaches it.
        may_store_first: as in StepLayout: no sequence has more rows than that allows.
    """

    has_floors, drops_rows = False, False

    def __init__(
        self, rows: Tensor, page_table: Tensor, geometry: CacheGeometry, longest_sequence: int,
        may_store_first: bool,
    ) -> None:  # fmt: skip
        self.may_store_first = may_store_first
        self.positions, self.slots, self.starts, self.first_row, self.left = rows
        self.sequence = self.slots
        self.page_table = page_table
        self.geometry = geometry
        self.device = rows.device
        self.total = rows.shape[1]
        self.row_numbers = torch.arange(self.total, device=self.device)
        self.no_floors = self.floors = torch.zeros_like(self.positions)
        self.window_length = geometry.ring_tokens - geometry.rollback_tokens
        self._longest_sequence = longest_sequence

    def visible(self, ratio: int) -> Tensor:
        """Complete groups of `ratio` tokens at each row [T]."""
        return (self.positions + 1) // ratio

    def most_visible(self, ratio: int) -> int:
        """Columns of scores, at least as many as any row may see."""
        return max(1, -(-(self._longest_sequence // ratio) // 64)) * 64

    def completing(self, ratio: int) -> tuple[Tensor, Tensor]:
        """All rows, with the number of the entry that each completes, or -1."""
        groups = (self.positions + 1) // ratio
        whole = (self.positions >= 0) & (groups * ratio == self.positions + 1)
        return self.row_numbers, torch.where(whole, groups - 1, -1)

    def keep_above_floor(self) -> "tuple[Tensor, StepLayout]":
        """No rows are dropped."""
        raise AssertionError("rows of a fixed layout have no window floors")


Layout = StepLayout | FixedLayout


def to_device(arrays: Sequence[Numbers], device: torch.device) -> list[Tensor]:
    """int64 arrays, flattened, as tensors on `device`: one copy that the host does not wait for.

    Each begins at an address that is a multiple of 16: kernels are compiled for that.
    """
    ends = np.cumsum([array.size + array.size % 2 for array in arrays]).tolist()
    packed = np.zeros(ends[-1], dtype=np.int64)
    for array, end in zip(arrays, ends, strict=True):
        start = end - array.size - array.size % 2
        packed[start : start + array.size] = array.ravel()
    host = torch.from_numpy(packed)
    if device.type == "cuda":
        host = host.pin_memory()
    sent = host.to(device, non_blocking=True)
    starts = (end - a.size - a.size % 2 for a, end in zip(arrays, ends, strict=True))
    return [sent[start : start + a.size] for start, a in zip(starts, arrays, strict=True)]


def _page_table(rows: Sequence[SequenceRows]) -> Numbers:
    most = max((len(r.pages) for r in rows), default=0)
    table = np.zeros((len(rows), max(most, 1)), dtype=np.int64)
    for i, r in enumerate(rows):
        table[i, : len(r.pages)] = r.pages
    return table

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
    pages: Sequence[int]
    start: int
    count: int
    window_floor: int = 0


class StepLayout:
    """Index tensors of one forward over T rows of B sequences, rows of a sequence in order.

    Attributes:
        positions: [T] int64; sequence: [T] index of each row's sequence.
        starts, first_row, slots: [T] position and number of the first row of the row's sequence,
            and its state slot; left: [T] rows from here to the sequence's last, both included.
        longest: most rows of one sequence.
    """

    def __init__(
        self, rows: Sequence[SequenceRows], geometry: CacheGeometry, device: torch.device
    ) -> None:
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
        slots = np.array([r.slot for r in rows], dtype=np.int64)
        left = (starts + counts)[sequence] - self.host_positions
        # One copy to the device for all of them, each row at an address that is a multiple of 16:
        # kernels are compiled for that.
        table = [self.host_positions, sequence, starts[sequence], first[sequence], slots[sequence]]
        padded = np.zeros((6, self.total + self.total % 2), dtype=np.int64)
        padded[:, : self.total] = [*table, left]
        together = self._device(padded)[:, : self.total]
        self.positions, self.sequence, self.starts, self.first_row, self.slots, self.left = together
        self._host_sequence = sequence
        self._completing: dict[int, Tensor] = {}

    def _device(self, values: "np.ndarray[tuple[int, ...], np.dtype[np.int64]]") -> Tensor:
        return torch.from_numpy(values).to(self.device)

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

    @cached_property
    def floors(self) -> Tensor:
        """[T] first position whose window key each row sees past the truncation boundary."""
        floors = np.array([r.window_floor for r in self.rows], dtype=np.int64)
        return self._device(floors[self._host_sequence])

    @property
    def has_floors(self) -> bool:
        """Whether any of them is past position 0."""
        return any(r.window_floor for r in self.rows)

    @cached_property
    def no_floors(self) -> Tensor:
        """[T] zeros."""
        return torch.zeros_like(self.positions)

    def keep_above_floor(self) -> "tuple[Tensor, StepLayout]":
        """Rows at or past their sequence's window floor, and the layout of those rows alone."""
        floors = np.array([r.window_floor for r in self.rows], dtype=np.int64)
        kept = np.flatnonzero(self.host_positions >= floors[self._host_sequence])
        rows = []
        for r in self.rows:
            dropped = max(0, r.window_floor - r.start)
            if dropped < r.count:
                rows.append(replace(r, start=r.start + dropped, count=r.count - dropped))
        return self._device(kept), StepLayout(rows, self.geometry, self.device)

    def completing_rows(self, ratio: int) -> Tensor:
        """Rows that complete a group of `ratio` tokens."""
        if ratio not in self._completing:
            rows = np.flatnonzero((self.host_positions + 1) % ratio == 0)
            self._completing[ratio] = self._device(rows)
        return self._completing[ratio]

    @cached_property
    def page_table(self) -> Tensor:
        """[B, most pages] page numbers, padded with 0."""
        most = max((len(r.pages) for r in self.rows), default=0)
        table = np.zeros((len(self.rows), max(most, 1)), dtype=np.int64)
        for i, r in enumerate(self.rows):
            table[i, : len(r.pages)] = r.pages
        return self._device(table)

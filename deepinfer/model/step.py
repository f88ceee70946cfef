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
        slots: [B] state slots; first_row: [B]; starts: [B] position of the first row.
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
        self.host_positions = np.arange(self.total) - first[sequence] + starts[sequence]
        ends = (starts + counts)[sequence]
        self.positions = self._device(self.host_positions)
        self.sequence = self._device(sequence)
        self.slots = self._device(np.array([r.slot for r in rows], dtype=np.int64))
        self.starts = self._device(starts)
        self.first_row = self._device(first)
        self._host_sequence = sequence
        self._host_left = ends - self.host_positions  # rows from here to the sequence's last
        self._host_slots = np.array([r.slot for r in rows], dtype=np.int64)[sequence]

    def _device(self, values: "np.ndarray[tuple[int, ...], np.dtype[np.int64]]") -> Tensor:
        return torch.from_numpy(values).to(self.device)

    def sequence_slices(self) -> list[slice]:
        """Row range of each sequence."""
        ends = np.cumsum([r.count for r in self.rows]).tolist()
        return [slice(end - r.count, end) for end, r in zip(ends, self.rows, strict=True)]

    def visible(self, ratio: int) -> Tensor:
        """Complete groups of `ratio` tokens at each row [T]."""
        return (self.positions + 1) // ratio

    def lookback(
        self, ring: int, length: int, floor: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Places of the tokens `length - 1` to 0 positions before each row, oldest first.

        Places index the concatenation of the sequences' rings [B * ring] and this forward's rows
        [T]: a token of this forward is read from its row, an earlier one from its ring.

        Args:
            floor: [T] first position that counts; default 0.

        Returns:
            places [T, length] int64 (0 where invalid) and valid [T, length] bool.
        """
        back = torch.arange(1 - length, 1, device=self.device)
        wanted = self.positions.unsqueeze(-1) + back
        valid = wanted >= (0 if floor is None else floor.unsqueeze(-1))
        starts = self.starts[self.sequence].unsqueeze(-1)
        base = self.sequence.unsqueeze(-1) * ring
        first = self.first_row[self.sequence].unsqueeze(-1) + len(self.rows) * ring
        places = torch.where(wanted >= starts, first + wanted - starts, base + wanted % ring)
        return torch.where(valid, places, 0), valid

    def ring_writes(self, ring: int) -> tuple[Tensor, Tensor]:
        """Rows that rings of `ring` tokens keep, and their places slot * ring + p % ring."""
        keep = np.flatnonzero(self._host_left <= ring)
        places = self._host_slots[keep] * ring + self.host_positions[keep] % ring
        return self._device(keep), self._device(places)

    @cached_property
    def window(self) -> tuple[Tensor, Tensor]:
        """Window places and validity of every row, for layers that see the whole window."""
        return self.lookback(self.geometry.ring_tokens, self._window_length)

    @cached_property
    def truncated_window(self) -> tuple[Tensor, Tensor]:
        """The same with each sequence's window floor."""
        if not any(r.window_floor for r in self.rows):
            return self.window
        floors = np.array([r.window_floor for r in self.rows], dtype=np.int64)
        floor = self._device(floors[self._host_sequence])
        return self.lookback(self.geometry.ring_tokens, self._window_length, floor)

    @property
    def _window_length(self) -> int:
        window = self.geometry.ring_tokens - self.geometry.rollback_tokens
        return min(window, int(self.host_positions.max(initial=0)) + 1)

    @cached_property
    def window_writes(self) -> tuple[Tensor, Tensor]:
        """`ring_writes` of the window rings."""
        return self.ring_writes(self.geometry.ring_tokens)

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
        return self._device(np.flatnonzero((self.host_positions + 1) % ratio == 0))

    @cached_property
    def page_table(self) -> Tensor:
        """[B, most pages] page numbers, padded with 0."""
        most = max((len(r.pages) for r in self.rows), default=0)
        table = np.zeros((len(self.rows), max(most, 1)), dtype=np.int64)
        for i, r in enumerate(self.rows):
            table[i, : len(r.pages)] = r.pages
        return self._device(table)

    def entry_places(self, sequence: Tensor, entries: Tensor, per_page: int) -> Tensor:
        """Flat places (page * per_page + offset) of entry numbers of given sequences."""
        pages = self.page_table[sequence, entries // per_page]
        return pages * per_page + entries % per_page

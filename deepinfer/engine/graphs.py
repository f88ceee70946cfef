"""Small steps as CUDA graphs: the forward and the logits of decode rows and short chunks.

Knows which numbers of rows and lengths are captured, and replays the smallest that fits; must not
know requests or how tokens are chosen. The launches of a step take the host longer than the GPU
needs for few rows.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deepinfer.kv.pool import CachePool
from deepinfer.model.cached import CachedState
from deepinfer.model.step import FixedLayout, to_device
from deepinfer.model.transformer import Transformer

# Growth of the captured lengths: scores of index layers are as wide as the longest sequence allows.
_LENGTH_STEP = 4
_SHORTEST = 2048
# Rows up to which steps are captured even if no so many sequences decode: prompts of a sentence, or
# what is left of a long one after a prefix hit. From here on a forward hides its own launches.
SMALL_STEP = 128
_NEVER_STORED = 2**30  # rows left of a sequence, more than any ring has


@dataclass(frozen=True)
class FixedRows:
    """Rows of one sequence in a step.

    Attributes:
        slot: its state slot; start: position of the first row.
        token_ids: of the rows, empty for the one token that was last sampled in this slot.
    """

    slot: int
    start: int
    token_ids: Sequence[int]

    @property
    def count(self) -> int:
        """How many rows there are."""
        return len(self.token_ids) or 1


def batch_ladder(most: int) -> list[int]:
    """Numbers of rows to capture up to `most`: every power of two up to 8, then closer together."""
    sizes = [1, 2, 4, 8, *range(16, 64, 8), *range(64, 128, 16), *range(128, 1025, 32)]
    return [size for size in sizes if size < most] + [most]


def length_ladder(most: int) -> list[int]:
    """Sequence lengths to capture, each four times the one before, up to `most` tokens."""
    lengths = []
    length = _SHORTEST
    while length < most:
        lengths.append(length)
        length *= _LENGTH_STEP
    return [*lengths, most]


class FixedStep:
    """One step of T rows, computed from tensors that stay where they are.

    Args:
        sampled: [slots] int64, the token last sampled in each slot.
        page_table: [slots, most pages] int64.
        longest: no position of this step reaches it.
        chunk: a sequence may have any number of rows; otherwise no more than its ring has slack
            for and one, which saves a copy in every layer.
    """

    def __init__(
        self, model: Transformer, pool: CachePool, token_map: Tensor | None, sampled: Tensor,
        page_table: Tensor, rows: int, longest: int, chunk: bool = False,
    ) -> None:  # fmt: skip
        self._chunk = chunk
        self._model, self._pool, self._token_map = model, pool, token_map
        self._sampled, self._page_table, self._longest = sampled, page_table, longest
        self._rows = rows
        device = pool.device
        self._no_drafts = torch.empty(len(sampled), 0, dtype=torch.int64, device=device)
        self._first = torch.zeros(rows, dtype=torch.int32, device=device)
        # Rows at addresses that are multiples of 16, as kernels are compiled for.
        self._inputs = torch.zeros(7, rows + rows % 2, dtype=torch.int64, device=device)
        self.write([])

    def write(self, parts: Sequence[FixedRows]) -> None:
        """Put the rows of the next run into place; what is left is padding."""
        table = np.zeros(self._inputs.shape, dtype=np.int64)
        table[0], table[4], table[6] = -1, _NEVER_STORED, -1
        counts = np.array([part.count for part in parts], dtype=np.int64)
        total = int(counts.sum())
        first = np.cumsum(counts) - counts
        starts = np.array([part.start for part in parts], dtype=np.int64)
        slots = np.array([part.slot for part in parts], dtype=np.int64)
        ids = [token for part in parts for token in part.token_ids or (-1,)]
        part_of = np.repeat(np.arange(len(parts)), counts)
        table[0, :total] = np.arange(total) - first[part_of] + starts[part_of]
        table[1, :total] = slots[part_of]
        table[2, :total] = starts[part_of]
        table[3, :total] = first[part_of]
        table[4, :total] = (first + counts)[part_of] - np.arange(total)
        table[5, :total] = ids
        table[6, :total] = np.where(table[5, :total] < 0, slots[part_of], -1)
        (sent,) = to_device([table], self._inputs.device)
        self._inputs.copy_(sent.view_as(self._inputs), non_blocking=True)

    def run(self) -> Tensor:
        """Logits [T, V] float32 of the rows."""
        inputs = self._inputs[:, : self._rows]
        ids, sources = inputs[5:]
        operators = self._model.precision.operators
        operators.fix_token_ids(ids, sources.int(), self._sampled, self._no_drafts, self._first)
        layout = FixedLayout(inputs[:5], self._page_table, self._pool.geometry, self._longest,
                             not self._chunk)  # fmt: skip
        state = CachedState(self._model, self._pool, layout, ids, self._token_map)
        return self._model.logits(self._model(ids, state).x).float()


@dataclass(frozen=True)
class Rung:
    """One graph: most rows, most tokens of a sequence, and whether it takes long chunks."""

    rows: int
    longest: int
    chunk: bool


class StepGraphs:
    """A graph for every rung of both ladders.

    Args:
        make: (rows, longest, chunk) to the step to capture.
        most_rows: of one step; most_tokens: of one sequence.
        slack: rows that a sequence may have in a step that takes no long chunks.
    """

    def __init__(
        self, make: Callable[[int, int, bool], FixedStep], most_rows: int, most_tokens: int,
        slack: int,
    ) -> None:  # fmt: skip
        self._make = make
        self._slack = slack
        # Largest first, as all share the memory of the first: only one runs at a time.
        self._rungs = [
            Rung(rows, longest, chunk)
            for longest in reversed(length_ladder(most_tokens))
            for rows in reversed(batch_ladder(most_rows))
            for chunk in (False, True)
            if not chunk or slack < rows <= SMALL_STEP
        ]
        self._captured: dict[Rung, tuple[FixedStep, torch.cuda.CUDAGraph, Tensor]] = {}

    @property
    def count(self) -> int:
        """Graphs that `capture` makes."""
        return len(self._rungs)

    @torch.inference_mode()
    def capture(self) -> Iterator[tuple[int, int]]:
        """Capture one graph at a time; yields its rows and longest sequence."""
        pool = None
        for rung in self._rungs:
            step = self._make(rung.rows, rung.longest, rung.chunk)
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):  # what is made at first use must not be captured
                step.run()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                logits = step.run()
            pool = graph.pool()
            self._captured[rung] = step, graph, logits
            yield rung.rows, rung.longest

    def rung(self, counts: Sequence[int], longest: int) -> Rung | None:
        """The smallest graph for so many rows of each sequence, the longest of them so long; None
        where no graph takes them."""
        chunk = max(counts) > self._slack
        fitting = (
            rung for rung in reversed(self._rungs)
            if rung.rows >= sum(counts) and rung.longest >= longest and rung.chunk >= chunk
        )  # fmt: skip
        return next(fitting, None)

    def replay(self, rung: Rung, parts: Sequence[FixedRows]) -> Tensor:
        """Logits [T, V] float32 of all rows, valid until the next replay."""
        step, graph, logits = self._captured[rung]
        step.write(parts)
        graph.replay()
        return logits[: sum(part.count for part in parts)]

"""Decode steps as CUDA graphs: the forward and the logits of one row per sequence.

Knows which numbers of rows and lengths are captured, and replays the smallest that fits; must not
know requests or how tokens are chosen. A step of some 2,000 launches takes the host 50 ms; its
graph takes one.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deepinfer.kv.pool import CachePool
from deepinfer.model.cached import CachedState
from deepinfer.model.step import DecodeLayout, to_device
from deepinfer.model.transformer import Transformer

# Growth of the captured lengths: scores of index layers are as wide as the longest sequence allows.
_LENGTH_STEP = 4
_SHORTEST = 2048


@dataclass(frozen=True)
class DecodeRow:
    """One sequence of a decode step.

    Attributes:
        slot: its state slot; position: of the token to be processed.
        token: its id, or -1 for the one that was last sampled in this slot.
    """

    slot: int
    position: int
    token: int


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


class DecodeStep:
    """One decode step of T rows, computed from tensors that stay where they are.

    Args:
        sampled: [slots] int64, the token last sampled in each slot.
        page_table: [slots, most pages] int64.
        longest: no position of this step reaches it.

    Attributes:
        inputs: [4, T] int64: positions (-1 for padding), slots, token ids, and the slot whose last
            sampled token to take instead, or -1.
    """

    def __init__(
        self, model: Transformer, pool: CachePool, token_map: Tensor | None, sampled: Tensor,
        page_table: Tensor, rows: int, longest: int,
    ) -> None:  # fmt: skip
        self._model, self._pool, self._token_map = model, pool, token_map
        self._sampled, self._page_table, self._longest = sampled, page_table, longest
        device = pool.device
        self._no_drafts = torch.empty(len(sampled), 0, dtype=torch.int64, device=device)
        self._first = torch.zeros(rows, dtype=torch.int32, device=device)
        # Rows at addresses that are multiples of 16, as kernels are compiled for.
        self._padded = torch.zeros(4, rows + rows % 2, dtype=torch.int64, device=device)
        self.inputs = self._padded[:, :rows]
        self.inputs[0] = -1
        self.inputs[3] = -1

    def write(self, rows: Sequence[DecodeRow]) -> None:
        """Put the rows of the next run into the inputs; what is left is padding."""
        table = np.zeros(self._padded.shape, dtype=np.int64)
        table[0], table[3] = -1, -1
        for i, row in enumerate(rows):
            table[0, i], table[1, i] = row.position, row.slot
            if row.token < 0:
                table[3, i] = row.slot
            else:
                table[2, i] = row.token
        (sent,) = to_device([table], self._padded.device)
        self._padded.copy_(sent.view_as(self._padded), non_blocking=True)

    def run(self) -> Tensor:
        """Logits [T, V] float32 of the rows."""
        positions, slots, ids, sources = self.inputs
        operators = self._model.precision.operators
        operators.fix_token_ids(ids, sources.int(), self._sampled, self._no_drafts, self._first)
        geometry = self._pool.geometry
        layout = DecodeLayout(positions, slots, self._page_table, geometry, self._longest)
        state = CachedState(self._model, self._pool, layout, ids, self._token_map)
        return self._model.logits(self._model(ids, state).x).float()


class DecodeGraphs:
    """A graph for every rung of both ladders.

    Args:
        make: (rows, longest) to the step to capture.
        most_rows: of one step; most_tokens: of one sequence.
    """

    def __init__(
        self, make: Callable[[int, int], DecodeStep], most_rows: int, most_tokens: int
    ) -> None:
        self._make = make
        self._rows = batch_ladder(most_rows)
        self._lengths = length_ladder(most_tokens)
        self._captured: dict[tuple[int, int], tuple[DecodeStep, torch.cuda.CUDAGraph, Tensor]] = {}

    @property
    def count(self) -> int:
        """Graphs that `capture` makes."""
        return len(self._rows) * len(self._lengths)

    @torch.inference_mode()
    def capture(self) -> Iterator[tuple[int, int]]:
        """Capture one graph at a time, largest first; yields its (rows, longest)."""
        pool = None
        for longest in reversed(self._lengths):
            for rows in reversed(self._rows):
                step = self._make(rows, longest)
                stream = torch.cuda.Stream()
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):  # what is made at first use must not be captured
                    step.run()
                torch.cuda.current_stream().wait_stream(stream)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool):
                    logits = step.run()
                # All share the memory of the first, as only one runs at a time.
                pool = graph.pool()
                self._captured[rows, longest] = step, graph, logits
                yield rows, longest

    def replay(self, rows: Sequence[DecodeRow]) -> Tensor:
        """Logits [T, V] float32 of a decode step, valid until the next replay."""
        longest = max(row.position for row in rows) + 1
        rung = next(size for size in self._rows if size >= len(rows))
        length = next(size for size in self._lengths if size >= longest)
        step, graph, logits = self._captured[rung, length]
        step.write(rows)
        graph.replay()
        return logits[: len(rows)]

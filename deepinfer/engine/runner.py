"""Runs the rows of a step on the device: cache tensors, forwards, logits.

Knows slots, pages, token ids and how a forward is laid out; must not know requests, or how tokens
are chosen.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from deepinfer.config import EngineConfig
from deepinfer.engine.graphs import SMALL_STEP, FixedRows, FixedStep, Rung, StepGraphs
from deepinfer.engine.page_table import PageTable
from deepinfer.engine.rows import ForwardRows, token_ids_of, wanted_rows
from deepinfer.kv.geometry import engine_geometry
from deepinfer.kv.pool import CachePool
from deepinfer.model.cached import run
from deepinfer.model.step import SequenceRows, StepLayout, to_device
from deepinfer.model.transformer import Transformer

# Multiply-adds of one square matrix product below which a second CPU thread costs more than it
# brings: handing out and joining the work of a few thousand tiny operations.
_PARALLEL_WORK = 2_000_000


class Runner:
    """The model and its cache on one device.

    Args:
        slots: state slots; token_map: [V] int64 n-gram classes, None without n-gram layers.

    Attributes:
        sampled: [slots] int64, the token last sampled in each slot.
        graphs: captured small steps, None until `capture`.
    """

    def __init__(
        self, config: EngineConfig, model: Transformer, token_map: Tensor | None, slots: int
    ) -> None:
        self.config = config
        self.model = model
        self.token_map = token_map
        self.device = model.embed.weight.device
        self.geometry = engine_geometry(model.config, config)
        self.pages = self.geometry.pages_for(config.cache_tokens)
        accumulate = model.precision.accumulate
        self.pool = CachePool(self.geometry, self.pages, slots, self.device, accumulate)
        longest = min(config.max_model_len, self.pages * config.page_tokens)
        self.page_table = PageTable(slots, self.geometry.pages_for(longest), self.device)
        self.sampled = torch.zeros(slots, dtype=torch.int64, device=self.device)
        self.graphs: StepGraphs | None = None
        # Kernels sum a row in one order whatever stands beside it; PyTorch's products do not.
        self._row_by_row = config.batch_invariant and not model.precision.packed
        # References of experts wait for the device.
        self._guards = config.sync_guard and model.precision.packed
        if self._guards:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # it says once that it does not see everything
                with self.guarded():
                    pass

    def capture(self) -> Iterator[tuple[int, int]]:
        """Capture the graphs that small steps then run as; yields (rows, longest sequence) of
        each.

        Nothing may run yet.
        """
        graphs = self._graphs()
        yield from graphs.capture()
        self.graphs = graphs

    @property
    def graph_count(self) -> int:
        """Graphs that `capture` makes."""
        return self._graphs().count

    def _graphs(self) -> StepGraphs:
        config = self.config
        longest = min(config.max_model_len, config.cache_tokens)

        def make(rows: int, most: int, chunk: bool) -> FixedStep:
            return FixedStep(self.model, self.pool, self.token_map, self.sampled,
                             self.page_table.device, rows, most, chunk)  # fmt: skip

        most_rows = max(config.max_num_seqs, min(SMALL_STEP, config.max_num_batched_tokens))
        return StepGraphs(make, most_rows, longest, self.geometry.rollback_tokens + 1)

    @torch.inference_mode()
    def forward(self, rows: Sequence[ForwardRows]) -> tuple[Tensor, list[slice]]:
        """Process the rows; logits [n, V] float32 of the wanted ones, and where each part's are.

        The logits are valid until the next forward.
        """
        with self.guarded():
            if self._row_by_row:
                return self._one_by_one(rows)
            if self.graphs is not None:
                longest = max(r.start + r.count for r in rows)
                rung = self.graphs.rung([r.count for r in rows], longest)
                if rung is not None:
                    return self._replay(self.graphs, rung, rows)
            return self._eager(rows)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """On a GPU, whatever makes the host wait for it raises."""
        if not self._guards:
            yield
            return
        before = torch.cuda.get_sync_debug_mode()
        try:
            torch.cuda.set_sync_debug_mode("error")
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)

    @torch.inference_mode()
    def keep_sampled(self, slots: Sequence[int], tokens: Tensor) -> None:
        """Note the tokens [n] that were sampled for the sequences in `slots`."""
        (index,) = to_device([np.array(slots, dtype=np.int64)], self.device)
        self.sampled.index_copy_(0, index, tokens.clamp_min(0))

    def _replay(
        self, graphs: StepGraphs, rung: Rung, rows: Sequence[ForwardRows]
    ) -> tuple[Tensor, list[slice]]:
        for r in rows:
            self.page_table.look(r.blocks)
        self.page_table.send()
        parts = [FixedRows(r.blocks.slot, r.start, r.token_ids) for r in rows]
        logits = graphs.replay(rung, parts)
        wanted, places = wanted_rows(rows, compact=False)
        if len(wanted) < len(logits):
            (numbers,) = to_device([wanted], self.device)
            logits = logits.index_select(0, numbers)
        return logits, places

    def _one_by_one(self, rows: Sequence[ForwardRows]) -> tuple[Tensor, list[slice]]:
        """A forward for each row: shapes, and so sums, depend on nothing but its own sequence."""
        logits: list[Tensor] = []
        places = []
        for r in rows:
            first = len(logits)
            for i in range(r.count):
                one = replace(r, token_ids=r.token_ids[i : i + 1], start=r.start + i,
                              wanted=int(i >= r.count - r.wanted))  # fmt: skip
                logits += self._eager([one])[0].unsqueeze(1)
            places.append(slice(first, len(logits)))
        none = torch.empty(0, self.model.config.vocab_size, device=self.device)
        return torch.cat(logits) if logits else none, places

    def _eager(self, rows: Sequence[ForwardRows]) -> tuple[Tensor, list[slice]]:
        if self.device.type == "cpu":
            self._set_threads(sum(r.count for r in rows))
        sequences = [
            SequenceRows(r.blocks.slot, self.page_table.row(r.blocks), r.start, r.count,
                         r.window_floor)
            for r in rows
        ]  # fmt: skip
        compact = self.config.yoco_prefill == "compact"
        wanted, places = wanted_rows(rows, compact)
        ids, sources = token_ids_of(rows)
        layout = StepLayout(sequences, self.geometry, self.device, [ids, sources, wanted])
        token_ids, from_slots, numbers = layout.extra
        if (sources >= 0).any():
            self.take_sampled(token_ids, from_slots)
        output = run(self.model, self.pool, layout, token_ids, self.token_map, compact=compact)
        return self.model.logits(output.hidden.x[numbers]).float(), places

    def take_sampled(self, token_ids: Tensor, slots: Tensor) -> None:
        """Put the token last sampled in each of `slots` [T] int64 into `token_ids`; -1 for none."""
        no_drafts = self.sampled.new_empty(len(self.sampled), 0)
        first = torch.zeros(len(slots), dtype=torch.int32, device=self.device)
        operators = self.model.precision.operators
        operators.fix_token_ids(token_ids, slots.int(), self.sampled, no_drafts, first)

    def _set_threads(self, rows: int) -> None:
        work = rows * self.model.config.hidden_size**2
        torch.set_num_threads(self.config.threads if work >= _PARALLEL_WORK else 1)

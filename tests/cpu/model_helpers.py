"""Small models in float64, and sequences run through the packed cache in any order.

In float64, sums in another order differ by 1e-15, too little to move a value across the edge of an
FP4 or FP8 code, so that two ways of computing a token agree to about 1e-12.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from deepinfer.config import DtypeName, EngineOptions, max_rollback
from deepinfer.engine.loading import Loaded, load
from deepinfer.kv.geometry import CacheGeometry, cache_geometry
from deepinfer.kv.pool import CachePool
from deepinfer.model.cached import StepOutput, draft, observe, run
from deepinfer.model.dspark import Draft
from deepinfer.model.norm import RMSNorm
from deepinfer.model.recompute import RecomputeState, recompute
from deepinfer.model.step import SequenceRows, StepLayout
from deepinfer.testing.compare import largest_difference

ORACLE_FOLDER = Path(__file__).parents[1] / "oracle"

# float64 rounding grows to this at most; a wrong key, entry or expert moves logits by 1e-3 or more.
EXACT = 1e-9


@cache
def loaded(folder: Path, dtype: DtypeName = "float64", act_quant: bool = True) -> Loaded:
    """The checkpoint in `folder`; every test of a run shares it, so nobody may change it."""
    options = EngineOptions(model=str(folder), dtype=dtype, act_quant=act_quant, threads=1)
    return load(options)


def random_ids(model: Loaded, count: int, seed: int = 0) -> Tensor:
    """[count] token ids, drawn from few so that n-grams repeat, image and noise tokens left out."""
    generator = torch.Generator().manual_seed(seed)
    few = torch.randint(20, model.model_config.vocab_size - 20, (40,), generator=generator)
    return few[torch.randint(40, (count,), generator=generator)]


@dataclass(frozen=True)
class Outputs:
    """What a model says of every token of one sequence: logits [T, V] and taps [T, A * H]."""

    logits: Tensor
    taps: Tensor | None

    def difference(self, other: "Outputs") -> float:
        """Largest difference of logits and taps; NaN if anything is."""
        logits = largest_difference(self.logits, other.logits)
        if self.taps is None or other.taps is None:
            return logits
        taps = largest_difference(self.taps, other.taps)
        return logits if logits != logits or logits > taps else taps

    def rows(self, start: int, end: int) -> "Outputs":
        """The outputs of some positions."""
        return Outputs(self.logits[start:end], None if self.taps is None else self.taps[start:end])


def joined(parts: Sequence[Outputs]) -> Outputs:
    """Outputs of consecutive rows as one."""
    taps = [part.taps for part in parts if part.taps is not None]
    return Outputs(torch.cat([p.logits for p in parts]), torch.cat(taps) if taps else None)


def recomputed(model: Loaded, ids: Tensor) -> Outputs:
    """Outputs of `ids` [T] without any cache."""
    with torch.inference_mode():
        hidden = recompute(model.model, ids, model.token_map)
        return Outputs(model.model.logits(hidden.x), hidden.taps)


class TruncatedRecompute(RecomputeState):
    """Recomputation under the mask of a truncated prefill."""

    floor = 0

    def attend(
        self, layer: int, queries: Tensor, kv: Tensor, norm: RMSNorm, sink: Tensor
    ) -> Tensor:
        whole = self.window
        boundary = self.config.boundary_layer
        if boundary is not None and layer >= boundary:
            self.window = whole & (self.positions >= self.floor)
        mixed = super().attend(layer, queries, kv, norm, sink)
        self.window = whole
        return mixed


def truncated_recomputed(model: Loaded, ids: Tensor, floor: int) -> Outputs:
    """Outputs of rows from `floor` on; no window at or past the boundary reaches before it."""
    state = TruncatedRecompute(model.model, ids, model.token_map)
    state.floor = floor
    with torch.inference_mode():
        hidden = model.model(ids, state)
        whole = Outputs(model.model.logits(hidden.x), hidden.taps)
    return whole.rows(floor, len(ids))


@dataclass
class Lane:
    """One sequence in a cache: where it lives, how many of its tokens are there, its floor."""

    slot: int
    pages: list[int]
    done: int = 0
    floor: int = 0

    def rows(self, start: int, count: int) -> SequenceRows:
        """Some of its tokens as rows of a forward."""
        return SequenceRows(self.slot, self.pages, start, count, self.floor)


class Cache:
    """A pool full of NaN with sequences at random slots and pages.

    Args:
        lengths: most tokens of each sequence.
        page_tokens: small, so that sequences have many pages.
    """

    def __init__(
        self, model: Loaded, lengths: Sequence[int], page_tokens: int = 16, seed: int = 0
    ) -> None:
        self.model = model
        config = model.model_config
        self.geometry: CacheGeometry = cache_geometry(config, page_tokens, max_rollback(config))
        wanted = [self.geometry.pages_for(length) for length in lengths]
        generator = torch.Generator().manual_seed(seed)
        pages = torch.randperm(sum(wanted) + 3, generator=generator).tolist()
        slots = torch.randperm(len(lengths) + 2, generator=generator).tolist()
        accumulate = model.model.precision.accumulate
        device = torch.device("cpu")
        self.pool = CachePool(self.geometry, len(pages), len(slots), device, accumulate)
        self.pool.poison()
        self.lanes = []
        for number, count in enumerate(wanted):
            self.lanes.append(Lane(slots[number], [pages.pop() for _ in range(count)]))

    def _layout(self, rows: Sequence[SequenceRows]) -> StepLayout:
        return StepLayout(rows, self.geometry, torch.device("cpu"))

    def forward(self, parts: Sequence[tuple[int, Tensor]], compact: bool = False) -> StepOutput:
        """Run tokens of some lanes, (lane number, ids), after what those lanes have done."""
        lanes = self.lanes
        layout = self._layout([lanes[i].rows(lanes[i].done, len(ids)) for i, ids in parts])
        ids = torch.cat([ids for _, ids in parts])
        m = self.model
        with torch.inference_mode():
            output = run(m.model, self.pool, layout, ids, m.token_map, compact=compact)
        for i, tokens in parts:
            self.lanes[i].done += len(tokens)
        return output

    def step(self, parts: Sequence[tuple[int, Tensor]]) -> list[Outputs]:
        """`forward` and the outputs of each part."""
        output = self.forward(parts)
        return [self.outputs(output, rows) for rows in output.layout.sequence_slices()]

    def outputs(self, output: StepOutput, rows: slice | None = None) -> Outputs:
        """Outputs of the rows of a step that went through all layers."""
        taken = slice(None) if rows is None else rows
        taps = output.hidden.taps
        with torch.inference_mode():
            logits = self.model.model.logits(output.hidden.x[taken])
        return Outputs(logits, None if taps is None else taps[taken])

    def prefill(self, lane: int, ids: Tensor, chunk: int) -> Outputs:
        """Run `ids` in chunks of at most `chunk` tokens."""
        return joined([self.step([(lane, part)])[0] for part in ids.split(chunk)])

    def rewind(self, lane: int, done: int) -> None:
        """Take a sequence back to `done` tokens: nothing but a number."""
        assert done <= self.lanes[lane].done
        self.lanes[lane].done = done

    def observe(self, lane: int, start: int, taps: Tensor) -> None:
        """Write the draft windows of committed rows of one lane, from position `start` on."""
        layout = self._layout([self.lanes[lane].rows(start, len(taps))])
        with torch.inference_mode():
            observe(self.model.model, self.pool, layout, taps)

    def draft(self, lanes: Sequence[int], next_ids: Tensor) -> Draft:
        """A draft round after the last token of each lane."""
        layout = self._layout([self.lanes[i].rows(self.lanes[i].done - 1, 1) for i in lanes])
        with torch.inference_mode():
            return draft(self.model.model, self.pool, layout, next_ids)

"""An engine whose model is a hash of every token before, as the cache has them.

Requests, scheduler, books, prefix tree, sampler and both loops are the real ones; a step takes a
millisecond or a few, so that a test can afford thousands. The device is the one of `kv_helpers`:
pages hold tokens, slots hold the last of them, what nobody owns is poisoned after every forward,
and a row that would read something old, foreign or unwritten fails.
"""

import zlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepinfer import LLM
from deepinfer.engine.drawing import Drawing
from deepinfer.engine.rows import ForwardRows
from deepinfer.kv.blocks import PageCopy, SlotCopy
from tests.cpu.engine_helpers import small_llm
from tests.cpu.kv_helpers import FakeDevice

WINDOW = 5


def hashed_logits(tokens: Sequence[int], vocabulary: int) -> Tensor:
    """Logits [V] float32 after `tokens`: any pure function in which few tokens are likely."""
    seed = zlib.crc32(np.array(tokens, dtype=np.int32).tobytes())
    drawn = np.random.default_rng(seed).standard_normal(vocabulary, dtype=np.float32)
    return torch.from_numpy(3 * drawn)


class _Pool:
    """The two copies that an engine orders, on the device of lists."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device

    def copy_slot(self, source: int, target: int) -> None:
        self._device.copy([SlotCopy(source, target)])

    def copy_page(self, source: int, target: int) -> None:
        self._device.copy([PageCopy(source, target)])


class StubRunner:
    """Takes the place of an engine's runner.

    Attributes:
        before: called with the rows of every forward once they are written and before their logits
            are: where it raises, the forward has left everything behind that a forward can.
        logits: called with the logits [n, V] and the rows of every forward; may change them.
        forwards: how many there were.
    """

    def __init__(self, llm: LLM) -> None:
        engine = llm.engine
        self.model, self.geometry = engine.runner.model, engine.runner.geometry
        self.graphs = None
        self.device = torch.device("cpu")
        self.sampled = torch.zeros(llm.config.state_slots, dtype=torch.int64)
        self.cache = FakeDevice(engine.manager, WINDOW, slack=self.geometry.rollback_tokens)
        self.pool: Any = _Pool(self.cache)
        self.before: Callable[[list[list[int]]], None] = lambda rows: None
        self.logits: Callable[[Tensor, list[list[int]]], None] = lambda logits, rows: None
        self.forwards = 0

    def guarded(self) -> Any:
        return nullcontext()

    def keep_sampled(self, slots: Sequence[int], tokens: Tensor) -> None:
        self.sampled[list(slots)] = tokens.clamp_min(0)

    def forward(self, rows: Sequence[ForwardRows]) -> tuple[Tensor, list[slice]]:
        self.forwards += 1
        vocabulary = self.model.config.vocab_size
        whole, logits, places = [], [], []
        for row in rows:
            ids = list(row.token_ids) or [int(self.sampled[row.blocks.slot])]
            tokens = self.cache.read(row.blocks, row.start) + ids
            assert all(0 <= token < vocabulary for token in tokens), "read what was never written"
            self.cache.write(row.blocks, row.start, ids)
            places.append(slice(len(logits), len(logits) + row.wanted))
            ends = range(len(tokens) - row.wanted + 1, len(tokens) + 1)
            logits += [hashed_logits(tokens[:end], vocabulary) for end in ends]
            whole.append(tokens)
        self.before(whole)
        self.cache.poison()
        result = torch.stack(logits) if logits else torch.empty(0, vocabulary)
        self.logits(result, whole)
        return result, places


def stub_llm(folder: Path, **settings: Any) -> LLM:
    """A small engine with a stub for its model: pages of 4 tokens, everything else scarce.

    Args:
        folder: a checkpoint that allows for such pages.
    """
    scarce = {"dtype": "float32", "page_tokens": 4, "max_model_len": 96, "cache_tokens": 96}
    llm = small_llm(folder, **{**scarce, **settings})
    engine = llm.engine
    engine.runner = StubRunner(llm)  # type: ignore[assignment]
    engine.drawing = Drawing(engine.config, engine.runner, engine._grammars)
    return llm

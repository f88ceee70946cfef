"""Truncated prefill: prompt rows that nothing reads later stop at the boundary layer.

Its meaning is a dense mask: from the boundary on, no window reaches past the floor. Computing all
rows under that mask, leaving the dropped rows out, and doing either in chunks are one and the same.
"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer.config import EngineOptions, Host, resolve
from deepinfer.engine.loading import Loaded
from deepinfer.errors import ConfigError
from deepinfer.model.recompute import recompute_draft
from tests.cpu.model_helpers import (
    EXACT,
    ORACLE_FOLDER,
    Cache,
    Outputs,
    joined,
    loaded,
    random_ids,
    recomputed,
    truncated_recomputed,
)

PROMPT, LENGTH = 90, 95
KEEP = 27  # more than window and rollback, and odd
FLOOR = PROMPT - KEEP
PAGE = {"tiny": 16, "oracle": 8}
NAMES = list(PAGE)


@pytest.fixture(scope="module")
def models(tiny_folder: Path) -> dict[str, Loaded]:
    return {"tiny": loaded(tiny_folder), "oracle": loaded(ORACLE_FOLDER)}


def truncated(model: Loaded, name: str, ids: Tensor, chunk: int, compact: bool) -> Outputs:
    """Outputs of the rows from the floor on: prompt in chunks, then token by token."""
    cache = Cache(model, [LENGTH], PAGE[name], seed=chunk)
    cache.lanes[0].floor = FLOOR
    parts = []
    # Chunks of one token around the floor only: they are slow.
    sizes: int | list[int] = chunk if chunk > 1 else [FLOOR - 3, *[1] * 7, PROMPT - FLOOR - 4]
    for tokens in [*ids[:PROMPT].split(sizes), *ids[PROMPT:].split(1)]:
        output = cache.forward([(0, tokens)], compact)
        kept = output.layout.host_positions >= FLOOR
        assert kept.all() or not compact
        parts.append(cache.outputs(output, torch.from_numpy(kept)))
    return joined(parts)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("compact", "chunk"),
    [
        *[(False, chunk) for chunk in (PROMPT, 16)],
        *[(True, chunk) for chunk in (PROMPT, 1, 16, FLOOR, FLOOR - 1, FLOOR + 1)],
    ],
)
def test_truncated_equals_the_dense_mask(
    models: dict[str, Loaded], name: str, compact: bool, chunk: int
) -> None:
    """Kept rows and the decoding after them; chunks wholly, partly and not before the floor."""
    model = models[name]
    ids = random_ids(model, LENGTH)
    found = truncated(model, name, ids, chunk, compact)
    assert found.difference(truncated_recomputed(model, ids, FLOOR)) < EXACT


@pytest.mark.parametrize("name", NAMES)
def test_the_mask_changes_the_result(models: dict[str, Loaded], name: str) -> None:
    ids = random_ids(models[name], LENGTH)
    whole = recomputed(models[name], ids).rows(FLOOR, LENGTH)
    assert truncated_recomputed(models[name], ids, FLOOR).difference(whole) > 1e-4


@pytest.mark.parametrize("compact", [False, True])
def test_a_floor_of_zero_is_exact(models: dict[str, Loaded], compact: bool) -> None:
    model = models["tiny"]
    ids = random_ids(model, 40)
    cache = Cache(model, [40])
    output = cache.forward([(0, ids)], compact)
    assert cache.outputs(output).difference(recomputed(model, ids)) < EXACT


@pytest.mark.parametrize("compact", [False, True])
def test_other_sequences_of_the_batch_keep_their_own_floor(
    models: dict[str, Loaded], compact: bool
) -> None:
    """A decoding row, a chunk that is dropped as a whole, a cut one, and one without truncation."""
    model = models["tiny"]
    floors = [30, 60, 43, 0]
    lengths = [48, 90, 70, 50]
    ids = [random_ids(model, length, lane) for lane, length in enumerate(lengths)]
    cache = Cache(model, lengths)
    for lane, floor in enumerate(floors):
        cache.lanes[lane].floor = floor
    steps = [
        [(0, ids[0][:47]), (1, ids[1][:20])],
        [(1, ids[1][20:55]), (2, ids[2][:50]), (0, ids[0][47:]), (3, ids[3])],
        [(2, ids[2][50:]), (1, ids[1][55:])],
    ]
    parts: list[list[Outputs]] = [[] for _ in floors]
    for step in steps:
        output = cache.forward(step, compact)
        for rows, place in zip(output.layout.rows, output.layout.sequence_slices(), strict=True):
            lane = next(i for i, at in enumerate(cache.lanes) if at.slot == rows.slot)
            skipped = max(0, floors[lane] - rows.start)
            parts[lane].append(cache.outputs(output, slice(place.start + skipped, place.stop)))
    for lane, part in enumerate(parts):
        assert (
            joined(part).difference(truncated_recomputed(model, ids[lane], floors[lane])) < EXACT
        ), lane


@pytest.mark.parametrize(
    "change",
    [
        {"kv_source_layer_ids": (2, 4, 5, 7)},  # its entries would lack the dropped rows
        {"engram_layer_ids": (1, 6)},  # its history would
        {"dspark_target_layer_ids": (4, 6, 7)},
        {"compress_ratios": (0, 0, 2, 2, 2, 2, 2, 2, 2, 0, 0)},
    ],
)
def test_models_that_need_every_row_are_refused(
    models: dict[str, Loaded], change: dict[str, Any]
) -> None:
    config = models["tiny"].model_config
    options = EngineOptions(model="x", yoco_prefill="compact")
    host = Host(cuda=False, cores=1)
    assert resolve(options, {}, config, host)[0].yoco_prefill == "compact"
    with pytest.raises(ConfigError, match="yoco_prefill = 'compact'; expected off"):
        resolve(options, {}, dataclasses.replace(config, **change), host)


@pytest.mark.parametrize("name", NAMES)
def test_drafts_after_a_truncated_prefill(models: dict[str, Loaded], name: str) -> None:
    """Kept rows fill the draft window; what the recomputed draft sees before them is nonsense."""
    model = models[name]
    ids = random_ids(model, PROMPT)
    cache = Cache(model, [PROMPT + 6], PAGE[name])
    cache.lanes[0].floor = FLOOR
    output = cache.forward([(0, ids)], compact=True)
    taps = output.hidden.taps
    assert taps is not None
    assert len(taps) == KEEP
    cache.observe(0, FLOOR, taps)
    found = cache.draft([0], ids[:1])
    with torch.inference_mode():
        padded = torch.cat([torch.full((FLOOR, taps.shape[1]), 1e6, dtype=taps.dtype), taps])
        wanted = recompute_draft(model.model, padded, ids[0])
    assert (found.logits - wanted.logits).abs().max() < EXACT
    assert (found.confidence - wanted.confidence).abs().max() < EXACT

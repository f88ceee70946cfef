"""Decode steps of fixed shape, as CUDA graphs capture them, equal steps laid out by the host."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor

from deepinfer.engine.graphs import DecodeRow, DecodeStep, batch_ladder, length_ladder
from deepinfer.engine.loading import Loaded
from deepinfer.kv.pool import CachePool
from deepinfer.testing.compare import largest_difference
from tests.cpu.model_helpers import EXACT, ORACLE_FOLDER, Cache, loaded, random_ids

LENGTHS = (1, 17, 40, 95)  # tokens before the decode steps: none, inside and past the window
STEPS = 18


@pytest.fixture(scope="module", params=["small", "oracle"])
def model(request: pytest.FixtureRequest, small_folder: Path) -> Loaded:
    return loaded(small_folder if request.param == "small" else ORACLE_FOLDER)


def contents(pool: CachePool) -> list[Tensor]:
    """Every tensor of a pool."""
    kinds = (pool.compressed, pool.index_codes, pool.index_scales, pool.groups)
    return [pool.window, pool.draft_window, pool.history, *(t for k in kinds for t in k.values())]


def page_table(cache: Cache) -> Tensor:
    """[slots, most pages] by slot; what no sequence has is page 0."""
    slots = cache.pool.history.shape[0]
    table = torch.zeros(slots, max(len(lane.pages) for lane in cache.lanes), dtype=torch.int64)
    for lane in cache.lanes:
        table[lane.slot, : len(lane.pages)] = torch.tensor(lane.pages)
    return table


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("on_device", [False, True])
def test_equals_a_step_by_the_host(model: Loaded, padding: int, on_device: bool) -> None:
    """Logits and every byte of the cache, padding rows beside, tokens from the host or sampled."""
    caches = [Cache(model, [n + STEPS for n in LENGTHS]) for _ in range(2)]
    host, fixed = caches
    prompts = [random_ids(model, length, seed=length) for length in LENGTHS]
    for cache in caches:
        for lane, ids in enumerate(prompts):
            cache.prefill(lane, ids, 16)
    sampled = torch.zeros(fixed.pool.history.shape[0], dtype=torch.int64)
    rows = len(LENGTHS) + padding
    longest = max(LENGTHS) + STEPS
    step = DecodeStep(model.model, fixed.pool, model.token_map, sampled, page_table(fixed), rows,
                      longest)  # fmt: skip
    for turn in range(STEPS):
        ids = random_ids(model, len(LENGTHS), seed=1000 + turn)
        lanes = [fixed.lanes[i] for i in range(len(LENGTHS))]
        tokens = ids.tolist()
        if on_device:
            sampled[[lane.slot for lane in lanes]] = ids
            tokens = [-1] * len(LENGTHS)
        step.write([DecodeRow(lane.slot, lane.done, token)
                    for lane, token in zip(lanes, tokens, strict=True)])  # fmt: skip
        with torch.inference_mode():
            logits = step.run()[: len(LENGTHS)]
        for lane in lanes:
            lane.done += 1
        expected = host.step([(i, ids[i : i + 1]) for i in range(len(LENGTHS))])
        whole = torch.cat([part.logits for part in expected]).float()
        assert largest_difference(logits, whole) < max(EXACT, 1e-6)
    pairs = zip(contents(fixed.pool), contents(host.pool), strict=True)
    for ours, theirs in pairs:
        if ours.dtype.is_floating_point:
            assert torch.allclose(ours, theirs, rtol=0, atol=EXACT, equal_nan=True)
        else:
            assert torch.equal(ours, theirs)


def test_padding_alone_writes_nothing(model: Loaded) -> None:
    cache = Cache(model, [8])
    before = copy.deepcopy(contents(cache.pool))
    sampled = torch.zeros(cache.pool.history.shape[0], dtype=torch.int64)
    step = DecodeStep(model.model, cache.pool, model.token_map, sampled, page_table(cache), 3, 64)
    step.write([])
    with torch.inference_mode():
        assert step.run().isfinite().all()
    for ours, theirs in zip(contents(cache.pool), before, strict=True):
        assert torch.equal(ours.nan_to_num(7), theirs.nan_to_num(7))


@pytest.mark.parametrize("most", [1, 2, 3, 32, 33, 100, 1000, 5000])
def test_ladders_end_where_they_should(most: int) -> None:
    for ladder in (batch_ladder(most), length_ladder(most)):
        assert ladder[-1] == most
        assert ladder == sorted(set(ladder))
        assert ladder[0] >= 1

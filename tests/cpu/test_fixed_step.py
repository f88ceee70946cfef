"""Steps of fixed shape, as CUDA graphs capture them, equal steps laid out by the host."""

import copy
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from deepinfer.engine.graphs import FixedRows, FixedStep, StepGraphs, batch_ladder, length_ladder
from deepinfer.engine.loading import Loaded
from deepinfer.kv.pool import CachePool
from deepinfer.testing.compare import largest_difference
from tests.cpu.model_helpers import EXACT, ORACLE_FOLDER, Cache, loaded, random_ids

LENGTHS = (1, 17, 40, 95)  # tokens before the steps: none, inside and past the window
STEPS = 12
ROUNDING = max(EXACT, 1e-6)  # logits are compared in float32


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


class Pair:
    """Two equal caches: one for steps by the host, one for steps of fixed shape."""

    def __init__(self, model: Loaded, rows: int, more: int, chunk: bool = False) -> None:
        self.host, self.fixed = (Cache(model, [n + more for n in LENGTHS]) for _ in range(2))
        for cache in (self.host, self.fixed):
            for lane, length in enumerate(LENGTHS):
                cache.prefill(lane, random_ids(model, length, seed=length), 16)
        self.sampled = torch.zeros(self.fixed.pool.history.shape[0], dtype=torch.int64)
        table = page_table(self.fixed)
        self.step = FixedStep(model.model, self.fixed.pool, model.token_map, self.sampled, table,
                              rows, max(LENGTHS) + more, chunk)  # fmt: skip

    def compare(self, parts: list[tuple[int, Tensor]], on_device: bool = False) -> None:
        """One step of both: logits are equal."""
        rows = []
        for number, ids in parts:
            lane = self.fixed.lanes[number]
            if on_device:
                self.sampled[lane.slot] = ids[0]
            rows.append(FixedRows(lane.slot, lane.done, [] if on_device else ids.tolist()))
            lane.done += len(ids)
        self.step.write(rows)
        with torch.inference_mode():
            logits = self.step.run()[: sum(len(ids) for _, ids in parts)]
        whole = torch.cat([part.logits for part in self.host.step(parts)]).float()
        assert largest_difference(logits, whole) < ROUNDING

    def assert_same_cache(self) -> None:
        for ours, theirs in zip(contents(self.fixed.pool), contents(self.host.pool), strict=True):
            if ours.dtype.is_floating_point:
                assert torch.allclose(ours, theirs, rtol=0, atol=EXACT, equal_nan=True)
            else:
                assert torch.equal(ours, theirs)


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("on_device", [False, True])
def test_decode_rows_equal_those_of_the_host(model: Loaded, padding: int, on_device: bool) -> None:
    """Logits and every byte of the cache, padding rows beside, tokens from the host or sampled."""
    pair = Pair(model, len(LENGTHS) + padding, STEPS)
    for turn in range(STEPS):
        ids = random_ids(model, len(LENGTHS), seed=1000 + turn)
        pair.compare([(i, ids[i : i + 1]) for i in range(len(LENGTHS))], on_device)
    pair.assert_same_cache()


def test_chunks_beside_decode_rows(model: Loaded) -> None:
    """As many rows of one sequence as its ring has slack for, decode rows and none of others."""
    most = Cache(model, [1]).geometry.rollback_tokens + 1
    pair = Pair(model, 3 * most + 5, 9 * most)
    counts = [
        [most, 1, 1, 1], [1, most, most, 1], [2, 0, most, 1], [0, 0, 0, most], [1, 1, 1, 1],
        [most, most, 0, most], [3, 1, 2, 1],
    ]  # fmt: skip
    for turn, shape in enumerate(counts):
        parts = [(i, random_ids(model, n, seed=100 * turn + i)) for i, n in enumerate(shape) if n]
        pair.compare(parts)
    pair.assert_same_cache()


def test_long_chunks(model: Loaded) -> None:
    """More rows of one sequence than its ring keeps, beside others."""
    ring = Cache(model, [1]).geometry.ring_tokens
    pair = Pair(model, 2 * ring + 5, 4 * ring, chunk=True)
    for turn, shape in enumerate([[ring + 3, 1, 1, 1], [1, ring - 1, 5, 1], [1, 1, 1, 2 * ring]]):
        parts = [(i, random_ids(model, n, seed=100 * turn + i)) for i, n in enumerate(shape)]
        pair.compare(parts)
    pair.assert_same_cache()


@given(
    rows=st.integers(1, 300), tokens=st.integers(1, 100_000), slack=st.integers(1, 100),
    counts=st.lists(st.integers(1, 40), min_size=1, max_size=12), longest=st.integers(1, 110_000),
)  # fmt: skip
def test_the_smallest_graph_that_fits(
    rows: int, tokens: int, slack: int, counts: list[int], longest: int
) -> None:
    graphs = StepGraphs(lambda *_: pytest.fail("nothing is captured"), rows, tokens, slack)
    found = graphs.rung(counts, longest)
    fitting = [
        rung for rung in graphs._rungs
        if rung.rows >= sum(counts) and rung.longest >= longest
        and (rung.chunk or max(counts) <= slack)
    ]  # fmt: skip
    if not fitting:
        assert found is None
        assert longest > tokens or sum(counts) > min(rows, 128) or max(counts) > slack
        return
    assert found in fitting
    assert found.longest == min(rung.longest for rung in fitting)
    assert found.rows == min(rung.rows for rung in fitting)
    assert found.chunk <= (max(counts) > slack)


def test_padding_alone_writes_nothing(model: Loaded) -> None:
    cache = Cache(model, [8])
    before = copy.deepcopy(contents(cache.pool))
    sampled = torch.zeros(cache.pool.history.shape[0], dtype=torch.int64)
    step = FixedStep(model.model, cache.pool, model.token_map, sampled, page_table(cache), 3, 64)
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

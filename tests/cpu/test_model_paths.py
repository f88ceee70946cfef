"""Every way of running a sequence gives what recomputing it whole gives.

Chunks of any length, token by token, alone or between others, wherever its pages and slot are. The
cache is full of NaN before the first write, so a read of anything that was not written shows.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deepinfer.engine.loading import Loaded
from deepinfer.model.recompute import recompute
from tests.cpu.model_helpers import (
    EXACT,
    ORACLE_FOLDER,
    Cache,
    Outputs,
    joined,
    loaded,
    random_ids,
    recomputed,
)

LENGTH = 130  # twice the candidates of the tiny checkpoint and then some
PAGE = {"tiny": 16, "oracle": 8}
# At and around groups, pages, window 16, ring 22 (21 for the oracle's), top-k and candidates.
CHUNKS = {
    "tiny": (3, 7, 15, 16, 17, 21, 22, 23, 33, 64, 130),
    "oracle": (8, 20, 21, 22, 25, 130),
}
NAMES = list(PAGE)


@pytest.fixture(scope="module")
def models(tiny_folder: Path) -> dict[str, Loaded]:
    return {"tiny": loaded(tiny_folder), "oracle": loaded(ORACLE_FOLDER)}


@pytest.fixture(scope="module")
def expected(models: dict[str, Loaded]) -> dict[str, Outputs]:
    return {name: recomputed(model, random_ids(model, LENGTH)) for name, model in models.items()}


@pytest.mark.parametrize(
    ("name", "chunk"), [(name, chunk) for name in NAMES for chunk in CHUNKS[name]]
)
def test_chunked_equals_recomputed(
    models: dict[str, Loaded], expected: dict[str, Outputs], name: str, chunk: int
) -> None:
    cache = Cache(models[name], [LENGTH], PAGE[name], seed=chunk)
    ids = random_ids(models[name], LENGTH)
    assert cache.prefill(0, ids, chunk).difference(expected[name]) < EXACT


@pytest.mark.parametrize("name", NAMES)
def test_token_by_token_equals_recomputed(
    models: dict[str, Loaded], expected: dict[str, Outputs], name: str
) -> None:
    """The first 26 tokens (past the first ring) and the last 10."""
    cache = Cache(models[name], [LENGTH], PAGE[name])
    first, middle, last = random_ids(models[name], LENGTH).split([26, LENGTH - 36, 10])
    parts = [cache.prefill(0, *part) for part in ((first, 1), (middle, LENGTH), (last, 1))]
    assert joined(parts).difference(expected[name]) < EXACT


def test_a_prompt_may_be_split_anywhere(
    models: dict[str, Loaded], expected: dict[str, Outputs]
) -> None:
    model, ids = models["tiny"], random_ids(models["tiny"], LENGTH)
    splits = range(1, 42)
    # One batch: every lane is the same sequence, split somewhere else.
    cache = Cache(model, [42] * len(splits))
    heads = cache.step([(lane, ids[:at]) for lane, at in enumerate(splits)])
    tails = cache.step([(lane, ids[at:42]) for lane, at in enumerate(splits)])
    for at, head, tail in zip(splits, heads, tails, strict=True):
        assert joined([head, tail]).difference(expected["tiny"].rows(0, 42)) < EXACT, at


Plan = list[list[tuple[int, int]]]


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Steps of a batch: (lane, tokens) in any order, most of them decodes or short chunks."""
    lanes = draw(st.integers(1, 5))
    counts = st.sampled_from([1, 1, 1, 2, 3, 5, 16, 17, 40])
    step = st.lists(st.tuples(st.integers(0, lanes - 1), counts), min_size=1, max_size=lanes,
                    unique_by=lambda part: part[0])  # fmt: skip
    return draw(st.lists(step, min_size=3, max_size=8))


def run_plan(cache: Cache, plan: Plan, ids: Sequence[Tensor]) -> dict[int, Outputs]:
    """Outputs of each lane after all steps of a plan."""
    parts: dict[int, list[Outputs]] = {}
    for step in plan:
        places = [(lane, cache.lanes[lane].done, count) for lane, count in step]
        tokens = [(lane, ids[lane][done : done + count]) for lane, done, count in places]
        for (lane, _), outputs in zip(step, cache.step(tokens), strict=True):
            parts.setdefault(lane, []).append(outputs)
    return {lane: joined(outputs) for lane, outputs in parts.items()}


def lengths(plan: Plan) -> list[int]:
    """Tokens of every lane in a plan; lanes that it leaves out have none."""
    lanes = max(lane for step in plan for lane, _ in step) + 1
    return [sum(n for step in plan for i, n in step if i == lane) for lane in range(lanes)]


@settings(max_examples=10)
@given(plan=plans(), seed=st.integers(0, 2**20))
def test_batched_equals_recomputed_alone(models: dict[str, Loaded], plan: Plan, seed: int) -> None:
    """Prefill and decode rows of several sequences in one step, any pages, slots and order."""
    model = models["tiny"]
    counts = lengths(plan)
    ids = [random_ids(model, count, seed + lane) for lane, count in enumerate(counts)]
    found = run_plan(Cache(model, counts, seed=seed), plan, ids)
    for lane, outputs in found.items():
        assert outputs.difference(recomputed(model, ids[lane])) < EXACT


def test_the_order_of_a_batch_does_not_matter(models: dict[str, Loaded]) -> None:
    """Long, short and one-token rows of four sequences, forwards and backwards."""
    model = models["oracle"]
    plan = [[(0, 40), (1, 1), (2, 23)], [(0, 1), (1, 30), (2, 1), (3, 2)], [(3, 1), (0, 9)]]
    counts = lengths(plan)
    ids = [random_ids(model, count, lane) for lane, count in enumerate(counts)]
    there = run_plan(Cache(model, counts, 8), plan, ids)
    back = run_plan(Cache(model, counts, 8), [step[::-1] for step in plan], ids)
    for lane, outputs in there.items():
        assert outputs.difference(back[lane]) < EXACT
        assert outputs.difference(recomputed(model, ids[lane])) < EXACT


def test_only_owned_memory_is_written(models: dict[str, Loaded]) -> None:
    model = models["tiny"]
    cache = Cache(model, [40, 17])
    cache.step([(0, random_ids(model, 40)), (1, random_ids(model, 17, 1))])
    pool = cache.pool
    slots = [i for i in range(pool.history.shape[0]) if i not in {x.slot for x in cache.lanes}]
    owned = {page for lane in cache.lanes for page in lane.pages}
    pages = [i for i in range(len(next(iter(pool.compressed.values())))) if i not in owned]
    assert len(slots) == 2
    assert len(pages) == 3
    assert (pool.window[:, slots] == 0xFF).all()
    assert (pool.history[slots] == -(2**62)).all()
    assert all(group[slots].isnan().all() for group in pool.groups.values())
    for records in (pool.compressed, pool.index_codes, pool.index_scales):
        assert all((tensor[pages] == 0xFF).all() for tensor in records.values())


@pytest.mark.parametrize("name", NAMES)
def test_one_and_two_tokens(models: dict[str, Loaded], name: str) -> None:
    """The first token of a group of two sees no entry at all, the second sees its own group."""
    model = models[name]
    ids = random_ids(model, 3)
    for count in (1, 2, 3):
        cache = Cache(model, [count] * 3, PAGE[name])
        for outputs in cache.step([(lane, ids[:count]) for lane in range(3)]):
            assert outputs.difference(recomputed(model, ids[:count])) < EXACT


def test_recomputing_several_sequences_at_once(models: dict[str, Loaded]) -> None:
    model = models["tiny"]
    ids = torch.stack([random_ids(model, 70, seed) for seed in range(3)])
    with torch.inference_mode():
        hidden = recompute(model.model, ids, model.token_map, keep_streams=True)
        logits = model.model.logits(hidden.x)
    assert hidden.taps is not None
    for row in range(3):
        both = Outputs(logits[row], hidden.taps[row])
        assert both.difference(recomputed(model, ids[row])) < EXACT
    assert [tuple(part.shape) for part in hidden.streams] == [(3, 70, 4, 128)] * 9


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("tiny", {"sliding_window": 15}),
        ("tiny", {"sliding_window": 17}),
        ("tiny", {"index_topk": 15}),
        ("tiny", {"candidate_topk_blocks": 9}),
        ("tiny", {"candidate_block_size": 4, "candidate_topk_blocks": 16}),
        ("tiny", {"candidate_source_layer_id": None}),
        ("tiny", {"index_source_layer_ids": (2, 4, 5)}),
        ("tiny", {"engram_pad_token_id": 3}),
        ("oracle", {"candidate_topk_blocks": 5}),
        ("oracle", {"index_topk": 9}),
    ],
)
def test_every_feature_acts_within_the_length(
    models: dict[str, Loaded],
    expected: dict[str, Outputs],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    change: dict[str, Any],
) -> None:
    """Otherwise the equalities above would hold without it."""
    model = models[name]
    monkeypatch.setattr(model.model, "config", dataclasses.replace(model.model_config, **change))
    assert recomputed(model, random_ids(model, LENGTH)).difference(expected[name]) > 1e-4

"""DSpark drafts: from the draft windows in the cache they are what recomputing gives.

However the backbone's rows came (chunks, single tokens, with rejected rows between), the drafter
reads committed rows only; and a checkpoint without a drafter works like any other.
"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer import LLM, SamplingParams
from deepinfer.config import max_rollback
from deepinfer.engine.loading import Loaded
from deepinfer.model.dspark import Draft
from deepinfer.model.recompute import recompute_draft
from deepinfer.testing.tiny import tiny_config, write_random_checkpoint
from tests.cpu.model_helpers import (
    EXACT,
    ORACLE_FOLDER,
    Cache,
    loaded,
    random_ids,
    recomputed,
)

PAGE = {"tiny": 16, "oracle": 8}
NAMES = list(PAGE)
LENGTH = 70


@pytest.fixture(scope="module")
def models(tiny_folder: Path) -> dict[str, Loaded]:
    return {"tiny": loaded(tiny_folder), "oracle": loaded(ORACLE_FOLDER)}


def taps_of(model: Loaded, ids: Tensor) -> Tensor:
    taps = recomputed(model, ids).taps
    assert taps is not None
    return taps


def draft_alone(model: Loaded, taps: Tensor, next_id: Tensor) -> Draft:
    with torch.inference_mode():
        return recompute_draft(model.model, taps, next_id)


def assert_same(found: Draft, row: int, wanted: Draft) -> None:
    """Row `row` of a draft round is `wanted`, a round of one sequence."""
    assert found.token_ids[row].tolist() == wanted.token_ids[0].tolist()
    for name in ("base_logits", "logits", "confidence"):
        difference = (getattr(found, name)[row] - getattr(wanted, name)[0]).abs().max()
        assert difference < EXACT, name


def feed(cache: Cache, lane: int, ids: Tensor, chunk: int) -> None:
    """Run tokens in chunks and write the draft windows of their rows."""
    for part in ids.split(chunk):
        start = cache.lanes[lane].done
        (outputs,) = cache.step([(lane, part)])
        assert outputs.taps is not None
        cache.observe(lane, start, outputs.taps)


@pytest.mark.parametrize(
    ("name", "chunk"),
    [*[("tiny", chunk) for chunk in (1, 5, 16, 23, LENGTH)], ("oracle", 5), ("oracle", LENGTH)],
)
def test_cached_drafts_equal_recomputed(models: dict[str, Loaded], name: str, chunk: int) -> None:
    """After a prompt in any chunks, then after each of a few decoded tokens."""
    model = models[name]
    length = 26 if chunk == 1 else LENGTH
    ids = random_ids(model, length + 3)
    taps = taps_of(model, ids)
    cache = Cache(model, [length + 3], PAGE[name])
    feed(cache, 0, ids[:length], chunk)
    for done in range(length, length + 3):
        found = cache.draft([0], ids[done : done + 1])
        assert_same(found, 0, draft_alone(model, taps[:done], ids[done]))
        feed(cache, 0, ids[done : done + 1], 1)


@pytest.mark.parametrize("name", NAMES)
def test_several_sequences_at_once(models: dict[str, Loaded], name: str) -> None:
    """Shorter than the window, exactly as long, longer than the ring; in any order."""
    model = models[name]
    lengths = [1, 2, 15, 16, 17, 22, 23, 48]
    ids = [random_ids(model, count, seed) for seed, count in enumerate(lengths)]
    cache = Cache(model, lengths, PAGE[name])
    for lane, part in enumerate(ids):
        feed(cache, lane, part, 13)
    following = random_ids(model, len(lengths), 99)
    for order in ([*range(8)], [5, 0, 7, 2], [0], [3]):
        found = cache.draft(order, following[order])
        for row, lane in enumerate(order):
            wanted = draft_alone(model, taps_of(model, ids[lane]), following[lane])
            assert_same(found, row, wanted)


def test_only_committed_rows_are_seen(models: dict[str, Loaded]) -> None:
    """Rounds of up to six rows, of which some are rejected; windows get the others' taps.

    The taps of rejected rows are written too in every second round: they lie past the last token
    and must neither be seen nor push anything out.
    """
    model = models["tiny"]
    most = max_rollback(model.model_config)
    ids = random_ids(model, LENGTH)
    taps = taps_of(model, ids)
    cache = Cache(model, [LENGTH + most])
    feed(cache, 0, ids[:11], 11)
    for number, right in enumerate([1, 2, 1, 6, 3, 1, 1, 5, 4, 2, 1, 6, 1]):
        done = cache.lanes[0].done
        wrong = random_ids(model, most - right, 1000 + done)
        (outputs,) = cache.step([(0, torch.cat([ids[done : done + right], wrong]))])
        assert outputs.taps is not None
        cache.observe(0, done, outputs.taps if number % 2 else outputs.taps[:right])
        cache.rewind(0, done + right)
        wanted = draft_alone(model, taps[: done + right], ids[done + right])
        assert_same(cache.draft([0], ids[done + right].unsqueeze(0)), 0, wanted)


def test_a_draft_changes_nothing_in_the_cache(models: dict[str, Loaded]) -> None:
    model = models["tiny"]
    ids = random_ids(model, 30)
    cache = Cache(model, [30])
    feed(cache, 0, ids, 30)
    before = cache.pool.draft_window.clone()
    first = cache.draft([0], ids[:1])
    assert torch.equal(before, cache.pool.draft_window)
    assert torch.equal(first.logits, cache.draft([0], ids[:1]).logits)


def test_every_slot_sees_every_slot(models: dict[str, Loaded]) -> None:
    """Not causal inside the block: other noise in the later slots moves the first one too."""
    model = models["tiny"]
    taps = taps_of(model, random_ids(model, 20))
    before = draft_alone(model, taps, torch.tensor(40)).base_logits[0]
    noise = model.model.mtp.noise_token
    try:
        model.model.mtp.noise_token = 41
        after = draft_alone(model, taps, torch.tensor(40)).base_logits[0]
    finally:
        model.model.mtp.noise_token = noise
    assert ((before - after).abs().amax(-1) > 1e-4).all()


def test_the_markov_bias_follows_the_chosen_token(models: dict[str, Loaded]) -> None:
    """logits[i] = base[i] + head e(t_i), and the confidence reads the state before the norm."""
    model = models["tiny"]
    m = model.model
    found = draft_alone(model, taps_of(model, random_ids(model, 20)), torch.tensor(40))
    last = m.mtp.stage(-1)
    previous = [40, *found.token_ids[0].tolist()[:-1]]
    bias = last.markov_head.head.weight @ last.markov_head.embed.weight[previous].T
    assert (found.base_logits[0] + bias.T - found.logits[0]).abs().max() < EXACT
    assert found.token_ids[0].tolist() == found.logits[0].argmax(-1).tolist()
    assert ((found.confidence > 0) & (found.confidence < 1)).all()


@pytest.mark.parametrize(
    "change",
    [{"sliding_window": 15}, {"sliding_window": 17}, {"dspark_target_layer_ids": (5, 6, 7)}],
)
def test_windows_and_taps_act(
    models: dict[str, Loaded], monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    model = models["tiny"]
    ids = random_ids(model, LENGTH)
    taps = taps_of(model, ids)
    before = draft_alone(model, taps, ids[0])
    monkeypatch.setattr(model.model, "config", dataclasses.replace(model.model_config, **change))
    if "dspark_target_layer_ids" in change:
        taps = taps_of(model, ids)
    after = draft_alone(model, taps, ids[0])
    assert (before.base_logits - after.base_logits).abs().max() > 1e-5


@pytest.mark.parametrize("keys", ["kept", "removed"])
def test_a_checkpoint_without_a_drafter(tmp_path: Path, keys: str) -> None:
    """No draft blocks, with and without the drafter's keys in config.json; several requests."""
    config = tiny_config(num_nextn_predict_layers=0, compress_ratios=[0, 0, 2, 2, 2, 1, 1, 1, 1])
    if keys == "removed":
        for key in [key for key in config["text_config"] if key.startswith("dspark")]:
            del config["text_config"][key]
    write_random_checkpoint(tmp_path, config, seed=3)
    llm = LLM(tmp_path, dtype="float64", threads=1, max_num_batched_tokens=32, max_num_seqs=2)
    assert len(llm.model.mtp) == 0
    assert max_rollback(llm.model_config) == 1
    prompts = [list(range(20, 60)), [5, 6, 7]]
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    replies = llm.generate(prompts, params)
    model = loaded(tmp_path)
    for prompt, reply in zip(prompts, replies, strict=True):
        generated = reply.outputs[0].token_ids
        outputs = recomputed(model, torch.tensor(prompt + generated))
        assert outputs.logits.argmax(-1)[len(prompt) - 1 : -1].tolist() == generated

"""A hit restores, bit for bit, the state that a cold run has at the same place.

Where chunks are the same, everything that the next row may read is: window rings, open groups, the
n-gram history and the pages below. And what a failed forward has half overwritten is not believed.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import deepinfer.engine.runner as runner_module
from deepinfer import LLM, SamplingParams
from deepinfer.engine.engine import Engine
from deepinfer.engine.rows import ForwardRows
from tests.cpu.engine_helpers import (
    GREEDY,
    Asked,
    Play,
    Witness,
    assert_idle,
    ids_of,
    played,
    poison,
    small_llm,
)
from tests.cpu.model_helpers import loaded, random_ids

PAGE = 16
DEMO = Path(__file__).parents[2] / "models" / "demo"


def readable_state(engine: Engine, row: ForwardRows) -> dict[str, Tensor]:
    """Copies of all that rows from `row.start` on may read."""
    pool, slot, border = engine.runner.pool, row.blocks.slot, row.start
    g = pool.geometry
    window = g.ring_tokens - g.rollback_tokens
    recent = torch.arange(max(0, border - window + 1), border) % g.ring_tokens
    history = torch.arange(max(0, border - g.history_tokens + g.rollback_tokens), border)
    found = {"window": pool.window[:, slot, recent],
             "history": pool.history[slot, history % g.history_tokens]}  # fmt: skip
    for layer, group in pool.groups.items():
        ratio = g.group_tokens - g.rollback_tokens
        open_ones = torch.arange(border // ratio * ratio, border)
        found[f"group {layer}"] = group[slot, open_ones % g.group_tokens]
    pages = torch.tensor(row.blocks.pages[: border // g.page_tokens], dtype=torch.int64)
    for name in ("compressed", "index_codes", "index_scales"):
        for layer, table in getattr(pool, name).items():
            found[f"{name} {layer}"] = table[pages]
    return {name: part.clone() for name, part in found.items()}


def states(llm: LLM, patch: pytest.MonkeyPatch) -> dict[int, dict[str, Tensor]]:
    """By position: what each forward finds when it begins there, the latest one's."""
    found: dict[int, dict[str, Tensor]] = {}
    forward = llm.engine.runner.forward

    def watch(rows: list[ForwardRows]) -> Any:
        found.update((row.start, readable_state(llm.engine, row)) for row in rows)
        return forward(rows)

    patch.setattr(llm.engine.runner, "forward", watch)
    return found


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_a_hit_restores_the_state_of_a_cold_run(
    small_folder: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """From checkpoints that were made at a border, or up to a page past it."""
    llm = small_llm(small_folder, dtype=dtype, cache_tokens=640)
    prompt = random_ids(loaded(small_folder), 70).tolist()
    one = SamplingParams(max_tokens=1, **GREEDY)
    found = states(llm, monkeypatch)
    poison(llm)
    llm.generate(prompt, one)
    cold = dict(found)
    assert set(cold) == set(range(0, 70, PAGE))
    for past in (0, 1, 2, 7, 15):
        poison(llm)
        llm.generate(prompt[: 48 + past], one)
        found.clear()
        (hit,) = llm.generate(prompt, one)
        assert hit.usage.cached_tokens == 48
        assert set(found) == {48, 64}
        for border, state in found.items():
            for name, part in state.items():
                assert torch.equal(part, cold[border][name]), (past, border, name)
    assert_idle(llm)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_demo_model_answers_the_same_after_a_hit(
    monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """In the precision it is served in: the same logits bit for bit, as the chunks are the same."""
    llm = LLM(DEMO, dtype=dtype, threads=1, max_num_batched_tokens=64, max_num_seqs=4,
              cache_tokens=1024, max_model_len=512)  # fmt: skip
    seen: list[Tensor] = []
    logits = llm.model.logits
    monkeypatch.setattr(llm.model, "logits", lambda x: seen.append(logits(x)) or seen[-1])
    prompt = llm.encode("Once upon a time, there was a fox who lived in a wood. " * 12)[:150]
    params = SamplingParams(max_tokens=6, seed=1, logprobs=2)
    poison(llm)
    for length in (150, 129, 128):
        llm.reset_prefix_cache()
        replies = []
        for cached in (0, (length - 1) // 64 * 64):
            seen.clear()
            (output,) = Play(llm).run([Asked(prompt[:length], params)])
            assert output.usage.cached_tokens == cached
            replies.append((output.outputs[0].token_ids, output.outputs[0].logprobs, list(seen)))
        (cold, reports, raw), (hit, same, taken_over) = replies
        assert (hit, same) == (cold, reports)
        assert all(torch.equal(*pair) for pair in zip(raw[-6:], taken_over[-6:], strict=True))


def fails_late(patch: pytest.MonkeyPatch, wrong: Callable[[], bool]) -> None:
    """Forwards of several sequences raise when everything is written, where `wrong` says so."""
    run = runner_module.run

    def failing(model: Any, pool: Any, layout: Any, *args: Any, **kwargs: Any) -> Any:
        output = run(model, pool, layout, *args, **kwargs)
        if len(layout.rows) > 1 and wrong():
            raise RuntimeError("out of memory")
        return output

    patch.setattr(runner_module, "run", failing)


@pytest.mark.parametrize("always", [False, True])
def test_what_a_failed_forward_has_overwritten_is_computed_again(
    small_folder: Path, monkeypatch: pytest.MonkeyPatch, always: bool
) -> None:
    """A chunk longer than the slack of the rings cannot just be run once more."""
    model = loaded(small_folder)
    llm = small_llm(small_folder, max_num_batched_tokens=48, cache_tokens=480)
    poison(llm)
    asked = [
        Asked([5, 6], SamplingParams(max_tokens=12, **GREEDY)),
        Asked(random_ids(model, 130).tolist(), SamplingParams(max_tokens=3, **GREEDY), at=1),
    ]
    witness = Witness(llm, monkeypatch)
    forwards = iter(range(100))
    fails_late(monkeypatch, lambda: always or next(forwards) == 1)
    outputs = Play(llm).run(asked)
    assert witness.check(model)
    assert [output.outputs[0].error for output in outputs] == [None, None]
    counts = [count for forward in witness.forwards for start, count in forward if start]
    assert max(counts) == PAGE
    alone = [played(llm, [replace(one, at=0)])[0].outputs[0].token_ids for one in asked]
    assert alone == ids_of(outputs)

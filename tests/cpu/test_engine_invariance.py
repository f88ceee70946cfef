"""batch_invariant: logits and reports are the same bit for bit, in the precision of the product.

Compared with a run alone in one chunk that keeps nothing: neighbours, chunks of any length, hits,
forks, preemption, and both loops.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer import LLM, SamplingParams
from deepinfer.engine.rows import ForwardRows
from tests.cpu.engine_helpers import Asked, Play, Reply, poison, reply, small_llm
from tests.cpu.model_helpers import loaded, random_ids

DEMO = Path(__file__).parents[2] / "models" / "demo"

# By the tokens up to the row.
Rows = dict[tuple[int, ...], Tensor]


def run(llm: LLM, asked: list[Asked], patch: pytest.MonkeyPatch) -> tuple[list[Reply], Rows]:
    """Replies, and the logits of every row that got any; a row that comes again is the same."""
    seen: list[tuple[Any, int, Tensor]] = []
    forward = llm.engine.runner.forward

    def watch(rows: list[ForwardRows]) -> Any:
        logits, places = forward(rows)
        owner = {s.blocks.slot: s for s in llm.engine.scheduler.running if s.blocks}
        for row, place in zip(rows, places, strict=True):
            first = row.start + row.count - row.wanted
            for position, raw in enumerate(logits[place].clone(), first):
                seen.append((owner[row.blocks.slot], position, raw))
        return logits, places

    with patch.context() as context:
        context.setattr(llm.engine.runner, "forward", watch)
        replies = [reply(output) for output in Play(llm).run(asked)]
    found: Rows = {}
    for sequence, position, raw in seen:
        key = tuple(sequence.tokens[: position + 1])
        assert torch.equal(found.setdefault(key, raw), raw), position
    return replies, found


def check(alone: LLM, llm: LLM, asked: list[Asked], patch: pytest.MonkeyPatch) -> None:
    cold: Rows = {}
    expected = []
    for one in asked:
        poison(alone)
        (answer,), rows = run(alone, [replace(one, at=0)], patch)
        expected.append(answer)
        cold.update(rows)
    poison(llm)
    replies, rows = run(llm, asked, patch)
    assert replies == expected
    assert len(rows) >= len(asked)
    for key, raw in rows.items():
        assert torch.equal(raw, cold[key]), len(key)


@pytest.mark.parametrize(
    ("dtype", "size"),
    [("bfloat16", {"overlap": True, "cache_tokens": 48, "max_num_batched_tokens": 7}),
     ("float32", {"max_num_seqs": 5, "cache_tokens": 320})],
)  # fmt: skip
def test_bit_for_bit(
    small_folder: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, size: dict[str, Any]
) -> None:
    model = loaded(small_folder)
    ids = random_ids(model, 40).tolist()
    tokens: dict[str, Any] = {"max_tokens": 5, "ignore_eos": True, "logprobs": 2}
    asked = [
        Asked([5], SamplingParams(seed=1, **tokens)),
        Asked(ids[:21], SamplingParams(seed=2, presence_penalty=0.5, **tokens)),
        Asked(ids[:13], SamplingParams(seed=3, n=2, **tokens), at=1),
        Asked([*ids[:18], 9], SamplingParams(seed=4, **tokens), at=5),
        Asked(ids[:7], SamplingParams(seed=5, prompt_logprobs=1, **tokens), at=5),
    ]
    settings: dict[str, Any] = {"dtype": dtype, "batch_invariant": True, "max_model_len": 48}
    alone = small_llm(small_folder, prefix_checkpoints=0, max_num_batched_tokens=64,
                      cache_tokens=48, **settings)  # fmt: skip
    llm = small_llm(small_folder, **settings, **size)
    check(alone, llm, asked, monkeypatch)
    counters = llm.engine.scheduler.counters
    assert llm.engine.manager.tree.counters.hits
    assert counters.forked if dtype == "float32" else counters.preempted


def test_the_demo_model(monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"threads": 1, "batch_invariant": True, "max_model_len": 256}
    alone = LLM(DEMO, prefix_checkpoints=0, **settings)
    asked = [
        Asked(alone.encode(text), SamplingParams(max_tokens=3, seed=1, logprobs=1))
        for text in ("Once upon a time", "One day, a fox saw a bird", "What is 2 + 3?")
    ]
    llm = LLM(DEMO, max_num_batched_tokens=8, max_num_seqs=3, **settings)
    check(alone, llm, asked, monkeypatch)


def test_with_a_truncated_prefill(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that stop half-way get no logits, one by one as in a chunk."""
    ids = random_ids(loaded(tiny_folder), 30).tolist()
    replies = []
    for invariant in (False, True):
        llm = small_llm(tiny_folder, batch_invariant=invariant, yoco_prefill="compact",
                        yoco_keep_tokens=25)  # fmt: skip
        poison(llm)
        replies.append(run(llm, [Asked(ids, SamplingParams(max_tokens=2, seed=1))], monkeypatch))
    (plain, rows), (same, ones) = replies
    assert plain == same
    assert rows.keys() == ones.keys()
    for key, raw in rows.items():
        assert torch.allclose(raw, ones[key], rtol=0, atol=1e-6)

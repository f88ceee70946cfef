"""The whole engine on a GPU: graphs, the overlapped loop, prefix hits, preemption change nothing.

With batch_invariant rows do not depend on each other, so log-probabilities are compared bit for
bit. The guard against waiting for the device is on throughout.
"""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer import LLM, SamplingParams
from deepinfer.engine.output import RequestOutput
from deepinfer.engine.rows import ForwardRows
from deepinfer.kv.audit import audit

DEMO = Path(__file__).parents[2] / "models" / "demo"
STORY = "Once upon a time there was a fox who lived at the edge of a wood. "
PROMPTS = ["What is 2 + 3?", STORY * 3, "Hello", STORY * 30, "The capital of France is", "A", "B"]
PARAMS = [
    SamplingParams(max_tokens=24, temperature=0.0, logprobs=3, ignore_eos=True),
    SamplingParams(max_tokens=30, temperature=0.8, seed=1, top_p=0.9, logprobs=1),
    SamplingParams(max_tokens=17, temperature=1.0, seed=2, top_k=40, n=3, logprobs=0),
    SamplingParams(max_tokens=40, temperature=0.7, seed=3, repetition_penalty=1.3, logprobs=2,
                   presence_penalty=0.5, frequency_penalty=0.2),
    SamplingParams(max_tokens=12, temperature=0.9, seed=4, min_tokens=5, logit_bias={50: 4.0},
                   banned_token_ids=(60, 61), prompt_logprobs=2),
    SamplingParams(max_tokens=20, temperature=1.0, seed=5, stop=["e", "zz"]),
    SamplingParams(max_tokens=20, temperature=1.0, seed=6, allowed_token_ids=tuple(range(40, 400))),
]  # fmt: skip


def demo(**settings: Any) -> LLM:
    given: dict[str, Any] = {
        "max_num_seqs": 8, "max_model_len": 640, "max_num_batched_tokens": 64,
        "cache_tokens": 8192, "batch_invariant": True,
    }  # fmt: skip
    return LLM(DEMO, device="cuda", **given | settings)


def essence(replies: list[RequestOutput]) -> list[Any]:
    """Everything of the replies but their ids and what was cached."""
    return [(r.outputs, r.prompt_logprobs) for r in replies]


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    """Every request alone, eagerly, in the plain loop, without a prefix cache."""
    llm = demo(enforce_eager=True, overlap=False, prefix_checkpoints=0)
    pairs = zip(PROMPTS, PARAMS, strict=True)
    return [essence(llm.generate(prompt, params))[0] for prompt, params in pairs]


SETTINGS: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True, "overlap": False},
    "eager overlapped": {"enforce_eager": True},
    "graphs": {"overlap": False},
    "graphs overlapped": {},
    "scarce pages": {"cache_tokens": 640, "prefix_checkpoints": 2},
    "one chunk": {"max_num_batched_tokens": 1024},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=list(SETTINGS))
def test_together_equals_alone(settings: dict[str, Any], expected: list[Any]) -> None:
    """Twice, so that the second time prompts come from the prefix cache."""
    llm = demo(**settings)
    assert llm.config.sync_guard
    for _ in range(2):
        assert essence(llm.generate(PROMPTS, PARAMS)) == expected
        audit(llm.engine.manager, [])
    found = llm.metrics.prefix
    assert found["pages_evicted"] > 0 if "cache_tokens" in settings else found["hits"] > 0


def test_a_graph_gives_the_bits_of_an_eager_step() -> None:
    """For every number of rows up to the ladder's end, padding or not, tokens of either origin.

    Every step starts from sequences of its own, as it may overwrite what a repetition would read:
    65 rows leave nothing of the window of 64 before them.
    """
    llm = demo(max_num_batched_tokens=256)
    runner, manager = llm.engine.runner, llm.engine.manager
    prompts = [llm.encode(STORY * (number + 1)) for number in range(8)]
    graphs = runner.graphs
    assert graphs is not None

    def logits(shape: list[int], known: bool, captured: bool) -> torch.Tensor:
        """Of a step of so many rows of each sequence, whose tokens are known here or sampled."""
        runner.graphs = None
        lanes = []
        for ids in prompts[: len(shape)]:
            blocks = manager.open(ids, reuse=False).blocks
            manager.reserve(blocks, len(ids) + 100)
            runner.forward([ForwardRows(blocks, ids, 0)])
            lanes.append((blocks, len(ids)))
        sampled = torch.arange(50, 50 + len(lanes), device="cuda")
        runner.keep_sampled([blocks.slot for blocks, _ in lanes], sampled)
        runner.graphs = graphs if captured else None
        rows = [
            ForwardRows(blocks, list(range(50 + lane, 50 + lane + count)) if known else [], length)
            for lane, (count, (blocks, length)) in enumerate(zip(shape, lanes, strict=True))
        ]
        found = runner.forward(rows)[0].clone()
        for blocks, _ in lanes:
            manager.free(blocks)
        return found

    chunks = [[40], [3, 1, 5], [65, 1], [70, 1, 2], [1, 100]]
    for shape in [[1] * count for count in range(1, 9)] + chunks:
        assert graphs.rung(shape, 640) is not None
        for known in (True, False) if max(shape) == 1 else (True,):
            replayed, eager = (logits(shape, known, captured) for captured in (True, False))
            assert torch.equal(replayed, eager), (shape, known)


def test_a_prefix_hit_is_fast_and_equal() -> None:
    llm = demo(max_num_batched_tokens=256)
    params = SamplingParams(max_tokens=8, temperature=0.0, logprobs=5, ignore_eos=True)
    prompt = llm.encode(STORY * 30)
    cold = llm.generate(prompt, params)
    hit = llm.generate(prompt, params)
    assert hit[0].usage.cached_tokens >= len(prompt) - 65
    assert essence(hit) == essence(cold)


def test_the_plan_is_kept() -> None:
    """The cache takes what was planned, and not more than the GPU allows."""
    gc.collect()  # engines of the tests before hold memory until then
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    llm = LLM(DEMO, device="cuda", max_num_seqs=4, max_model_len=4096, enforce_eager=True)
    geometry = llm.engine.runner.geometry
    cache = llm.engine.runner.pages * geometry.bytes_per_page
    cache += llm.config.state_slots * geometry.bytes_per_slot
    assert llm.config.cache_tokens == 2 * 4 * 4096
    assert 0 <= torch.cuda.memory_allocated() - before - cache < 200e6

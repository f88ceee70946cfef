"""Generation without an engine, and what must hold of an engine that has nothing to do."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepinfer import LLM, SamplingParams
from deepinfer.engine.engine import Engine
from deepinfer.engine.loading import Loaded
from deepinfer.engine.output import RequestOutput
from deepinfer.kv.audit import audit
from deepinfer.sampling.sampler import sample
from tests.cpu.model_helpers import recomputed

GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


def small_llm(folder: Path, **settings: Any) -> LLM:
    """An engine in which everything is scarce: 3 sequences, 16 tokens a step, 160 in the cache."""
    scarce: dict[str, Any] = {
        "dtype": "float64", "threads": 1, "max_num_seqs": 3, "max_num_batched_tokens": 16,
        "max_model_len": 160, "cache_tokens": 160, "page_tokens": 16,
    }  # fmt: skip
    return LLM(folder, **{**scarce, **settings})


def logits_after(model: Loaded, ids: list[int]) -> Tensor:
    """Recomputed logits [T, V] float32 of every token."""
    return recomputed(model, torch.tensor(ids)).logits.float()


def slow_ids(model: Loaded, prompt: list[int], params: SamplingParams) -> list[int]:
    """max_tokens tokens after `prompt`, the whole sequence recomputed for each of them."""
    assert params.seed is not None or params.temperature == 0
    ids = list(prompt)
    for _ in range(params.budget):
        last = logits_after(model, ids)[-1:]
        ids.append(sample(last, [params], [params.seed or 0], [len(ids)]).item())
    return ids[len(prompt) :]


def ids_of(replies: list[RequestOutput]) -> list[list[int]]:
    """Generated ids of each reply."""
    return [reply.outputs[0].token_ids for reply in replies]


def poison(llm: LLM) -> None:
    """Fill the cache of an idle engine with NaN."""
    llm.reset_prefix_cache()
    llm.engine.runner.pool.poison()


def assert_idle(llm: LLM) -> None:
    """Nothing runs or waits, the books add up without any sequence, no chunk lies about."""
    engine = llm.engine
    assert not engine.has_work
    assert not llm._inbox
    assert not engine._completions
    assert not engine._open
    audit(engine.manager, [])


def audit_running(engine: Engine) -> None:
    """The books of an engine add up between two steps."""
    live = [(s.blocks, s.computed) for s in engine.scheduler.running if s.blocks is not None]
    audit(engine.manager, live)

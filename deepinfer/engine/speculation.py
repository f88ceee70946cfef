"""Speculative decoding of one prompt on an engine that does nothing else meanwhile.

Knows where the engine keeps model and cache; must not know how drafts are made and verified.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch

from deepinfer.engine.engine import Engine
from deepinfer.speculative.greedy import GreedySpeculation, Round


@torch.inference_mode()
def rounds(engine: Engine, prompt_ids: list[int], max_tokens: int) -> Iterator[Round]:
    """Greedy rounds after a checked prompt; the last is cut at `max_tokens` or after the end token.

    Leaving the iterator gives the pages back.
    """
    runner, manager = engine.runner, engine.manager
    config = runner.model.config
    blocks = manager.open(prompt_ids, reuse=False).blocks
    try:
        slack = config.dspark_block_size + 1
        manager.reserve(blocks, len(prompt_ids) + max_tokens + slack)
        one = GreedySpeculation(runner.model, runner.pool, blocks, runner.token_map,
                                runner.config.max_num_batched_tokens)  # fmt: skip
        token = one.prefill(prompt_ids)
        eos, left = config.eos_token_id, max_tokens
        yield Round([token], 0, 0, [])
        left -= 1
        for turn in one.rounds(token) if token != eos and left else ():
            ids = turn.token_ids[:left]
            if eos in ids:
                ids = ids[: ids.index(eos) + 1]
            yield replace(turn, token_ids=ids, accepted=min(turn.accepted, len(ids)))
            left -= len(ids)
            if not left or ids[-1] == eos:
                return
    finally:
        manager.free(blocks)

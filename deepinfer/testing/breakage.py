"""Named breakages: one part of a loaded model made wrong, the way engines get it wrong.

Knows which product function each part runs through; must not know how the damage is measured.

`BREAKAGES` is the table. Each of its functions takes a loaded `LLM` and returns a context manager;
inside it the cached path, the one that generates, computes something else, and afterwards nothing
is left of that: functions and parameters are exchanged, never written to. Most are exchanged for
the whole process, so another model that runs meanwhile is broken too. What a broken model computes
depends on the requests of its context alone, not on what ran before.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from deepinfer.engine.llm import LLM
from deepinfer.model.attention import Attention
from deepinfer.model.block import Block
from deepinfer.model.cached import CachedState
from deepinfer.model.dspark import MarkovHead
from deepinfer.model.engram import Engram
from deepinfer.model.hyper_connection import HyperConnection, SublayerInput
from deepinfer.model.linear import Precision
from deepinfer.model.moe import MixtureOfExperts, Router
from deepinfer.model.rope import RotaryTables
from deepinfer.model.step import StepLayout
from deepinfer.ops.select import Operator

Patch = AbstractContextManager[Any]
LATE_KEYS = 128
Breakage = Callable[[LLM], Patch]


@contextmanager
def _parameters(changes: list[tuple[nn.Parameter, Tensor]]) -> Iterator[None]:
    """Let parameters hold other tensors for a while; their own memory is not written to."""
    kept = [(parameter, parameter.data) for parameter, _ in changes]
    try:
        for parameter, values in changes:
            parameter.data = values
        yield
    finally:
        for parameter, data in kept:
            parameter.data = data


def _operator(llm: LLM, name: str, function: Callable[..., Any]) -> Patch:
    """Let an operator of the model compute something else."""
    chosen = llm.model.precision.operators._chosen
    spec = chosen[name].spec
    return patch.dict(chosen, {name: Operator(spec, "broken", function, "breakage", strict=False)})


def window_one_short(llm: LLM) -> Patch:
    """The oldest key of a full window is not seen.

    Imitates `<` for `<=` in a window mask, or counting the token itself twice.
    """

    def length(layout: StepLayout) -> int:
        window = layout.geometry.ring_tokens - layout.geometry.rollback_tokens - 1
        return min(window, int(layout.host_positions.max(initial=0)) + 1)

    return patch.object(StepLayout, "window_length", property(length))


def no_sinks(llm: LLM) -> Patch:
    """Attention without sinks: their logits are -inf, so that they take no part in any softmax.

    Imitates a stock attention kernel in place of one that knows sinks. (A logit of 0 would be
    another sink, not none.)
    """
    modules = [module for module in llm.model.modules() if isinstance(module, Attention)]
    return _parameters([(m.attn_sink, torch.full_like(m.attn_sink, -torch.inf)) for m in modules])


def one_rope_table(llm: LLM) -> Patch:
    """Layers with compressed entries rotate by the base table of the window layers.

    Imitates an engine with one rotary table per model and no YaRN in some of its layers.
    """
    original = RotaryTables.rotations

    def base(tables: RotaryTables, positions: Tensor, ratio: int, dtype: torch.dtype) -> Tensor:
        return original(tables, positions, 0, dtype)

    return patch.object(RotaryTables, "rotations", base)


def no_inverse_rope(llm: LLM) -> Patch:
    """Attention's output keeps the rotation of its keys, which serve as values too.

    Imitates attention of models whose values are not rotated.
    """

    rope = llm.model.precision.operators.rope

    def forward_only(x: Tensor, rotations: Tensor, inverse: bool = False) -> Tensor:
        return x if inverse else rope(x, rotations)

    return _operator(llm, "rope", forward_only)


def random_selection(llm: LLM) -> Patch:
    """Where not all entries are taken, those attended to are drawn at random from the visible.

    Imitates a top-k kernel that reads the wrong row or returns unordered scratch memory.
    """
    generator = torch.Generator().manual_seed(0)
    topk_select = llm.model.precision.operators.topk_select

    def select(scores: Tensor, k: int) -> Tensor:
        drawn = torch.rand(scores.shape, generator=generator).to(scores.device)
        return topk_select(drawn.masked_fill(scores == -torch.inf, -torch.inf), k)

    return _operator(llm, "topk_select", select)


def late_index_keys(llm: LLM) -> Patch:
    """The last LATE_KEYS index keys that a step writes are zeros for good.

    Imitates stale index keys: the end of a step's writes is lost, on a cleared page.
    """
    store = llm.model.precision.operators.store_index_key

    def clear_newest(
        keys: Tensor, weight: Tensor, eps: float, rotations: Tensor, codes: Tensor,
        scales: Tensor, places: Tensor,
    ) -> None:  # fmt: skip
        store(keys, weight, eps, rotations, codes, scales, places)
        late = places[-LATE_KEYS:]
        codes[late] = 0
        scales[late] = 127

    return _operator(llm, "store_index_key", clear_newest)


def wrong_candidates(llm: LLM) -> Patch:
    """The coarse level keeps the blocks with the lowest scores, and the newest one.

    Imitates a sort in the wrong direction.
    """

    candidate_blocks = llm.model.precision.operators.candidate_block_list

    def candidates(scores: Tensor, visible: Tensor, block_size: int, blocks: int) -> Tensor:
        flipped = torch.where(scores == -torch.inf, scores, -scores)
        return candidate_blocks(flipped, visible, block_size, blocks)

    return _operator(llm, "candidate_block_list", candidates)


def entries_one_off(llm: LLM) -> Patch:
    """Attention reads the compressed entry before each selected one.

    Imitates group numbers that are counted from one in one kernel and from zero in another.
    """
    original = CachedState.select

    def select(state: CachedState, layer: int, queries: Tensor, weights: Tensor) -> None:
        original(state, layer, queries, weights)
        assert state._selection is not None
        entries = state._selection
        state._selection = torch.where(entries > 0, entries - 1, entries)

    return patch.object(CachedState, "select", select)


def history_one_off(llm: LLM) -> Patch:
    """N-grams leave out the token before the current one: older tokens move up by one.

    Imitates a history whose cursor is behind by one, so that its newest token is not in it yet.
    """
    original = CachedState.ngram_classes

    def classes(state: CachedState) -> Tensor:
        right = original(state)  # [T, G], newest first
        return torch.cat([right[:, :1], right[:, 2:], right[:, -1:]], dim=-1)

    return patch.object(CachedState, "ngram_classes", classes)


def no_engram(llm: LLM) -> Patch:
    """N-gram memory adds nothing to the streams.

    Imitates an engine that has no such module or whose look-up has not arrived in time.
    """
    return patch.object(Engram, "forward", lambda engram, streams, state: streams)


def permuted_experts(llm: LLM) -> Patch:
    """Every routed row goes to the expert after the one that it was routed to.

    Imitates a wrong map from experts to ranks, or offsets of sorted rows that are off by one.
    """
    original = MixtureOfExperts.route

    def route(moe: MixtureOfExperts, x: Tensor) -> tuple[Tensor, Tensor]:
        ids, weights = original(moe, x)
        return (ids + 1) % moe.experts.w2.shape[0], weights

    return patch.object(MixtureOfExperts, "route", route)


def no_router_bias(llm: LLM) -> Patch:
    """Experts are chosen by their scores alone.

    Imitates a router without the selection bias, or one whose bias was never loaded.
    """
    routers = [module for module in llm.model.modules() if isinstance(module, Router)]
    return _parameters([(router.bias, torch.zeros_like(router.bias)) for router in routers])


def identity_comb(llm: LLM) -> Patch:
    """Residual streams are carried on without being mixed with each other.

    Imitates Sinkhorn iterations that never ran, or plain residual connections.
    """
    original = HyperConnection._step

    def step(module: HyperConnection, *arguments: Any) -> SublayerInput:
        entering = original(module, *arguments)
        comb = entering.comb
        identity = torch.eye(comb.shape[-1], dtype=comb.dtype, device=comb.device)
        return entering._replace(comb=identity.expand_as(comb))

    return patch.object(HyperConnection, "_step", step)


def unshifted_pre(llm: LLM) -> Patch:
    """Attention's input is collapsed with coefficients of its own streams, not with carried ones.

    Imitates hyper-connections as published, without the shift by one sublayer.
    """
    original = Block.prepare

    def prepare(block: Block, streams: Tensor, pre: Tensor) -> SublayerInput:
        return original(block, streams, original(block, streams, pre).pre)

    return patch.object(Block, "prepare", prepare)


def no_act_quant(llm: LLM) -> Patch:
    """Activations enter FP8 and FP4 matrices unrounded; cache records keep their formats.

    Imitates running the weights with bfloat16 activations, which the model was not trained for.
    """
    return patch.object(Precision, "activation", lambda precision, x: x)


def no_markov_bias(llm: LLM) -> Patch:
    """The drafter's logits get no bias by the draft before.

    Imitates drafting all slots of a block in parallel. Nothing but drafts may change.
    """
    original = MarkovHead.forward

    def forward(head: MarkovHead, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        embedded, bias = original(head, token_ids)
        return embedded, torch.zeros_like(bias)

    return patch.object(MarkovHead, "forward", forward)


def other_chunks(llm: LLM) -> Patch:
    """Not a breakage: steps of 3/8 of the tokens, so that sums are taken in another order.

    What this moves is rounding; a breakage has to move more.
    """
    scheduler = llm.engine.scheduler
    limits = scheduler.limits
    tokens = max(limits.max_num_seqs, limits.max_num_batched_tokens * 3 // 8)
    return patch.object(scheduler, "limits", replace(limits, max_num_batched_tokens=tokens))


BREAKAGES: dict[str, Breakage] = {
    function.__name__: function
    for function in (
        window_one_short, no_sinks, one_rope_table, no_inverse_rope, random_selection,
        late_index_keys, wrong_candidates, entries_one_off, history_one_off, no_engram,
        permuted_experts, no_router_bias, identity_comb, unshifted_pre, no_act_quant,
        no_markov_bias,
    )
}  # fmt: skip

# These may change drafts only; the text stays what it is.
DRAFTS_ONLY = frozenset({"no_markov_bias"})

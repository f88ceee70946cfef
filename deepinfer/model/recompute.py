"""Running whole sequences without any state: the specification of the model, in dense masks.

Knows all tokens at once; must not know caches. Batched over sequences of one length, and
differentiable: the tool that trains the demo checkpoint runs this path.
"""

import torch
from torch import Tensor

from deepinfer.model.dspark import Draft
from deepinfer.model.norm import RMSNorm
from deepinfer.model.transformer import Hidden, Transformer
from deepinfer.ops.candidate_blocks import candidate_blocks
from deepinfer.ops.compress import pool_groups
from deepinfer.ops.index_scores import index_scores
from deepinfer.ops.kv_records import round_compressed, round_index, round_window
from deepinfer.ops.rope import rope
from deepinfer.ops.sparse_attention import attention_with_sink
from deepinfer.ops.topk_select import topk_select


class RecomputeState:
    """State of B whole sequences of T tokens; rows have the shape [B, T] (model description 3.15).

    Args:
        token_ids: [B, T] int64.
        token_map: [V] int64, class of every token id; only used by n-gram layers.
    """

    def __init__(self, model: Transformer, token_ids: Tensor, token_map: Tensor | None) -> None:
        self.config = model.config
        self.dtype = model.precision.dtype
        self.token_ids = token_ids
        self.token_map = token_map
        self.rotary = model.rotary
        self.positions = torch.arange(token_ids.shape[-1], device=token_ids.device)
        self.entries: dict[int, Tensor] = {}
        self.index_keys: dict[int, Tensor] = {}
        self.candidates: Tensor | None = None
        self.selected: dict[int, Tensor] = {}
        back = self.positions.unsqueeze(-1) - self.positions
        self.window = (back >= 0) & (back < self.config.sliding_window)

    def rotations(self, ratio: int) -> Tensor:
        """Rotations [T, d/2] of all positions."""
        return self.rotary.rotations(self.positions, ratio, self.dtype)

    def ngram_classes(self) -> Tensor:
        """[B, T, G]; positions before the sequence take the class of the padding token."""
        assert self.token_map is not None
        classes = self.token_map[self.token_ids]
        pad = self.token_map[self.config.engram_pad_token_id]
        depth = self.config.engram_max_ngram_size
        length = classes.shape[-1]
        padded = torch.cat([pad.expand(*classes.shape[:-1], depth - 1), classes], dim=-1)
        return torch.stack(
            [padded[..., depth - 1 - back : depth - 1 - back + length] for back in range(depth)], -1
        )

    def pool(self, layer: int, values: Tensor, gates: Tensor, norm: RMSNorm) -> Tensor:
        """[B, T, D] to latents [B, T // r, D]; a last incomplete group is left out."""
        ratio = self.config.compress_ratio(layer)
        whole = values.shape[-2] // ratio * ratio
        grouped = [part[..., :whole, :].unflatten(-2, (-1, ratio)) for part in (values, gates)]
        return norm(pool_groups(*grouped).to(self.dtype))

    def entry_rotations(self, layer: int) -> Tensor:
        """Rotations [T // r, d/2] at the first token of each group."""
        ratio = self.config.compress_ratio(layer)
        first = self.positions[: len(self.positions) // ratio * ratio : ratio]
        return self.rotary.rotations(first, ratio, self.dtype)

    def store_entries(self, layer: int, latents: Tensor, keys: Tensor, norm: RMSNorm) -> None:
        """Keep the rounded values."""
        rotations = self.entry_rotations(layer)
        self.entries[layer] = round_compressed(rope(latents, rotations))
        self.index_keys[layer] = round_index(rope(norm(keys), rotations))

    def truncate(self, layer: int) -> None:
        """All rows go on through all layers."""
        return

    def visible(self, layer: int) -> Tensor:
        """Entries that each position may see [T]: complete groups only."""
        return (self.positions + 1) // self.config.compress_ratio(layer)

    def scores(self, layer: int, queries: Tensor, weights: Tensor) -> Tensor:
        """Index scores [B, T, n], -inf where an entry is not visible."""
        keys = self.index_keys[self.config.kv_source(layer)]
        visible = self.visible(layer).unsqueeze(-1)
        numbers = torch.arange(keys.shape[-2], device=keys.device)
        scores = index_scores(queries, weights, keys)
        return scores.masked_fill(numbers >= visible, float("-inf"))

    def select(self, layer: int, queries: Tensor, weights: Tensor) -> None:
        """Publish the selection of index source `layer` as a mask [B, T, n]."""
        c = self.config
        scores = self.scores(layer, queries, weights)
        if layer == c.candidate_source_layer_id:
            self.candidates = candidate_blocks(
                scores, self.visible(layer), c.candidate_block_size, c.candidate_topk_blocks
            )
        elif c.restricts_to_candidates(layer) and self.candidates is not None:
            scores = scores.masked_fill(~self.candidates, float("-inf"))
        chosen = topk_select(scores, c.index_topk)
        # Padding goes to one column more than there are entries, which is dropped.
        mask = torch.zeros(*scores.shape[:-1], scores.shape[-1] + 1, dtype=torch.bool,
                           device=scores.device)  # fmt: skip
        mask.scatter_(-1, torch.where(chosen < 0, scores.shape[-1], chosen), True)
        self.selected[layer] = mask[..., :-1]

    def window_keys(self, layer: int, kv: Tensor, norm: RMSNorm) -> Tensor:
        """Window keys [B, T, D] with the rounding of their record."""
        return round_window(rope(norm(kv), self.rotations(self.config.compress_ratio(layer))))

    def attend(
        self, layer: int, queries: Tensor, kv: Tensor, norm: RMSNorm, sink: Tensor
    ) -> Tensor:
        """Dense attention over the window and all entries, masked to the selected ones."""
        scale = self.config.head_dim**-0.5
        keys = self.window_keys(layer, kv, norm)
        valid = self.window.expand(*keys.shape[:-1], -1)
        if self.config.compress_ratio(layer):
            keys = torch.cat([keys, self.entries[self.config.kv_source(layer)]], dim=-2)
            selected = self.selected[self.config.index_source(layer)]
            valid = torch.cat([valid, selected], dim=-1)
        return attention_with_sink(queries, keys.unsqueeze(-3), valid, sink, scale)


class RecomputeDraftState:
    """Draft slots of one sequence after P processed tokens, all keys at hand; rows are [n].

    Args:
        context: window keys [P, D] of each stage, normalised and rotated, before rounding.
        positions: [n] of the slots.
    """

    def __init__(self, model: Transformer, context: list[Tensor], positions: Tensor) -> None:
        window = model.config.sliding_window
        self.context = [round_window(keys[-window:]) for keys in context]
        self.scale = model.config.head_dim**-0.5
        self._rotations = model.rotary.rotations(positions, 0, model.precision.dtype)

    def rotations(self, ratio: int) -> Tensor:
        """Rotations [n, d/2] of the slots, base table."""
        return self._rotations

    def attend(
        self, layer: int, queries: Tensor, kv: Tensor, norm: RMSNorm, sink: Tensor
    ) -> Tensor:
        """Attention over the context window and all slots of the block, earlier and later."""
        own = round_window(rope(norm(kv), self._rotations))
        keys = torch.cat([self.context[layer], own], dim=-2)
        valid = torch.ones(1, keys.shape[-2], dtype=torch.bool, device=keys.device)
        return attention_with_sink(queries, keys.unsqueeze(-3), valid, sink, self.scale)


def recompute(
    model: Transformer, token_ids: Tensor, token_map: Tensor | None, keep_streams: bool = False
) -> Hidden:
    """Forward of one whole sequence [T] or several of equal length [B, T], without state."""
    state = RecomputeState(model, token_ids, token_map)
    return model(token_ids, state, keep_streams)


def recompute_draft(model: Transformer, taps: Tensor, next_id: Tensor) -> Draft:
    """One greedy draft round after a sequence with taps [P, A * H]; `next_id` [] was sampled."""
    device = taps.device
    length = taps.shape[0]
    base = model.rotary.rotations(torch.arange(length, device=device), 0, model.precision.dtype)
    context = [rope(norm(keys), base) for keys, norm in model.mtp.context_keys(taps)]
    positions = torch.arange(length, length + model.mtp.block_size, device=device)
    state = RecomputeDraftState(model, context, positions)
    ids = model.mtp.draft_inputs(next_id.unsqueeze(0))
    streams, pre = model.initial_streams(ids[0])
    x = model.mtp.hidden(streams, pre, state)
    last = model.mtp.stage(-1)
    base_logits = model.head(last.norm(x))
    return model.mtp.decode(x.unsqueeze(0), base_logits.unsqueeze(0), next_id.unsqueeze(0))

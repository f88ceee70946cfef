"""Running rows of many sequences against the packed cache: prefill chunks, decode, drafts.

Knows how records of earlier steps and rows of this step meet; must not know who owns slots and
pages. Rolling a sequence back is only a smaller `start` next time: rings have slack for it, and
entries past the start are written again before they are read.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.kv.pool import CachePool
from deepinfer.model.dspark import Draft, greedy
from deepinfer.model.norm import RMSNorm
from deepinfer.model.step import Layout, StepLayout
from deepinfer.model.transformer import Hidden, Transformer


class CachedState:
    """State of one forward of T rows (model description 3.15 and 4).

    Args:
        token_ids: [T] int64.
        token_map: [V] int64 n-gram classes, None without n-gram layers.
        compact: rows below their sequence's window floor stop at the boundary layer (6.3).
    """

    def __init__(
        self,
        model: Transformer,
        pool: CachePool,
        layout: Layout,
        token_ids: Tensor,
        token_map: Tensor | None,
        compact: bool = False,
    ) -> None:
        self.config = model.config
        self.precision = model.precision
        self.operators = model.precision.operators
        self.rotary = model.rotary
        self.cache = pool
        self.layout: Layout = layout
        self.scale = self.config.head_dim**-0.5
        self._compact = compact
        self._token_ids = token_ids
        self._token_map = token_map
        self._rotations: dict[bool, Tensor] = {}
        self._windows: dict[bool, Tensor] = {}
        self._ring_targets: dict[int, Tensor] = {}
        self._classes: Tensor | None = None
        self._candidates: Tensor | None = None
        self._selection: Tensor | None = None
        self._selected: dict[int, Tensor] = {}

    def rotations(self, ratio: int) -> Tensor:
        """Rotations [T, d/2] of the rows."""
        key = ratio > 0
        if key not in self._rotations:
            dtype = self.precision.dtype
            self._rotations[key] = self.rotary.rotations(self.layout.positions, ratio, dtype)
        return self._rotations[key]

    def _places(self, ring: int, length: int, rings: int, floors: Tensor) -> Tensor:
        """[T, length] places of each row's last tokens in rings [rings * ring] and rows [T]."""
        layout = self.layout
        places: Tensor = self.operators.window_index(
            layout.positions, layout.starts, layout.slots, layout.first_row, floors,
            length, ring, rings,
        )  # fmt: skip
        return places

    def _targets(self, ring: int) -> Tensor:
        """[T] where rings of `ring` tokens keep the rows, -1 for rows that they do not."""
        if ring not in self._ring_targets:
            layout = self.layout
            self._ring_targets[ring] = self.operators.ring_targets(
                layout.positions, layout.slots, layout.left, ring
            )
        return self._ring_targets[ring]

    def ngram_classes(self) -> Tensor:
        """[T, G]; the classes of this forward's rows go into the history rings at first use."""
        if self._classes is None:
            assert self._token_map is not None
            history, layout = self.cache.history, self.layout
            slots, ring = history.shape
            own = self._token_map[self._token_ids]
            depth = self.config.engram_max_ngram_size
            places = self._places(ring, depth, slots, layout.no_floors)
            table = torch.cat([history.flatten(), own])
            pad = self._token_map[self.config.engram_pad_token_id]
            self._classes = torch.where(places >= 0, table[places.clamp_min(0)], pad).flip(-1)
            self.operators.copy_rows(
                own.unsqueeze(-1), history.view(-1, 1), layout.row_numbers, self._targets(ring)
            )
        return self._classes

    def pool(self, layer: int, values: Tensor, gates: Tensor, norm: RMSNorm) -> Tensor:
        """[T, D] to latents [groups, D] of the groups completed by these rows."""
        kept = self.cache.groups[layer]
        slots, ring = kept.shape[:2]
        layout, ratio = self.layout, self.config.compress_ratio(layer)
        rows, _ = layout.completing(ratio)
        places = self._places(ring, ratio, slots, layout.no_floors)[rows].long()
        state = kept.flatten(0, 1)
        latents: Tensor = self.operators.compress_groups(
            values, gates, state, places, norm.weight, norm.eps, self.precision.dtype
        )
        self.operators.store_groups(values, gates, state, layout.row_numbers, self._targets(ring))
        return latents

    def store_entries(self, layer: int, latents: Tensor, keys: Tensor, norm: RMSNorm) -> None:
        """Pack the entries into their pages."""
        pool, layout, operators = self.cache, self.layout, self.operators
        ratio = self.config.compress_ratio(layer)
        rows, entries = layout.completing(ratio)
        places = operators.entry_places(
            entries.unsqueeze(-1), layout.sequence[rows], layout.page_table,
            pool.geometry.entries[layer],
        ).squeeze(-1).long()  # fmt: skip
        first = layout.positions[rows] - (ratio - 1)
        rotations = self.rotary.rotations(first, ratio, self.precision.dtype)
        operators.store_compressed(latents, rotations, pool.compressed[layer].flatten(0, 1), places)
        operators.store_index_key(
            keys, norm.weight, norm.eps, rotations, pool.index_codes[layer].flatten(0, 1),
            pool.index_scales[layer].flatten(0, 1), places,
        )  # fmt: skip

    def truncate(self, layer: int) -> "tuple[Tensor, CachedState] | None":
        """At the boundary of a compact prefill: the kept suffix of each sequence."""
        wanted = self._compact and self.layout.drops_rows
        if not (wanted and layer == self.config.boundary_layer):
            return None
        rows, layout = self.layout.keep_above_floor()
        self.layout = layout
        for known in (self._rotations, self._windows, self._ring_targets, self._selected):
            known.clear()
        self._selection = self._candidates = None
        return rows, self

    def select(self, layer: int, queries: Tensor, weights: Tensor) -> None:
        """Publish the entries [T, K] that each row attends to, padded with -1.

        Scoring is skipped when everything is taken.
        """
        c, layout = self.config, self.layout
        ratio = c.compress_ratio(layer)
        source = layer == c.candidate_source_layer_id
        most, visible = layout.most_visible(ratio), layout.visible(ratio)
        all_candidates = most <= c.candidate_topk_blocks * c.candidate_block_size
        if source:
            self._candidates = None
        if most <= c.index_topk and (not source or all_candidates):
            numbers = torch.arange(most, device=visible.device)
            self._selection = torch.where(numbers < visible.unsqueeze(-1), numbers, -1)
        elif c.restricts_to_candidates(layer) and self._candidates is not None:
            self._selection = self._select_candidates(layer, queries, weights, visible)
        else:
            scores = self.scores(layer, queries, weights, visible, most)
            if source and not all_candidates:
                self._candidates = self.operators.candidate_block_list(
                    scores, visible, c.candidate_block_size, c.candidate_topk_blocks
                )
            self._selection = self.operators.topk_select(scores, c.index_topk)
        self._selected.clear()

    def scores(
        self, layer: int, queries: Tensor, weights: Tensor, visible: Tensor, width: int
    ) -> Tensor:
        """Scores [T, width] of all entries, -inf where a row does not see them."""
        source, pool, layout = self.config.kv_source(layer), self.cache, self.layout
        found: Tensor = self.operators.paged_index_scores(
            queries, weights, pool.index_codes[source], pool.index_scales[source],
            layout.page_table, layout.sequence, visible, width,
        )  # fmt: skip
        return found

    def _select_candidates(
        self, layer: int, queries: Tensor, weights: Tensor, visible: Tensor
    ) -> Tensor:
        """Selection [T, K] among the entries of candidate blocks; no other key is read."""
        source, pool, layout = self.config.kv_source(layer), self.cache, self.layout
        size, operators = self.config.candidate_block_size, self.operators
        scores = operators.candidate_scores(
            queries, weights, pool.index_codes[source], pool.index_scales[source],
            layout.page_table, layout.sequence, visible, self._candidates, size,
        )  # fmt: skip
        columns = operators.topk_select(scores, self.config.index_topk)
        selection: Tensor = operators.restore_entries(columns, self._candidates, size)
        return selection

    def _selected_places(self, source: int) -> Tensor:
        """Places [T, K] int32 of the current selection in the pages of `source`."""
        if source not in self._selected:
            assert self._selection is not None
            layout, per_page = self.layout, self.cache.geometry.entries[source]
            self._selected[source] = self.operators.entry_places(
                self._selection, layout.sequence, layout.page_table, per_page
            )
        return self._selected[source]

    def _window(self, layer: int, rings: int) -> Tensor:
        """Window places [T, W] int32 that `layer` sees."""
        layout, boundary = self.layout, self.config.boundary_layer
        truncated = boundary is not None and layer >= boundary and layout.has_floors
        if truncated not in self._windows:
            floors = layout.floors if truncated else layout.no_floors
            ring = self.cache.geometry.ring_tokens
            self._windows[truncated] = self._places(ring, layout.window_length, rings, floors)
        return self._windows[truncated]

    def attend(
        self, layer: int, queries: Tensor, kv: Tensor, norm: RMSNorm, sink: Tensor
    ) -> Tensor:
        """Attention over the window (ring and rows of this forward) and the selected entries."""
        rings = self.cache.window[layer]
        ring, ratio = rings.flatten(0, 1), self.config.compress_ratio(layer)
        targets, first = self._targets(rings.shape[1]), self.layout.may_store_first
        records = self.operators.store_window(
            kv, norm.weight, norm.eps, self.rotations(ratio),
            ring if first else None, targets if first else None,
        )  # fmt: skip
        compressed = places = None
        if ratio:
            source = self.config.kv_source(layer)
            compressed = self.cache.compressed[source].flatten(0, 1)
            places = self._selected_places(source)
        mixed: Tensor = self.operators.sparse_attention(
            queries, ring, records, self._window(layer, rings.shape[0]), compressed, places,
            sink, self.scale,
        )[0]  # fmt: skip
        if not first:
            self.operators.copy_rows(records, ring, self.layout.row_numbers, targets)
        return mixed


class CachedDraftState:
    """Draft slots of B sequences against their draft windows; rows are [B * n].

    Args:
        layout: one row per sequence, the last position that the target has processed.
        slots_per_draft: n.
    """

    def __init__(
        self, model: Transformer, pool: CachePool, layout: StepLayout, slots_per_draft: int
    ) -> None:
        self.pool = pool
        self.operators = model.precision.operators
        self.scale = model.config.head_dim**-0.5
        device, dtype = layout.device, model.precision.dtype
        after = torch.arange(1, slots_per_draft + 1, device=device)
        positions = layout.positions.unsqueeze(-1) + after
        self._rotations = model.rotary.rotations(positions.flatten(), 0, dtype)
        # Every row of the layout is already in the ring: none is a row of this forward.
        rings, ring = pool.window.shape[1], pool.geometry.ring_tokens
        window = self.operators.window_index(
            layout.positions, layout.positions + 1, layout.slots, layout.first_row,
            layout.no_floors, layout.window_length, ring, rings,
        )  # fmt: skip
        own = rings * ring + torch.arange(positions.numel(), device=device).view_as(positions)
        index = torch.cat([window, own.to(torch.int32)], dim=-1)
        # One list of keys per sequence, repeated for its slots.
        self._index = index.repeat_interleave(slots_per_draft, dim=0)

    def rotations(self, ratio: int) -> Tensor:
        """Rotations [B * n, d/2] of the slots, base table."""
        return self._rotations

    def attend(
        self, layer: int, queries: Tensor, kv: Tensor, norm: RMSNorm, sink: Tensor
    ) -> Tensor:
        """Attention over the draft window and all slots of the block, earlier and later."""
        records = self.operators.store_window(
            kv, norm.weight, norm.eps, self._rotations, None, None
        )
        ring = self.pool.draft_window[layer].flatten(0, 1)
        mixed: Tensor = self.operators.sparse_attention(
            queries, ring, records, self._index, None, None, sink, self.scale
        )[0]
        return mixed


def observe(model: Transformer, pool: CachePool, layout: StepLayout, taps: Tensor) -> None:
    """Write the draft windows of processed rows: `taps` [T, A * H] of the rows of `layout`."""
    operators = model.precision.operators
    rotations = model.rotary.rotations(layout.positions, 0, model.precision.dtype)
    ring = pool.geometry.ring_tokens
    targets = operators.ring_targets(layout.positions, layout.slots, layout.left, ring)
    for stage, (keys, norm) in enumerate(model.mtp.context_keys(taps)):
        ring_of_stage = pool.draft_window[stage].flatten(0, 1)
        operators.store_window(keys, norm.weight, norm.eps, rotations, ring_of_stage, targets)


def draft(model: Transformer, pool: CachePool, layout: StepLayout, next_ids: Tensor) -> Draft:
    """One greedy draft round of B sequences.

    Args:
        layout: one row per sequence: the last position whose draft window entry was written.
        next_ids: [B] tokens sampled for the position after it.
    """
    slots = model.mtp.block_size
    state = CachedDraftState(model, pool, layout, slots)
    streams, pre = model.initial_streams(model.mtp.draft_inputs(next_ids).flatten())
    x = model.mtp.hidden(streams, pre, state)
    base_logits = model.head(model.mtp.stage(-1).norm(x))
    return model.mtp.decode(
        x.unflatten(0, (-1, slots)), base_logits.unflatten(0, (-1, slots)), next_ids, greedy
    )


@dataclass
class StepOutput:
    """Result of a cached forward before the head; see `Hidden`.

    Attributes:
        layout: the rows that `hidden` covers, fewer than given when a prefill was truncated.
    """

    hidden: Hidden
    layout: StepLayout


def run(
    model: Transformer,
    pool: CachePool,
    layout: StepLayout,
    token_ids: Tensor,
    token_map: Tensor | None,
    *,
    compact: bool = False,
    keep_streams: bool = False,
) -> StepOutput:
    """Forward of the rows of `layout`, reading and extending the cache."""
    state = CachedState(model, pool, layout, token_ids, token_map, compact)
    hidden = model(token_ids, state, keep_streams)
    assert isinstance(state.layout, StepLayout)
    return StepOutput(hidden, state.layout)

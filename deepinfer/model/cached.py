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
from deepinfer.model.step import StepLayout
from deepinfer.model.transformer import Hidden, Transformer
from deepinfer.ops.candidate_blocks import candidate_blocks
from deepinfer.ops.index_scores import index_scores
from deepinfer.ops.kv_records import (
    pack_compressed,
    pack_index_key,
    pack_window,
    unpack_compressed,
    unpack_index_key,
    unpack_window,
)
from deepinfer.ops.sparse_attention import attention_with_sink
from deepinfer.ops.topk_select import topk_select


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
        layout: StepLayout,
        token_ids: Tensor,
        token_map: Tensor | None,
        compact: bool = False,
    ) -> None:
        self.config = model.config
        self.dtype = model.precision.dtype
        self.rotary = model.rotary
        self.pool = pool
        self.layout = layout
        self.scale = self.config.head_dim**-0.5
        self._compact = compact
        self._token_ids = token_ids
        self._token_map = token_map
        self._rotations: dict[bool, Tensor] = {}
        self._classes: Tensor | None = None
        self._candidates: list[Tensor | None] = []
        self._selection: tuple[int, Tensor] | None = None
        self._selected: dict[int, tuple[Tensor, Tensor]] = {}

    def rotations(self, ratio: int) -> Tensor:
        """Rotations [T, d/2] of the rows."""
        key = ratio > 0
        if key not in self._rotations:
            self._rotations[key] = self.rotary.rotations(self.layout.positions, ratio, self.dtype)
        return self._rotations[key]

    def ngram_classes(self) -> Tensor:
        """[T, G]; the classes of this forward's rows go into the history rings at first use."""
        if self._classes is None:
            assert self._token_map is not None
            layout, ring = self.layout, self.pool.geometry.history_tokens
            own = self._token_map[self._token_ids]
            places, valid = layout.lookback(ring, self.config.engram_max_ngram_size)
            table = torch.cat([self.pool.history[layout.slots].flatten(), own])
            pad = self._token_map[self.config.engram_pad_token_id]
            self._classes = torch.where(valid, table[places], pad).flip(-1)
            rows, targets = layout.ring_writes(ring)
            self.pool.history.view(-1)[targets] = own[rows]
        return self._classes

    def groups(self, layer: int, values: Tensor, gates: Tensor) -> tuple[Tensor, Tensor]:
        """[T, D] to [groups, r, D] of groups completed by these rows; rows go into the ring."""
        layout, ring = self.layout, self.pool.geometry.group_tokens
        kept = self.pool.groups[layer]
        both = torch.stack([values, gates], dim=1)
        ratio = self.config.compress_ratio(layer)
        rows = layout.completing_rows(ratio)
        places, _ = layout.lookback(ring, ratio)
        table = torch.cat([kept[layout.slots].flatten(0, 1), both])
        whole = table[places[rows]]
        kept_rows, targets = layout.ring_writes(ring)
        kept.flatten(0, 1)[targets] = both[kept_rows]
        return whole[:, :, 0], whole[:, :, 1]

    def entry_rotations(self, layer: int) -> Tensor:
        """Rotations [groups, d/2] at the first token of each group completed by these rows."""
        ratio = self.config.compress_ratio(layer)
        rows = self.layout.completing_rows(ratio)
        first = self.layout.positions[rows] - (ratio - 1)
        return self.rotary.rotations(first, ratio, self.dtype)

    def store_entries(self, layer: int, compressed: Tensor, index_keys: Tensor) -> None:
        """Pack the entries into their pages."""
        ratio = self.config.compress_ratio(layer)
        rows = self.layout.completing_rows(ratio)
        entries = self.layout.positions[rows] // ratio
        per_page = self.pool.geometry.entries[layer]
        places = self.layout.entry_places(self.layout.sequence[rows], entries, per_page)
        self.pool.compressed[layer].flatten(0, 1)[places] = pack_compressed(compressed)
        keys = pack_index_key(index_keys)
        codes = self.pool.geometry.index_code_bytes
        self.pool.index_codes[layer].flatten(0, 1)[places] = keys[:, :codes]
        self.pool.index_scales[layer].flatten(0, 1)[places] = keys[:, codes:]

    def truncate(self, layer: int) -> "tuple[Tensor, CachedState] | None":
        """At the boundary of a compact prefill: the kept suffix of each sequence."""
        floors = any(rows.window_floor > rows.start for rows in self.layout.rows)
        if not (self._compact and floors and layer == self.config.boundary_layer):
            return None
        rows, layout = self.layout.keep_above_floor()
        self.layout = layout
        self._rotations.clear()
        return rows, self

    def select(self, layer: int, queries: Tensor, weights: Tensor) -> None:
        """Publish the entries [T, K] that each row attends to, padded with -1."""
        ratio = self.config.compress_ratio(layer)
        visible = self.layout.visible(ratio)
        chosen = []
        for number, rows in enumerate(self.layout.sequence_slices()):
            most = self._most_visible(number, ratio)
            selected = self._select_sequence(
                layer, number, queries[rows], weights[rows], visible[rows], most
            )
            chosen.append(selected)
        width = max(part.shape[-1] for part in chosen)
        padded = [torch.nn.functional.pad(p, (0, width - p.shape[-1]), value=-1) for p in chosen]
        self._selection = (layer, torch.cat(padded))
        self._selected.clear()

    def _most_visible(self, number: int, ratio: int) -> int:
        rows = self.layout.rows[number]
        return (rows.start + rows.count) // ratio

    def _select_sequence(
        self, layer: int, number: int, queries: Tensor, weights: Tensor, visible: Tensor, most: int
    ) -> Tensor:
        """Selection [rows, k] of one sequence; scoring is skipped when everything is taken."""
        c = self.config
        source = layer == c.candidate_source_layer_id
        numbers = torch.arange(most, device=visible.device)
        all_candidates = most <= c.candidate_topk_blocks * c.candidate_block_size
        if most <= c.index_topk and (not source or all_candidates):
            if source:
                self._candidates.append(None)
            return torch.where(numbers < visible.unsqueeze(-1), numbers, -1)
        keys = self._index_keys(c.kv_source(layer), number, most)
        scores = index_scores(queries, weights, keys)
        scores = scores.masked_fill(numbers >= visible.unsqueeze(-1), float("-inf"))
        if source:
            self._candidates.append(
                candidate_blocks(scores, visible, c.candidate_block_size, c.candidate_topk_blocks)
            )
        elif c.restricts_to_candidates(layer):
            candidates = self._candidates[number]
            if candidates is not None:
                scores = scores.masked_fill(~candidates, float("-inf"))
        return topk_select(scores, c.index_topk)

    def _index_keys(self, source: int, number: int, count: int) -> Tensor:
        """Index keys [count, Di] of the first entries of one sequence."""
        per_page = self.pool.geometry.entries[source]
        pages = self.layout.page_table[number, : -(-count // per_page)]
        codes = self.pool.index_codes[source][pages].flatten(0, 1)[:count]
        scales = self.pool.index_scales[source][pages].flatten(0, 1)[:count]
        return unpack_index_key(torch.cat([codes, scales], dim=-1), self.dtype)

    def _selected_keys(self, source: int) -> tuple[Tensor, Tensor]:
        """Compressed keys [T, K, D] of the current selection, and their validity [T, K]."""
        if source not in self._selected:
            assert self._selection is not None
            _, entries = self._selection
            valid = entries >= 0
            per_page = self.pool.geometry.entries[source]
            sequence = self.layout.sequence.unsqueeze(-1).expand_as(entries)
            places = self.layout.entry_places(sequence, entries.clamp_min(0), per_page)
            records = self.pool.compressed[source].flatten(0, 1)[places]
            self._selected[source] = (unpack_compressed(records, self.dtype), valid)
        return self._selected[source]

    def attend(self, layer: int, queries: Tensor, kv: Tensor, sink: Tensor) -> Tensor:
        """Attention over the window (ring and rows of this forward) and the selected entries."""
        ring = self.pool.window[layer]
        records = pack_window(kv)
        boundary = self.config.boundary_layer
        truncated = boundary is not None and layer >= boundary
        places, valid = self.layout.truncated_window if truncated else self.layout.window
        table = torch.cat([ring[self.layout.slots].flatten(0, 1), records])
        keys = unpack_window(table, self.dtype)[places]
        if self.config.compress_ratio(layer):
            entries, selected = self._selected_keys(self.config.kv_source(layer))
            keys = torch.cat([keys, entries], dim=1)
            valid = torch.cat([valid, selected], dim=1)
        rows, targets = self.layout.window_writes
        ring.flatten(0, 1)[targets] = records[rows]
        return attention_with_sink(queries, keys, valid, sink, self.scale)


class CachedDraftState:
    """Draft slots of B sequences against their draft windows; rows are [B, n].

    Args:
        layout: one row per sequence, the last position that the target has processed.
        slots_per_draft: n.
    """

    def __init__(
        self, model: Transformer, pool: CachePool, layout: StepLayout, slots_per_draft: int
    ) -> None:
        self.pool = pool
        self.layout = layout
        self.dtype = model.precision.dtype
        self.scale = model.config.head_dim**-0.5
        after = torch.arange(1, slots_per_draft + 1, device=layout.device)
        self.positions = layout.positions.unsqueeze(-1) + after
        self._rotations = model.rotary.rotations(self.positions, 0, self.dtype)
        # Every row of the layout is already in the ring, so places come from positions alone.
        length = min(model.config.sliding_window, int(layout.host_positions.max(initial=0)) + 1)
        back = torch.arange(1 - length, 1, device=layout.device)
        wanted = layout.positions.unsqueeze(-1) + back
        self.valid = wanted >= 0
        ring = pool.geometry.ring_tokens
        self.places = layout.slots.unsqueeze(-1) * ring + wanted % ring

    def rotations(self, ratio: int) -> Tensor:
        """Rotations [B, n, d/2] of the slots, base table."""
        return self._rotations

    def attend(self, layer: int, queries: Tensor, kv: Tensor, sink: Tensor) -> Tensor:
        """Attention over the draft window and all slots of the block, earlier and later."""
        records = self.pool.draft_window[layer].flatten(0, 1)[self.places]
        own = pack_window(kv)
        keys = unpack_window(torch.cat([records, own], dim=1), self.dtype)
        slots = torch.ones(*own.shape[:2], dtype=torch.bool, device=own.device)
        valid = torch.cat([self.valid, slots], dim=1)
        # One list of keys per sequence, shared by its slots.
        keys, valid = keys.unsqueeze(1), valid.unsqueeze(1)
        return attention_with_sink(queries, keys, valid, sink, self.scale)


def observe(model: Transformer, pool: CachePool, layout: StepLayout, taps: Tensor) -> None:
    """Write the draft windows of processed rows: `taps` [T, A * H] of the rows of `layout`."""
    rotations = model.rotary.rotations(layout.positions, 0, model.precision.dtype)
    rows, targets = layout.window_writes
    for stage, keys in enumerate(model.mtp.context_keys(taps, rotations)):
        pool.draft_window[stage].flatten(0, 1)[targets] = pack_window(keys)[rows]


def draft(model: Transformer, pool: CachePool, layout: StepLayout, next_ids: Tensor) -> Draft:
    """One greedy draft round of B sequences.

    Args:
        layout: one row per sequence: the last position whose draft window entry was written.
        next_ids: [B] tokens sampled for the position after it.
    """
    state = CachedDraftState(model, pool, layout, model.mtp.block_size)
    streams, pre = model.initial_streams(model.mtp.draft_inputs(next_ids))
    x = model.mtp.hidden(streams, pre, state)
    base_logits = model.head(model.mtp.stage(-1).norm(x))
    return model.mtp.decode(x, base_logits, next_ids, greedy)


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
    return StepOutput(hidden, state.layout)

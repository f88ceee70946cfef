"""The cache's tensors.

Knows shapes and devices; must not know which sequence owns what.
"""

import torch
from torch import Tensor

from deepinfer.kv.geometry import CacheGeometry


class CachePool:
    """Packed records of all layers, on one device.

    Attributes:
        window: [layers, slots, ring, bytes] uint8, slot of position p is p % ring.
        draft_window: the same for draft blocks.
        groups: per pooling layer [slots, group, 2, D], values and gates at p % group.
        history: [slots, history] int64 n-gram classes at p % history.
        compressed: per KV source layer [pages, entries, bytes] uint8.
        index_codes, index_scales: the two parts of index keys, [pages, entries, bytes] uint8.
    """

    def __init__(
        self,
        geometry: CacheGeometry,
        pages: int,
        slots: int,
        device: torch.device,
        accumulate: torch.dtype = torch.float32,
    ) -> None:
        g = geometry
        self.geometry = geometry
        self.device = device

        def records(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.uint8, device=device)

        self.window = records(g.layers, slots, g.ring_tokens, g.window_bytes)
        self.draft_window = records(g.draft_blocks, slots, g.ring_tokens, g.window_bytes)
        self.groups = {
            layer: torch.zeros(
                slots, g.group_tokens, 2, g.head_dim, dtype=accumulate, device=device
            )
            for layer in g.pooling_layers
        }
        self.history = torch.zeros(slots, g.history_tokens, dtype=torch.int64, device=device)
        self.compressed = {
            layer: records(pages, entries, g.compressed_bytes)
            for layer, entries in g.entries.items()
        }
        self.index_codes = {
            layer: records(pages, entries, g.index_code_bytes)
            for layer, entries in g.entries.items()
        }
        self.index_scales = {
            layer: records(pages, entries, g.index_scale_bytes)
            for layer, entries in g.entries.items()
        }

    def copy_slot(self, source: int, target: int) -> None:
        """Everything that a sequence has outside of the pages, to another slot."""
        for rings in (self.window, self.draft_window):
            rings[:, target].copy_(rings[:, source])
        for kept in (*self.groups.values(), self.history):
            kept[target].copy_(kept[source])

    def copy_page(self, source: int, target: int) -> None:
        """One page of every KV source layer, to another page."""
        for tables in (self.compressed, self.index_codes, self.index_scales):
            for pages in tables.values():
                pages[target].copy_(pages[source])

    def poison(self) -> None:
        """Fill everything with bytes that decode to NaN, so that a read before a write shows."""
        packed = [self.window, self.draft_window, *self.compressed.values()]
        packed += [*self.index_codes.values(), *self.index_scales.values()]
        for tensor in packed:
            tensor.fill_(0xFF)
        for group in self.groups.values():
            group.fill_(float("nan"))
        self.history.fill_(-(2**62))

"""Which pages the sequence in every state slot has, here and on the device.

Knows slots and page numbers; must not know what pages hold.
"""

import numpy as np
import torch

from deepinfer.kv.blocks import SequenceBlocks
from deepinfer.model.step import Numbers, to_device


class PageTable:
    """Pages of the sequence in every slot, [slots, most pages] int64, here and on the device.

    Only what was added since the last look is copied, so a long sequence costs no more than a
    short one. While a sequence has its slot, its pages are only appended to.
    """

    def __init__(self, slots: int, most_pages: int, device: torch.device) -> None:
        self._host = np.zeros((slots, most_pages), dtype=np.int64)
        self.device = torch.zeros(slots, most_pages, dtype=torch.int64, device=device)
        self._owners: list[SequenceBlocks | None] = [None] * slots
        self._known = [0] * slots
        self._unsent: dict[int, int] = {}  # by slot: the first page that the device does not know

    def look(self, blocks: SequenceBlocks) -> None:
        """Note which pages a sequence has."""
        slot, pages = blocks.slot, blocks.pages
        if self._owners[slot] is not blocks:
            self._owners[slot], self._known[slot] = blocks, 0
        known = self._known[slot]
        if known < len(pages):
            self._host[slot, known : len(pages)] = pages[known:]
            self._unsent[slot] = min(known, self._unsent.get(slot, known))
            self._known[slot] = len(pages)

    def row(self, blocks: SequenceBlocks) -> Numbers:
        """Page numbers of one sequence."""
        self.look(blocks)
        return self._host[blocks.slot, : len(blocks.pages)].copy()

    def send(self) -> None:
        """Bring the device's table up to date with all rows that were looked at."""
        if not self._unsent:
            return
        width = self._host.shape[1]
        changes = [(slot, first, self._known[slot]) for slot, first in self._unsent.items()]
        places = [np.arange(a, b) + slot * width for slot, a, b in changes]
        pages = [self._host[slot, a:b] for slot, a, b in changes]
        to, numbers = to_device([np.concatenate(places), np.concatenate(pages)], self.device.device)
        self.device.view(-1).index_copy_(0, to, numbers)
        self._unsent.clear()  # not before: what could not be sent is sent with the next ones

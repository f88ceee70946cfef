"""A device made of lists: what copy orders and rows would do to pages and state slots.

A page holds the token of each of its positions, a slot is a ring with (position, token) of the last
positions, as window keys and the n-gram history are. What nobody owns is poisoned after every step,
so whatever reads something old, foreign or unwritten is found out.
"""

import zlib
from collections.abc import Sequence

from deepinfer.kv.blocks import Copy, PageCopy, SequenceBlocks
from deepinfer.kv.manager import KVManager

POISON = -1


def next_token(tokens: Sequence[int], seed: int, vocabulary: int) -> int:
    """What the model makes of `tokens`: any pure function."""
    return zlib.crc32(bytes([seed, *tokens])) % vocabulary


class FakeDevice:
    """Pages and slots of one manager.

    Args:
        window: positions before a row that the row reads from its slot.
        slack: positions by which a slot can be taken back, at least the page_tokens that
            `KVManager` asks for.
    """

    def __init__(self, manager: KVManager, window: int, slack: int) -> None:
        self.manager = manager
        self.window = window
        self.page_tokens = manager.page_tokens
        self.ring = window + slack
        self.pages = [[POISON] * manager.page_tokens for _ in range(manager.pages)]
        self.slots = [self._poisoned_ring() for _ in range(manager.allocator.slots)]

    def _poisoned_ring(self) -> list[tuple[int, int]]:
        return [(POISON, POISON)] * self.ring

    def copy(self, copies: list[Copy]) -> None:
        """Run orders, one after the other."""
        for order in copies:
            if isinstance(order, PageCopy):
                self.pages[order.target] = list(self.pages[order.source])
            else:
                self.slots[order.target] = list(self.slots[order.source])

    def read(self, blocks: SequenceBlocks, count: int) -> list[int]:
        """Tokens 0..count - 1 as the pages have them; the window of the next row must agree."""
        size = self.page_tokens
        found: list[int] = []
        for page in blocks.pages[: -(-count // size)]:
            found += self.pages[page]
        del found[count:]
        ring = self.slots[blocks.slot]
        for position in range(max(0, count - self.window), count):
            assert ring[position % self.ring] == (position, found[position]), "state is wrong"
        return found

    def write(self, blocks: SequenceBlocks, start: int, tokens: Sequence[int]) -> None:
        """Rows of one sequence."""
        ring = self.slots[blocks.slot]
        for position, token in enumerate(tokens, start):
            page, offset = divmod(position, self.page_tokens)
            self.pages[blocks.pages[page]][offset] = token
            ring[position % self.ring] = (position, token)

    def poison(self) -> None:
        """Spoil what nobody owns."""
        free_pages, free_slots = self.manager.allocator.free_numbers()
        for page in free_pages:
            self.pages[page] = [POISON] * self.page_tokens
        for slot in free_slots:
            self.slots[slot] = self._poisoned_ring()

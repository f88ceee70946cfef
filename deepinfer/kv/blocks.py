"""Which pages and state slots are free, and which sequence owns the others.

Knows numbers only; must not know torch or what a page holds.
"""

from dataclasses import dataclass, field

from deepinfer.errors import OutOfPages


@dataclass
class SequenceBlocks:
    """Pages and state slot of one sequence; `pages[i]` holds tokens i * page_tokens onwards.

    The slot is -1 once the sequence is closed.
    """

    slot: int
    pages: list[int] = field(default_factory=list)


class BlockAllocator:
    """Free lists of pages and slots. Lowest numbers are handed out first after a fresh start."""

    def __init__(self, pages: int, slots: int, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self.pages = pages
        self.slots = slots
        self._free_pages = list(range(pages - 1, -1, -1))
        self._free_slots = list(range(slots - 1, -1, -1))

    @property
    def free_pages(self) -> int:
        """Pages that no sequence owns."""
        return len(self._free_pages)

    @property
    def free_slots(self) -> int:
        """Slots that no sequence owns."""
        return len(self._free_slots)

    def can_open(self, tokens: int) -> bool:
        """Whether a new sequence of `tokens` tokens fits now."""
        return bool(self._free_slots) and -(-tokens // self.page_tokens) <= self.free_pages

    def open(self) -> SequenceBlocks:
        """A state slot for a new sequence without pages."""
        if not self._free_slots:
            raise OutOfPages(f"all {self.slots} state slots are in use")
        return SequenceBlocks(self._free_slots.pop())

    def reserve(self, blocks: SequenceBlocks, tokens: int) -> None:
        """Make room for `tokens` tokens in all; either every page is added or none."""
        assert blocks.slot >= 0, "pages wanted for a closed sequence"
        missing = -(-tokens // self.page_tokens) - len(blocks.pages)
        if missing > self.free_pages:
            raise OutOfPages(
                f"{missing} cache pages wanted, {self.free_pages} of {self.pages} free"
            )
        blocks.pages.extend(self._free_pages.pop() for _ in range(missing))

    def close(self, blocks: SequenceBlocks) -> None:
        """Give back everything that a sequence owns."""
        assert blocks.slot >= 0, "sequence closed twice"
        self._free_pages.extend(reversed(blocks.pages))
        self._free_slots.append(blocks.slot)
        blocks.pages, blocks.slot = [], -1

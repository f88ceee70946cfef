"""Which pages and state slots are free, and how many holders the others have.

Knows numbers only; must not know torch, tokens or what a page holds.
"""

from dataclasses import dataclass, field

from deepinfer.errors import OutOfPages


@dataclass(frozen=True)
class SlotCopy:
    """An order to the device: everything in state slot `source` also into slot `target`."""

    source: int
    target: int


@dataclass(frozen=True)
class PageCopy:
    """An order to the device: everything in page `source` also into page `target`, all layers."""

    source: int
    target: int


Copy = SlotCopy | PageCopy


@dataclass
class SequenceBlocks:
    """Pages and state slot of one sequence; `pages[i]` holds tokens i * page_tokens onwards.

    The slot is -1 once the sequence is closed.
    """

    slot: int
    pages: list[int] = field(default_factory=list)


class BlockAllocator:
    """Free lists, and reference counts of pages.

    A page may have several holders, a slot has one. Lowest numbers are handed out first after a
    fresh start.

    Attributes:
        pages, slots: how many there are; page_tokens: tokens of one page.
        references: holders of every page, 0 = free.
    """

    def __init__(self, pages: int, slots: int, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self.pages = pages
        self.slots = slots
        self.references = [0] * pages
        self._free_pages = list(range(pages - 1, -1, -1))
        self._free_slots = list(range(slots - 1, -1, -1))

    @property
    def free_pages(self) -> int:
        """Pages that nobody holds."""
        return len(self._free_pages)

    @property
    def free_slots(self) -> int:
        """Slots that nobody owns."""
        return len(self._free_slots)

    def free_numbers(self) -> tuple[list[int], list[int]]:
        """Numbers of the free pages and of the free slots, for audits."""
        return list(self._free_pages), list(self._free_slots)

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens."""
        return -(-tokens // self.page_tokens)

    def reserve(self, blocks: SequenceBlocks, tokens: int) -> None:
        """Make room for `tokens` tokens in all; either every page is added or none.

        Raises:
            OutOfPages: more pages are wanted than are free.
        """
        assert blocks.slot >= 0, "pages wanted for a closed sequence"
        missing = self.pages_for(tokens) - len(blocks.pages)
        if missing > self.free_pages:
            raise OutOfPages(
                f"{missing} cache pages wanted, {self.free_pages} of {self.pages} free"
            )
        for _ in range(missing):
            page = self._free_pages.pop()
            self.references[page] = 1
            blocks.pages.append(page)

    def share(self, page: int) -> None:
        """One holder more of a page that has one."""
        assert self.references[page] > 0, f"page {page} is free and cannot be shared"
        self.references[page] += 1

    def release(self, page: int) -> int:
        """One holder less; returns how many are left, and with none the page is free."""
        left = self.references[page] - 1
        assert left >= 0, f"page {page} was released more often than it was taken"
        self.references[page] = left
        if not left:
            self._free_pages.append(page)
        return left

    def take_slot(self) -> int:
        """A free slot, which is the caller's from now on; there must be one."""
        assert self._free_slots, f"all {self.slots} state slots are in use"
        return self._free_slots.pop()

    def give_slot(self, slot: int) -> None:
        """Take back a slot from its owner."""
        self._free_slots.append(slot)

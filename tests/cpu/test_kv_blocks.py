"""Pages and slots: nothing is lost, nothing has two owners, whatever sequences do."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from deepinfer.errors import OutOfPages
from deepinfer.kv.blocks import BlockAllocator, SequenceBlocks


class Allocations(RuleBasedStateMachine):
    """Sequences are opened, grow and are closed at random; the books are audited after each."""

    @initialize(pages=st.integers(0, 12), slots=st.integers(0, 5), page_tokens=st.integers(1, 9))
    def start(self, pages: int, slots: int, page_tokens: int) -> None:
        self.allocator = BlockAllocator(pages, slots, page_tokens)
        self.live: list[SequenceBlocks] = []
        self.closed: list[SequenceBlocks] = []

    def pages_for(self, tokens: int) -> int:
        return sum(1 for first in range(0, tokens, self.allocator.page_tokens) if first < tokens)

    @rule(tokens=st.integers(0, 60))
    def open_with_tokens(self, tokens: int) -> None:
        free = self.allocator.free_pages
        fits = len(self.live) < self.allocator.slots and self.pages_for(tokens) <= free
        assert self.allocator.can_open(tokens) == fits
        if fits:
            blocks = self.allocator.open()
            assert blocks.pages == []
            self.allocator.reserve(blocks, tokens)
            assert len(blocks.pages) == self.pages_for(tokens)
            self.live.append(blocks)

    @rule()
    def open_empty(self) -> None:
        if len(self.live) < self.allocator.slots:
            self.live.append(self.allocator.open())
        else:
            with pytest.raises(OutOfPages, match=f"all {self.allocator.slots} state slots"):
                self.allocator.open()

    @precondition(lambda self: self.live)
    @rule(data=st.data(), tokens=st.integers(0, 80))
    def grow(self, data: st.DataObject, tokens: int) -> None:
        blocks = data.draw(st.sampled_from(self.live))
        before, free = list(blocks.pages), self.allocator.free_pages
        wanted = self.pages_for(tokens)
        if wanted - len(before) > free:
            text = f"{wanted - len(before)} cache pages wanted, {free} of {self.allocator.pages}"
            with pytest.raises(OutOfPages, match=text):
                self.allocator.reserve(blocks, tokens)
            assert blocks.pages == before
            assert self.allocator.free_pages == free
        else:
            self.allocator.reserve(blocks, tokens)
            assert blocks.pages[: len(before)] == before  # pages never move under a sequence
            assert len(blocks.pages) == max(wanted, len(before))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        blocks = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        self.allocator.close(blocks)
        assert blocks.pages == []
        self.closed.append(blocks)

    @precondition(lambda self: self.closed)
    @rule(data=st.data())
    def use_after_close(self, data: st.DataObject) -> None:
        blocks = data.draw(st.sampled_from(self.closed))
        with pytest.raises(AssertionError, match="closed twice"):
            self.allocator.close(blocks)
        with pytest.raises(AssertionError, match="closed sequence"):
            self.allocator.reserve(blocks, 100)

    @invariant()
    def audit(self) -> None:
        allocator = self.allocator
        owned = [page for blocks in self.live for page in blocks.pages]
        slots = [blocks.slot for blocks in self.live]
        assert len(set(owned)) == len(owned)
        assert set(owned) <= set(range(allocator.pages))
        assert allocator.free_pages + len(owned) == allocator.pages
        assert len(set(slots)) == len(slots)
        assert set(slots) <= set(range(allocator.slots))
        assert allocator.free_slots + len(slots) == allocator.slots


Allocations.TestCase.settings = settings(max_examples=100, stateful_step_count=30)
TestAllocations = Allocations.TestCase


def test_lowest_numbers_come_first() -> None:
    allocator = BlockAllocator(pages=6, slots=3, page_tokens=16)
    first, second = allocator.open(), allocator.open()
    allocator.reserve(first, 33)
    allocator.reserve(second, 16)
    assert (first.slot, first.pages) == (0, [0, 1, 2])
    assert (second.slot, second.pages) == (1, [3])
    allocator.close(first)
    third = allocator.open()
    allocator.reserve(third, 64)
    assert (third.slot, third.pages) == (0, [0, 1, 2, 4])


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (16, 1), (17, 2), (96, 6)])
def test_pages_are_whole(tokens: int, pages: int) -> None:
    allocator = BlockAllocator(pages=6, slots=1, page_tokens=16)
    assert allocator.can_open(tokens)
    assert not allocator.can_open(97)
    blocks = allocator.open()
    allocator.reserve(blocks, tokens)
    assert len(blocks.pages) == pages
    allocator.reserve(blocks, 0)  # which gives nothing back
    assert len(blocks.pages) == pages


def test_a_stale_close_does_not_free_the_slot_of_the_next_owner() -> None:
    allocator = BlockAllocator(pages=2, slots=1, page_tokens=16)
    old = allocator.open()
    allocator.close(old)
    allocator.open()
    with pytest.raises(AssertionError, match="closed twice"):
        allocator.close(old)
    assert allocator.free_slots == 0

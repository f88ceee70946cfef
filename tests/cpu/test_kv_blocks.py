"""Pages and slots: nothing is lost, nothing is free that somebody holds, whatever sequences do."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from deepinfer.errors import OutOfPages
from deepinfer.kv.blocks import BlockAllocator, Copy, PageCopy, SequenceBlocks, SlotCopy, waves


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


class Books:
    """Two allocators in one: the real one, and sets that say what it should hold."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.allocator = BlockAllocator(rng.randint(1, 8), rng.randint(1, 4), rng.randint(1, 3))
        self.holders = [0] * self.allocator.pages
        self.slots: list[int] = []
        self.live: list[SequenceBlocks] = []
        self.shared: list[int] = []  # pages that somebody who is no sequence holds too

    def step(self) -> None:
        rng, allocator = self.rng, self.allocator
        action = rng.randrange(6)
        if action == 0 and allocator.free_slots:
            self.live.append(allocator.open())
            self.slots.append(self.live[-1].slot)
        elif action == 1 and self.live:
            blocks = rng.choice(self.live)
            self.grow(blocks, rng.randint(0, 10))
        elif action == 2 and self.live:
            blocks = self.live.pop(rng.randrange(len(self.live)))
            for page in blocks.pages:
                self.holders[page] -= 1
            self.slots.remove(blocks.slot)
            allocator.close(blocks)
        elif action == 3 and any(self.holders):
            page = rng.choice([page for page, count in enumerate(self.holders) if count])
            allocator.share(page)
            self.shared.append(page)
            self.holders[page] += 1
        elif action == 4 and self.shared:
            page = self.shared.pop(rng.randrange(len(self.shared)))
            self.holders[page] -= 1
            assert allocator.release(page) == self.holders[page]
        elif action == 5 and self.live and allocator.free_slots:  # one slot for another
            blocks = rng.choice(self.live)
            slot = allocator.take_slot()
            assert slot not in self.slots
            allocator.give_slot(blocks.slot)
            self.slots.remove(blocks.slot)
            self.slots.append(slot)
            blocks.slot = slot

    def grow(self, blocks: SequenceBlocks, tokens: int) -> None:
        before = list(blocks.pages)
        missing = -(-tokens // self.allocator.page_tokens) - len(before)
        if missing > self.holders.count(0):
            with pytest.raises(OutOfPages):
                self.allocator.reserve(blocks, tokens)
            assert blocks.pages == before
        else:
            self.allocator.reserve(blocks, tokens)
            for page in blocks.pages[len(before) :]:
                assert self.holders[page] == 0
                self.holders[page] = 1
            assert len(blocks.pages) == len(before) + max(missing, 0)

    def audit(self) -> None:
        allocator = self.allocator
        pages, slots = allocator.free_numbers()
        assert allocator.references == self.holders
        assert sorted(pages) == [page for page, count in enumerate(self.holders) if not count]
        assert sorted(slots + self.slots) == list(range(allocator.slots))


@pytest.mark.parametrize("seed", range(5))
def test_books_add_up_over_120_000_steps(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(600):
        books = Books(rng)
        for _ in range(200):
            books.step()
            books.audit()


def test_a_page_is_free_when_its_last_holder_lets_go() -> None:
    allocator = BlockAllocator(pages=1, slots=2, page_tokens=4)
    blocks = allocator.open()
    allocator.reserve(blocks, 1)
    allocator.share(0)
    allocator.close(blocks)
    assert allocator.free_pages == 0
    assert allocator.release(0) == 0
    assert allocator.free_pages == 1
    with pytest.raises(AssertionError, match="page 0 was released more often"):
        allocator.release(0)
    with pytest.raises(AssertionError, match="page 0 is free"):
        allocator.share(0)


def copies() -> st.SearchStrategy[list[Copy]]:
    numbers = st.integers(0, 3)
    one = st.one_of(st.builds(SlotCopy, numbers, numbers), st.builds(PageCopy, numbers, numbers))
    return st.lists(one, max_size=12)


def run_at_once(state: dict[tuple[type, int], object], orders: list[Copy]) -> None:
    read = [state[type(order), order.source] for order in orders]
    for order, content in zip(orders, read, strict=True):
        state[type(order), order.target] = content


@settings(max_examples=300)
@given(copies())
def test_waves_do_what_the_orders_do_one_after_the_other(orders: list[Copy]) -> None:
    start = {(kind, number): object() for kind in (SlotCopy, PageCopy) for number in range(4)}
    one_by_one: dict[tuple[type, int], object] = dict(start)
    in_waves: dict[tuple[type, int], object] = dict(start)
    for order in orders:
        run_at_once(one_by_one, [order])
    groups = waves(orders)
    for group in groups:
        run_at_once(in_waves, group)
        targets = [(type(order), order.target) for order in group]
        assert len(set(targets)) == len(targets), "written twice at once"
        own = {(type(order), order.source) for order in group if order.source != order.target}
        assert not own & set(targets), "read and written at once"
    assert in_waves == one_by_one
    assert [order for group in groups for order in group] == orders


def test_independent_orders_are_one_wave() -> None:
    orders: list[Copy] = [SlotCopy(0, 1), SlotCopy(0, 2), PageCopy(1, 0), PageCopy(2, 3)]
    assert waves(orders) == [orders]
    assert waves([]) == []

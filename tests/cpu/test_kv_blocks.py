"""Pages and slots: nothing is lost, nothing is free that somebody holds, whatever sequences do."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.errors import OutOfPages
from deepinfer.kv.blocks import BlockAllocator, SequenceBlocks


class Books:
    """Two allocators in one: the real one, and lists that say what it should hold."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.allocator = BlockAllocator(rng.randint(0, 8), rng.randint(1, 4), rng.randint(1, 3))
        self.holders = [0] * self.allocator.pages
        self.live: list[SequenceBlocks] = []
        self.shared: list[int] = []  # pages that somebody who is no sequence holds too

    def step(self) -> None:
        rng, allocator = self.rng, self.allocator
        action = rng.randrange(6)
        if action == 0 and len(self.live) < allocator.slots:
            self.live.append(SequenceBlocks(allocator.take_slot()))
        elif action == 1 and self.live:
            self.grow(rng.choice(self.live), rng.randint(0, 10))
        elif action == 2 and self.live:
            self.close(self.live.pop(rng.randrange(len(self.live))))
        elif action == 3 and any(self.holders):
            page = rng.choice([page for page, count in enumerate(self.holders) if count])
            allocator.share(page)
            self.shared.append(page)
            self.holders[page] += 1
        elif action == 4 and self.shared:
            self.release(self.shared.pop(rng.randrange(len(self.shared))))
        elif action == 5 and self.live and len(self.live) < allocator.slots:
            blocks = rng.choice(self.live)  # it changes its slot
            slot = allocator.take_slot()
            allocator.give_slot(blocks.slot)
            blocks.slot = slot

    def grow(self, blocks: SequenceBlocks, tokens: int) -> None:
        before = list(blocks.pages)
        missing = -(-tokens // self.allocator.page_tokens) - len(before)
        free = self.holders.count(0)
        if missing > free:
            text = f"{missing} cache pages wanted, {free} of {self.allocator.pages} free"
            with pytest.raises(OutOfPages, match=text):
                self.allocator.reserve(blocks, tokens)
            assert blocks.pages == before
        else:
            self.allocator.reserve(blocks, tokens)
            assert blocks.pages[: len(before)] == before  # pages never move under a sequence
            for page in blocks.pages[len(before) :]:
                assert self.holders[page] == 0
                self.holders[page] = 1
            assert len(blocks.pages) == len(before) + max(missing, 0)

    def release(self, page: int) -> None:
        self.holders[page] -= 1
        assert self.allocator.release(page) == self.holders[page]

    def close(self, blocks: SequenceBlocks) -> None:
        for page in blocks.pages:
            self.release(page)
        self.allocator.give_slot(blocks.slot)

    def audit(self) -> None:
        allocator = self.allocator
        pages, slots = allocator.free_numbers()
        taken = [blocks.slot for blocks in self.live]
        assert allocator.references == self.holders
        assert sorted(pages) == [page for page, count in enumerate(self.holders) if not count]
        assert sorted(slots + taken) == list(range(allocator.slots))
        assert (allocator.free_pages, allocator.free_slots) == (len(pages), len(slots))


@pytest.mark.parametrize("seed", range(5))
def test_books_add_up_over_120_000_steps(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(600):
        books = Books(rng)
        for _ in range(200):
            books.step()
            books.audit()


@settings(max_examples=30)
@given(st.randoms(use_true_random=False))
def test_books_add_up_over_steps_that_shrink(rng: random.Random) -> None:
    books = Books(rng)
    for _ in range(40):
        books.step()
        books.audit()


def opened(allocator: BlockAllocator, tokens: int) -> SequenceBlocks:
    blocks = SequenceBlocks(allocator.take_slot())
    allocator.reserve(blocks, tokens)
    return blocks


def test_lowest_numbers_come_first_and_what_was_freed_last() -> None:
    allocator = BlockAllocator(pages=6, slots=3, page_tokens=16)
    first, second = opened(allocator, 33), opened(allocator, 16)
    assert (first.slot, first.pages) == (0, [0, 1, 2])
    assert (second.slot, second.pages) == (1, [3])
    for page in reversed(first.pages):
        allocator.release(page)
    allocator.give_slot(first.slot)
    third = opened(allocator, 64)
    assert (third.slot, third.pages) == (0, [0, 1, 2, 4])


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (16, 1), (17, 2), (96, 6)])
def test_pages_are_whole(tokens: int, pages: int) -> None:
    allocator = BlockAllocator(pages=6, slots=1, page_tokens=16)
    assert allocator.pages_for(tokens) == pages
    blocks = opened(allocator, tokens)
    assert len(blocks.pages) == pages
    allocator.reserve(blocks, 0)  # which gives nothing back
    assert len(blocks.pages) == pages


def test_a_page_is_free_when_its_last_holder_lets_go() -> None:
    allocator = BlockAllocator(pages=1, slots=2, page_tokens=4)
    opened(allocator, 1)
    allocator.share(0)
    assert allocator.release(0) == 1
    assert allocator.free_pages == 0
    assert allocator.release(0) == 0
    assert allocator.free_pages == 1
    with pytest.raises(AssertionError, match="page 0 was released more often"):
        allocator.release(0)
    with pytest.raises(AssertionError, match="page 0 is free"):
        allocator.share(0)


def test_what_is_not_there_is_not_given() -> None:
    allocator = BlockAllocator(pages=1, slots=1, page_tokens=4)
    blocks = opened(allocator, 4)
    with pytest.raises(AssertionError, match="all 1 state slots are in use"):
        allocator.take_slot()
    with pytest.raises(AssertionError, match="closed sequence"):
        allocator.reserve(SequenceBlocks(-1), 1)
    with pytest.raises(OutOfPages, match="1 cache pages wanted, 0 of 1 free"):
        allocator.reserve(blocks, 5)

"""The cache's books against a device made of lists: everybody reads what was computed for them."""

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.errors import OutOfPages
from deepinfer.kv.audit import audit
from deepinfer.kv.blocks import SequenceBlocks
from deepinfer.kv.manager import KVManager
from tests.cpu.kv_helpers import FakeDevice

TAKEN_BACK = 2  # most tokens by which a sequence of the walk is rolled back


@dataclass
class Live:
    """A sequence of the walk.

    Attributes:
        tokens: its ids, prompt and more; extra: keys of its first pages.
        computed: how many of them the device has; most: how many it had at most.
        kept: up to where others may share its pages.
        floor: depth of the checkpoint in its past: what was before is not in its slot.
    """

    blocks: SequenceBlocks
    tokens: list[int]
    extra: list[int]
    computed: int
    most: int
    kept: int
    floor: int


class Walk:
    """Random operations on a tiny cache; the device runs every order, spoils what is free."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        checkpoints, self.sequences = rng.randint(0, 3), rng.randint(1, 3)
        size = rng.randint(1, 3)
        self.manager = KVManager(rng.randint(2, 8), self.sequences + checkpoints, size, checkpoints)
        self.device = FakeDevice(self.manager, rng.randint(1, 4), slack=size + TAKEN_BACK)
        self.live: list[Live] = []
        self.opened = self.hits = 0

    def step(self) -> None:
        actions = [self.open, self.open, self.extend, self.extend, self.extend, self.checkpoint,
                   self.fork, self.end, self.roll_back]  # fmt: skip
        action = self.rng.choice(actions)
        if action == self.open:
            self.open()
        elif self.live:
            one = self.rng.choice(self.live)
            action(one)  # type: ignore[call-arg]
        self.device.poison()
        audit(self.manager, [(one.blocks, one.computed) for one in self.live])
        if self.live:
            self.check(self.rng.choice(self.live))

    def letter(self) -> int:
        """Nearly always the same, so that many sequences begin alike."""
        return self.rng.randrange(12) // 11

    def values(self, one: Live) -> list[int]:
        """What the device holds for its tokens: the content of a page depends on its extra key."""
        size = self.manager.page_tokens
        keys = dict(enumerate(one.extra))
        return [token + 10 * keys.get(i // size, 0) for i, token in enumerate(one.tokens)]

    def check(self, one: Live) -> None:
        assert self.device.read(one.blocks, one.computed) == self.values(one)[: one.computed]

    def open(self) -> None:
        rng, size = self.rng, self.manager.page_tokens
        tokens = [self.letter() for _ in range(rng.randint(1, 4 * size + 1))]
        extra = [0] * rng.randrange(2) + [rng.randrange(10) // 9]
        reuse = rng.random() < 0.9
        depth, pages = self.best(tokens, extra) if reuse else (0, [])
        idle = sum(self.manager.tree.is_idle(page) for page in pages)
        wanted = self.manager.pages_for(len(tokens)) - len(pages)
        fits = wanted <= self.manager.available_pages - idle and len(self.live) < self.sequences
        if not fits:
            with pytest.raises(OutOfPages):
                self.manager.open(tokens, extra, reuse=reuse)
            return
        opened = self.manager.open(tokens, extra, reuse=reuse)
        assert (opened.cached_tokens, opened.blocks.pages) == (depth, pages)
        assert depth <= opened.known_tokens < len(tokens)
        self.device.copy(opened.copies)
        self.live.append(Live(opened.blocks, tokens, extra, depth, depth, depth, depth))
        self.check(self.live[-1])
        self.opened += 1
        self.hits += depth > 0

    def best(self, tokens: list[int], extra: list[int]) -> tuple[int, list[int]]:
        """The deepest checkpoint before the last token, found by going through all of them."""
        size = self.manager.page_tokens
        found: tuple[int, list[int]] = (0, [])
        for node in self.manager.tree.nodes():
            path = []
            step = node
            while step.parent is not None:
                path.insert(0, step)
                step = step.parent
            letters = [i for n in path for i in memoryview(n.key[0]).cast("i")]
            keys = [extra[i] if i < len(extra) else () for i in range(len(path))]
            same = tokens[: node.depth] == letters and [n.key[1] for n in path] == keys
            if node.slot >= 0 and same and found[0] < node.depth < len(tokens):
                found = node.depth, [n.page for n in path]
        assert found[0] % size == 0
        return found

    def extend(self, one: Live) -> None:
        target = min(one.computed + self.rng.randint(1, 4), self.manager.pages * 3)
        missing = self.manager.pages_for(target) - len(one.blocks.pages)
        before, available = list(one.blocks.pages), self.manager.available_pages
        cached = list(self.manager.tree.nodes())
        if missing > available:
            with pytest.raises(OutOfPages):
                self.manager.reserve(one.blocks, target)
            assert one.blocks.pages == before
            assert list(self.manager.tree.nodes()) == cached
            return
        self.manager.reserve(one.blocks, target)
        while len(one.tokens) < target:
            one.tokens.append(self.letter())
        self.device.write(one.blocks, one.computed, self.values(one)[one.computed : target])
        one.computed = target
        one.most = max(one.most, target)

    def checkpoint(self, one: Live) -> None:
        size = self.manager.page_tokens
        depth = (one.computed - self.rng.randint(0, 1)) // size * size
        if depth > one.kept:
            replace = self.rng.random() < 0.8
            order = self.manager.checkpoint(
                one.blocks, one.tokens, depth, one.extra, replace=replace
            )
            self.device.copy([order] if order else [])
            one.kept = depth

    def fork(self, one: Live) -> None:
        size = self.manager.page_tokens
        count = max(one.computed - self.rng.randint(0, 1), one.most - TAKEN_BACK, one.floor)
        fits = len(self.live) < self.sequences and (
            count % size == 0 or self.manager.available_pages > 0
        )
        if not fits:
            with pytest.raises(OutOfPages):
                self.manager.fork(one.blocks, count)
            return
        blocks, copies = self.manager.fork(one.blocks, count)
        self.device.copy(copies)
        full = count // size * size
        one.kept = max(one.kept, full)
        tokens = one.tokens[: count + 1]
        self.live.append(Live(blocks, tokens, list(one.extra), count, one.most, full, one.floor))
        self.check(self.live[-1])

    def roll_back(self, one: Live) -> None:
        target = max(one.computed - self.rng.randint(0, 2), one.kept, one.most - TAKEN_BACK)
        if target < one.computed:
            self.manager.roll_back(one.blocks, target)
            one.computed = target
            del one.tokens[target:]

    def end(self, one: Live) -> None:
        self.live.remove(one)
        if self.rng.random() < 0.8:
            # The last tokens may not be known yet.
            known = max(one.computed - self.rng.choice([0, 0, 1, 2, 5]), one.floor)
            self.manager.retire(one.blocks, one.tokens[:known], one.computed, one.extra)
        else:
            self.manager.free(one.blocks)
        if self.rng.random() < 0.02:
            self.manager.tree.clear()

    def finish(self) -> None:
        for one in self.live:
            self.manager.free(one.blocks)
        audit(self.manager, [])
        assert self.manager.available_pages == self.manager.pages
        self.manager.tree.clear()
        audit(self.manager, [])
        assert self.manager.allocator.free_pages == self.manager.pages


@pytest.mark.parametrize("seed", range(4))
def test_random_walks(seed: int) -> None:
    rng = random.Random(seed)
    opened = hits = 0
    for _ in range(250):
        walk = Walk(rng)
        for _ in range(300):
            walk.step()
        walk.finish()
        opened, hits = opened + walk.opened, hits + walk.hits
    assert hits > opened / 20  # the walk goes where it is to go


@settings(max_examples=30)
@given(st.randoms(use_true_random=False))
def test_random_walks_that_shrink(rng: random.Random) -> None:
    walk = Walk(rng)
    for _ in range(40):
        walk.step()
    walk.finish()


# --- one rule at a time; a page is four tokens ---


def kept(manager: KVManager) -> list[int]:
    """Depths of all checkpoints."""
    return sorted(node.depth for node in manager.tree.nodes() if node.slot >= 0)


def computed(manager: KVManager, tokens: list[int]) -> SequenceBlocks:
    """A sequence that has computed all of `tokens`."""
    blocks = manager.open(tokens).blocks
    manager.reserve(blocks, len(tokens))
    return blocks


def test_reasons_of_misses() -> None:
    manager = KVManager(16, 4, 4, 2)
    misses = manager.tree.counters.misses
    for tokens, reason in (
        ([1], "too_short"),
        ([1] * 4, "too_short"),  # one of its tokens has to be computed
        ([1] * 5, "empty"),
        ([2] * 5, "diverged"),
        ([1] * 5, "no_checkpoint"),
    ):
        before = misses.get(reason, 0)
        blocks = computed(manager, tokens)
        assert misses[reason] == before + 1, (tokens, reason)
        if reason == "empty":
            manager.tree.insert(tokens, (), blocks.pages[:1])
        manager.free(blocks)
    manager.free(manager.open([1] * 5, reuse=False).blocks)
    assert misses["disabled"] == 1
    manager.retire(computed(manager, [1] * 5), [1] * 5, 5)
    assert manager.open([1] * 5).cached_tokens == 4
    assert (manager.tree.counters.hits, manager.tree.counters.tokens_reused) == (1, 4)


def test_a_new_sequence_must_leave_the_spare_pages() -> None:
    manager = KVManager(4, 2, 4, 0)
    with pytest.raises(OutOfPages, match="5 cache pages wanted, 4 of 4 available"):
        manager.open([1] * 9, spare=2)
    assert manager.open([1] * 9, spare=1).blocks.pages == []


def test_slots_for_checkpoints_are_not_for_sequences() -> None:
    manager = KVManager(4, 3, 4, 2)
    blocks = manager.open([1]).blocks
    with pytest.raises(OutOfPages, match="all 1 state slots for sequences are in use"):
        manager.open([1])
    with pytest.raises(OutOfPages, match="all 1 state slots"):
        manager.fork(blocks, 0)


@pytest.mark.parametrize(("known", "depth"), [(12, 12), (11, 8), (8, 8), (7, None), (0, None)])
def test_a_slot_serves_for_a_border_that_is_a_page_behind_at_most(
    known: int, depth: int | None
) -> None:
    manager = KVManager(4, 2, 4, 1)
    manager.retire(computed(manager, [1] * 12), [1] * known, 12)
    assert kept(manager) == ([] if depth is None else [depth])
    audit(manager, [])


@pytest.mark.parametrize("running", [True, False])
def test_keeping_what_is_kept_already_counts_as_use(running: bool) -> None:
    """And makes no second checkpoint of it."""
    manager = KVManager(16, 4, 4, 2)
    for token in (1, 2):
        manager.retire(computed(manager, [token] * 4), [token] * 4, 4)
    blocks = computed(manager, [1] * 4)
    if running:
        assert manager.checkpoint(blocks, [1] * 4, 4) is None
        manager.free(blocks)
    else:
        manager.retire(blocks, [1] * 4, 4)
    audit(manager, [])
    manager.tree.evict()
    assert manager.open([1] * 5).cached_tokens == 4


def test_a_sequence_is_closed_once() -> None:
    manager = KVManager(4, 2, 4, 1)
    blocks = computed(manager, [1] * 5)
    manager.retire(blocks, [1] * 5, 5)
    assert blocks == SequenceBlocks(-1)
    for close in (manager.free, lambda gone: manager.retire(gone, [1] * 5, 5)):
        with pytest.raises(AssertionError, match="closed"):
            close(blocks)


def test_nobody_is_taken_back_into_a_shared_page() -> None:
    manager = KVManager(4, 2, 4, 1)
    blocks = computed(manager, [1] * 9)
    manager.checkpoint(blocks, [1] * 9, 8)
    manager.roll_back(blocks, 8)
    assert len(blocks.pages) == 2
    with pytest.raises(AssertionError, match="would be written to"):
        manager.roll_back(blocks, 7)


def test_the_audit_finds_what_is_wrong() -> None:
    def broken(message: str, harm: Callable[[KVManager, SequenceBlocks], object]) -> None:
        manager = KVManager(8, 4, 4, 2)
        manager.retire(computed(manager, [2] * 9), [2] * 9, 9)
        blocks = computed(manager, [1] * 9)
        audit(manager, [(blocks, 9)])
        harm(manager, blocks)
        with pytest.raises(AssertionError, match=message):
            audit(manager, [(blocks, 9)])

    broken("holders", lambda manager, blocks: blocks.pages.pop())
    broken("page twice", lambda manager, blocks: blocks.pages.append(blocks.pages[0]))
    broken("holders", lambda manager, blocks: manager.allocator.share(blocks.pages[0]))
    broken("holders", lambda manager, blocks: manager.allocator.release(blocks.pages[0]))
    broken("slots", lambda manager, blocks: manager.allocator.take_slot())
    broken("slots", lambda manager, blocks: manager.allocator.give_slot(blocks.slot))
    broken("is shared", lambda manager, blocks: manager.tree.insert([1] * 12, (), blocks.pages))
    broken("tokens in", lambda manager, blocks: manager.roll_back(blocks, 8))
    broken("idle", lambda manager, blocks: manager.tree._idle.popitem())
    broken("checkpoints", lambda manager, blocks: manager.tree._owners.popitem())

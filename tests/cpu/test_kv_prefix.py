"""The prefix tree: content decides, only checkpoints are hit, what was used least recently goes."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.kv.blocks import BlockAllocator, SequenceBlocks
from deepinfer.kv.prefix import Node, PrefixTree, page_keys

PAGE = 4


class Cache:
    """A tree and sequences that fill it; token lists are texts, a page is four letters."""

    def __init__(self, checkpoints: int = 4, pages: int = 32) -> None:
        self.allocator = BlockAllocator(pages, 8, PAGE)
        self.tree = PrefixTree(self.allocator, checkpoints)

    def compute(self, text: str) -> SequenceBlocks:
        blocks = SequenceBlocks(self.allocator.take_slot())
        self.allocator.reserve(blocks, len(text))
        return blocks

    def keep(self, text: str, *, state: bool = True) -> Node:
        """A sequence computes `text`, leaves it in the tree, with its slot or without, and ends."""
        blocks = self.compute(text)
        node = self.tree.insert(ids(text), (), blocks.pages)
        if state and node.slot < 0:
            self.tree.adopt(node, blocks.slot)
        else:
            self.allocator.give_slot(blocks.slot)
        self.tree.release(blocks.pages)
        self.tree.touch(node)
        return node

    def found(self, text: str, limit: int = 10**6) -> tuple[int, int]:
        """Depth of the hit, tokens known."""
        match = self.tree.match(ids(text), (), min(limit, len(text)))
        assert len(match.pages) * PAGE == match.node.depth
        return match.node.depth, match.known

    def held(self) -> set[str]:
        """All prefixes in the tree."""
        return {text_of(node) for node in self.tree.nodes()}


def ids(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def text_of(node: Node) -> str:
    text = ""
    while node.parent is not None:
        letters = memoryview(node.key[0]).cast("i")
        text = "".join(map(chr, letters)) + text
        node = node.parent
    return text


def test_only_a_checkpoint_is_hit_and_the_deepest_one_within_the_limit() -> None:
    cache = Cache()
    cache.keep("aaaabbbbccccdddd", state=False)
    assert cache.found("aaaabbbbccccdddd") == (0, 16)
    cache.keep("aaaabbbb")
    cache.keep("aaaabbbbcccc")
    assert cache.found("aaaabbbbccccdddd") == (12, 16)
    assert cache.found("aaaabbbbccccdddd", limit=11) == (8, 8)
    assert cache.found("aaaabbbbccccdddd", limit=12) == (12, 12)
    assert cache.found("aaaabbbbcccx") == (8, 8)
    assert cache.found("aaaabbbxcccc") == (0, 4)
    assert cache.found("xaaaabbbb") == (0, 0)
    assert cache.found("aaa") == (0, 0)


def test_a_page_differs_by_what_came_before_it() -> None:
    cache = Cache()
    cache.keep("aaaabbbb")
    cache.keep("ccccbbbb")
    assert cache.held() == {"aaaa", "aaaabbbb", "cccc", "ccccbbbb"}
    assert cache.found("bbbb") == (0, 0)


def test_extra_keys_tell_pages_with_the_same_tokens_apart() -> None:
    cache = Cache()
    for image in ("cat", "dog"):
        blocks = cache.compute("iiiiaaaa")
        node = cache.tree.insert(ids("iiiiaaaa"), [image], blocks.pages)
        cache.tree.adopt(node, blocks.slot)
    cat = cache.tree.match(ids("iiiiaaaa"), ["cat"], 8)
    dog = cache.tree.match(ids("iiiiaaaa"), ["dog", ()], 8)
    assert cat.known == dog.known == 8
    assert not set(cat.pages) & set(dog.pages)
    assert cache.tree.match(ids("iiiiaaaa"), (), 8).known == 0
    assert cache.tree.match(ids("iiiiaaaa"), ["cat", "cat"], 8).known == 4


class SameHash:
    """An extra key of which all have the same hash."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __hash__(self) -> int:
        return 1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SameHash) and other.name == self.name


def test_equal_hashes_are_no_equal_content() -> None:
    cache = Cache()
    blocks = cache.compute("aaaa")
    cache.tree.insert(ids("aaaa"), [SameHash("x")], blocks.pages)
    assert cache.tree.match(ids("aaaa"), [SameHash("x")], 4).known == 4
    assert cache.tree.match(ids("aaaa"), [SameHash("y")], 4).known == 0


@given(st.lists(st.integers(0, 2**31 - 1), max_size=12), st.lists(st.integers(0, 2), max_size=12))
def test_keys_are_equal_exactly_where_tokens_are(first: list[int], second: list[int]) -> None:
    def keys(tokens: Sequence[int]) -> list[object]:
        return list(page_keys(tokens, (), 3, len(tokens) // 3))

    for tokens in (first, second):
        for other in (first, second):
            for number, key in enumerate(keys(tokens)):
                same = tokens[3 * number : 3 * number + 3] == other[3 * number : 3 * number + 3]
                place = keys(other)[number : number + 1]
                assert (place == [key]) == (same and bool(place))


def test_the_least_recently_used_leaf_goes_first() -> None:
    cache = Cache()
    cache.keep("aaaabbbb")
    cache.keep("cccc")
    cache.keep("aaaadddd")
    for left in (
        {"aaaa", "cccc", "aaaadddd"},
        {"aaaa", "aaaadddd"},
        {"aaaa"},
        set(),
    ):
        cache.tree.evict()
        assert cache.held() == left
    assert cache.tree.counters.pages_evicted == 4
    assert cache.allocator.free_pages == cache.allocator.pages
    assert cache.allocator.free_slots == cache.allocator.slots


def test_a_hit_counts_as_use() -> None:
    cache = Cache()
    cache.keep("aaaabbbb")
    cache.keep("cccc")
    match = cache.tree.match(ids("aaaabbbb"), (), 8)
    cache.tree.use(match)
    cache.tree.release(match.pages)
    for left in ({"aaaa", "aaaabbbb"}, {"aaaa"}):
        cache.tree.evict()
        assert cache.held() == left


def test_pages_in_use_are_not_evicted() -> None:
    cache = Cache()
    cache.keep("aaaabbbb")
    cache.keep("cccc")
    cache.tree.use(cache.tree.match(ids("aaaabbbb"), (), 8))
    assert cache.tree.idle_pages == 1
    cache.tree.evict()
    assert cache.held() == {"aaaa", "aaaabbbb"}
    assert cache.tree.idle_pages == 0


def test_every_eviction_frees_a_page() -> None:
    """Also when an idle page lies before a busy one: nodes fall, the sequence keeps its pages."""
    cache = Cache()
    cache.keep("aaaa", state=False)
    blocks = cache.compute("aaaabbbb")
    cache.tree.insert(ids("aaaabbbb"), (), blocks.pages)  # its first page is not the tree's
    assert cache.tree.idle_pages == 1
    free = cache.allocator.free_pages
    cache.tree.evict()
    assert cache.allocator.free_pages == free + 1
    assert cache.held() == set()
    assert [cache.allocator.references[page] for page in blocks.pages] == [1, 1]


def test_the_least_recently_used_checkpoint_goes_first() -> None:
    cache = Cache(checkpoints=2)
    first, second = cache.keep("aaaa"), cache.keep("bbbb")
    assert not cache.tree.has_room()
    match = cache.tree.match(ids("aaaa"), (), 4)
    cache.tree.use(match)
    cache.tree.release(match.pages)
    cache.tree.evict_checkpoint()
    assert first.slot >= 0
    assert second.slot < 0
    assert cache.tree.has_room()
    assert cache.tree.counters.checkpoints_evicted == 1
    with pytest.raises(AssertionError, match="no room"):
        cache.tree.adopt(first, 7)


def test_a_checkpoint_that_is_made_again_counts_as_used() -> None:
    cache = Cache()
    first, second = cache.keep("aaaa"), cache.keep("bbbb")
    assert cache.keep("aaaa") is first
    cache.tree.evict_checkpoint()
    assert first.slot >= 0
    assert second.slot < 0


def order_after_losing(kept: str, *others: str) -> list[str]:
    """Last pages in the order in which they go, `kept` being used last and losing its checkpoint.

    "d" is the page that was used least recently.
    """
    cache = Cache()
    blocks = cache.compute(kept)
    node = cache.tree.insert(ids(kept), (), blocks.pages)
    cache.tree.adopt(node, blocks.slot)
    for text in ("dddd", *others):
        cache.keep(text)
    cache.tree.release(blocks.pages)
    cache.tree.evict_checkpoint()
    assert node.slot < 0
    order = []
    while cache.tree.idle_pages:
        before = cache.held()
        cache.tree.evict()
        order.append("".join(sorted(text[-1] for text in before - cache.held())))
    return order


def test_pages_that_lead_to_no_checkpoint_any_more_go_first() -> None:
    assert order_after_losing("aaaabbbbcccc") == ["c", "b", "a", "d"]


@pytest.mark.parametrize(
    ("others", "order"),
    [
        (["aaaa"], ["c", "b", "d", "a"]),  # up to a checkpoint
        (["aaaabbbbxxxx"], ["c", "d", "x", "b", "a"]),  # up to a branch
        (["aaaabbbbccccxxxx"], ["d", "x", "c", "b", "a"]),  # it leads to one itself
    ],
)
def test_pages_that_lead_to_another_checkpoint_stay(others: list[str], order: list[str]) -> None:
    assert order_after_losing("aaaabbbbcccc", *others) == order


def test_clear_forgets_everything_and_takes_nothing_from_sequences() -> None:
    cache = Cache()
    cache.keep("aaaabbbb")
    cache.keep("aaaacccc")
    match = cache.tree.match(ids("aaaabbbb"), (), 8)
    cache.tree.use(match)
    cache.tree.clear()
    assert cache.held() == set()
    assert cache.tree.idle_pages == cache.tree.slots_owned == 0
    assert [cache.allocator.references[page] for page in match.pages] == [1, 1]
    cache.tree.release(match.pages)
    assert cache.allocator.free_pages == cache.allocator.pages


def test_a_deep_path_is_no_recursion() -> None:
    cache = Cache(pages=5000)
    cache.keep("a" * PAGE * 5000)
    assert cache.found("a" * PAGE * 5000) == (PAGE * 5000, PAGE * 5000)
    cache.tree.clear()
    assert cache.allocator.free_pages == 5000

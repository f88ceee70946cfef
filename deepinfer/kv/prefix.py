"""Which token prefixes the cache still holds: a tree with a node for each page.

Knows tokens, pages and state slots by number; must not know sequences, requests or torch. A page
alone is no place to go on from: window keys, open groups and the n-gram history of that place are
needed too. They are in a state slot, so only a node that owns a slot, a *checkpoint*, can be hit. A
hit costs a copy of that slot, and the pages are shared.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from struct import Struct

from deepinfer.kv.blocks import BlockAllocator

# Content of a page: its token ids as bytes, and what else decides about it (an image's hash).
PageKey = tuple[bytes, Hashable]


def page_keys(
    tokens: Sequence[int], extra_keys: Sequence[Hashable], page_tokens: int, pages: int
) -> Iterator[PageKey]:
    """Keys of the first `pages` pages of a sequence; they are compared by content, never by hash.

    Args:
        tokens: ids of at least `pages` * `page_tokens` tokens, in [0, 2^31).
        extra_keys: one for each page that has one; () for the pages after them.
    """
    pack = Struct(f"{page_tokens}i").pack
    for number in range(pages):
        first = number * page_tokens
        extra = extra_keys[number] if number < len(extra_keys) else ()
        yield pack(*tokens[first : first + page_tokens]), extra


class Node:
    """One page of a prefix.

    Attributes:
        parent, key: the node before it and its place there; the root has neither.
        page: page number, -1 in the root.
        depth: tokens up to the end of the page.
        children: nodes after it.
        slot: state slot with the state after `depth` tokens, -1 without.
    """

    __slots__ = ("children", "depth", "key", "page", "parent", "slot")

    def __init__(self, parent: "Node | None", key: PageKey, page: int, depth: int) -> None:
        self.parent = parent
        self.key = key
        self.page = page
        self.depth = depth
        self.children: dict[PageKey, Node] = {}
        self.slot = -1


@dataclass(frozen=True)
class Match:
    """What the tree knows of some tokens.

    Attributes:
        node: the deepest checkpoint, the root (depth 0) when there is none.
        pages: the pages up to `node`.
        known: tokens that the tree has pages for, a checkpoint there or not.
    """

    node: Node
    pages: list[int]
    known: int


@dataclass
class PrefixCounters:
    """What became of look-ups, and what was given up for room.

    Attributes:
        hits: look-ups that found a checkpoint; tokens_reused: what these did not compute again.
        misses: look-ups that did not, by reason: `disabled` (no checkpoints, or the request does
            not want any), `too_short` (less than a page and a token), `empty` (nothing is held),
            `diverged` (the first page is not held), `no_checkpoint` (pages are, but no state).
        pages_evicted, checkpoints_evicted: given up because something newer needed them.
    """

    hits: int = 0
    tokens_reused: int = 0
    misses: dict[str, int] = field(default_factory=dict)
    pages_evicted: int = 0
    checkpoints_evicted: int = 0

    def miss(self, reason: str) -> None:
        """Count one more miss for `reason`."""
        self.misses[reason] = self.misses.get(reason, 0) + 1


class PrefixTree:
    """Prefixes of whole pages, the least recently used given up first.

    The tree is one holder of each of its pages. A page that sequences hold too is *busy*; giving it
    up would bring nothing, so only the others, the *idle* ones, are.

    Args:
        allocator: the books on pages and slots.
        checkpoints: most slots that the tree may own; 0 = it stays empty.
    """

    def __init__(self, allocator: BlockAllocator, checkpoints: int) -> None:
        self.allocator = allocator
        self.checkpoints = checkpoints
        self.counters = PrefixCounters()
        self.root = Node(None, (b"", ()), -1, 0)
        self._node_of_page: list[Node | None] = [None] * allocator.pages
        # Both in the order of last use. Paths enter `_idle` deepest node first, so the first node
        # is a leaf as a rule.
        self._idle: OrderedDict[Node, None] = OrderedDict()
        self._owners: OrderedDict[Node, None] = OrderedDict()

    @property
    def idle_pages(self) -> int:
        """Pages that only the tree holds: `evict` can free each of them."""
        return len(self._idle)

    @property
    def slots_owned(self) -> int:
        """Checkpoints in the tree."""
        return len(self._owners)

    def nodes(self) -> Iterator[Node]:
        """All nodes but the root, parents first."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def is_idle(self, page: int) -> bool:
        """Whether the tree believes to be the only holder of `page`."""
        return self._node_of_page[page] in self._idle

    def match(self, tokens: Sequence[int], extra_keys: Sequence[Hashable], limit: int) -> Match:
        """The longest prefix of `tokens` that is held, at most `limit` tokens; changes nothing."""
        size = self.allocator.page_tokens
        node = best = self.root
        pages: list[int] = []
        for key in page_keys(tokens, extra_keys, size, limit // size):
            child = node.children.get(key)
            if child is None:
                break
            node = child
            pages.append(node.page)
            if node.slot >= 0:
                best = node
        return Match(best, pages[: best.depth // size], node.depth)

    def use(self, match: Match) -> None:
        """A sequence holds the pages of a hit from now on, besides the tree."""
        for page in match.pages:
            self.allocator.share(page)
            node = self._node_of_page[page]
            assert node is not None, f"page {page} is not in the tree"
            self._idle.pop(node, None)
        self._owners.move_to_end(match.node)

    def release(self, pages: Sequence[int]) -> None:
        """A sequence gives up `pages`, the first of its tokens first."""
        for page in reversed(pages):
            if self.allocator.release(page) == 1:
                node = self._node_of_page[page]
                if node is not None:  # the holder that is left is the tree
                    self._idle[node] = None

    def insert(
        self, tokens: Sequence[int], extra_keys: Sequence[Hashable], pages: Sequence[int]
    ) -> Node:
        """The node of the prefix that `pages` hold, made of them where the tree lacks it.

        The caller holds `pages` at least until this returns. Where the tree has a page with the
        same content already, that one stays.
        """
        node = self.root
        size = self.allocator.page_tokens
        for page, key in zip(pages, page_keys(tokens, extra_keys, size, len(pages)), strict=True):
            child = node.children.get(key)
            if child is None:
                child = Node(node, key, page, node.depth + size)
                node.children[key] = child
                assert self._node_of_page[page] is None, f"page {page} is in the tree already"
                self._node_of_page[page] = child
                self.allocator.share(page)
            node = child
        return node

    def touch(self, node: Node) -> None:
        """Count `node` and what leads to it as just used."""
        if node in self._owners:
            self._owners.move_to_end(node)
        while node.parent is not None:
            if node in self._idle:
                self._idle.move_to_end(node)
            node = node.parent

    def has_room(self) -> bool:
        """Whether a checkpoint more needs no other one to go."""
        return len(self._owners) < self.checkpoints

    def adopt(self, node: Node, slot: int) -> None:
        """Make `node` a checkpoint by giving it `slot`; there must be room."""
        assert node.slot < 0 and self.has_room(), "no room for a checkpoint"
        node.slot = slot
        self._owners[node] = None

    def evict_checkpoint(self) -> None:
        """Free the slot of the least recently used checkpoint; its pages stay.

        Pages that only led to it are of little use from now on and are the next to go.
        """
        node, _ = self._owners.popitem(last=False)
        self.allocator.give_slot(node.slot)
        node.slot = -1
        self.counters.checkpoints_evicted += 1
        for useless in reversed(self._tail(node)):
            if useless in self._idle:
                self._idle.move_to_end(useless, last=False)

    def _tail(self, node: Node) -> list[Node]:
        """`node` and the nodes before it that lead to no checkpoint, deepest first."""
        tail: list[Node] = []
        if not node.children:
            while node.parent is not None and node.slot < 0 and len(node.children) < 2:
                tail.append(node)
                node = node.parent
        return tail

    def evict(self) -> None:
        """Give up the least recently used idle page and what comes after it; frees one or more."""
        node = next(iter(self._idle))
        self.counters.pages_evicted += self._drop(node)

    def forget(self, tokens: Sequence[int], extra_keys: Sequence[Hashable], beyond: int) -> None:
        """Give up what is held of `tokens` beyond the first `beyond`, and what comes after it."""
        size, node = self.allocator.page_tokens, self.root
        for key in page_keys(tokens, extra_keys, size, len(tokens) // size):
            child = node.children.get(key)
            if child is None:
                return
            if child.depth > beyond:
                self._drop(child)
                return
            node = child

    def clear(self) -> None:
        """Forget everything, as after a failure that may have left wrong content behind."""
        for node in list(self.root.children.values()):
            self._drop(node)

    def _drop(self, node: Node) -> int:
        """Remove a node and all nodes after it; returns how many."""
        assert node.parent is not None, "the root stays"
        del node.parent.children[node.key]
        stack, count = [node], 0
        while stack:
            gone = stack.pop()
            stack.extend(gone.children.values())
            count += 1
            self._idle.pop(gone, None)
            self._node_of_page[gone.page] = None
            self.allocator.release(gone.page)
            if gone.slot >= 0:
                del self._owners[gone]
                self.allocator.give_slot(gone.slot)
        return count

"""What sequences hold of the cache: pages, a state slot, and prefixes that others have computed.

Knows tokens and numbers of pages and slots; must not know requests, the model or torch. What has to
be copied on the device comes back as orders, which hold one after the other, before anything else
is written.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from deepinfer.errors import OutOfPages
from deepinfer.kv.blocks import BlockAllocator, Copy, PageCopy, SequenceBlocks, SlotCopy
from deepinfer.kv.prefix import Match, PrefixTree


@dataclass(frozen=True)
class Opened:
    """A new sequence.

    Attributes:
        blocks: its slot, and the pages of what it need not compute.
        cached_tokens: how much that is, a multiple of the page size, less than its tokens.
        known_tokens: up to where others have computed the same tokens, >= cached_tokens. Where it
            is greater, a checkpoint there would have been hit, so one ought to be made.
        copies: orders to run before its first forward.
    """

    blocks: SequenceBlocks
    cached_tokens: int
    known_tokens: int
    copies: list[Copy]


class KVManager:
    """One set of books for pages and slots of all sequences and of the prefix tree.

    A page that a sequence still writes to has no other holder: shared pages are full, and below
    what all of their holders have computed.

    A checkpoint is a state slot that belongs to a page border. Slots remember enough to be taken
    back by page_tokens tokens, so the slot of a sequence as it is serves for the last border that
    the sequence has passed.

    Args:
        pages, slots, page_tokens: the pool's sizes.
        prefix_checkpoints: how many of the slots may belong to the prefix tree; 0 = no reuse.
    """

    def __init__(self, pages: int, slots: int, page_tokens: int, prefix_checkpoints: int) -> None:
        assert 0 <= prefix_checkpoints <= slots, "more checkpoints than slots"
        self.allocator = BlockAllocator(pages, slots, page_tokens)
        self.tree = PrefixTree(self.allocator, prefix_checkpoints)
        self.page_tokens = page_tokens
        self.pages = pages

    def reset(self) -> None:
        """Begin anew with everything free and nothing kept, whoever held what; counters go on."""
        counters, slots = self.tree.counters, self.allocator.slots
        self.allocator = BlockAllocator(self.pages, slots, self.page_tokens)
        self.tree = PrefixTree(self.allocator, self.tree.checkpoints)
        self.tree.counters = counters

    @property
    def available_pages(self) -> int:
        """Pages that are free, or would be after giving up cached prefixes."""
        return self.allocator.free_pages + self.tree.idle_pages

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens."""
        return self.allocator.pages_for(tokens)

    def open(
        self,
        tokens: Sequence[int],
        extra_keys: Sequence[Hashable] = (),
        *,
        reuse: bool = True,
        spare: int = 0,
    ) -> Opened:
        """Start a sequence of `tokens`, behind the longest prefix that can be reused.

        At least one token is left to compute. No pages are reserved for it yet.

        Args:
            extra_keys: what decides about the content of a page besides its tokens, for the first
                pages one each, such as an image's hash; () for the others.
            reuse: False computes everything, as prompt log-probabilities need.
            spare: pages that must stay available besides those for all of `tokens`.

        Raises:
            OutOfPages: no slot is free, or the pages that are available do not suffice; nothing
                has changed then.
        """
        reuse = reuse and self.tree.checkpoints > 0
        limit = len(tokens) - 1 if reuse else 0
        match = self.tree.match(tokens, extra_keys, limit)
        wanted = self.pages_for(len(tokens)) - len(match.pages) + spare
        available = self.available_pages - sum(map(self.tree.is_idle, match.pages))
        if wanted > available:
            raise OutOfPages(f"{wanted} cache pages wanted, {available} of {self.pages} available")
        blocks = self._new()
        copies: list[Copy] = []
        if match.pages:
            self.tree.use(match)
            blocks.pages.extend(match.pages)
            copies.append(SlotCopy(match.node.slot, blocks.slot))
        self._count(match, len(tokens), reuse)
        return Opened(blocks, match.node.depth, match.known, copies)

    def reserve(self, blocks: SequenceBlocks, tokens: int) -> None:
        """Make room for `tokens` tokens in all, giving up cached prefixes as needed.

        Raises:
            OutOfPages: even that would not suffice; nothing has changed then.
        """
        missing = self.pages_for(tokens) - len(blocks.pages)
        if missing <= self.available_pages:
            while missing > self.allocator.free_pages:
                self.tree.evict()
        self.allocator.reserve(blocks, tokens)

    def checkpoint(
        self,
        blocks: SequenceBlocks,
        tokens: Sequence[int],
        depth: int,
        extra_keys: Sequence[Hashable] = (),
        *,
        replace: bool = True,
    ) -> SlotCopy | None:
        """Keep the first `depth` tokens of a running sequence for others.

        Args:
            tokens: `depth` of them or more.
            depth: a page border that the sequence has passed, by page_tokens tokens at most.
            replace: whether another checkpoint may have to go for it.

        Returns:
            The order that makes the checkpoint; None when there is one at this place already, or
            none can be made.
        """
        assert depth % self.page_tokens == 0, f"{depth} is no page border"
        if not depth or not self.tree.checkpoints or not (replace or self.tree.has_room()):
            return None
        node = self.tree.insert(tokens, extra_keys, blocks.pages[: depth // self.page_tokens])
        made = node.slot < 0
        if made:
            if not self.tree.has_room():
                self.tree.evict_checkpoint()
            self.tree.adopt(node, self.allocator.take_slot())
        self.tree.touch(node)
        return SlotCopy(blocks.slot, node.slot) if made else None

    def fork(self, blocks: SequenceBlocks, computed: int) -> tuple[SequenceBlocks, list[Copy]]:
        """A second sequence with the first `computed` tokens of `blocks`, and its orders.

        Full pages are shared, a page that is partly filled is copied.

        Args:
            computed: at most what `blocks` has computed, and by no more less than a sequence can
                be rolled back.

        Raises:
            OutOfPages: no slot or no page is available; nothing has changed then.
        """
        full, rest = divmod(computed, self.page_tokens)
        if rest and not self.available_pages:
            raise OutOfPages(f"1 cache page wanted, 0 of {self.pages} available")
        child = self._new()
        for page in blocks.pages[:full]:
            self.allocator.share(page)
        child.pages.extend(blocks.pages[:full])
        if not computed:
            return child, []
        copies: list[Copy] = [SlotCopy(blocks.slot, child.slot)]
        if rest:
            self.reserve(child, computed)
            copies.append(PageCopy(blocks.pages[full], child.pages[full]))
        return child, copies

    def roll_back(self, blocks: SequenceBlocks, computed: int) -> None:
        """Give back the pages behind the first `computed` tokens.

        The page that is written to next must not have been shared: nobody is taken back behind
        what was kept for others.
        """
        keep = self.pages_for(computed)
        self.tree.release(blocks.pages[keep:])
        del blocks.pages[keep:]
        if computed % self.page_tokens:
            page = blocks.pages[-1]
            assert self.allocator.references[page] == 1, f"shared page {page} would be written to"

    def free(self, blocks: SequenceBlocks) -> None:
        """End a sequence; what it has computed is lost, apart from what was kept before."""
        assert blocks.slot >= 0, "sequence closed twice"
        self.tree.release(blocks.pages)
        self.allocator.give_slot(blocks.slot)
        blocks.pages, blocks.slot = [], -1

    def retire(
        self,
        blocks: SequenceBlocks,
        tokens: Sequence[int],
        computed: int,
        extra_keys: Sequence[Hashable] = (),
    ) -> None:
        """End a sequence; its pages and its slot, as it is, stay for others as a checkpoint.

        Args:
            tokens: those of the sequence, as far as they are known.
            computed: how many tokens the cache holds, perhaps more than are known.
        """
        border = self._border(min(computed, len(tokens)), computed)
        if not border:
            self.free(blocks)
            return
        pages, slot = blocks.pages, blocks.slot
        assert slot >= 0, "sequence closed twice"
        node = self.tree.insert(tokens, extra_keys, pages[: border // self.page_tokens])
        if node.slot >= 0:
            self.allocator.give_slot(slot)
        else:
            if not self.tree.has_room():
                self.tree.evict_checkpoint()
            self.tree.adopt(node, slot)
        self.tree.release(pages)
        self.tree.touch(node)
        blocks.pages, blocks.slot = [], -1

    def _border(self, known: int, computed: int) -> int:
        """The last page border within `known` tokens, 0 where no checkpoint can be made of it."""
        border = known - known % self.page_tokens
        recoverable = computed - border <= self.page_tokens
        return border if recoverable and self.tree.checkpoints else 0

    def _new(self) -> SequenceBlocks:
        """A slot for a sequence; those set aside for checkpoints are not to be had."""
        set_aside = self.tree.checkpoints - self.tree.slots_owned
        if self.allocator.free_slots <= set_aside:
            most = self.allocator.slots - self.tree.checkpoints
            raise OutOfPages(f"all {most} state slots for sequences are in use")
        return SequenceBlocks(self.allocator.take_slot())

    def _count(self, match: Match, tokens: int, reuse: bool) -> None:
        counters = self.tree.counters
        if match.pages:
            counters.hits += 1
            counters.tokens_reused += match.node.depth
        elif not reuse:
            counters.miss("disabled")
        elif tokens <= self.page_tokens:
            counters.miss("too_short")
        elif match.known:
            counters.miss("no_checkpoint")
        else:
            counters.miss("diverged" if self.tree.root.children else "empty")

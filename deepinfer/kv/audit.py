"""Proof that the cache's books add up.

Knows every rule that pages, slots and the prefix tree must keep; must not repair anything.
"""

from collections import Counter
from collections.abc import Iterable

from deepinfer.kv.blocks import SequenceBlocks
from deepinfer.kv.manager import KVManager


def audit(manager: KVManager, live: Iterable[tuple[SequenceBlocks, int]]) -> None:
    """Check the books of `manager` against everybody who holds something.

    Takes time proportional to the size of the cache: for tests.

    Args:
        live: the blocks of every open sequence, and how many tokens it has computed.

    Raises:
        AssertionError: something is lost, has an owner too many, or is shared while it can still be
            written to; the message names it.
    """
    sequences = list(live)
    _audit_tree(manager)
    _audit_pages(manager, sequences)
    _audit_slots(manager, [blocks for blocks, _ in sequences])


def _audit_pages(manager: KVManager, sequences: list[tuple[SequenceBlocks, int]]) -> None:
    references, size = manager.allocator.references, manager.page_tokens
    holders = Counter(node.page for node in manager.tree.nodes())
    for blocks, _ in sequences:
        assert len(set(blocks.pages)) == len(blocks.pages), f"a page twice in {blocks.pages}"
        holders.update(blocks.pages)
    free, _ = manager.allocator.free_numbers()
    assert len(set(free)) == len(free), f"a page is free twice: {sorted(free)}"
    free_set = set(free)
    for page, count in enumerate(references):
        assert count == holders[page], f"page {page}: {holders[page]} holders, {count} counted"
        assert (count == 0) == (page in free_set), f"page {page}: {count} holders and free, or lost"
    for blocks, computed in sequences:
        assert computed <= len(blocks.pages) * size, f"{computed} tokens in {blocks.pages}"
        for number, page in enumerate(blocks.pages):
            shared = references[page] > 1
            full = (number + 1) * size <= computed
            assert full or not shared, f"page {page} is shared, and written to from {computed} on"


def _audit_slots(manager: KVManager, sequences: list[SequenceBlocks]) -> None:
    _, free = manager.allocator.free_numbers()
    owned = [node.slot for node in manager.tree.nodes() if node.slot >= 0]
    slots = sorted([*free, *owned, *(blocks.slot for blocks in sequences)])
    assert slots == list(range(manager.allocator.slots)), f"slots free, kept and in use: {slots}"
    assert len(owned) == manager.tree.slots_owned <= manager.tree.checkpoints, "checkpoints"
    most = manager.allocator.slots - manager.tree.checkpoints
    assert len(sequences) <= most, f"{len(sequences)} sequences, {most} slots for them"


def _audit_tree(manager: KVManager) -> None:
    tree, references = manager.tree, manager.allocator.references
    seen: set[int] = set()
    idle = 0
    for node in tree.nodes():
        parent = node.parent
        assert parent is not None and parent.children[node.key] is node, f"page {node.page}: links"
        assert node.depth == parent.depth + manager.page_tokens, f"page {node.page}: depth"
        assert node.page not in seen, f"page {node.page} is in the tree twice"
        seen.add(node.page)
        alone = references[node.page] == 1
        assert tree.is_idle(node.page) == alone, f"page {node.page}: idle is not {alone}"
        idle += alone
    assert idle == tree.idle_pages, f"{tree.idle_pages} idle pages, {idle} in the tree"

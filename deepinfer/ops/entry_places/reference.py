"""Reference of entry_places.

Knows page tables; must not know what an entry holds or why it was chosen.
"""

import torch
from torch import Tensor


def entry_places(
    entries: Tensor, sequence: Tensor, page_table: Tensor, entries_per_page: int
) -> Tensor:
    """Flat places of entries in the pages of their sequences: page * e + offset.

    Args:
        entries: [T, K] int32 or int64 entry numbers, below M * e; -1 (or less): none.
        sequence: [T] int64 row of the page table of each row.
        page_table: [B, M] int64 page numbers.
        entries_per_page: e.

    Returns:
        [T, K] int32, -1 where there is no entry. Places must be below 2^31.
    """
    entry = entries.long().clamp_min(0)
    columns = torch.div(entry, entries_per_page, rounding_mode="floor")
    pages = page_table[sequence.unsqueeze(-1), columns]
    places = pages * entries_per_page + entry % entries_per_page
    return torch.where(entries >= 0, places, -1).to(torch.int32)

"""Reference of cp_mirror: which rows a rank works on when each rank gets an early and a late slice.

Knows lengths of sequences; must not know what rows hold.
"""

import torch
from torch import Tensor


def local_starts(starts: Tensor, ranks: int) -> Tensor:
    """First place of each sequence among a rank's rows, [n + 1] int64, and their number.

    A sequence of q rows is cut into 2 * ranks pieces of ceil(q / (2 * ranks)), the last ones
    shorter or empty; a rank has two of them.
    """
    pieces = (starts[1:] - starts[:-1] + 2 * ranks - 1) // (2 * ranks)
    return torch.nn.functional.pad((2 * pieces).cumsum(0), (1, 0))


def cp_mirror(
    starts: Tensor, ranks: int, rank: int, total: int, length: int
) -> tuple[Tensor, Tensor]:
    """The rows of a rank, and where each row lies among the rows of all ranks.

    Rank r has pieces r and 2 * ranks - 1 - r of every sequence (see `local_starts`), one after the
    other: with causal attention all ranks have the same work.

    Args:
        starts: [n + 1] int64, first row of each sequence, then their number. total: rows, at least
            starts[n]. length: places of a rank, at least local_starts[n].

    Returns:
        mirror [length] int64: row at each place, -1 for padding; reverse [total] int64: rank *
        length + place of each row, -1 after the last sequence.
    """
    device = starts.device
    local = local_starts(starts, ranks)
    # The last entries are the ends: what lies behind belongs to an empty sequence.
    size = torch.nn.functional.pad(starts[1:] - starts[:-1], (0, 1))
    piece = ((size + 2 * ranks - 1) // (2 * ranks)).clamp_min(1)

    place = torch.arange(length, device=device)
    sequence = torch.searchsorted(local, place, right=True) - 1
    within, width = place - local[sequence], piece[sequence]
    number = torch.where(within < width, rank, 2 * ranks - 1 - rank)
    offset = number * width + within % width
    mirror = torch.where(offset < size[sequence], starts[sequence] + offset, -1)

    row = torch.arange(total, device=device)
    sequence = torch.searchsorted(starts, row, right=True) - 1
    within, width = row - starts[sequence], piece[sequence]
    number = within // width
    late = number >= ranks
    owner = torch.where(late, 2 * ranks - 1 - number, number)
    found = owner * length + local[sequence] + torch.where(late, width, 0) + within % width
    return mirror, torch.where(row < starts[-1], found, -1)

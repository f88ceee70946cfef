"""Reference of state_copy: rows of one table to places in another.

Knows rows and their numbers; must not know what state they hold.
"""

import torch
from torch import Tensor


def copy_rows(source: Tensor, target: Tensor, from_rows: Tensor, to_rows: Tensor) -> None:
    """target[to_rows[i]] = source[from_rows[i]], in place; a negative number skips the pair.

    Rows are copied bit for bit. Numbers in `to_rows` that are not negative must differ, and when
    both tables are one no row may be read that is also written: the order of copies is not defined.
    Numbers past the end of a table are errors that nobody reports.

    Args:
        source: [R, ...], any dtype; target: [R', ...], the same dtype and sizes of a row; either
            may have gaps between its rows.
        from_rows, to_rows: [n] int32 or int64.
    """
    if from_rows.shape[0] == 0 or source.shape[0] == 0 or target.shape[0] == 0:
        return
    keep = (from_rows >= 0) & (to_rows >= 0)
    # A skipped pair repeats the first one that is not skipped, so that every index is valid and
    # equal places get equal rows; when all are skipped, row 0 of the target is written to itself.
    first = keep.to(torch.uint8).argmax().view(1)
    chosen = torch.where(keep, torch.arange(keep.shape[0], device=keep.device), first)
    read, written = from_rows[chosen].clamp_min(0), to_rows[chosen].clamp_min(0)
    some = keep.any().view(-1, *[1] * (source.dim() - 1))
    target[written] = torch.where(some, source[read], target[written])

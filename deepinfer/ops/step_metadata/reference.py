"""Reference of the step metadata: where a row's window lies, where it is kept, what was assumed.

Knows positions, rings and rows of a step; must not know what a ring holds.

A token of this step is read from its row, an earlier one from its sequence's ring. Rings and rows
form one table: `rings` rings of `ring` places, then the rows of the step. When a step is planned
before the step ahead of it is finished, the plan takes all its drafts as accepted; the two fix-ups
put in what really was.
"""

import torch
from torch import Tensor


def window_index(
    positions: Tensor, starts: Tensor, slots: Tensor, first_row: Tensor, floors: Tensor,
    window: int, ring: int, rings: int,
) -> Tensor:  # fmt: skip
    """Places of the `window` tokens up to and including each row's own, oldest first.

    For the token at p = position - window + 1 .. position: -1 where p < floor or p < 0; where
    p >= start its row of this step, rings * ring + first_row + p - start; else
    slot * ring + p mod ring.

    Args:
        positions: [T] int64; starts: [T] int64, position of the first row of the row's sequence in
            this step; slots: [T] int64, the sequence's ring; first_row: [T] int64, the sequence's
            first row in this step; floors: [T] int64, first position that counts.

    Returns:
        [T, window] int32; places must stay below 2^31.
    """
    wanted = positions.unsqueeze(-1) + torch.arange(1 - window, 1, device=positions.device)
    start = starts.unsqueeze(-1)
    own = rings * ring + first_row.unsqueeze(-1) + wanted - start
    kept = slots.unsqueeze(-1) * ring + wanted % ring
    places = torch.where(wanted >= start, own, kept)
    valid = (wanted >= floors.unsqueeze(-1)) & (wanted >= 0)
    return torch.where(valid, places, -1).to(torch.int32)


def ring_targets(positions: Tensor, slots: Tensor, left: Tensor, ring: int) -> Tensor:
    """Places slot * ring + position mod ring of the rows that rings keep, -1 for the others.

    A ring keeps the last `ring` rows of its sequence, so no two rows have the same place.

    Args:
        positions, slots: [T] int64; left: [T] int64, rows from this one to the last of its
            sequence in this step, both included.

    Returns:
        [T] int64.
    """
    return torch.where(left <= ring, slots * ring + positions % ring, -1)


def fix_lengths(lengths: Tensor, planned: Tensor, accepted: Tensor, source: Tensor) -> None:
    """lengths -= planned - accepted[source] where source >= 0, in place.

    Args:
        lengths: [B] int32, lengths if all planned drafts were accepted; planned: [B] int32;
            accepted: [B'] int32, drafts that the step before accepted; source: [B] int32, each
            sequence's number in that step, negative for a new sequence.
    """
    if accepted.shape[0] == 0:
        return
    rejected = planned - accepted[source.clamp_min(0)]
    lengths.sub_(torch.where(source >= 0, rejected, 0))


def fix_token_ids(
    token_ids: Tensor, source: Tensor, sampled: Tensor, drafts: Tensor, draft_step: Tensor
) -> None:
    """Put the tokens of the step before into the rows that continue its sequences, in place.

    A row with source >= 0 takes sampled[source] at step 0 and drafts[source, step - 1] after;
    a row with negative source, or with a step outside of 0 .. n, keeps its token.

    Args:
        token_ids: [T] int64 or int32; source: [T] int32, the number that the row's sequence had in
            the step before; sampled: [B'], drafts: [B', n], int64 or int32; draft_step: [T] int32,
            the row's number in its sequence.
    """
    if sampled.shape[0] == 0:
        return
    tokens = torch.cat([sampled.unsqueeze(-1).to(drafts.dtype), drafts], dim=-1)
    valid = (source >= 0) & (draft_step >= 0) & (draft_step < tokens.shape[1])
    known = tokens[torch.where(valid, source, 0), torch.where(valid, draft_step, 0)]
    token_ids.copy_(torch.where(valid, known.to(token_ids.dtype), token_ids))

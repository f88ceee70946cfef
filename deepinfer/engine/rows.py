"""The rows of a forward: whose they are, their tokens, and which of them get logits.

Knows positions and token ids; must not know tensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from deepinfer.kv.blocks import SequenceBlocks
from deepinfer.model.step import Numbers


@dataclass(frozen=True)
class ForwardRows:
    """Rows of one sequence in a forward.

    Attributes:
        token_ids: of the rows, empty for the one token that was last sampled in the slot.
        start: position of the first row.
        window_floor: see SequenceRows.
        wanted: the last so many rows get logits.
    """

    blocks: SequenceBlocks
    token_ids: Sequence[int]
    start: int
    window_floor: int = 0
    wanted: int = 1

    @property
    def count(self) -> int:
        """How many rows there are."""
        return len(self.token_ids) or 1


def token_ids_of(rows: Sequence[ForwardRows]) -> tuple[Numbers, Numbers]:
    """Token ids of all rows, and the slots whose last sampled token replaces one, or -1."""
    ids: list[int] = []
    sources: list[int] = []
    for r in rows:
        ids += r.token_ids or [0]
        sources += [-1] * len(r.token_ids) or [r.blocks.slot]
    return np.array(ids, dtype=np.int64), np.array(sources, dtype=np.int64)


def wanted_rows(rows: Sequence[ForwardRows], compact: bool) -> tuple[Numbers, list[slice]]:
    """Numbers of the rows that get logits, among those that go through all layers, and the place
    of each part's logits."""
    wanted: list[int] = []
    places = []
    end = 0
    for r in rows:
        dropped = min(r.count, max(0, r.window_floor - r.start)) if compact else 0
        end += r.count - dropped
        places.append(slice(len(wanted), len(wanted) + min(r.wanted, r.count - dropped)))
        wanted += range(end - min(r.wanted, r.count - dropped), end)
    return np.array(wanted, dtype=np.int64), places

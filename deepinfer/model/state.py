"""What modules may ask about tokens other than the ones they are given.

Knows the questions; the answers live in `recompute` (everything at once) and `cached` (packed
records of earlier steps).
"""

from typing import Protocol

from torch import Tensor


class AttentionState(Protocol):
    """Keys of a sequence, as one attention layer sees them. Rows are the tokens of this forward."""

    def rotations(self, ratio: int) -> Tensor:
        """Rotations [rows, d/2] of this forward's positions, from the table of `ratio`."""
        ...

    def attend(self, layer: int, queries: Tensor, kv: Tensor, sink: Tensor) -> Tensor:
        """Attention of `queries` [rows, N, D]; `kv` [rows, D] are the rows' own window keys.

        The state rounds `kv` to its record, keeps it, and adds the entries selected for the layer.
        """
        ...


class SequenceState(AttentionState, Protocol):
    """An AttentionState of the backbone: also compressed entries, selections and n-grams."""

    def groups(self, layer: int, values: Tensor, gates: Tensor) -> tuple[Tensor, Tensor]:
        """Groups of r tokens that these rows complete: values and gates [groups, r, D]."""
        ...

    def entry_rotations(self, layer: int) -> Tensor:
        """Rotations [groups, d/2] of the entries that these rows complete (first token of each)."""
        ...

    def store_entries(self, layer: int, compressed: Tensor, index_keys: Tensor) -> None:
        """Round and keep the completed entries [groups, D] and their index keys [groups, Di]."""
        ...

    def select(self, layer: int, queries: Tensor, weights: Tensor) -> None:
        """Choose the entries that `layer` and the layers reusing it attend to."""
        ...

    def truncate(self, layer: int) -> "tuple[Tensor, SequenceState] | None":
        """Called once the entries of `layer` are stored: rows that go on, with their state.

        None (the usual case) means that all rows go on.
        """
        ...

    def ngram_classes(self) -> Tensor:
        """Classes [rows, G] of each row's token and of the G - 1 before it."""
        ...

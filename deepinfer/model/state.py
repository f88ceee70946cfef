"""What modules may ask about tokens other than the ones they are given.

Knows the questions; the answers live in `recompute` (everything at once) and `cached` (packed
records of earlier steps).
"""

from typing import Protocol

from torch import Tensor

from deepinfer.model.norm import RMSNorm


class AttentionState(Protocol):
    """Keys of a sequence, as one attention layer sees them. Rows are the tokens of this forward."""

    def rotations(self, ratio: int) -> Tensor:
        """Rotations [rows, d/2] of this forward's positions, from the table of `ratio`."""
        ...

    def attend(
        self, layer: int, queries: Tensor, kv: Tensor, norm: RMSNorm, sink: Tensor
    ) -> Tensor:
        """Attention of rotated `queries` [rows, N, D].

        `kv` [rows, D] are the rows' own window keys as projected. The state normalises and rotates
        them, rounds them to their record, keeps it, and adds the entries selected for the layer.
        """
        ...


class SequenceState(AttentionState, Protocol):
    """An AttentionState of the backbone: also compressed entries, selections and n-grams."""

    def pool(self, layer: int, values: Tensor, gates: Tensor, norm: RMSNorm) -> Tensor:
        """Latents [groups, D] of the groups of r tokens that these rows complete, normalised.

        `values` and `gates` [rows, D] are those of all rows; what stays open is kept.
        """
        ...

    def store_entries(self, layer: int, latents: Tensor, keys: Tensor, norm: RMSNorm) -> None:
        """Rotate, round and keep the completed entries and their index keys.

        Both are rotated at the position of their group's first token. `latents` [groups, D] are
        normalised; `keys` [groups, Di] are as projected, `norm` normalises them.
        """
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

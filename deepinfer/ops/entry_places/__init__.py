"""Places in the paged cache of entries of sequences."""

from deepinfer.ops.entry_places.reference import entry_places

__all__ = ["entry_places"]

"""Row numbers of n-gram tables."""

from deepinfer.ops.engram_hash.reference import engram_hash

__all__ = ["engram_hash"]

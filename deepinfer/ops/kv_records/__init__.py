"""Packed cache records: window (FP8), compressed (FP4) and index key (MXFP4)."""

from deepinfer.ops.kv_records.reference import (
    pack_compressed,
    pack_index_key,
    pack_window,
    round_compressed,
    round_index,
    round_window,
    unpack_compressed,
    unpack_index_key,
    unpack_window,
)

__all__ = [
    "pack_compressed",
    "pack_index_key",
    "pack_window",
    "round_compressed",
    "round_index",
    "round_window",
    "unpack_compressed",
    "unpack_index_key",
    "unpack_window",
]

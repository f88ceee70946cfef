"""Packed cache records: window (FP8), compressed (FP4) and index key (MXFP4)."""

from deepinfer.ops.kv_records.reference import (
    index_query,
    load_compressed,
    load_index_key,
    load_window,
    pack_compressed,
    pack_index_key,
    pack_window,
    round_compressed,
    round_index,
    round_window,
    store_compressed,
    store_index_key,
    store_window,
    unpack_compressed,
    unpack_index_key,
    unpack_window,
)

__all__ = [
    "index_query",
    "load_compressed",
    "load_index_key",
    "load_window",
    "pack_compressed",
    "pack_index_key",
    "pack_window",
    "round_compressed",
    "round_index",
    "round_window",
    "store_compressed",
    "store_index_key",
    "store_window",
    "unpack_compressed",
    "unpack_index_key",
    "unpack_window",
]

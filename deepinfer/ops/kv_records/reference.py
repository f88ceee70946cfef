"""Reference of the packed cache records: rounding, packing, unpacking, storing and loading.

Knows the three record layouts of model description 4.2 and rows of a cache; must not know pages,
rings or slots.

A record is the concatenation of codes and scales of one entry:

    window      D e4m3 bytes, then D/32 e8m0 bytes                      528 bytes at D = 512
    compressed  D/2 bytes of e2m1 pairs, then D/16 e4m3 bytes           288 bytes at D = 512
    index key   D/2 bytes of e2m1 pairs, then D/32 e8m0 bytes            68 bytes at D = 128

`unpack_x(pack_x(v))` equals `round_x(v)` bit for bit, for every finite v.

Where a cache is written or read, `places` are its rows; a negative place stands for none.
"""

import torch
from torch import Tensor

from deepinfer.numerics import (
    E2M1_MAX,
    FP4_GROUP,
    FP8_GROUP,
    MXFP4_GROUP,
    accumulate_dtype,
    decode_e4m3,
    decode_e8m0,
    encode_e8m0,
    fp4_scale,
    mxfp4_scale,
    round_e2m1,
    straight_through,
    unpack_e2m1,
)
from deepinfer.ops.act_quant import act_quant, fp4_quantise, fp8_quantise, mxfp4_quantise
from deepinfer.ops.rms_norm import rms_norm
from deepinfer.ops.rope import rope


def _groups(x: Tensor, size: int) -> Tensor:
    return x.to(accumulate_dtype(x.dtype)).unflatten(-1, (-1, size))


def _fp4_codes(groups: Tensor, scale: Tensor) -> Tensor:
    return round_e2m1((groups / scale).clamp(-E2M1_MAX, E2M1_MAX))


def _round_compressed(x: Tensor) -> Tensor:
    groups = _groups(x, FP4_GROUP)
    scale = fp4_scale(groups)
    return (_fp4_codes(groups, scale) * scale).flatten(-2).to(x.dtype)


def _round_index(x: Tensor) -> Tensor:
    groups = _groups(x, MXFP4_GROUP)
    scale = mxfp4_scale(groups)
    return (_fp4_codes(groups, scale) * scale).flatten(-2).to(x.dtype)


def round_window(kv: Tensor) -> Tensor:
    """Window key `kv` [..., D] with the rounding of its FP8 record: the same rule as act_quant."""
    return act_quant(kv)


def round_compressed(kv: Tensor) -> Tensor:
    """Compressed key `kv` [..., D] with the rounding of its FP4 record (model description 3.6).

    s = e4m3(max(amax, 6 * 2^-9) / 6) over 16 channels, y = s * e2m1(clamp(kv / s, -6, 6)), ties
    to the even code. Straight-through for gradients.
    """
    return straight_through(kv, _round_compressed)


def round_index(x: Tensor) -> Tensor:
    """Index key or query `x` [..., D] with MXFP4 rounding (model description 3.7).

    s = 2^ceil(log2(max(amax, 6 * 2^-126) / 6)) over 32 channels, y = s * e2m1(clamp(x / s, -6, 6)),
    ties to the even code. Straight-through for gradients.
    """
    return straight_through(x, _round_index)


def pack_window(kv: Tensor) -> Tensor:
    """FP8 records of window keys: [..., D] values to [..., D + D/32] uint8."""
    codes, scales = fp8_quantise(kv)
    return torch.cat([codes, encode_e8m0(scales)], dim=-1)


def unpack_window(records: Tensor, dtype: torch.dtype) -> Tensor:
    """Values [..., D] in `dtype` of FP8 window records [..., D + D/32] uint8."""
    dim = records.shape[-1] * FP8_GROUP // (FP8_GROUP + 1)
    accumulate = accumulate_dtype(dtype)
    codes = decode_e4m3(records[..., :dim], accumulate).unflatten(-1, (-1, FP8_GROUP))
    scale = decode_e8m0(records[..., dim:], accumulate).unsqueeze(-1)
    return (codes * scale).flatten(-2).to(dtype)


def pack_compressed(kv: Tensor) -> Tensor:
    """FP4 records of compressed keys: [..., D] values to [..., D/2 + D/16] uint8."""
    return torch.cat(fp4_quantise(kv), dim=-1)


def unpack_compressed(records: Tensor, dtype: torch.dtype) -> Tensor:
    """Values [..., D] in `dtype` of FP4 compressed records [..., D/2 + D/16] uint8."""
    half = records.shape[-1] * 8 // 9
    accumulate = accumulate_dtype(dtype)
    codes = unpack_e2m1(records[..., :half], accumulate).unflatten(-1, (-1, FP4_GROUP))
    scale = decode_e4m3(records[..., half:], accumulate).unsqueeze(-1)
    return (codes * scale).flatten(-2).to(dtype)


def pack_index_key(key: Tensor) -> Tensor:
    """MXFP4 records of index keys: [..., D] values to [..., D/2 + D/32] uint8."""
    return torch.cat(mxfp4_quantise(key), dim=-1)


def unpack_index_key(records: Tensor, dtype: torch.dtype) -> Tensor:
    """Values [..., D] in `dtype` of MXFP4 index-key records [..., D/2 + D/32] uint8."""
    half = records.shape[-1] * 16 // 17
    accumulate = accumulate_dtype(dtype)
    codes = unpack_e2m1(records[..., :half], accumulate).unflatten(-1, (-1, MXFP4_GROUP))
    scale = decode_e8m0(records[..., half:], accumulate).unsqueeze(-1)
    return (codes * scale).flatten(-2).to(dtype)


def _store(cache: Tensor, places: Tensor, records: Tensor) -> None:
    """cache[places[i]] = records[i] where places[i] >= 0, without a device sync."""
    if places.numel() == 0:
        return
    # Rows without a place repeat the first write that there is; if there is none, they write what
    # row 0 holds already.
    valid = places >= 0
    if places.numel() == 1:  # one row on a CPU: a third of the operations
        target = places.clamp_min(0)
        cache[target] = torch.where(valid.unsqueeze(-1), records, cache[target])
        return
    first = valid.to(torch.uint8).argmax(0, keepdim=True)
    target = places[first].clamp_min(0)
    kept = torch.where(valid[first].unsqueeze(-1), records[first], cache[target])
    cache[torch.where(valid, places, target)] = torch.where(valid.unsqueeze(-1), records, kept)


def _load(cache: Tensor, places: Tensor) -> Tensor:
    """Records [..., bytes] at `places` [...]; bytes of 0 where a place is negative."""
    return torch.where((places >= 0).unsqueeze(-1), cache[places.clamp_min(0)], 0)


def store_window(
    kv: Tensor,
    weight: Tensor,
    eps: float,
    rotations: Tensor,
    cache: Tensor | None,
    places: Tensor | None,
) -> Tensor:
    """Window keys from projected keys: normalised, rotated, packed, and stored in the same sweep.

    The norm and the rotation round to the dtype of `kv` each, as they do alone.

    Args:
        kv: [T, D]; weight: [D] of the norm; rotations: [T, d/2] complex.
        cache: [R, D + D/32] uint8, changed in place: cache[places[i]] = records[i].
        places: [T] int64, negative: row i is not stored. No two rows may share a place. Without a
            cache or without places nothing is stored.

    Returns:
        records [T, D + D/32] uint8 of all rows.
    """
    records = pack_window(rope(rms_norm(kv, weight, eps), rotations))
    if cache is not None and places is not None:
        _store(cache, places, records)
    return records


def store_compressed(latents: Tensor, rotations: Tensor, cache: Tensor, places: Tensor) -> None:
    """Compressed entries from latents: rotated, rounded to their dtype, packed and stored.

    Args:
        latents: [G, D] normalised, not rotated; rotations: [G, d/2] complex.
        cache: [E, D/2 + D/16] uint8, changed in place.
        places: [G] int64, negative: not stored. No two rows may share a place.
    """
    _store(cache, places, pack_compressed(rope(latents, rotations)))


def store_index_key(
    keys: Tensor,
    weight: Tensor,
    eps: float,
    rotations: Tensor,
    codes: Tensor,
    scales: Tensor,
    places: Tensor,
) -> None:
    """Index keys from projected latents: normalised, rotated, packed and stored.

    The norm and the rotation round to the dtype of `keys` each, as they do alone.

    Args:
        keys: [G, D]; weight: [D] of the norm; rotations: [G, d/2] complex.
        codes: [E, D/2] uint8 and scales: [E, D/32] uint8, both changed in place.
        places: [G] int64, negative: not stored. No two rows may share a place.
    """
    records = pack_index_key(rope(rms_norm(keys, weight, eps), rotations))
    half = codes.shape[-1]
    _store(codes, places, records[:, :half])
    _store(scales, places, records[:, half:])


def index_query(queries: Tensor, rotations: Tensor) -> Tensor:
    """Index queries: rotated, rounded to their dtype, then to MXFP4 values.

    Args:
        queries: [..., T, N, D]; rotations: [..., T, d/2] complex, one for all heads of a token,
            broadcast over leading axes.

    Returns:
        [..., T, N, D] in the dtype of `queries`.
    """
    return round_index(rope(queries, rotations.unsqueeze(-2)))


def load_window(cache: Tensor, places: Tensor, dtype: torch.dtype) -> Tensor:
    """Values [n, D] in `dtype` of window records `cache` [R, D + D/32] at `places` [n] int64.

    A negative place gives zeros; nothing is read for it.
    """
    return unpack_window(_load(cache, places), dtype)


def load_compressed(cache: Tensor, places: Tensor, dtype: torch.dtype) -> Tensor:
    """Values [n, D] in `dtype` of entries `cache` [E, D/2 + D/16] at `places` [n] int64.

    A negative place gives zeros; nothing is read for it.
    """
    return unpack_compressed(_load(cache, places), dtype)


def load_index_key(codes: Tensor, scales: Tensor, places: Tensor, dtype: torch.dtype) -> Tensor:
    """Values [n, D] in `dtype` of keys `codes` [E, D/2], `scales` [E, D/32] at `places` [n] int64.

    A negative place gives zeros; nothing is read for it.
    """
    records = torch.cat([_load(codes, places), _load(scales, places)], dim=-1)
    return unpack_index_key(records, dtype)

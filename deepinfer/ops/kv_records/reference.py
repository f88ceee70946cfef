"""Reference of the packed cache records: rounding, packing and unpacking, in bytes.

Knows the three record layouts of model description 4.2; must not know pages, rings or slots.

A record is the concatenation of codes and scales of one entry:

    window      D e4m3 bytes, then D/32 e8m0 bytes                      528 bytes at D = 512
    compressed  D/2 bytes of e2m1 pairs, then D/16 e4m3 bytes           288 bytes at D = 512
    index key   D/2 bytes of e2m1 pairs, then D/32 e8m0 bytes            68 bytes at D = 128

`unpack_x(pack_x(v))` equals `round_x(v)` bit for bit, for every finite v.
"""

import torch
from torch import Tensor

from deepinfer.numerics import (
    E2M1_MAX,
    E4M3_MAX,
    FP4_GROUP,
    FP8_GROUP,
    MXFP4_GROUP,
    accumulate_dtype,
    decode_e4m3,
    decode_e8m0,
    encode_e2m1,
    encode_e4m3,
    encode_e8m0,
    fp4_scale,
    fp8_scale,
    mxfp4_scale,
    pack_nibbles,
    round_e2m1,
    straight_through,
    unpack_e2m1,
)


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
    from deepinfer.ops.act_quant import act_quant

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
    groups = _groups(kv, FP8_GROUP)
    scale = fp8_scale(groups)
    codes = encode_e4m3((groups / scale).clamp(-E4M3_MAX, E4M3_MAX)).flatten(-2)
    return torch.cat([codes, encode_e8m0(scale).squeeze(-1)], dim=-1)


def unpack_window(records: Tensor, dtype: torch.dtype) -> Tensor:
    """Values [..., D] in `dtype` of FP8 window records [..., D + D/32] uint8."""
    dim = records.shape[-1] * FP8_GROUP // (FP8_GROUP + 1)
    accumulate = accumulate_dtype(dtype)
    codes = decode_e4m3(records[..., :dim], accumulate).unflatten(-1, (-1, FP8_GROUP))
    scale = decode_e8m0(records[..., dim:], accumulate).unsqueeze(-1)
    return (codes * scale).flatten(-2).to(dtype)


def pack_compressed(kv: Tensor) -> Tensor:
    """FP4 records of compressed keys: [..., D] values to [..., D/2 + D/16] uint8."""
    groups = _groups(kv, FP4_GROUP)
    scale = fp4_scale(groups)
    codes = pack_nibbles(encode_e2m1(_fp4_codes(groups, scale)).flatten(-2))
    return torch.cat([codes, encode_e4m3(scale).squeeze(-1)], dim=-1)


def unpack_compressed(records: Tensor, dtype: torch.dtype) -> Tensor:
    """Values [..., D] in `dtype` of FP4 compressed records [..., D/2 + D/16] uint8."""
    half = records.shape[-1] * 8 // 9
    accumulate = accumulate_dtype(dtype)
    codes = unpack_e2m1(records[..., :half], accumulate).unflatten(-1, (-1, FP4_GROUP))
    scale = decode_e4m3(records[..., half:], accumulate).unsqueeze(-1)
    return (codes * scale).flatten(-2).to(dtype)


def pack_index_key(key: Tensor) -> Tensor:
    """MXFP4 records of index keys: [..., D] values to [..., D/2 + D/32] uint8."""
    groups = _groups(key, MXFP4_GROUP)
    scale = mxfp4_scale(groups)
    codes = pack_nibbles(encode_e2m1(_fp4_codes(groups, scale)).flatten(-2))
    return torch.cat([codes, encode_e8m0(scale).squeeze(-1)], dim=-1)


def unpack_index_key(records: Tensor, dtype: torch.dtype) -> Tensor:
    """Values [..., D] in `dtype` of MXFP4 index-key records [..., D/2 + D/32] uint8."""
    half = records.shape[-1] * 16 // 17
    accumulate = accumulate_dtype(dtype)
    codes = unpack_e2m1(records[..., :half], accumulate).unflatten(-1, (-1, MXFP4_GROUP))
    scale = decode_e8m0(records[..., half:], accumulate).unsqueeze(-1)
    return (codes * scale).flatten(-2).to(dtype)

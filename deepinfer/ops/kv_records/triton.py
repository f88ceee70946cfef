"""Triton kernels that make, store and load packed cache records.

Knows record layouts and rows of a cache; must not know pages, rings or slots. Rows are independent
of each other. Every kernel keeps a row in registers from its load to its store.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.errors import Unsupported
from deepinfer.kernels import formats
from deepinfer.kernels.launch import require_gpu
from deepinfer.kernels.signature import Signature
from deepinfer.numerics import FP4_GROUP, FP8_GROUP, MXFP4_GROUP
from deepinfer.ops.act_quant.triton import (
    flat_rows,
    pack_fp4,
    pack_fp8,
    pack_mxfp4,
    require_groups,
    round_mxfp4,
)
from deepinfer.ops.rms_norm.triton import load_rows, normalise_rounded
from deepinfer.ops.rope.triton import real_rotations, rotate_tail

# Values and warps of one program. A warp that has a whole row sums it without shared memory.
TILES = {
    "store_window": (512, 1),
    "store_compressed": (512, 1),
    "store_index_key": (1024, 4),
    "index_query": (2048, 4),
    "load_window": (1024, 4),
    "load_compressed": (1024, 4),
    "load_index_key": (1024, 4),
}


@triton.jit(do_not_specialize=["rows"])
def _store_window(
    kv, weight, rotations, records, cache, places, rows, stride, cache_stride, eps,
    DIM: tl.constexpr, TAIL: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    STORE: tl.constexpr,
):  # fmt: skip
    GROUPS: tl.constexpr = BLOCK // 32
    dtype: tl.constexpr = kv.dtype.element_ty
    flat_row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row = flat_row[:, None]
    inside = row < rows
    value = load_rows(kv, row, inside, stride, DIM, BLOCK)
    value = normalise_rounded(value, weight, eps, DIM, BLOCK, ROWS, dtype)
    even, odd = rotate_tail(value, rotations, row, inside, DIM, TAIL, BLOCK, ROWS, dtype)
    codes, scale = pack_fp8(tl.reshape(tl.join(even, odd), (ROWS * GROUPS, 32)))
    codes = tl.reshape(codes, (ROWS, BLOCK))
    scale = tl.reshape(formats.encode_e8m0(scale), (ROWS, GROUPS))
    # A lane stores the eight bytes that a load of 16 bytes gave it: for wider stores, which the
    # compiler would prefer, bytes would have to change lanes.
    column = tl.max_contiguous(tl.arange(0, BLOCK)[None, :], (1, 8))
    group = tl.arange(0, GROUPS)[None, :]
    record = records + row * (DIM + DIM // 32)
    tl.store(record + column, codes, mask=inside & (column < DIM))
    tl.store(record + DIM + group, scale, mask=inside & (group < DIM // 32))
    if STORE:
        place = tl.load(places + flat_row, mask=flat_row < rows, other=-1)[:, None]
        kept = place >= 0
        entry = cache + place * cache_stride
        tl.store(entry + column, codes, mask=kept & (column < DIM))
        tl.store(entry + DIM + group, scale, mask=kept & (group < DIM // 32))


@triton.jit(do_not_specialize=["rows"])
def _store_fp4(
    x, weight, rotations, codes, scales, places, rows, stride, code_stride, scale_stride, eps,
    DIM: tl.constexpr, TAIL: tl.constexpr, SIZE: tl.constexpr, NORM: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    GROUPS: tl.constexpr = BLOCK // SIZE
    dtype: tl.constexpr = x.dtype.element_ty
    flat_row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row = flat_row[:, None]
    inside = row < rows
    place = tl.load(places + flat_row, mask=flat_row < rows, other=-1)[:, None]
    kept = place >= 0
    # Rows that go nowhere are read all the same: no load has to wait for the places.
    value = load_rows(x, row, inside, stride, DIM, BLOCK)
    if NORM:
        value = normalise_rounded(value, weight, eps, DIM, BLOCK, ROWS, dtype)
    even, odd = rotate_tail(value, rotations, row, inside, DIM, TAIL, BLOCK, ROWS, dtype)
    even = tl.reshape(even, (ROWS * GROUPS, SIZE // 2))
    odd = tl.reshape(odd, (ROWS * GROUPS, SIZE // 2))
    if SIZE == 16:
        packed, scale = pack_fp4(even, odd)
    else:
        packed, scale = pack_mxfp4(even, odd)
    # As in `_store_window`, with half as many bytes.
    byte = tl.max_contiguous(tl.arange(0, BLOCK // 2)[None, :], (1, 4))
    group = tl.arange(0, GROUPS)[None, :]
    packed = tl.reshape(packed, (ROWS, BLOCK // 2))
    scale = tl.reshape(scale, (ROWS, GROUPS))
    tl.store(codes + place * code_stride + byte, packed, mask=kept & (byte < DIM // 2))
    tl.store(scales + place * scale_stride + group, scale, mask=kept & (group < DIM // SIZE))


@triton.jit(do_not_specialize=["rows"])
def _index_query(
    queries, rotations, out, rows, stride,
    HEADS: tl.constexpr, DIM: tl.constexpr, TAIL: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = out.dtype.element_ty
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    inside = row < rows
    value = load_rows(queries, row, inside, stride, DIM, BLOCK)
    token = row // HEADS
    even, odd = rotate_tail(value, rotations, token, inside, DIM, TAIL, BLOCK, ROWS, dtype)
    turned = tl.reshape(tl.join(even, odd), (ROWS * BLOCK // 32, 32))
    column = tl.arange(0, BLOCK)[None, :]
    rounded = tl.reshape(round_mxfp4(turned), (ROWS, BLOCK)).to(dtype)  # exact: no rounding here
    tl.store(out + row * DIM + column, rounded, mask=inside & (column < DIM))


@triton.jit
def _load_scales(
    scales, places, first, rows, stride,
    COUNT: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Scale bytes [ROWS * GROUPS, 1] of records from row `first` on, COUNT of GROUPS in each."""
    group = tl.arange(0, ROWS * GROUPS)
    row = first + group // GROUPS
    place = tl.load(places + row, mask=row < rows, other=-1)
    number = group % GROUPS
    mask = (place >= 0) & (number < COUNT)
    return tl.load(scales + place * stride + number, mask=mask, other=0)[:, None]


@triton.jit(do_not_specialize=["rows"])
def _load_window(
    cache, places, out, rows, cache_stride,
    DIM: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    GROUPS: tl.constexpr = BLOCK // 32
    first = tl.program_id(0).to(tl.int64) * ROWS
    flat_row = first + tl.arange(0, ROWS)
    place = tl.load(places + flat_row, mask=flat_row < rows, other=-1)[:, None]
    kept = place >= 0
    column = tl.arange(0, BLOCK)[None, :]
    codes = tl.load(cache + place * cache_stride + column, mask=kept & (column < DIM), other=0)
    scale = _load_scales(cache + DIM, places, first, rows, cache_stride, DIM // 32, GROUPS, ROWS)
    value = tl.reshape(formats.decode_e4m3(codes), (ROWS * GROUPS, 32))
    value = value * formats.decode_e8m0(scale)
    value = formats.narrow(tl.reshape(value, (ROWS, BLOCK)), out.dtype.element_ty)
    inside = (flat_row < rows)[:, None] & (column < DIM)
    tl.store(out + flat_row[:, None] * DIM + column, value, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _load_fp4(
    codes, scales, places, out, rows, code_stride, scale_stride,
    DIM: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    GROUPS: tl.constexpr = BLOCK // SIZE
    first = tl.program_id(0).to(tl.int64) * ROWS
    flat_row = first + tl.arange(0, ROWS)
    place = tl.load(places + flat_row, mask=flat_row < rows, other=-1)[:, None]
    kept = place >= 0
    byte = tl.arange(0, BLOCK // 2)[None, :]
    pairs = tl.load(codes + place * code_stride + byte, mask=kept & (byte < DIM // 2), other=0)
    scale = _load_scales(scales, places, first, rows, scale_stride, DIM // SIZE, GROUPS, ROWS)
    if SIZE == 16:
        scale = formats.decode_e4m3(scale)
    else:
        scale = formats.decode_e8m0(scale)
    pairs = tl.reshape(pairs, (ROWS * GROUPS, SIZE // 2))
    even = formats.decode_e2m1(pairs) * scale
    odd = formats.decode_e2m1(pairs >> 4) * scale
    value = tl.reshape(tl.join(even, odd), (ROWS, BLOCK))
    column = tl.arange(0, BLOCK)[None, :]
    inside = (flat_row < rows)[:, None] & (column < DIM)
    value = formats.narrow(value, out.dtype.element_ty)
    tl.store(out + flat_row[:, None] * DIM + column, value, mask=inside)


def _blocks(name: str, dim: int) -> dict[str, int]:
    """Constants of a kernel for records of `dim` channels, and its number of warps."""
    values, warps = TILES[name]
    block = triton.next_power_of_2(dim)
    warps = max(warps, min(block // values, 16))
    return {"DIM": dim, "BLOCK": block, "ROWS": max(1, values // block), "num_warps": warps}


def _require_caches(*caches: Tensor) -> None:
    for cache in caches:
        require_gpu(cache)
        if cache.dim() != 2 or cache.stride(1) != 1 or cache.dtype != torch.uint8:
            raise Unsupported("a cache has to be [rows, bytes] uint8 with adjacent bytes")


def store_window(
    kv: Tensor,
    weight: Tensor,
    eps: float,
    rotations: Tensor,
    cache: Tensor | None,
    places: Tensor | None,
) -> Tensor:
    """See the reference. Rows of `kv` and of the cache may be strided.

    Raises:
        Unsupported: no GPU, a dtype other than bfloat16 and float32, D no multiple of 32,
            rotations that are not complex64, or a cache whose bytes are not adjacent.
    """
    dim = kv.shape[-1]
    require_groups(kv, FP8_GROUP)
    _require_caches(*(() if cache is None else (cache,)))
    turns = real_rotations(rotations, dim)
    rows = kv.shape[0]
    records = torch.empty(rows, dim + dim // FP8_GROUP, dtype=torch.uint8, device=kv.device)
    if rows == 0:
        return records
    store = cache is not None and places is not None
    # Without a cache the kernel touches neither of the two.
    target = cache if cache is not None else records
    where = places.contiguous() if places is not None else records
    flat, blocks = flat_rows(kv), _blocks("store_window", dim)
    _store_window[(triton.cdiv(rows, blocks["ROWS"]),)](
        flat, weight.contiguous(), turns, records, target, where, rows, flat.stride(0),
        target.stride(0), eps, TAIL=2 * turns.shape[-2], STORE=store, **blocks,
    )  # fmt: skip
    return records


def _launch_fp4(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    rotations: Tensor,
    codes: Tensor,
    scales: Tensor,
    places: Tensor,
    size: int,
) -> None:
    require_groups(x, size)
    _require_caches(codes, scales)
    turns = real_rotations(rotations, x.shape[-1])
    rows = x.shape[0]
    if rows == 0:
        return
    name = "store_compressed" if weight is None else "store_index_key"
    flat, blocks = flat_rows(x), _blocks(name, x.shape[-1])
    _store_fp4[(triton.cdiv(rows, blocks["ROWS"]),)](
        flat, turns if weight is None else weight.contiguous(), turns, codes, scales,
        places.contiguous(), rows, flat.stride(0), codes.stride(0), scales.stride(0), eps,
        TAIL=2 * turns.shape[-2], SIZE=size, NORM=weight is not None, **blocks,
    )  # fmt: skip


def store_compressed(latents: Tensor, rotations: Tensor, cache: Tensor, places: Tensor) -> None:
    """See the reference; strides and errors as in `store_window`, for multiples of 16."""
    half = latents.shape[-1] // 2
    codes, scales = cache[:, :half], cache[:, half:]
    _launch_fp4(latents, None, 0.0, rotations, codes, scales, places, FP4_GROUP)


def store_index_key(
    keys: Tensor,
    weight: Tensor,
    eps: float,
    rotations: Tensor,
    codes: Tensor,
    scales: Tensor,
    places: Tensor,
) -> None:
    """See the reference; strides and errors as in `store_window`."""
    _launch_fp4(keys, weight, eps, rotations, codes, scales, places, MXFP4_GROUP)


def index_query(queries: Tensor, rotations: Tensor) -> Tensor:
    """See the reference; errors as in `store_window`. Uneven strides are copied first."""
    require_groups(queries, MXFP4_GROUP)
    *lead, heads, dim = queries.shape
    turns = real_rotations(rotations.expand(*lead, -1), dim)
    out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
    if out.numel() == 0:
        return out
    flat, blocks = flat_rows(queries), _blocks("index_query", dim)
    _index_query[(triton.cdiv(flat.shape[0], blocks["ROWS"]),)](
        flat, turns, out, flat.shape[0], flat.stride(0), HEADS=heads, TAIL=2 * turns.shape[-2],
        **blocks,
    )  # fmt: skip
    return out


def _values(places: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    if dtype not in (torch.bfloat16, torch.float32):
        raise Unsupported(f"{dtype}: gives bfloat16 and float32")
    return torch.empty((*places.shape, dim), dtype=dtype, device=places.device)


def load_window(cache: Tensor, places: Tensor, dtype: torch.dtype) -> Tensor:
    """See the reference. Rows of the cache may be strided.

    Raises:
        Unsupported: no GPU, a dtype other than bfloat16 and float32, or a cache whose bytes are
            not adjacent.
    """
    _require_caches(cache)
    dim = cache.shape[1] * FP8_GROUP // (FP8_GROUP + 1)
    out = _values(places, dim, dtype)
    rows = places.numel()
    if rows:
        blocks = _blocks("load_window", dim)
        _load_window[(triton.cdiv(rows, blocks["ROWS"]),)](
            cache, places.contiguous(), out, rows, cache.stride(0), **blocks
        )
    return out


def _launch_load(
    codes: Tensor, scales: Tensor, places: Tensor, dtype: torch.dtype, size: int
) -> Tensor:
    _require_caches(codes, scales)
    dim = 2 * codes.shape[1]
    out = _values(places, dim, dtype)
    rows = places.numel()
    if rows:
        blocks = _blocks("load_compressed" if size == FP4_GROUP else "load_index_key", dim)
        _load_fp4[(triton.cdiv(rows, blocks["ROWS"]),)](
            codes, scales, places.contiguous(), out, rows, codes.stride(0),
            scales.stride(0), SIZE=size, **blocks,
        )  # fmt: skip
    return out


def load_compressed(cache: Tensor, places: Tensor, dtype: torch.dtype) -> Tensor:
    """See the reference; strides and errors as in `load_window`."""
    half = cache.shape[1] * 8 // 9
    return _launch_load(cache[:, :half], cache[:, half:], places, dtype, FP4_GROUP)


def load_index_key(codes: Tensor, scales: Tensor, places: Tensor, dtype: torch.dtype) -> Tensor:
    """See the reference; strides and errors as in `load_window`."""
    return _launch_load(codes, scales, places, dtype, MXFP4_GROUP)


_ROTATED = {"rotations": "*fp32", "rows": "i32", "stride": "i32"}
_FP4_CACHE = {"codes": "*u8", "scales": "*u8", "places": "*i64"}
_FP4_CACHE |= {"code_stride": "i32", "scale_stride": "i32"}
_NORMED = {"weight": "*fp32", "eps": "fp32", **_ROTATED}


def _signature(
    name: str,
    kernel: Any,
    dim: int,
    types: dict[str, str],
    constants: dict[str, Any],
    divisible: tuple[str, ...],
) -> Signature:
    blocks = _blocks(name, dim)
    warps = blocks.pop("num_warps")
    return Signature(name, kernel, types, {**constants, **blocks}, warps, divisible=divisible)


_STORE = {"x": "*bf16", **_NORMED, **_FP4_CACHE}
_LOAD = {"out": "*bf16", "rows": "i32", **_FP4_CACHE}
_WINDOW_CACHE = {"cache": "*u8", "places": "*i64", "cache_stride": "i32"}

SIGNATURES: tuple[Signature, ...] = (
    _signature(
        "store_window",
        _store_window,
        512,
        {"kv": "*bf16", "records": "*u8", **_NORMED, **_WINDOW_CACHE},
        {"TAIL": 64, "STORE": True},
        ("rows", "stride", "cache_stride"),
    ),
    _signature(
        "store_compressed",
        _store_fp4,
        512,
        _STORE,
        {"TAIL": 64, "SIZE": FP4_GROUP, "NORM": False},
        ("rows", "stride", "code_stride", "scale_stride"),
    ),
    _signature(
        "store_index_key",
        _store_fp4,
        128,
        _STORE,
        {"TAIL": 64, "SIZE": MXFP4_GROUP, "NORM": True},
        ("rows", "stride", "code_stride"),
    ),
    _signature(
        "index_query",
        _index_query,
        128,
        {"queries": "*bf16", "out": "*bf16", **_ROTATED},
        {"HEADS": 32, "TAIL": 64},
        ("rows", "stride"),
    ),
    _signature(
        "load_window",
        _load_window,
        512,
        {"out": "*bf16", "rows": "i32", **_WINDOW_CACHE},
        {},
        ("rows", "cache_stride"),
    ),
    _signature(
        "load_compressed",
        _load_fp4,
        512,
        _LOAD,
        {"SIZE": FP4_GROUP},
        ("rows", "code_stride", "scale_stride"),
    ),
    _signature(
        "load_index_key", _load_fp4, 128, _LOAD, {"SIZE": MXFP4_GROUP}, ("rows", "code_stride")
    ),
)

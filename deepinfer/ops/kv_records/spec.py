"""Contracts of storing and loading packed cache records, as data.

Cases whose result is bytes draw rows and rotations for which the norm and the rotation are exact
in float32 (see the specs of rms_norm and rope): only the rounding that is part of the format is
left, and it has to be the same everywhere.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from deepinfer.numerics import FP4_GROUP, FP8_GROUP, MXFP4_GROUP
from deepinfer.ops.kv_records.reference import (
    index_query,
    load_compressed,
    load_index_key,
    load_window,
    pack_compressed,
    pack_index_key,
    pack_window,
    store_compressed,
    store_index_key,
    store_window,
)
from deepinfer.ops.rms_norm.spec import EPS, exact_rows, weights
from deepinfer.ops.rope.spec import exact_rotations, rotations_of
from deepinfer.ops.spec import Argument, Arguments, Backend, Case, OpSpec, Tolerance, Work, size_of

Make = Callable[[torch.Generator, torch.device], Arguments]
_BF16, _FP32 = torch.bfloat16, torch.float32


def poisoned(rows: int, width: int, device: torch.device, step: int | None = None) -> Tensor:
    """A cache [rows, width] of bytes that decode to NaN; rows lie `step` bytes apart."""
    step = width if step is None else step
    memory = torch.empty((rows - 1) * step + width, dtype=torch.uint8, device=device)
    return memory.as_strided((rows, width), (step, 1)).fill_(0xFF)


def _places(generator: torch.Generator, count: int, rows: int, skipped: float) -> Tensor:
    """Distinct rows of a cache for `count` records, some of them -1."""
    places = torch.randperm(rows, generator=generator)[:count]
    return torch.where(torch.rand(count, generator=generator) < skipped, -1, places)


def _magnitudes(x: Tensor) -> Tensor:
    """Rows of zeros of both signs, of equal values, and of extreme powers of two."""
    x[0], x[1], x[2] = 0.0, -0.0, 3.0
    x[3] *= 2.0**-90
    x[4] *= 2.0**10
    return x


def _store(
    kind: str,
    count: int,
    dim: int,
    tail: int,
    dtype: torch.dtype = _BF16,
    slots: int | None = None,
    skipped: float = 0.25,
    step: int | None = None,
    extreme: bool = False,
) -> Make:
    """Arguments of one of the three store operators, or of store_window without a cache."""

    def make(generator: torch.Generator, device: torch.device) -> Arguments:
        rows = count + 5 if slots is None else slots
        x = exact_rows(generator, count, dim, dtype)
        x = _magnitudes(x) if extreme else x
        norm = {"weight": weights(generator, dim).to(device), "eps": EPS}
        turns = exact_rotations(generator, (count,), tail).to(device)
        places = _places(generator, count, rows, skipped).to(device)
        if kind == "compressed":
            cache = poisoned(rows, dim // 2 + dim // FP4_GROUP, device, step)
            return {"latents": x.to(device), "rotations": turns, "cache": cache, "places": places}
        if kind == "index":
            caches = {
                "codes": poisoned(rows, dim // 2, device, step),
                "scales": poisoned(rows, dim // MXFP4_GROUP, device),
            }
            return {"keys": x.to(device), **norm, "rotations": turns, **caches, "places": places}
        bytes_ = dim + dim // FP8_GROUP
        kept: Arguments = {"cache": None, "places": None}
        if kind == "window":
            kept = {"cache": poisoned(rows, bytes_, device, step), "places": places}
        return {"kv": x.to(device), **norm, "rotations": turns, **kept}

    return make


def _strided(kind: str) -> Make:
    plain = _store(kind, 5, 64, 32)

    def make(generator: torch.Generator, device: torch.device) -> Arguments:
        arguments = plain(generator, device)
        name = next(iter(arguments))
        wide = torch.full((5, 192), float("nan"), dtype=_BF16, device=device)
        wide[:, 64:128] = arguments[name]
        return {**arguments, name: wide[:, 64:128]}

    return make


def _store_cases(kind: str, dim: int) -> Callable[[], Iterator[Case]]:
    def cases() -> Iterator[Case]:
        yield Case("5x64", "tiny", _store(kind, 5, 64, 32))
        yield Case("5x64-fp32", "tiny", _store(kind, 5, 64, 32, _FP32))
        yield Case("no-rows", "hostile", _store(kind, 0, 64, 32))
        yield Case(f"1x{dim}", "hostile", _store(kind, 1, dim, 64, skipped=0.0))
        yield Case("3x96", "hostile", _store(kind, 3, 96, 16))
        yield Case("nothing-kept", "hostile", _store(kind, 5, 64, 32, skipped=1.1))
        yield Case("extremes", "hostile", _store(kind, 7, 64, 32, extreme=True, skipped=0.0))
        yield Case("strided", "hostile", _strided(kind))
        yield Case("past-2GiB", "hostile", _store(kind, 3, 64, 32, slots=4, step=2**30 + 16))
        if kind == "window":
            yield Case("no-cache", "hostile", _store("records", 5, 64, 32))
            yield Case("4096-no-cache", "released", _store("records", 4096, dim, 64))
        for count in (1, 33, 256, 4096):
            yield Case(f"{count}x{dim}", "released", _store(kind, count, dim, 64))

    return cases


def _queries(
    lead: tuple[int, int], dim: int, tail: int, dtype: torch.dtype = _BF16, exact: bool = True
) -> Make:
    turns = exact_rotations if exact else rotations_of

    def make(generator: torch.Generator, device: torch.device) -> Arguments:
        power = torch.randint(-6, 7, (*lead, 1), generator=generator)
        x = torch.randn(*lead, dim, generator=generator) * torch.exp2(power.float())
        x = x.to(_BF16).to(dtype)
        rotations = turns(generator, (lead[0],), tail)
        return {"queries": x.to(device), "rotations": rotations.to(device)}

    return make


def _extreme_queries(generator: torch.Generator, device: torch.device) -> Arguments:
    arguments = _queries((3, 7), 64, 32)(generator, device)
    _magnitudes(arguments["queries"].view(-1, 64))
    return arguments


def _query_cases() -> Iterator[Case]:
    yield Case("3x4x64", "tiny", _queries((3, 4), 64, 32))
    yield Case("3x4x64-fp32", "tiny", _queries((3, 4), 64, 32, _FP32))
    yield Case("0x4x64", "hostile", _queries((0, 4), 64, 32))
    yield Case("1x1x128", "hostile", _queries((1, 1), 128, 64))
    yield Case("2x5x96", "hostile", _queries((2, 5), 96, 16))
    yield Case("extremes", "hostile", _extreme_queries)
    for rows in (1, 128, 4096):
        yield Case(f"{rows}x32x128", "released", _queries((rows, 32), 128, 64, exact=False))


def _load(
    kind: str, count: int, dim: int, dtype: torch.dtype = _BF16, step: int | None = None
) -> Make:
    """Arguments of one of the three load operators; slots that no place names stay poisoned."""

    def make(generator: torch.Generator, device: torch.device) -> Arguments:
        slots = count // 2 + 4 if step is None else 4
        order = torch.randperm(slots, generator=generator)
        written = (order if step is None else order.sort(descending=True)[0])[: max(1, slots - 2)]
        x = torch.randn(len(written), dim, generator=generator)
        x *= torch.exp2(torch.randint(-12, 9, (len(written), 1), generator=generator).float())
        pack = {"window": pack_window, "compressed": pack_compressed, "index": pack_index_key}
        records = pack[kind](x.to(_BF16))
        cache = poisoned(slots, records.shape[1], device, step)
        cache[written.to(device)] = records.to(device)
        picked = torch.randint(0, len(written), (count,), generator=generator)
        places = written[picked]
        places[1::4] = -1
        rest = {"places": places.to(device), "dtype": dtype}
        if kind == "index":
            return {"codes": cache[:, : dim // 2], "scales": cache[:, dim // 2 :], **rest}
        return {"cache": cache, **rest}

    return make


def _load_cases(kind: str, dim: int) -> Callable[[], Iterator[Case]]:
    def cases() -> Iterator[Case]:
        yield Case("9x64", "tiny", _load(kind, 9, 64))
        yield Case("9x64-fp32", "tiny", _load(kind, 9, 64, _FP32))
        yield Case("no-places", "hostile", _load(kind, 0, 64))
        yield Case(f"1x{dim}", "hostile", _load(kind, 1, dim))
        yield Case("7x96", "hostile", _load(kind, 7, 96))
        yield Case("past-2GiB", "hostile", _load(kind, 5, 64, step=2**30 + 16))
        for count in (1, 511, 4096):
            yield Case(f"{count}x{dim}", "released", _load(kind, count, dim))
        yield Case(f"4096x{dim}-fp32", "released", _load(kind, 4096, dim, _FP32))

    return cases


def _store_work(records: int, name: str, size: int, code_bits: int) -> Callable[..., Work]:
    """Read the input and the rotations, write `records` copies of each record."""

    def work(arguments: Arguments) -> Work:
        x: Tensor = arguments[name]
        copies = records - (1 if name == "kv" and arguments["cache"] is None else 0)
        written = copies * (x.numel() * code_bits // 8 + x.numel() // size)
        moved = size_of(x, arguments["rotations"], arguments.get("places")) + written
        return Work(bytes=moved, flops=12 * x.numel())

    return work


def _query_work(arguments: Arguments) -> Work:
    x = arguments["queries"]
    return Work(bytes=2 * size_of(x) + size_of(arguments["rotations"]), flops=8 * x.numel())


def _load_work(channels: int, bytes_: int) -> Callable[[Arguments], Work]:
    """Records of `bytes_` bytes for `channels` channels are read, values are written."""

    def work(arguments: Arguments) -> Work:
        places, dtype = arguments["places"], arguments["dtype"]
        caches = [arguments[name] for name in ("cache", "codes", "scales") if name in arguments]
        record = sum(cache.shape[1] for cache in caches)
        dim = record * channels // bytes_
        moved = places.numel() * (record + dim * dtype.itemsize) + size_of(places)
        return Work(bytes=moved, flops=places.numel() * dim)

    return work


_ROTATIONS = Argument("rotations", "T d/2", "complex64", "in", "of each row")
_WEIGHT = Argument("weight", "D", "fp32", "in", "of the norm")
_STORED = Argument("places", "T", "int64", "in", "rows of the cache, distinct; negative: none")
_WINDOW = Argument("cache", "R D+D/32", "uint8", "inout", "window records; may be missing")
_ENTRIES = Argument("cache", "R D/2+D/16", "uint8", "inout", "compressed records")
_CODES = Argument("codes", "R D/2", "uint8", "inout", "e2m1 pairs of index keys")
_SCALES = Argument("scales", "R D/32", "uint8", "inout", "e8m0 scales of index keys")
_LOADED = Argument("places", "n", "int64", "in", "rows of the cache; negative: zeros")
_VALUES = Argument("values", "n D", "bf16 | fp32", "out", "dequantised records")


def _given(*arguments: Argument) -> tuple[Argument, ...]:
    """The same tensors where a call only reads them."""
    return tuple(Argument(a.name, a.shape, a.dtype, "in", a.meaning) for a in arguments)


def _spec(
    reference: Callable[..., Any],
    summary: str,
    arguments: tuple[Argument, ...],
    cases: Callable[[], Iterator[Case]],
    work: Callable[[Arguments], Work],
    stands_for: tuple[str, ...],
    tolerance: Mapping[str, Tolerance] | None = None,
) -> OpSpec:
    name = reference.__name__
    return OpSpec(
        name=name,
        summary=summary,
        arguments=arguments,
        reference=reference,
        backends=(Backend("triton", f"deepinfer.ops.kv_records.triton:{name}"),),
        cases=cases,
        work=work,
        tolerance=tolerance or {},
        stands_for=stands_for,
    )


def _values(name: str) -> Argument:
    return Argument(name, "T D", "bf16 | fp32", "in", "rows, which may be strided")


_FUSED = ("fused_transform", "store_kv_cache", "quant")

SPECS: tuple[OpSpec, ...] = (
    _spec(
        store_window,
        "norm, rotation, FP8 record, store",
        (
            _values("kv"),
            _WEIGHT,
            _ROTATIONS,
            _WINDOW,
            _STORED,
            Argument("records", "T D+D/32", "uint8", "out", "the records of all rows"),
        ),
        _store_cases("window", 512),
        _store_work(2, "kv", FP8_GROUP, 8),
        _FUSED,
    ),
    _spec(
        store_compressed,
        "rotation, FP4 record, store",
        (_values("latents"), _ROTATIONS, _ENTRIES, _STORED),
        _store_cases("compressed", 512),
        _store_work(1, "latents", FP4_GROUP, 4),
        _FUSED,
    ),
    _spec(
        store_index_key,
        "norm, rotation, MXFP4 codes and scales, store",
        (_values("keys"), _WEIGHT, _ROTATIONS, _CODES, _SCALES, _STORED),
        _store_cases("index", 128),
        _store_work(1, "keys", MXFP4_GROUP, 4),
        _FUSED,
    ),
    _spec(
        index_query,
        "rotation and MXFP4 rounding of index queries",
        (
            Argument("queries", "T N D", "bf16 | fp32", "in", "un-rotated"),
            _ROTATIONS,
            Argument("y", "T N D", "as queries", "out", "values on the MXFP4 grid"),
        ),
        _query_cases,
        _query_work,
        ("fused_transform",),
        # Where a fused product changes a rotated value's last bit, it may round to the next code.
        {"y": Tolerance("rounding", limit=0.6, share=0.002)},
    ),
    _spec(
        load_window,
        "dequantised window records",
        (*_given(_WINDOW), _LOADED, _VALUES),
        _load_cases("window", 512),
        _load_work(32, 33),
        ("load_paged_kv_cache", "kv_index_cat"),
    ),
    _spec(
        load_compressed,
        "dequantised compressed records",
        (*_given(_ENTRIES), _LOADED, _VALUES),
        _load_cases("compressed", 512),
        _load_work(16, 9),
        ("load_paged_kv_cache",),
    ),
    _spec(
        load_index_key,
        "dequantised index keys",
        (*_given(_CODES, _SCALES), _LOADED, _VALUES),
        _load_cases("index", 128),
        _load_work(32, 17),
        ("load_paged_kv_cache",),
    ),
)

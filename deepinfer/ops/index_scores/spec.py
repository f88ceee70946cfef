"""Contracts of paged_index_scores and candidate_scores, as data."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deepinfer.ops.index_scores.reference import candidate_scores, paged_index_scores
from deepinfer.ops.kv_records import pack_index_key, round_index
from deepinfer.ops.spec import Argument, Arguments, Backend, Case, OpSpec, Tolerance, Work, size_of


@dataclass(frozen=True)
class _Setting:
    """What a case is made of.

    Attributes:
        rows: rows of each sequence, next to each other.
        entries: entries of each sequence; its last row sees all of them, each earlier one less.
        exponents: keys and queries are multiplied by 2^k, k within these bounds, group by group.
        shuffled: rows of the sequences in random order.
        far: the pages lie that many bytes apart.
        bytes_only: keys are random bytes with scales from 2^-3 to 1, which are drawn faster.
    """

    rows: tuple[int, ...]
    entries: tuple[int, ...]
    heads: int = 4
    channels: int = 32
    per_page: int = 16
    dtype: torch.dtype = torch.bfloat16
    exponents: tuple[int, int] = (-2, 2)
    shuffled: bool = False
    far: int = 0
    bytes_only: bool = False


def _values(generator: torch.Generator, *shape: int, exponents: tuple[int, int]) -> Tensor:
    """Normal values times 2^k, one k for each group of 32 channels."""
    values = torch.randn(*shape, generator=generator).unflatten(-1, (-1, 32))
    power = torch.randint(
        exponents[0], exponents[1] + 1, (*values.shape[:-1], 1), generator=generator
    )
    return (values * torch.exp2(power.float())).flatten(-2)


def _pages(
    records: Tensor, pages: Tensor, per_page: int, size: int, far: int, device: torch.device
) -> Tensor:
    """[P, e, size] cache of poisoned bytes with `records` [n, size] at places page by page."""
    count = int(pages.max()) + 1 if pages.numel() else 1
    if far:
        stride = max(far, per_page * size)
        room = torch.empty((count - 1) * stride + per_page * size, dtype=torch.uint8, device=device)
        cache = room.as_strided((count, per_page, size), (stride, size, 1)).fill_(0xFF)
    else:
        cache = torch.full((count, per_page, size), 0xFF, dtype=torch.uint8, device=device)
    place = torch.arange(len(records))
    cache[pages[place // per_page].to(device), (place % per_page).to(device)] = records.to(device)
    return cache


def _records(setting: _Setting, entries: int, pages: int, generator: torch.Generator) -> Tensor:
    """Index-key records of `entries` entries, and poisoned ones up to the end of `pages` pages."""
    codes, scales = setting.channels // 2, setting.channels // 32
    records = torch.full((pages * setting.per_page, codes + scales), 0xFF, dtype=torch.uint8)
    if setting.bytes_only:
        records[:entries].random_(0, 256, generator=generator)
        records[:entries, codes:].random_(124, 128, generator=generator)
    else:
        key = _values(generator, entries, setting.channels, exponents=setting.exponents)
        records[:entries] = pack_index_key(key)
    return records


def _arguments(
    setting: _Setting, generator: torch.Generator, device: torch.device
) -> tuple[Arguments, int]:
    """Arguments shared by both operators, and the most entries of a sequence."""
    s = setting
    most = max(s.entries, default=0)
    columns = max(-(-most // s.per_page), 1)
    used = [-(-n // s.per_page) for n in s.entries]
    foreign = 0 if s.far else 3  # pages that nobody owns
    shuffled = torch.randperm(sum(used) + foreign, generator=generator)
    table = torch.zeros(len(s.entries), columns, dtype=torch.int64)
    keys, order, first = [], [], 0
    for number, (entries, pages) in enumerate(zip(s.entries, used, strict=True)):
        table[number, :pages] = shuffled[first : first + pages]
        order.append(shuffled[first : first + pages])
        first += pages
        keys.append(_records(s, entries, pages, generator))
    flat, places = torch.cat(keys), torch.cat(order)
    half = s.channels // 2
    rows = torch.tensor(s.rows)
    sequence = torch.repeat_interleave(torch.arange(len(s.rows)), rows)
    back = torch.cat([torch.arange(n - 1, -1, -1) for n in s.rows])
    visible = (torch.tensor(s.entries)[sequence] - back).clamp_min(0)
    if s.shuffled:
        mixed = torch.randperm(len(sequence), generator=generator)
        sequence, visible = sequence[mixed], visible[mixed]
    count = len(sequence)
    queries = _values(generator, count, s.heads, s.channels, exponents=s.exponents)
    weights = torch.randn(count, s.heads, generator=generator) * 2.0**-6
    return {
        "queries": round_index(queries).to(s.dtype).to(device),
        "weights": weights.to(device),
        "codes": _pages(flat[:, :half], places, s.per_page, half, s.far, device),
        "scales": _pages(flat[:, half:], places, s.per_page, s.channels // 32, s.far, device),
        "page_table": table.to(device),
        "sequence": sequence.to(device),
        "visible": visible.to(device),
    }, most


Make = Callable[[torch.Generator, torch.device], Arguments]


def _paged(setting: _Setting, spare: int = 0) -> Make:
    def make(generator: torch.Generator, device: torch.device) -> Arguments:
        arguments, most = _arguments(setting, generator, device)
        return {**arguments, "width": most + spare}

    return make


def _candidates(setting: _Setting, blocks: int, block_size: int = 8) -> Make:
    """Each row gets up to `blocks` random blocks of those that it sees, in part or whole."""

    def make(generator: torch.Generator, device: torch.device) -> Arguments:
        arguments, most = _arguments(setting, generator, device)
        count = max(-(-most // block_size), 1)
        visible = arguments["visible"].cpu()
        keys = torch.rand(len(visible), count, generator=generator)
        seen = torch.arange(count) * block_size < visible.unsqueeze(-1)
        chosen = torch.where(seen, keys, -1.0).topk(min(blocks, count), dim=-1)
        numbers = torch.where(chosen.values >= 0, chosen.indices, count).sort(dim=-1).values
        numbers = torch.where(numbers < count, numbers, -1).to(torch.int32)
        padded = torch.nn.functional.pad(numbers, (0, blocks - numbers.shape[1]), value=-1)
        return {**arguments, "blocks": padded.to(device), "block_size": block_size}

    return make


def _strided(setting: _Setting) -> Make:
    """Every argument that may be is a part of something wider."""

    def make(generator: torch.Generator, device: torch.device) -> Arguments:
        arguments, most = _arguments(setting, generator, device)
        for name in ("queries", "weights", "page_table", "sequence", "visible"):
            value = arguments[name]
            wide = value.new_full((*value.shape[:-1], 2 * value.shape[-1]), 7)
            arguments[name] = wide[..., ::2].copy_(value)
        return {**arguments, "width": most}

    return make


_TINY = _Setting((1, 2), (37, 20))
_CHUNK = _Setting((6, 1, 3), (40, 3, 140), heads=3, channels=64)
_FEW = _Setting((3, 1), (40, 21), heads=3, channels=64, per_page=12)
_TALL = _Setting((26,), (20,))
_WIDE = _Setting((1, 1), (30, 17), heads=32, channels=128)
_HUGE = _Setting((2, 2), (33, 40), exponents=(-96, 12), dtype=torch.float32)
_SPREAD = _Setting((2,), (40,), channels=96, exponents=(-60, 14))


def _released(rows: tuple[int, ...], entries: tuple[int, ...], per_page: int = 64) -> _Setting:
    return _Setting(rows, entries, heads=32, channels=128, per_page=per_page, bytes_only=True)


def _paged_cases() -> Iterator[Case]:
    yield Case("tiny", "tiny", _paged(_TINY))
    yield Case("chunk", "tiny", _paged(_CHUNK))
    yield Case("tall", "tiny", _paged(_TALL))
    yield Case("heads", "tiny", _paged(_WIDE))
    yield Case("no rows", "hostile", _paged(_Setting((0,), (20,))))
    yield Case("no entries", "hostile", _paged(_Setting((2, 1), (0, 0))))
    yield Case("some see nothing", "hostile", _paged(_Setting((3, 2), (1, 0)), spare=200))
    yield Case("mixed order", "hostile", _paged(replace(_CHUNK, shuffled=True)))
    yield Case("magnitudes", "hostile", _paged(_HUGE))
    yield Case("groups far apart", "hostile", _paged(_SPREAD))
    yield Case("strided", "hostile", _strided(_TINY))
    yield Case("far pages", "hostile", _paged(_Setting((1,), (20,), far=2**31 + 16)))
    for count in (1, 64):
        yield Case(
            f"{count} of 16384", "released", _paged(_released((1,) * count, (16384,) * count))
        )
    verify = _released((6,) * 16, tuple(range(4096, 4096 + 16 * 700, 700)), 32)
    yield Case("verify 16 x 6", "released", _paged(verify))
    yield Case("chunk of 1024 at 8192", "released", _paged(_released((1024,), (8192,), 32)))
    yield Case("mixed step", "released", _paged(_released((1,) * 7 + (500,), (3000,) * 8)))
    yield Case("1 of 262144", "released", _paged(_released((1,), (262144,))))


def _candidate_cases() -> Iterator[Case]:
    yield Case("tiny", "tiny", _candidates(_TINY, 4))
    yield Case("odd blocks", "tiny", _candidates(_FEW, 9, 3))
    yield Case("heads", "tiny", _candidates(_WIDE, 3))
    yield Case("no rows", "hostile", _candidates(_Setting((0,), (20,)), 2))
    yield Case("some see nothing", "hostile", _candidates(_Setting((3, 2), (1, 0)), 3))
    yield Case("mixed order", "hostile", _candidates(replace(_FEW, per_page=8, shuffled=True), 5))
    yield Case("magnitudes", "hostile", _candidates(_HUGE, 3))
    yield Case("far pages", "hostile", _candidates(_Setting((1,), (20,), far=2**31 + 16), 2))
    for count in (1, 64):
        setting = _released((1,) * count, (17000,) * count)
        yield Case(f"{count} of 17000", "released", _candidates(setting, 2048))
    yield Case("chunk of 128", "released", _candidates(_released((128,), (65536,)), 2048))


def _key_bytes(arguments: Arguments, entries: int) -> int:
    codes, scales = arguments["codes"], arguments["scales"]
    return entries * int(codes.shape[-1] + scales.shape[-1])


def _paged_work(arguments: Arguments) -> Work:
    queries, visible, sequence = (arguments[n] for n in ("queries", "visible", "sequence"))
    rows, heads, channels = queries.shape
    most = torch.zeros(len(arguments["page_table"]), dtype=torch.int64, device=visible.device)
    most = most.scatter_reduce(0, sequence, visible, "amax")
    moved = _key_bytes(arguments, int(most.sum())) + size_of(queries, arguments["weights"])
    return Work(
        bytes=moved + rows * int(arguments["width"]) * 4,
        flops=2 * heads * (channels + 1) * int(visible.sum()),
    )


def _candidate_work(arguments: Arguments) -> Work:
    queries, blocks = arguments["queries"], arguments["blocks"]
    _, heads, channels = queries.shape
    entries = int((blocks >= 0).sum()) * int(arguments["block_size"])
    moved = _key_bytes(arguments, entries) + size_of(queries, arguments["weights"], blocks)
    written = blocks.numel() * int(arguments["block_size"]) * 4
    return Work(bytes=moved + written, flops=2 * heads * (channels + 1) * entries)


_SHARED = (
    Argument("queries", "T Hi Di", "bf16 | fp32", "in", "values rounded to MXFP4"),
    Argument("weights", "T Hi", "fp32", "in", "head weights"),
    Argument("codes", "P e Di/2", "uint8", "in", "e2m1 pairs of index keys, e entries per page"),
    Argument("scales", "P e Di/32", "uint8", "in", "e8m0 scales of index keys"),
    Argument("page_table", "B M", "int64", "in", "pages of each sequence"),
    Argument("sequence", "T", "int64", "in", "sequence of each row"),
    Argument("visible", "T", "int64", "in", "entries that each row sees"),
)
# float32 sums in another order; relative to the root mean square of all scores.
_TOLERANCE = {"scores": Tolerance("close", limit=2e-5)}

SPECS: tuple[OpSpec, ...] = (
    OpSpec(
        name="paged_index_scores",
        summary="scores of all visible entries, from pages of MXFP4 index keys",
        arguments=(*_SHARED, Argument("scores", "T n", "fp32", "out", "-inf: not visible")),
        reference=paged_index_scores,
        backends=(Backend("triton", "deepinfer.ops.index_scores.triton:paged_index_scores"),),
        cases=_paged_cases,
        work=_paged_work,
        tolerance=_TOLERANCE,
        stands_for=(
            "load_paged_kv_cache",
            "deep_gemm.fp8_fp4_mqa_logits",
            "deep_gemm.fp8_fp4_paged_mqa_logits",
            "deep_gemm.get_paged_mqa_logits_metadata",
        ),
    ),
    OpSpec(
        name="candidate_scores",
        summary="scores of the entries of listed blocks, side by side",
        arguments=(
            *_SHARED,
            Argument("blocks", "T C", "int32", "in", "blocks of each row, ascending, -1: none"),
            Argument("scores", "T C*bs", "fp32", "out", "-inf: no block, or not visible"),
        ),
        reference=candidate_scores,
        backends=(Backend("triton", "deepinfer.ops.index_scores.triton:candidate_scores"),),
        cases=_candidate_cases,
        work=_candidate_work,
        tolerance=_TOLERANCE,
        stands_for=(
            "deep_gemm.fp8_fp4_sparse_mqa_logits",
            "deep_gemm.fp8_fp4_paged_sparse_mqa_logits",
            "deep_gemm.get_sparse_mqa_logits_metadata",
            "deep_gemm.get_paged_sparse_mqa_logits_metadata",
        ),
    ),
)

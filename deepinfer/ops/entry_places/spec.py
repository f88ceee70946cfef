"""Contract of entry_places, as data."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from deepinfer.ops.entry_places.reference import entry_places
from deepinfer.ops.spec import Argument, Arguments, Backend, Case, OpSpec, Work, size_of

Make = Callable[[torch.Generator, torch.device], Arguments]


def _random(
    rows: int,
    width: int,
    sequences: int,
    pages: int,
    per_page: int,
    dtype: torch.dtype = torch.int64,
) -> Make:
    """Each row has ascending entries of a random sequence and a random number of -1 behind."""

    def make(generator: torch.Generator, device: torch.device) -> Arguments:
        numbers = torch.randint(0, pages * per_page, (rows, width), generator=generator)
        used = torch.randint(0, width + 1, (rows, 1), generator=generator)
        used[:1] = width
        entries = torch.where(torch.arange(width) < used, numbers.sort(dim=-1).values, -1)
        table = torch.randperm(sequences * pages, generator=generator).view(sequences, pages)
        sequence = torch.randint(0, sequences, (rows,), generator=generator)
        return {
            "entries": entries.to(dtype).to(device),
            "sequence": sequence.to(device),
            "page_table": table.to(device),
            "entries_per_page": per_page,
        }

    return make


def _high_pages(generator: torch.Generator, device: torch.device) -> Arguments:
    """Places up to 2^31 - 1."""
    arguments = _random(2, 20, 2, 4, 64)(generator, device)
    arguments["page_table"] += 2**25 - 8
    return arguments


def _strided(generator: torch.Generator, device: torch.device) -> Arguments:
    arguments = _random(3, 20, 2, 4, 8)(generator, device)
    for name in ("entries", "page_table"):
        value = arguments[name]
        wide = value.new_full((value.shape[0], value.shape[1] + 5), 3)
        arguments[name] = wide[:, 2 : 2 + value.shape[1]].copy_(value)
    arguments["sequence"] = arguments["sequence"].repeat_interleave(2)[::2]
    return arguments


def _cases() -> Iterator[Case]:
    yield Case("5x20", "tiny", _random(5, 20, 3, 4, 8))
    yield Case("5x20-int32", "tiny", _random(5, 20, 3, 4, 6, torch.int32))
    yield Case("0 rows", "hostile", _random(0, 20, 3, 4, 8))
    yield Case("0 columns", "hostile", _random(3, 0, 3, 4, 8))
    yield Case("600 columns", "hostile", _random(2, 600, 2, 40, 32))
    yield Case("high pages", "hostile", _high_pages)
    yield Case("strided", "hostile", _strided)
    for rows in (1, 64, 4096):
        yield Case(f"{rows}x512", "released", _random(rows, 512, 8, 512, 64))


def _work(arguments: Arguments) -> Work:
    entries: Tensor = arguments["entries"]
    return Work(bytes=size_of(entries, arguments["sequence"]) + 12 * entries.numel())


SPECS: tuple[OpSpec, ...] = (
    OpSpec(
        name="entry_places",
        summary="places in the paged cache of chosen entries",
        arguments=(
            Argument("entries", "T K", "int32 | int64", "in", "entry numbers, -1: none"),
            Argument("sequence", "T", "int64", "in", "sequence of each row"),
            Argument("page_table", "B M", "int64", "in", "pages of each sequence"),
            Argument("places", "T K", "int32", "out", "page * e + offset, -1: none"),
        ),
        reference=entry_places,
        backends=(Backend("triton", "deepinfer.ops.entry_places.triton:entry_places"),),
        cases=_cases,
        work=_work,
        stands_for=("flash_mla_utils", "get_kv_index"),
    ),
)

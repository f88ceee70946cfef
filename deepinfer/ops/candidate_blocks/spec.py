"""Contracts of candidate_block_list and restore_entries, as data."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from deepinfer.ops.candidate_blocks.reference import candidate_block_list, restore_entries
from deepinfer.ops.spec import Argument, Arguments, Backend, Case, OpSpec, Work, size_of

Make = Callable[[torch.Generator, torch.device], Arguments]


def _random(rows: int, entries: int, block_size: int, blocks: int, values: int = 0) -> Make:
    """Normal scores, or whole numbers of `values` kinds; rows see different parts."""

    def make(generator: torch.Generator, device: torch.device) -> Arguments:
        scores = torch.randn(rows, entries, generator=generator)
        if values:
            scores = torch.randint(0, values, (rows, entries), generator=generator).float()
        visible = torch.randint(0, entries + 1, (rows,), generator=generator)
        visible[:1] = entries
        scores.masked_fill_(torch.arange(entries) >= visible.unsqueeze(-1), float("-inf"))
        sizes = {"block_size": block_size, "blocks": blocks}
        return {"scores": scores.to(device), "visible": visible.to(device), **sizes}

    return make


def _special(generator: torch.Generator, device: torch.device) -> Arguments:
    """NaN, infinities and zeros of both signs; rows that see nothing, one entry, everything."""
    values = [torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 3e38, -3e38, 1e-45, 1.0]
    scores = torch.tensor(values)[torch.randint(0, len(values), (6, 61), generator=generator)]
    visible = torch.tensor([0, 1, 61, 60, 8, 9])
    scores.masked_fill_(torch.arange(61) >= visible.unsqueeze(-1), float("-inf"))
    scores[3] = torch.nan
    scores[4] = -torch.inf
    sizes = {"block_size": 8, "blocks": 5}
    return {"scores": scores.to(device), "visible": visible.to(device), **sizes}


def _worst_is_newest(generator: torch.Generator, device: torch.device) -> Arguments:
    """Scores that fall with the number: the newest block is kept though it is the worst."""
    scores = torch.arange(48.0, 0.0, -1.0).repeat(3, 1)
    visible = torch.tensor([48, 41, 7])
    scores.masked_fill_(torch.arange(48) >= visible.unsqueeze(-1), float("-inf"))
    sizes = {"block_size": 8, "blocks": 2}
    return {"scores": scores.to(device), "visible": visible.to(device), **sizes}


def _strided(make: Make, name: str) -> Make:
    """`name` is a part of something wider."""

    def strided(generator: torch.Generator, device: torch.device) -> Arguments:
        arguments = make(generator, device)
        value = arguments[name]
        wide = value.new_full((value.shape[0], value.shape[1] + 9), 5)
        arguments[name] = wide[:, 4 : 4 + value.shape[1]].copy_(value)
        return arguments

    return strided


def _list_cases() -> Iterator[Case]:
    yield Case("4x100 by 8", "tiny", _random(4, 100, 8, 5))
    yield Case("3x47 by 3", "tiny", _random(3, 47, 3, 6))
    yield Case("0 rows", "hostile", _random(0, 40, 8, 3))
    yield Case("0 entries", "hostile", _random(3, 0, 8, 3))
    yield Case("1 entry", "hostile", _random(2, 1, 8, 3))
    yield Case("more blocks than there are", "hostile", _random(3, 70, 8, 40))
    yield Case("ties", "hostile", _random(4, 500, 4, 50, values=3))
    yield Case("special values", "hostile", _special)
    yield Case("worst is newest", "hostile", _worst_is_newest)
    yield Case("strided", "hostile", _strided(_random(3, 100, 8, 4), "scores"))
    for rows, entries in ((1, 20000), (64, 32768), (512, 32768), (8, 1048576)):
        yield Case(f"{rows}x{entries}", "released", _random(rows, entries, 8, 2048))
    yield Case("ties of 64x131072", "released", _random(64, 131072, 8, 2048, values=5))


def _columns(rows: int, width: int, count: int, block_size: int, dtype: torch.dtype) -> Make:
    """Ascending columns of rows of ascending blocks, both padded with -1."""

    def make(generator: torch.Generator, device: torch.device) -> Arguments:
        numbers = torch.arange(count).expand(rows, count) * 3
        numbers = numbers + torch.randint(0, 3, (rows, count), generator=generator)
        used = torch.randint(0, count + 1, (rows, 1), generator=generator)
        used[:1] = count
        blocks = torch.where(torch.arange(count) < used, numbers, -1).to(torch.int32)
        order = torch.rand(rows, max(count * block_size, width), generator=generator)
        columns = order.argsort(dim=-1)[:, :width].sort(dim=-1).values
        selected = torch.where(columns < used * block_size, columns, -1).to(dtype)
        tensors = {"selected": selected.to(device), "blocks": blocks.to(device)}
        return {**tensors, "block_size": block_size}

    return make


def _restore_cases() -> Iterator[Case]:
    yield Case("3x10", "tiny", _columns(3, 10, 4, 8, torch.int64))
    yield Case("3x17-int32", "tiny", _columns(3, 17, 9, 3, torch.int32))
    yield Case("0 rows", "hostile", _columns(0, 10, 4, 8, torch.int64))
    yield Case("0 columns", "hostile", _columns(2, 0, 4, 8, torch.int64))
    yield Case("0 blocks", "hostile", _columns(2, 5, 0, 8, torch.int64))
    yield Case("600 columns", "hostile", _columns(2, 600, 90, 8, torch.int64))
    yield Case("strided", "hostile", _strided(_columns(3, 10, 4, 8, torch.int64), "selected"))
    for rows in (1, 64, 4096):
        yield Case(f"{rows}x512", "released", _columns(rows, 512, 2048, 8, torch.int64))


def _list_work(arguments: Arguments) -> Work:
    scores: Tensor = arguments["scores"]
    count = -(-scores.shape[1] // int(arguments["block_size"]))
    written = scores.shape[0] * min(count, int(arguments["blocks"])) * 4
    return Work(bytes=scores.numel() * 4 + written)


def _restore_work(arguments: Arguments) -> Work:
    selected: Tensor = arguments["selected"]
    return Work(bytes=2 * size_of(selected) + 4 * selected.numel())


SPECS: tuple[OpSpec, ...] = (
    OpSpec(
        name="candidate_block_list",
        summary="numbers of the best blocks of entries of each row, ascending",
        arguments=(
            Argument("scores", "T n", "fp32", "in", "-inf: not visible; NaN counts as -inf"),
            Argument("visible", "T", "int64", "in", "entries that each row sees"),
            Argument("list", "T C", "int32", "out", "block numbers, ascending, padded with -1"),
        ),
        reference=candidate_block_list,
        backends=(Backend("triton", "deepinfer.ops.candidate_blocks.triton:candidate_block_list"),),
        cases=_list_cases,
        work=_list_work,
        stands_for=("candidate_blocks", "deep_select.topk"),
    ),
    OpSpec(
        name="restore_entries",
        summary="entry numbers of selected columns of candidate scores",
        arguments=(
            Argument("selected", "T K", "int32 | int64", "in", "columns, -1: none"),
            Argument("blocks", "T C", "int32", "in", "block numbers of each row"),
            Argument("entries", "T K", "as selected", "out", "entry numbers, -1: none"),
        ),
        reference=restore_entries,
        backends=(Backend("triton", "deepinfer.ops.candidate_blocks.triton:restore_entries"),),
        cases=_restore_cases,
        work=_restore_work,
        stands_for=("candidate_blocks",),
    ),
)

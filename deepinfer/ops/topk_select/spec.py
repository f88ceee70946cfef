"""Contract of topk_select, as data."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from deepinfer.ops.spec import Argument, Arguments, Backend, Case, OpSpec, Work
from deepinfer.ops.topk_select.reference import topk_select

Make = Callable[[torch.Generator, torch.device], Arguments]


def random_scores(generator: torch.Generator, rows: int, entries: int, hidden: float) -> Tensor:
    """Normal scores of which the last ones, up to a part `hidden` of each row, are -inf."""
    scores = torch.randn(rows, entries, generator=generator)
    seen = entries - (torch.rand(rows, 1, generator=generator) * hidden * entries).long()
    return scores.masked_fill(torch.arange(entries) >= seen, float("-inf"))


def _random(rows: int, entries: int, k: int, hidden: float = 0.5) -> Make:
    def make(generator: torch.Generator, device: torch.device) -> Arguments:
        return {"scores": random_scores(generator, rows, entries, hidden).to(device), "k": k}

    return make


def _ties(rows: int, entries: int, k: int, values: int) -> Make:
    """Few different values, zeros of both signs among them."""

    def make(generator: torch.Generator, device: torch.device) -> Arguments:
        drawn = torch.randint(0, values, (rows, entries), generator=generator)
        sign = torch.randint(0, 2, (rows, entries), generator=generator) * 2.0 - 1.0
        return {"scores": ((drawn - values // 2).float() * sign).to(device), "k": k}

    return make


def _special(generator: torch.Generator, device: torch.device) -> Arguments:
    """NaN, infinities, subnormals, largest numbers; a row of -inf and a row of NaN."""
    top, tiny = torch.finfo(torch.float32).max, 1e-45
    values = [torch.nan, torch.inf, -torch.inf, 0.0, -0.0, top, -top, tiny, -tiny, 1.0, -1.0]
    scores = torch.tensor(values)[torch.randint(0, len(values), (7, 300), generator=generator)]
    scores[0] = -torch.inf
    scores[1] = torch.nan
    scores[2] = -top
    scores[3, 5:] = -torch.inf
    return {"scores": scores.to(device), "k": 90}


def _strided(generator: torch.Generator, device: torch.device) -> Arguments:
    wide = random_scores(generator, 3, 700, 0.2).to(device)
    return {"scores": wide[:, 3:500], "k": 30}


def _columns(generator: torch.Generator, device: torch.device) -> Arguments:
    return {"scores": random_scores(generator, 90, 5, 0.2).to(device).t(), "k": 30}


def _many_axes(generator: torch.Generator, device: torch.device) -> Arguments:
    scores = random_scores(generator, 6, 70, 0.9).to(device)
    return {"scores": scores.view(2, 3, 70), "k": 11}


def _cases() -> Iterator[Case]:
    yield Case("3x50 k 8", "tiny", _random(3, 50, 8))
    yield Case("two levels", "tiny", _random(2, 9000, 512))
    yield Case("0 rows", "hostile", _random(0, 50, 8))
    yield Case("0 entries", "hostile", _random(3, 0, 8))
    yield Case("k above n", "hostile", _random(2, 33, 40, 1.0))
    yield Case("k 1 of 1", "hostile", _random(2, 1, 1, 0.0))
    yield Case("ties", "hostile", _ties(4, 1000, 333, 5))
    yield Case("all equal", "hostile", _ties(2, 200, 70, 1))
    yield Case("ties across chunks", "hostile", _ties(2, 9001, 512, 3))
    yield Case("three levels", "hostile", _ties(1, 40001, 512, 2000))
    yield Case("k 2048", "hostile", _random(1, 9500, 2048, 0.1))
    yield Case("special values", "hostile", _special)
    yield Case("strided rows", "hostile", _strided)
    yield Case("strided columns", "hostile", _columns)
    yield Case("many axes", "hostile", _many_axes)
    for rows, entries in ((1, 16384), (64, 16384), (4096, 16384), (1, 131072), (64, 131072),
                          (1, 1048576), (8, 1048576)):  # fmt: skip
        yield Case(f"512 of {rows}x{entries}", "released", _random(rows, entries, 512, 0.1))
    yield Case("ties of 64x131072", "released", _ties(64, 131072, 512, 9))
    yield Case("2048 of 16x131072", "released", _random(16, 131072, 2048, 0.1))


def _work(arguments: Arguments) -> Work:
    scores: Tensor = arguments["scores"]
    k = min(int(arguments["k"]), scores.shape[-1])
    written = scores[..., :1].numel() * k * 8
    return Work(bytes=scores.numel() * 4 + written)


SPECS: tuple[OpSpec, ...] = (
    OpSpec(
        name="topk_select",
        summary="columns of the k largest scores of each row, ascending",
        arguments=(
            Argument("scores", "T n", "fp32", "in", "-inf and NaN are never selected"),
            Argument("selected", "T K", "int64", "out", "ascending, padded with -1"),
        ),
        reference=topk_select,
        backends=(Backend("triton", "deepinfer.ops.topk_select.triton:topk_select"),),
        cases=_cases,
        work=_work,
        stands_for=("deep_select.topk",),
    ),
)

"""Rejected draft rows leave no trace: going on after them is like never having run them.

Taking a sequence back is only a smaller number of tokens; rings must still hold what the next row
reads, and entries, groups and n-gram classes of rejected rows must be written again before they are
read. Lanes of a batch stand at different positions, so one forward tries many.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from deepinfer.config import max_rollback
from deepinfer.engine.loading import Loaded
from tests.cpu.model_helpers import (
    EXACT,
    ORACLE_FOLDER,
    Cache,
    Outputs,
    joined,
    loaded,
    random_ids,
    recomputed,
)

LENGTH = 100
# Around groups, windows of 16, rings of 21 and 22, twice as much, pages, and candidates.
STARTS = [*range(8), *range(14, 25), 31, 32, 33, 36, 37, 38, 42, 43, 44, 63, 64, 65, 80, 81]
PAGE = {"tiny": 16, "oracle": 8}


@pytest.fixture(scope="module")
def models(tiny_folder: Path) -> dict[str, Loaded]:
    return {"tiny": loaded(tiny_folder), "oracle": loaded(ORACLE_FOLDER)}


@pytest.fixture(scope="module")
def expected(models: dict[str, Loaded]) -> dict[str, Outputs]:
    return {name: recomputed(model, random_ids(model, LENGTH)) for name, model in models.items()}


def started(model: Loaded, name: str, ids: Tensor) -> Cache:
    """A cache whose lanes hold the first STARTS[lane] tokens of `ids`."""
    cache = Cache(model, [LENGTH + 8] * len(STARTS), PAGE[name])
    cache.step([(lane, ids[:start]) for lane, start in enumerate(STARTS) if start])
    return cache


def reject(cache: Cache, rows: int, seed: int) -> None:
    """Run wrong tokens in every lane and take them back."""
    before = [lane.done for lane in cache.lanes]
    wrong = [random_ids(cache.model, rows, seed + lane) for lane in range(len(before))]
    cache.step(list(enumerate(wrong)))
    for lane, done in enumerate(before):
        cache.rewind(lane, done)


def assert_goes_on(cache: Cache, ids: Tensor, expected: Outputs, counts: tuple[int, ...]) -> None:
    """The next tokens of every lane, in steps of `counts` tokens, are those of a clean run."""
    parts: list[list[Outputs]] = [[] for _ in cache.lanes]
    for count in counts:
        places = [(lane, cache.lanes[lane].done) for lane in range(len(cache.lanes))]
        steps = cache.step([(lane, ids[done : done + count]) for lane, done in places])
        for part, outputs in zip(parts, steps, strict=True):
            part.append(outputs)
    for start, part in zip(STARTS, parts, strict=True):
        clean = expected.rows(start, start + sum(counts))
        assert joined(part).difference(clean) < EXACT, f"after rejected rows at {start}"


@pytest.mark.parametrize(
    ("name", "after"), [("tiny", (1, 1, 2)), ("tiny", (19,)), ("oracle", (6, 1))]
)
def test_the_largest_rollback(
    models: dict[str, Loaded],
    expected: dict[str, Outputs],
    name: str,
    after: tuple[int, ...],
) -> None:
    """As many rows as a sequence may be taken back by, at every position, twice over."""
    model = models[name]
    ids = random_ids(model, LENGTH)
    cache = started(model, name, ids)
    for seed in (100, 200):
        reject(cache, max_rollback(model.model_config), seed)
    assert_goes_on(cache, ids, expected[name], after)


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_fewer_rejected_rows(
    models: dict[str, Loaded], expected: dict[str, Outputs], rows: int
) -> None:
    ids = random_ids(models["tiny"], LENGTH)
    cache = started(models["tiny"], "tiny", ids)
    reject(cache, rows, 100)
    assert_goes_on(cache, ids, expected["tiny"], (1, 2))


def test_taking_back_the_end_of_a_long_chunk(
    models: dict[str, Loaded], expected: dict[str, Outputs]
) -> None:
    """A chunk longer than every ring, of which the last rows are taken back."""
    model = models["tiny"]
    ids = random_ids(model, LENGTH)
    for rows in range(1, max_rollback(model.model_config) + 1):
        wrong = random_ids(model, rows, 1000)
        cache = Cache(model, [LENGTH])
        cache.step([(0, torch.cat([ids[: 60 - rows], wrong]))])
        cache.rewind(0, 60 - rows)
        clean = expected["tiny"].rows(60 - rows, 75)
        assert cache.prefill(0, ids[60 - rows : 75], 8).difference(clean) < EXACT, rows


def test_rejection_right_after_every_commit(
    models: dict[str, Loaded], expected: dict[str, Outputs]
) -> None:
    """One token at a time with a full rejection before each: the oldest reads of every ring."""
    ids = random_ids(models["oracle"], LENGTH)
    cache = started(models["oracle"], "oracle", ids)
    parts: list[list[Outputs]] = [[] for _ in STARTS]
    for step in range(3):
        reject(cache, max_rollback(models["oracle"].model_config), 1000 * step)
        places = [(lane, cache.lanes[lane].done) for lane in range(len(STARTS))]
        steps = cache.step([(lane, ids[done : done + 1]) for lane, done in places])
        for part, outputs in zip(parts, steps, strict=True):
            part.append(outputs)
    for start, part in zip(STARTS, parts, strict=True):
        assert joined(part).difference(expected["oracle"].rows(start, start + 3)) < EXACT, start


def test_speculative_rounds(models: dict[str, Loaded], expected: dict[str, Outputs]) -> None:
    """Rounds in which a random part of up to six rows is right; the rest is taken back."""
    model = models["tiny"]
    ids = random_ids(model, LENGTH)
    generator = torch.Generator().manual_seed(0)
    lanes = 7
    most = max_rollback(model.model_config)
    cache = Cache(model, [LENGTH + most] * lanes)
    parts: list[list[Outputs]] = [[] for _ in range(lanes)]
    while min(lane.done for lane in cache.lanes) < LENGTH - most:
        rows = torch.randint(1, most + 1, (lanes,), generator=generator).tolist()
        right = [int(torch.randint(1, n + 1, (), generator=generator)) for n in rows]
        step = []
        for lane, (count, good) in enumerate(zip(rows, right, strict=True)):
            done = cache.lanes[lane].done
            if done < LENGTH - most:
                wrong = random_ids(model, count - good, 1000 + done)
                step.append((lane, torch.cat([ids[done : done + good], wrong])))
        for (lane, _), outputs in zip(step, cache.step(step), strict=True):
            before = sum(len(part.logits) for part in parts[lane])
            parts[lane].append(outputs.rows(0, right[lane]))
            cache.rewind(lane, before + right[lane])
    for part in parts:
        whole = joined(part)
        assert whole.difference(expected["tiny"].rows(0, len(whole.logits))) < EXACT

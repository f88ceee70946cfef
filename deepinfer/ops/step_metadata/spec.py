"""What the step metadata operators are, as data.

Knows shapes and cases; must not know any backend's code.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from deepinfer.ops.spec import Argument, Arguments, Backend, Case, OpSpec, Work, size_of
from deepinfer.ops.step_metadata.reference import (
    fix_lengths,
    fix_token_ids,
    ring_targets,
    window_index,
)


def layout(
    generator: torch.Generator, device: torch.device, counts: tuple[int, ...], longest: int,
    rings: int,
) -> Arguments:  # fmt: skip
    """Per-row tensors of a step with `counts` rows of each sequence, by the operators' names."""
    B = len(counts)
    each = torch.tensor(counts, dtype=torch.int64)
    sequence = torch.arange(B).repeat_interleave(each)
    begin = torch.randint(0, longest, (B,), generator=generator)
    begin[: B // 2] = begin[: B // 2] % 5  # some windows reach below position 0
    first = each.cumsum(0) - each
    number = torch.arange(len(sequence)) - first[sequence]
    floors = torch.randint(0, longest, (B,), generator=generator) * (torch.arange(B) % 2)
    named = {
        "positions": begin[sequence] + number,
        "starts": begin[sequence],
        "slots": torch.randperm(rings, generator=generator)[:B][sequence],
        "first_row": first[sequence],
        "floors": floors[sequence],
        "left": each[sequence] - number,
    }
    return {name: value.to(device) for name, value in named.items()}


_WINDOW_ROWS = ("positions", "starts", "slots", "first_row", "floors")
_TARGET_ROWS = ("positions", "slots", "left")


def _layout_case(
    name: str, kind: str, counts: tuple[int, ...], longest: int, ring: int, rings: int, window: int
) -> Case:
    """A case of window_index, or of ring_targets where `window` is 0."""

    def make(generator: torch.Generator, device: torch.device) -> Arguments:
        rows = layout(generator, device, counts, longest, rings)
        if window == 0:
            return {**{k: rows[k] for k in _TARGET_ROWS}, "ring": ring}
        named = {k: rows[k] for k in _WINDOW_ROWS}
        return {**named, "window": window, "ring": ring, "rings": rings}

    return Case(name, kind, make)  # type: ignore[arg-type]


def _layout_cases(windows: bool) -> Callable[[], Iterable[Case]]:
    def cases() -> Iterable[Case]:
        width = 1 if windows else 0
        yield _layout_case("tiny", "tiny", (3, 1, 4), 40, 12, 5, 8 * width)
        yield _layout_case("no-rows", "hostile", (), 40, 12, 5, 8 * width)
        yield _layout_case("longer-than-the-ring", "hostile", (20, 1), 30, 7, 2, 5 * width)
        yield _layout_case("far-ring", "hostile", (2,), 1 << 40, 3, 1 << 20, 3 * width)
        for B in (1, 32, 512):
            yield _layout_case(
                f"released-{B}x6", "released", (6,) * B, 1 << 20, 134, 513, 128 * width
            )
        yield _layout_case("released-4096", "released", (4096,), 1 << 20, 134, 64, 128 * width)

    return cases


def _fix_case(name: str, kind: str, B: int, before: int, n: int, tokens: bool) -> Case:
    """A case of fix_token_ids, or of fix_lengths; `before` sequences ran in the step before."""

    def make(generator: torch.Generator, device: torch.device) -> Arguments:
        def numbers(low: int, high: int, *shape: int) -> Any:
            return torch.randint(low, high, shape, generator=generator)

        source = numbers(-2, max(before, 1), B).to(torch.int32)
        accepted = numbers(0, n + 1, before).to(torch.int32)
        if not tokens:
            lengths = numbers(n, 1 << 20, B).to(torch.int32)
            planned = torch.full((B,), n, dtype=torch.int32)
            named = {"lengths": lengths, "planned": planned, "accepted": accepted}
        else:
            source = source.repeat_interleave(n + 1)
            named = {
                "token_ids": numbers(0, 129280, B * (n + 1)),
                "sampled": numbers(0, 129280, before),
                "drafts": numbers(0, 129280, before, n),
                "draft_step": torch.arange(B * (n + 1), dtype=torch.int32) % (n + 1),
            }
            if kind == "hostile":
                named["draft_step"] = named["draft_step"] * 2 - 1
        return {k: v.to(device) for k, v in {**named, "source": source}.items()}

    return Case(name, kind, make)  # type: ignore[arg-type]


def _fix_cases(tokens: bool) -> Callable[[], Iterable[Case]]:
    def cases() -> Iterable[Case]:
        yield _fix_case("tiny", "tiny", 5, 4, 5, tokens)
        yield _fix_case("no-sequences", "hostile", 0, 3, 5, tokens)
        yield _fix_case("all-new", "hostile", 3, 0, 5, tokens)
        yield _fix_case("steps-out-of-range", "hostile", 4, 3, 2, tokens)
        yield _fix_case("no-drafts", "hostile", 3, 3, 0, tokens)
        for B in (1, 32, 512):
            yield _fix_case(f"released-{B}", "released", B, B, 5, tokens)

    return cases


def _work(a: Arguments) -> Work:
    """All arguments once, and what is made: windows, targets, or the changed tensor again."""
    tensors = [v for v in a.values() if isinstance(v, torch.Tensor)]
    if "window" in a:
        made = 4 * a["positions"].numel() * a["window"]
    else:
        made = size_of(a.get("left"), a.get("lengths"), a.get("token_ids"))
    return Work(size_of(*tensors) + made)


def _row(name: str, meaning: str) -> Argument:
    return Argument(name, "T", "int64", "in", meaning)


def _backend(name: str) -> tuple[Backend, ...]:
    return (Backend("triton", f"deepinfer.ops.step_metadata.triton:{name}"),)


_POSITIONS = _row("positions", "position of each row's token")
_SLOTS = _row("slots", "ring of the row's sequence")
_SOURCE = "number in the step before, negative for new sequences"

SPECS: tuple[OpSpec, ...] = (
    OpSpec(
        name="window_index",
        summary="Where the window of each row lies: in its ring or among the rows of the step",
        arguments=(
            _POSITIONS,
            _row("starts", "position of the first row of the sequence in this step"),
            _SLOTS,
            _row("first_row", "first row of the sequence in this step"),
            _row("floors", "first position that counts"),
            Argument("places", "T window", "int32", "out", "oldest first, -1 for none"),
        ),
        reference=window_index,
        backends=_backend("window_index"),
        cases=_layout_cases(True),
        work=_work,
        stands_for=(
            "swa_index", "get_kv_index", "kv_index_cat", "prepare_decode_metadata",
            "gather_engram_tokens",
        ),
    ),
    OpSpec(
        name="ring_targets",
        summary="Where the rings of a step's sequences keep its rows",
        arguments=(
            _POSITIONS,
            _SLOTS,
            _row("left", "rows from this one to the last of its sequence, both included"),
            Argument("targets", "T", "int64", "out", "-1 for rows that are not kept"),
        ),
        reference=ring_targets,
        backends=_backend("ring_targets"),
        cases=_layout_cases(False),
        work=_work,
        stands_for=("prepare_decode_metadata",),
    ),
    OpSpec(
        name="fix_lengths",
        summary="Lengths that were planned before drafts were judged, corrected",
        arguments=(
            Argument("lengths", "B", "int32", "inout", "with all drafts accepted; then right"),
            Argument("planned", "B", "int32", "in", "drafts that were taken as accepted"),
            Argument("accepted", "B'", "int32", "in", "drafts that the step before accepted"),
            Argument("source", "B", "int32", "in", _SOURCE),
        ),
        reference=fix_lengths,
        backends=_backend("fix_lengths"),
        cases=_fix_cases(False),
        work=_work,
        stands_for=("compute_seqlens_k",),
    ),
    OpSpec(
        name="fix_token_ids",
        summary="Tokens that were not known when a step was planned, put in",
        arguments=(
            Argument("token_ids", "T", "int64 | int32", "inout", "tokens of the step's rows"),
            Argument("source", "T", "int32", "in", f"the row's sequence: {_SOURCE}"),
            Argument("sampled", "B'", "int64 | int32", "in", "token of each sequence's step 0"),
            Argument("drafts", "B' n", "int64 | int32", "in", "tokens of its steps 1 .. n"),
            Argument("draft_step", "T", "int32", "in", "the row's number in its sequence"),
        ),
        reference=fix_token_ids,
        backends=_backend("fix_token_ids"),
        cases=_fix_cases(True),
        work=_work,
        stands_for=("gather_input_ids",),
    ),
)  # fmt: skip

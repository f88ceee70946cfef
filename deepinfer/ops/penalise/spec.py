"""Contracts of count_tokens and penalise, as data."""

from collections.abc import Iterator

import torch

from deepinfer.ops.penalise.reference import count_tokens, penalise
from deepinfer.ops.spec import (
    Argument,
    Arguments,
    Backend,
    Case,
    OpSpec,
    Tolerance,
    Work,
    size_of,
)


def _ids(generator: torch.Generator, B: int, L: int, V: int) -> torch.Tensor:
    """Rows of lengths 0 .. L, with repetitions, padded with -1."""
    ids = torch.randint(0, max(V // 3, 1), (B, L), generator=generator)
    length = torch.randint(0, L + 1, (B, 1), generator=generator)
    return torch.where(torch.arange(L) < length, ids, -1)


def _count_case(name: str, kind: str, B: int, L: int, V: int) -> Case:
    def make(generator: torch.Generator, device: torch.device) -> Arguments:
        ids = _ids(generator, B, L, V)
        if kind == "hostile" and ids.numel():
            ids[0, -1] = V  # past the last
        counts = torch.randint(0, 3, (B, V), generator=generator).to(torch.int32)
        return {"ids": ids.to(device), "counts": counts.to(device)}

    return Case(name, kind, make)  # type: ignore[arg-type]


def _count_cases() -> Iterator[Case]:
    yield _count_case("3x40", "tiny", 3, 40, 30)
    yield _count_case("no ids", "hostile", 2, 0, 30)
    yield _count_case("no rows", "hostile", 0, 5, 30)
    yield _count_case("one token only", "hostile", 2, 1500, 1)
    yield _count_case("64x8192", "released", 64, 8192, 129280)


def _case(name: str, kind: str, B: int, V: int, K: int) -> Case:
    def make(generator: torch.Generator, device: torch.device) -> Arguments:
        counts = torch.zeros(2, B, V, dtype=torch.int32)
        for part in counts:
            count_tokens(_ids(generator, B, min(V, 3000), V), part)
        logits = torch.randn(B, V, generator=generator) * 5
        if kind == "hostile" and logits.numel():
            logits[:, ::3] = -torch.inf
            logits[:, 1::7] = 0.0
        turn = torch.arange(B) % 4
        values = torch.randn(B, K, generator=generator) * 10
        ids = torch.randint(-1, V, (B, K), generator=generator)
        if K > 3:
            ids[:, 1] = ids[:, 3]
        wide = torch.zeros(B, V + 7, device=device)[:, :V]
        named = {
            "prompt_counts": counts[0],
            "output_counts": counts[1],
            "repetition": torch.tensor([1.0, 1.3, 1.0, 0.8])[turn],
            "presence": torch.tensor([0.0, 0.0, 1.5, -0.5])[turn],
            "frequency": torch.tensor([0.0, 0.4, 0.0, 0.25])[turn],
            "bias_ids": ids,
            "bias_values": values,
        }
        return {"logits": wide.copy_(logits), **{k: v.to(device) for k, v in named.items()}}

    return Case(name, kind, make)  # type: ignore[arg-type]


def _cases() -> Iterator[Case]:
    yield _case("5x100", "tiny", 5, 100, 6)
    yield _case("no biases", "tiny", 4, 60, 0)
    yield _case("0 rows", "hostile", 0, 60, 2)
    yield _case("1 token", "hostile", 4, 1, 5)
    yield _case("-inf and 0", "hostile", 4, 2100, 70)
    for B in (1, 64):
        yield _case(f"{B}x129280", "released", B, 129280, 300)


def _work(arguments: Arguments) -> Work:
    tensors = [v for v in arguments.values() if isinstance(v, torch.Tensor)]
    logits = arguments.get("logits")
    return Work(size_of(*tensors) + size_of(logits))


def _backend(name: str) -> tuple[Backend, ...]:
    return (Backend("triton", f"deepinfer.ops.penalise.triton:{name}"),)


SPECS: tuple[OpSpec, ...] = (
    OpSpec(
        name="count_tokens",
        summary="How often tokens occurred, from lists of them",
        arguments=(
            Argument("ids", "B L", "int64 | int32", "in", "padded with -1"),
            Argument("counts", "B V", "int32", "inout", "grow"),
        ),
        reference=count_tokens,
        backends=_backend("count_tokens"),
        cases=_count_cases,
        work=_work,
    ),
    OpSpec(
        name="penalise",
        summary="Repetition, presence and frequency penalties, and biases of logits",
        arguments=(
            Argument("logits", "B V", "fp32", "inout", "rows of neutral parameters stay"),
            Argument("prompt_counts", "B V", "int32", "in", "tokens of the prompt"),
            Argument("output_counts", "B V", "int32", "in", "tokens of the output"),
            Argument("repetition", "B", "fp32", "in", "1: off"),
            Argument("presence", "B", "fp32", "in", "0: off"),
            Argument("frequency", "B", "fp32", "in", "0: off"),
            Argument("bias_ids", "B K", "int64", "in", "-1: none"),
            Argument("bias_values", "B K", "fp32", "in", "added last"),
        ),
        reference=penalise,
        backends=_backend("penalise"),
        cases=_cases,
        work=_work,
        tolerance={"logits": Tolerance("close", 1e-6)},
    ),
)

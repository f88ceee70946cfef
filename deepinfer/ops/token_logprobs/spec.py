"""Contracts of token_logprobs and top_logprobs, as data."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

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
from deepinfer.ops.token_logprobs.reference import token_logprobs, top_logprobs


def _case(name: str, kind: str, rows: int, V: int, k: int, scale: float = 4.0) -> Case:
    """A case of token_logprobs, or of top_logprobs where k > 0; hostile: ties and -inf."""

    def make(generator: torch.Generator, device: torch.device) -> Arguments:
        logits = torch.randn(rows, V, generator=generator) * scale
        ids = torch.randint(0, V, (rows,), generator=generator)
        if kind == "hostile" and rows:
            logits = logits.round()
            logits[:, 1:] = logits[:, 1:].masked_fill(logits[:, 1:] > 2 * scale, -torch.inf)
            logits[-1, 3:] = -torch.inf
            ids[0] = -1
        wide = torch.zeros(rows, V + 5, device=device)[:, :V].copy_(logits)
        return {"logits": wide, "k": k} if k else {"logits": wide, "ids": ids.to(device)}

    return Case(name, kind, make)  # type: ignore[arg-type]


def _cases(k: int) -> Callable[[], Iterator[Case]]:
    def cases() -> Iterator[Case]:
        yield _case("3x100", "tiny", 3, 100, k)
        yield _case("0 rows", "hostile", 0, 50, k)
        yield _case("ties and -inf", "hostile", 3, 301, k, 1.0)
        yield _case("two chunks", "hostile", 2, 9001, k)
        yield _case("large", "hostile", 1, 40, k, 1e4)
        yield _case("1 token", "tiny", 1, 1, k)
        for rows in (1, 64, 1024):
            yield _case(f"{rows}x129280", "released", rows, 129280, k)

    return cases


def _work(arguments: Arguments) -> Work:
    logits: Tensor = arguments["logits"]
    answers = logits.shape[0] * max(int(arguments.get("k", 1)), 1) * 12
    return Work(size_of(logits, arguments.get("ids")) + answers, 4 * logits.numel())


_LOGITS = Argument("logits", "B V", "fp32", "in", "no NaN, no +inf, not all -inf")

SPECS: tuple[OpSpec, ...] = (
    OpSpec(
        name="token_logprobs",
        summary="Log-probability and rank of one token per row, of the raw distribution",
        arguments=(
            _LOGITS,
            Argument("ids", "B", "int64", "in", "negative: -inf, rank 0"),
            Argument("logprobs", "B", "fp32", "out", "natural logarithm"),
            Argument("ranks", "B", "int64", "out", "from 1; the lower id first among equals"),
        ),
        reference=token_logprobs,
        backends=(Backend("triton", "deepinfer.ops.token_logprobs.triton:token_logprobs"),),
        cases=_cases(0),
        work=_work,
        tolerance={"logprobs": Tolerance("close", 1e-5)},
        stands_for=("sampler",),
    ),
    OpSpec(
        name="top_logprobs",
        summary="The most likely tokens of each row, and their log-probabilities",
        arguments=(
            _LOGITS,
            Argument("ids", "B k", "int64", "out", "-1 in place of tokens of -inf"),
            Argument("logprobs", "B k", "fp32", "out", "descending"),
        ),
        reference=top_logprobs,
        backends=(Backend("triton", "deepinfer.ops.token_logprobs.triton:top_logprobs"),),
        cases=_cases(20),
        work=_work,
        tolerance={"logprobs": Tolerance("close", 1e-5)},
        stands_for=("sampler",),
    ),
)

"""Contract of sample_tokens, as data."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from deepinfer.ops.sample_tokens.reference import sample_tokens
from deepinfer.ops.spec import Argument, Arguments, Backend, Case, OpSpec, Work, size_of

Make = Callable[[torch.Generator, torch.device], Arguments]

# (temperature, top-k, top-p, min-p) of rows, in turn.
MIXED = (
    (1.0, 0, 1.0, 0.0), (0.0, 0, 1.0, 0.0), (0.7, 20, 0.9, 0.0), (1.0, 0, 0.95, 0.0),
    (1.5, 50, 1.0, 0.0), (1.0, 0, 0.99, 0.05), (1.0, 1, 1.0, 0.0), (0.6, 3000, 0.8, 0.0),
)  # fmt: skip
FILTERED = ((1.0, 50, 0.95, 0.0), (0.8, 20, 0.9, 0.0))
Rules = Sequence[tuple[float, int, float, float]]


def parameters(generator: torch.Generator, rows: int, rules: Rules) -> dict[str, Tensor]:
    """Rules in turn, and seeds and positions of all sizes."""
    heat, k, p, least = zip(*(rules[i % len(rules)] for i in range(max(rows, 1))), strict=True)
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator)
    return {
        "temperature": torch.tensor(heat, dtype=torch.float32)[:rows],
        "top_k": torch.tensor(k, dtype=torch.int32)[:rows],
        "top_p": torch.tensor(p, dtype=torch.float32)[:rows],
        "min_p": torch.tensor(least, dtype=torch.float32)[:rows],
        "seeds": seeds,
        "positions": torch.randint(0, 2**40, (rows,), generator=generator),
    }


def _case(
    name: str, kind: str, rows: int, V: int, rules: Rules = MIXED, scale: float = 4.0,
    change: Callable[[Tensor], Tensor] = lambda x: x,
) -> Case:  # fmt: skip
    """Normal logits times `scale`, changed by `change`.

    Wide ones, of which few tokens matter: a drawn number then hardly falls so close to the edge of
    a token that the last place of an exponential decides.
    """

    def make(generator: torch.Generator, device: torch.device) -> Arguments:
        logits = change(torch.randn(rows, V, generator=generator) * scale)
        named = {k: v.to(device) for k, v in parameters(generator, rows, rules).items()}
        strided = torch.empty(rows, 2 * V if name == "strided" else V, device=device)[:, :V]
        return {"logits": strided.copy_(logits), **named}

    return Case(name, kind, make)  # type: ignore[arg-type]


def _faulty(logits: Tensor) -> Tensor:
    logits[0] = -torch.inf
    logits[1, 3] = torch.nan
    logits[2, -1] = torch.inf
    logits[3, 5:] = -torch.inf
    logits[4, 0] = torch.nan
    return logits


def _zeros(logits: Tensor) -> Tensor:
    return torch.where(logits.round() == 0, -0.0, logits.round() * 0)


def _cases() -> Iterator[Case]:
    yield _case("8x50", "tiny", 8, 50)
    yield _case("two chunks", "tiny", 1, 9000, FILTERED)
    yield _case("0 rows", "hostile", 0, 50)
    yield _case("1 token", "hostile", 2, 1, FILTERED)
    yield _case("ties", "hostile", 4, 300, MIXED[2:6], 1.0, torch.round)
    yield _case("zeros of both signs", "hostile", 2, 257, FILTERED, 1.0, _zeros)
    yield _case("no distributions", "hostile", 5, 70, ((1.0, 9, 0.9, 0.0), (0.0, 0, 1.0, 0.0)),
                4.0, _faulty)  # fmt: skip
    yield _case("huge", "hostile", 2, 500, FILTERED, 1e4)
    yield _case("tiny values", "hostile", 2, 500, FILTERED, 1e-30)
    yield _case("strided", "hostile", 2, 300, FILTERED)
    for rows in (1, 64, 384, 1024):
        yield _case(f"mixed {rows}x129280", "released", rows, 129280, MIXED, 25.0)
    for rows in (1, 64):
        yield _case(f"filtered {rows}x129280", "released", rows, 129280, FILTERED, 6.0)
    yield _case("filtered 64x262144", "released", 64, 262144, FILTERED, 6.0)
    yield _case("greedy 64x129280", "released", 64, 129280, ((0.0, 0, 1.0, 0.0),))


def _work(arguments: Arguments) -> Work:
    logits: Tensor = arguments["logits"]
    tensors = [v for v in arguments.values() if isinstance(v, Tensor)]
    return Work(size_of(*tensors) + logits.shape[0] * 12, 4 * logits.numel())


SAMPLING = (
    Argument("temperature", "B", "fp32", "in", "0: the largest logit"),
    Argument("top_k", "B", "int32 | int64", "in", "no limit where <= 0"),
    Argument("top_p", "B", "fp32 | fp64", "in", "1: off"),
    Argument("min_p", "B", "fp32 | fp64", "in", "0: off"),
    Argument("seeds", "B", "int64", "in", "the bits of unsigned numbers"),
    Argument("positions", "B", "int64", "in", "position of the token to be drawn"),
)

SPECS: tuple[OpSpec, ...] = (
    OpSpec(
        name="sample_tokens",
        summary="One token per row: temperature, top-k, top-p, min-p and a seeded draw",
        arguments=(
            Argument("logits", "B V", "fp32", "in", "-inf is never drawn"),
            *SAMPLING,
            Argument("tokens", "B", "int64", "out", "-1 in rows that are no distribution"),
            Argument("status", "B", "int32", "out", "1 in rows that are no distribution"),
        ),
        reference=sample_tokens,
        backends=(Backend("triton", "deepinfer.ops.sample_tokens.triton:sample_tokens"),),
        cases=_cases,
        work=_work,
        stands_for=("fused_sample", "random_sampling"),
    ),
)

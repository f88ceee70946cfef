"""Contract of verify_drafts, as data."""

from collections.abc import Iterator

import torch
from torch import Tensor

from deepinfer.ops.sample_tokens.spec import FILTERED, MIXED, SAMPLING, Rules, parameters
from deepinfer.ops.spec import Argument, Arguments, Backend, Case, OpSpec, Work, size_of
from deepinfer.ops.verify_drafts.reference import verify_drafts


def _case(
    name: str, kind: str, B: int, n: int, V: int, rules: Rules = MIXED, probs: bool = False,
    scale: float = 4.0,
) -> Case:  # fmt: skip
    """Drafts that were drawn from something like the logits; hostile ones are partly nonsense."""

    def make(generator: torch.Generator, device: torch.device) -> Arguments:
        logits = torch.randn(B, n + 1, V, generator=generator) * scale
        noisy = logits[:, :n] + torch.randn(B, n, 1, generator=generator) * 0.2
        if probs:
            noisy = noisy + torch.randn(B, n, V, generator=generator) * 0.2
        drafts = noisy.argmax(-1)
        counts = torch.randint(0, n + 1, (B,), generator=generator).to(torch.int32)
        if kind != "hostile":
            counts[: B // 2] = n
        elif n and B:
            drafts[:, n // 2] = torch.randint(-1, V + 1, (B,), generator=generator)
            logits[-1, -1, 0] = torch.nan
            logits[-1, 0] = torch.inf
        named = {"logits": logits, "draft_ids": drafts, "counts": counts}
        named |= parameters(generator, B, rules)
        if probs:
            named["draft_probs"] = torch.softmax(noisy, -1)
        return {k: v.to(device) for k, v in named.items()}

    return Case(name, kind, make)  # type: ignore[arg-type]


def _cases() -> Iterator[Case]:
    yield _case("3 of 2 drafts", "tiny", 3, 2, 60)
    yield _case("2 of 2 drafts, probabilities", "tiny", 2, 2, 60, FILTERED, True)
    yield _case("0 sequences", "hostile", 0, 2, 60)
    yield _case("no drafts", "hostile", 2, 0, 60)
    yield _case("nonsense", "hostile", 2, 2, 300, MIXED)
    yield _case("nonsense, probabilities", "hostile", 2, 1, 300, FILTERED, True)
    for B in (1, 64, 170):
        yield _case(f"{B} of 5 drafts", "released", B, 5, 129280, MIXED, False, 25.0)
    yield _case("64 of 5 drafts, filtered", "released", 64, 5, 129280, FILTERED, False, 6.0)
    yield _case("16 of 5 drafts, probabilities", "released", 16, 5, 129280, FILTERED, True, 25.0)


def _work(arguments: Arguments) -> Work:
    logits: Tensor = arguments["logits"]
    tensors = [v for v in arguments.values() if isinstance(v, Tensor)]
    B, rows = logits.shape[:2]
    return Work(size_of(*tensors) + B * (rows + 1) * 8, 4 * logits.numel())


SPECS: tuple[OpSpec, ...] = (
    OpSpec(
        name="verify_drafts",
        summary="Lossless rejection sampling of drafted tokens, and the token after them",
        arguments=(
            Argument("logits", "B n+1 V", "fp32", "in", "row j judges draft j"),
            Argument("draft_ids", "B n", "int64", "in", "outside of the vocabulary: rejected"),
            Argument("counts", "B", "int32 | int64", "in", "drafts of each sequence, 0 .. n"),
            *SAMPLING,
            Argument("draft_probs", "B n V", "fp32", "in", "None: drafts are one-hot"),
            Argument("accepted", "B", "int32", "out", "drafts that stay"),
            Argument("tokens", "B n+1", "int64", "out", "those, the next token, then -1"),
            Argument("status", "B", "int32", "out", "1: the next token has no distribution"),
        ),
        reference=verify_drafts,
        backends=(Backend("triton", "deepinfer.ops.verify_drafts.triton:verify_drafts"),),
        cases=_cases,
        work=_work,
        stands_for=("sampler", "fused_sample"),
    ),
)

"""Verification of drafts: the output is what plain sampling would have given."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer.ops.sample_tokens import sample_tokens
from deepinfer.ops.sample_tokens import triton as draws
from deepinfer.ops.token_masses import token_masses
from deepinfer.ops.verify_drafts import triton as kernels
from deepinfer.ops.verify_drafts import verify_drafts

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
BOTH = pytest.mark.parametrize("verify", [verify_drafts, kernels.verify_drafts])


def rules(B: int, heat: float, k: int = 0, p: float = 1.0) -> dict[str, Tensor]:
    return {
        "temperature": torch.full((B,), heat, device=DEVICE),
        "top_k": torch.full((B,), k, device=DEVICE),
        "top_p": torch.full((B,), p, device=DEVICE),
        "min_p": torch.zeros(B, device=DEVICE),
        "seeds": torch.randint(-(2**63), 2**63 - 1, (B,)).to(DEVICE),
        "positions": torch.randint(0, 2**40, (B,)).to(DEVICE),
    }


def chi_square(ids: Tensor, probabilities: Tensor) -> float:
    expected = probabilities.double().cpu() * len(ids)
    found = torch.bincount(ids.cpu(), minlength=len(expected)).double()
    assert bool((found[expected == 0] == 0).all())
    possible = expected > 0
    return float(((found - expected)[possible].square() / expected[possible]).sum())


@pytest.mark.parametrize("from_distribution", [False, True])
@pytest.mark.parametrize(("heat", "k", "p"), [(1.0, 0, 1.0), (0.8, 6, 0.9)])
def test_tokens_follow_the_target(from_distribution: bool, heat: float, k: int, p: float) -> None:
    """Every token that comes out, given those before it, has its row's distribution."""
    B, n, V = 30000, 2, 10
    row = torch.randn(n + 1, V, device=DEVICE)
    logits = row.expand(B, n + 1, V)
    named = rules(B, heat, k, p)
    q, _ = token_masses(row, *(x[: n + 1] for x in list(named.values())[:4]))
    q = q.double() / q.sum(-1, keepdim=True)
    probs, drafts = None, torch.randint(0, V, (B, n)).to(DEVICE)
    if from_distribution:
        p_row = torch.softmax(row[:n] * 0.5 + torch.randn(n, V, device=DEVICE) * 0.5, -1)
        probs = p_row.expand(B, n, V)
        drafts = torch.stack(
            [torch.multinomial(p_row[j].cpu(), B, replacement=True) for j in range(n)], -1
        ).to(DEVICE)
    counts = torch.full((B,), n, dtype=torch.int32, device=DEVICE)
    args = (logits, drafts, counts)
    accepted, tokens, status = verify_drafts(*args, **named, draft_probs=probs)
    assert not status.any()
    for j in range(n + 1):
        reached = (accepted >= j).nonzero().flatten()
        assert chi_square(tokens[reached, j], q[j]) < 55  # 9 degrees of freedom
    few = B if ON_GPU else 2
    part = {name: x[:few] for name, x in named.items()}
    found = kernels.verify_drafts(
        *(x[:few] for x in args), **part, draft_probs=None if probs is None else probs[:few]
    )
    wrong = int((found[1] != tokens[:few]).any(-1).sum())
    assert wrong <= B / 1000 * ON_GPU


def decode(step: Callable[[int, list[int]], list[int]], first: int, length: int) -> list[int]:
    tokens = [first]
    while len(tokens) < length:
        tokens += step(tokens[-1], tokens)
    return tokens[:length]


@BOTH
def test_greedy_is_plain_decoding(verify: Any) -> None:
    """A model whose logits depend on the last token, and a drafter that is often wrong."""
    V, n, length = 12, 3, 60 if ON_GPU or verify is verify_drafts else 8
    table = torch.randn(V, V, device=DEVICE)
    best = table.argmax(-1).tolist()
    plain = decode(lambda last, _: [best[last]], 3, length)

    def step(last: int, tokens: list[int]) -> list[int]:
        drafts, token = [], last
        for j in range(n):
            token = best[token] if (len(tokens) * 7 + j * 5) % 4 else (token + 1) % V
            drafts.append(token)
        logits = table[[last, *drafts]].unsqueeze(0)
        counts = torch.tensor([n], dtype=torch.int32, device=DEVICE)
        draft_ids = torch.tensor([drafts], device=DEVICE)
        accepted, found, _ = verify(logits, draft_ids, counts, **rules(1, 0.0))
        kept = found[0].tolist()[: int(accepted) + 1]
        assert found[0].tolist()[len(kept) :] == [-1] * (n + 1 - len(kept))
        return kept

    assert decode(step, 3, length) == plain


@BOTH
def test_without_drafts_it_is_a_draw(verify: Any) -> None:
    logits = torch.randn(3, 3, 50, device=DEVICE)
    logits[:, 1:] = torch.nan  # never looked at
    named = rules(3, 1.0, 9, 0.9)
    none = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    drafts = torch.zeros(3, 2, dtype=torch.int64, device=DEVICE)
    accepted, tokens, status = verify(logits, drafts, none, **named)
    draw = sample_tokens if verify is verify_drafts else draws.sample_tokens
    expected, _ = draw(logits[:, 0], **named)
    assert accepted.tolist() == status.tolist() == [0, 0, 0]
    assert tokens.tolist() == [[token, -1, -1] for token in expected.tolist()]


@BOTH
def test_a_sure_draft_stays_and_an_impossible_one_falls(verify: Any) -> None:
    logits = torch.randn(2, 3, 40, device=DEVICE)
    logits[0, 0] = -torch.inf
    logits[0, 0, 7] = 0.0
    logits[0, 1, 8] = -torch.inf
    drafts = torch.tensor([[7, 8], [-1, 3]], device=DEVICE)
    counts = torch.tensor([2, 2], dtype=torch.int32, device=DEVICE)
    accepted, tokens, _ = verify(logits, drafts, counts, **rules(2, 1.0))
    assert accepted.tolist() == [1, 0]
    assert tokens[0, 0] == 7
    assert tokens[0, 1] not in (8, -1)
    assert tokens[:, 2].tolist() == [-1, -1]


@BOTH
def test_drafts_among_equal_logits(verify: Any) -> None:
    """top-k cuts through equal logits: of drafts there, only the first ids are possible."""
    logits = torch.zeros(3, 2, 300, device=DEVICE)
    drafts = torch.tensor([[4], [5], [299]], device=DEVICE)
    counts = torch.ones(3, dtype=torch.int32, device=DEVICE)
    named = rules(3, 1.0, 5)
    accepted, tokens, _ = verify(logits, drafts, counts, **named)
    assert accepted.tolist()[1:] == [0, 0]
    expected = verify_drafts(logits, drafts, counts, **named)
    assert tokens.tolist() == expected[1].tolist()


def test_a_sequence_alone() -> None:
    logits = torch.randn(3, 3, 400, device=DEVICE) * 2
    logits[2, 1, 3] = torch.inf
    drafts = logits[:, :2].argmax(-1)
    drafts[2, 0] = logits[2, 0].argmax()
    counts = torch.tensor([2, 1, 2], dtype=torch.int32, device=DEVICE)
    named = rules(3, 0.5, 30, 0.95)
    together = kernels.verify_drafts(logits, drafts, counts, **named)
    for i in range(3):
        one = slice(i, i + 1)
        part = {name: x[one] for name, x in named.items()}
        alone = kernels.verify_drafts(logits[one], drafts[one], counts[one], **part)
        for a, b in zip(alone, together, strict=True):
            assert a.tolist() == b[one].tolist()

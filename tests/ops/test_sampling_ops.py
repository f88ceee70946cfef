"""Operators between logits and tokens: draws, masks, penalties, log-probabilities, schedules."""

import math
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.errors import Unsupported
from deepinfer.kernels.philox import uniform
from deepinfer.ops.apply_bitmask import apply_bitmask
from deepinfer.ops.apply_bitmask import triton as masks
from deepinfer.ops.confidence import confidence
from deepinfer.ops.penalise import count_tokens, penalise
from deepinfer.ops.penalise import triton as penalties
from deepinfer.ops.sample_tokens import sample_tokens
from deepinfer.ops.sample_tokens import triton as kernels
from deepinfer.ops.sample_tokens.reference import uniforms
from deepinfer.ops.schedule_drafts import schedule_drafts
from deepinfer.ops.token_logprobs import token_logprobs, top_logprobs
from deepinfer.ops.token_masses import token_masses
from deepinfer.sampling.params import SamplingParams
from deepinfer.testing import draws, philox
from deepinfer.testing.draws import sample

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")


def numbers(rows: int) -> tuple[Tensor, Tensor]:
    """Seeds and positions whose upper bits matter."""
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,))
    return seeds.to(DEVICE), torch.randint(0, 2**62, (rows,)).to(DEVICE)


def rules(rows: int, *each: tuple[float, int, float, float]) -> dict[str, Tensor]:
    """temperature, top-k, top-p and min-p of rows, in turn."""
    heat, k, p, least = zip(*(each[i % len(each)] for i in range(rows)), strict=True)
    return {
        "temperature": torch.tensor(heat, dtype=torch.float32, device=DEVICE),
        "top_k": torch.tensor(k, device=DEVICE),
        "top_p": torch.tensor(p, dtype=torch.float64, device=DEVICE),
        "min_p": torch.tensor(least, dtype=torch.float64, device=DEVICE),
    }


def call(function: Any, logits: Tensor, named: dict[str, Tensor], *at: Tensor) -> list[Tensor]:
    return list(function(logits, **named, seeds=at[0], positions=at[1]))


def chi_square(ids: Tensor, probabilities: Tensor) -> float:
    """Sum of (found - expected)^2 / expected; ids must be possible ones."""
    expected = probabilities.double().cpu() * len(ids)
    found = torch.bincount(ids.cpu(), minlength=len(expected)).double()
    assert bool((found[expected == 0] == 0).all())
    possible = expected > 0
    return float(((found - expected)[possible].square() / expected[possible]).sum())


MIXED = (
    (1.0, 0, 1.0, 0.0), (0.0, 3, 0.5, 0.1), (0.7, 20, 0.9, 0.0), (1.0, 0, 0.95, 0.0),
    (1.5, 50, 1.0, 0.02), (1.0, 0, 0.99, 0.05), (2.0, 1, 1.0, 0.0), (100.0, 30, 0.8, 0.0),
)  # fmt: skip


@triton.jit
def uniform_kernel(seeds, positions, out, STREAM: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    tl.store(out + row, uniform(tl.load(seeds + row), tl.load(positions + row), STREAM))


def test_random_numbers_are_those_of_the_sampler() -> None:
    seeds, positions = numbers(20)
    seeds[0], positions[0] = -1, -1
    for stream in (0, 2):
        words = (np.array(x.tolist(), dtype=np.int64).view(np.uint64) for x in (seeds, positions))
        expected = torch.from_numpy(philox.uniforms(*(x.tolist() for x in words), stream))
        assert torch.equal(uniforms(seeds, positions, stream).cpu(), expected)
        out = torch.empty(20, dtype=torch.float64, device=DEVICE)
        uniform_kernel[(20,)](seeds, positions, out, STREAM=stream)
        assert torch.equal(out.cpu(), expected)


@pytest.mark.parametrize("vocabulary", [5, 300, 5000])
def test_reference_is_the_sampler(vocabulary: int) -> None:
    logits = (torch.randn(40, vocabulary) * 3).round()  # with ties
    named, (seeds, positions) = rules(40, *MIXED), numbers(40)
    params = [
        SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m)
        for t, k, p, m in (MIXED[i % len(MIXED)] for i in range(40))
    ]
    expected = sample(logits, params, [s % 2**64 for s in seeds.tolist()], positions.tolist())
    named = {k: v.cpu() for k, v in named.items()}
    ids, status = call(sample_tokens, logits, named, seeds.cpu(), positions.cpu())
    assert torch.equal(ids, expected)
    assert not status.any()


@pytest.mark.parametrize("each", MIXED[2:6])
def test_draws_follow_the_distribution(each: tuple[float, int, float, float]) -> None:
    rows, V = 20000, 30
    logits = torch.randn(V, device=DEVICE).expand(rows, V)
    named, at = rules(rows, each), numbers(rows)
    masses, _ = token_masses(logits[:1], *(x[:1] for x in named.values()))
    probabilities = masses[0].double() / masses[0].sum()
    ids, _ = call(sample_tokens, logits, named, *at)
    assert chi_square(ids, probabilities) < 90  # 29 degrees of freedom: once in 10^7 times
    few = rows if ON_GPU else 3
    named = {k: v[:few] for k, v in named.items()}
    found, _ = call(kernels.sample_tokens, logits[:few], named, *(x[:few] for x in at))
    assert int((found != ids[:few]).sum()) <= rows / 1000 * ON_GPU


def test_a_row_alone() -> None:
    logits = torch.randn(4, 2500, device=DEVICE) * 3
    named, at = rules(4, *MIXED[2:6]), numbers(4)
    together, _ = call(kernels.sample_tokens, logits, named, *at)
    for row in range(4):
        one = slice(row, row + 1)
        part = {k: v[one] for k, v in named.items()}
        alone, _ = call(kernels.sample_tokens, logits[one], part, *(x[one] for x in at))
        assert alone.tolist() == together[one].tolist()


@pytest.mark.parametrize("k", [1, 5, 8500])
def test_equal_logits_keep_the_lowest_ids(k: int) -> None:
    """Ties over several chunks; positive and negative zero are equal."""
    logits = torch.zeros(2, 9000, device=DEVICE)
    logits[:, ::2] = -0.0
    logits[1, 100:] -= 1e-7
    named, at = rules(2, (1.0, k, 1.0, 0.0)), numbers(2)
    ids, _ = call(kernels.sample_tokens, logits, named, *at)
    assert bool((ids < k).all())
    assert ids.tolist() == call(sample_tokens, logits, named, *at)[0].tolist()


def test_top_p_counts_ties() -> None:
    logits = torch.zeros(3, 64, device=DEVICE)
    named, at = rules(3, (1.0, 0, 0.0625, 0.0)), numbers(3)
    ids, _ = call(kernels.sample_tokens, logits, named, *at)
    assert bool((ids < 4).all())
    logits[:, 7] = 1.0  # above the ties
    ids, _ = call(kernels.sample_tokens, logits, rules(3, (1.0, 0, 0.01, 0.0)), *at)
    assert ids.tolist() == [7, 7, 7]


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_extreme_temperatures() -> None:
    logits = torch.randn(4, 300, device=DEVICE) * 100
    logits[:, 5:9] = -torch.inf
    logits[2, 4] = 3e38
    logits[2, 3] = -3e38
    named, at = rules(4, (1e-44, 0, 1.0, 0.0), (3e38, 0, 1.0, 0.0), (1.0, 7, 0.9, 0.0)), numbers(4)
    ids, status = call(kernels.sample_tokens, logits, named, *at)
    assert ids[0] == logits[0].argmax()
    assert ids[3] == logits[3].argmax()
    assert ids[1] not in range(5, 9)
    assert ids[2] == 4
    assert not status.any()


def test_faulty_rows_do_not_disturb_others() -> None:
    logits = torch.randn(4, 70, device=DEVICE)
    logits[0, 3], logits[1, 69], logits[2] = math.nan, math.inf, -math.inf
    named, at = rules(4, (1.0, 5, 0.9, 0.1)), numbers(4)
    ids, status = call(kernels.sample_tokens, logits, named, *at)
    assert ids[:3].tolist() == [-1] * 3
    assert status.tolist() == [1, 1, 1, 0]
    assert ids[3] == call(sample_tokens, logits, named, *at)[0][3]


def test_refused() -> None:
    named, at = rules(1, MIXED[0]), numbers(1)
    wide = torch.zeros(1, 4, dtype=torch.float64, device=DEVICE)
    with pytest.raises(Unsupported, match="float64"):
        call(kernels.sample_tokens, wide, named, *at)
    with pytest.raises(Unsupported, match="vocabulary"):
        call(kernels.sample_tokens, torch.zeros(1, 1 << 19, device=DEVICE), named, *at)


@pytest.mark.parametrize("function", [apply_bitmask, masks.apply_bitmask])
def test_bitmask_leaves_the_rest_alone(function: Any) -> None:
    wide = torch.ones(6, 80, device=DEVICE)
    mask = torch.zeros(2, 2, dtype=torch.int32)
    mask[0, 0], mask[1, 1] = 0b101, -(2**31)
    logits = wide[1:5, 4:68]
    function(logits, mask.to(DEVICE), torch.tensor([3, 0], device=DEVICE))
    expected = torch.ones(6, 80)
    expected[4, 4:68] = expected[1, 4:68] = -torch.inf
    expected[4, 4] = expected[4, 6] = expected[1, 4 + 63] = 1.0
    assert torch.equal(wide.cpu(), expected)


def penalised(row: list[float], prompt: list[int], output: list[int]) -> list[float]:
    """Repetition 1.5, presence 0.5, frequency 0.25, as written in words."""
    row = list(row)
    for token in set(prompt) | set(output):
        row[token] = row[token] / 1.5 if row[token] > 0 else row[token] * 1.5
    for token in set(output):
        row[token] -= 0.5 + 0.25 * output.count(token)
    return row


@pytest.mark.parametrize("apply", [penalise, penalties.penalise])
@pytest.mark.parametrize("count", [count_tokens, penalties.count_tokens])
def test_penalties(apply: Any, count: Any) -> None:
    wide = torch.randn(2, 50, device=DEVICE)
    before = wide.clone()
    logits = wide[:, 5:45]
    prompt, output = [1, 1, 7, 39], [7, 7, 7, 2]
    counts = torch.zeros(2, 2, 40, dtype=torch.int32, device=DEVICE)
    for ids, part in zip((prompt, output), counts, strict=True):
        count(torch.tensor([[*ids, -1, -1]] * 2, device=DEVICE), part)
    each = {
        "repetition": torch.tensor([1.5, 1.0], device=DEVICE),
        "presence": torch.tensor([0.5, 0.0], device=DEVICE),
        "frequency": torch.tensor([0.25, 0.0], device=DEVICE),
        "bias_ids": torch.tensor([[3, 3, -1, 3], [4, 4, 5, -1]], device=DEVICE),
        "bias_values": torch.tensor([[1.0, 2, 9, 4], [1, 1, 3, 9]], device=DEVICE),
    }
    apply(logits, counts[0], counts[1], **each)
    expected = before.clone()
    row = penalised(before[0, 5:45].tolist(), prompt, output)
    expected[0, 5:45] = torch.tensor(row, device=DEVICE)
    expected[0, 5 + 3] += 7
    expected[1, 5 + 4] += 2
    expected[1, 5 + 5] += 3
    torch.testing.assert_close(wide, expected, rtol=1e-6, atol=1e-6)
    touched = torch.zeros(50, dtype=torch.bool)
    touched[[9, 10]] = True
    assert torch.equal(wide[1].cpu()[~touched], before[1].cpu()[~touched])


def test_logprobs_are_those_of_replies() -> None:
    logits = (torch.randn(6, 90) * 3).round()
    chosen = torch.randint(0, 90, (6,))
    expected = draws.token_logprobs(logits, chosen, 5)
    values, ranks = token_logprobs(logits, chosen)
    ids, top = top_logprobs(logits, 5)
    assert [entry.rank for entry in expected] == ranks.tolist()
    assert [entry.logprob for entry in expected] == values.tolist()
    for row, entry in enumerate(expected):
        assert entry.top == tuple(zip(ids[row].tolist(), top[row].tolist(), strict=True))


def test_schedule_takes_the_best() -> None:
    confidence_of = torch.rand(9, 4)
    counts = torch.randint(0, 5, (9,)).to(torch.int32)
    drafts = []
    for sequence in range(9):
        chance = torch.ones(())
        for j in range(int(counts[sequence])):
            chance = chance * confidence_of[sequence, j]
            drafts.append((-float(chance), sequence))
    for budget in range(-1, len(drafts) + 2):
        taken = [sequence for _, sequence in sorted(drafts)[: max(budget, 0)]]
        granted = schedule_drafts(confidence_of, counts, torch.tensor([budget]))
        assert granted.tolist() == [taken.count(i) for i in range(9)]


def test_confidence_is_the_heads() -> None:
    x, embedded, weight = torch.randn(3, 40), torch.randn(3, 8), torch.randn(1, 48)
    logit = torch.nn.functional.linear(torch.cat([x, embedded], -1), weight).squeeze(-1)
    torch.testing.assert_close(confidence(x, embedded, weight), torch.sigmoid(logit))

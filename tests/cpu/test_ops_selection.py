"""What is chosen: entries, candidate blocks, experts and table rows, against sorting in Python.

Scores come from few values, so that most rows have ties; the lower index wins everywhere.
"""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deepinfer.checkpoint.hf_config import parse_model_config
from deepinfer.checkpoint.released import RELEASED_CONFIG
from deepinfer.model.engram import hash_multipliers, table_primes, table_rows
from deepinfer.model.moe import MixtureOfExperts
from deepinfer.ops.candidate_blocks import candidate_blocks
from deepinfer.ops.engram_hash import engram_hash
from deepinfer.ops.moe_gate import moe_gate
from deepinfer.ops.topk_select import topk_select
from tests.cpu.model_helpers import loaded

INF = math.inf
SCORES = st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, 3e38, -3e38, 1e-45, INF, -INF, math.nan])


def best_first(scores: list[float]) -> list[int]:
    """Indices that may be chosen, best first, lower index first among equals."""
    usable = [i for i, score in enumerate(scores) if score > -INF]  # NaN is not
    return sorted(usable, key=lambda i: (-scores[i], i))


# Entries


@settings(max_examples=300)
@given(st.lists(SCORES, max_size=12), st.integers(1, 14))
def test_topk_select(scores: list[float], k: int) -> None:
    found = topk_select(torch.tensor([scores], dtype=torch.float32), k)[0].tolist()
    expected = sorted(best_first(scores)[:k])
    assert found == expected + [-1] * (min(k, len(scores)) - len(expected))


def test_topk_select_of_many_rows_and_axes() -> None:
    scores = torch.randint(-3, 4, (2, 5, 40)).float()
    found = topk_select(scores, 7)
    assert found.shape == (2, 5, 7)
    for row, chosen in zip(scores.flatten(0, 1).tolist(), found.flatten(0, 1), strict=True):
        assert chosen.tolist() == sorted(best_first(row)[:7])


def test_float64_scores_are_compared_as_float32() -> None:
    """Two ways of computing one score may differ in its last digits: that must not break a tie."""
    scores = torch.tensor([[1.0, 1.0 + 1e-12, 1.0 + 1e-3]], dtype=torch.float64)
    assert topk_select(scores, 2).tolist() == [[0, 2]]


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0)])
def test_nothing_to_select(shape: tuple[int, int]) -> None:
    assert topk_select(torch.zeros(shape), 4).shape == (shape[0], min(4, shape[1]))
    visible = torch.zeros(shape[0], dtype=torch.int64)
    assert candidate_blocks(torch.zeros(shape), visible, 8, 2).shape == shape


# Candidate blocks


def slow_candidates(scores: list[float], visible: int, size: int, blocks: int) -> list[bool]:
    count = -(-len(scores) // size)
    best = [max(scores[b * size : (b + 1) * size]) for b in range(count)]
    if visible > 0:
        best[(visible - 1) // size] = INF
    kept = best_first(best)[:blocks]
    return [i // size in kept for i in range(len(scores))]


@settings(max_examples=500)
@given(
    st.lists(SCORES.filter(lambda score: not math.isnan(score)), min_size=1, max_size=20),
    st.integers(0, 20),
    st.integers(1, 5),
    st.integers(1, 6),
)
def test_candidate_blocks(values: list[float], visible: int, size: int, blocks: int) -> None:
    visible = min(visible, len(values))
    scores = values[:visible] + [-INF] * (len(values) - visible)
    found = candidate_blocks(torch.tensor([scores]), torch.tensor([visible]), size, blocks)
    assert found[0].tolist() == slow_candidates(scores, visible, size, blocks)


def test_the_newest_block_always_stays() -> None:
    """Even as the worst of all, and for every query its own."""
    scores = torch.arange(12.0, 0.0, -1.0).repeat(3, 1)
    visible = torch.tensor([12, 9, 4])
    numbers = torch.arange(12)
    scores = scores.masked_fill(numbers >= visible.unsqueeze(-1), -INF)
    found = candidate_blocks(scores, visible, 4, 2)
    kept = [sorted({i // 4 for i, ok in enumerate(row) if ok}) for row in found.tolist()]
    assert kept == [[0, 2], [0, 2], [0]]


# Experts


def slow_gate(
    logits: list[float], bias: list[float], selected: int, scaling: float, normalise: bool
) -> tuple[list[int], list[float]]:
    softplus = [max(x, 0.0) + math.log1p(math.exp(-abs(x))) for x in logits]
    scores = [math.sqrt(x) for x in softplus]
    ids = best_first([s + b for s, b in zip(scores, bias, strict=True)])[:selected]
    weights = [scores[i] for i in ids]
    if normalise and selected > 1:
        total = math.fsum(weights) + 1e-20
        weights = [w / total for w in weights]
    return ids, [w * scaling for w in weights]


@pytest.mark.parametrize("selected", [1, 3, 8])
@pytest.mark.parametrize("normalise", [False, True])
def test_moe_gate(selected: int, normalise: bool) -> None:
    logits = torch.randn(20, 8, dtype=torch.float64) * torch.tensor(
        [[0.1], [3.0], [30.0], [200.0]] * 5
    )
    bias = torch.randn(8, dtype=torch.float64)
    ids, weights = moe_gate(logits, bias, selected, 1.5, normalise)
    for t in range(20):
        expected = slow_gate(logits[t].tolist(), bias.tolist(), selected, 1.5, normalise)
        assert ids[t].tolist() == expected[0]
        assert weights[t].tolist() == pytest.approx(expected[1], rel=1e-8, abs=1e-30)


def test_equal_experts_go_by_number() -> None:
    ids, weights = moe_gate(torch.zeros(3, 6), torch.zeros(6), 3, 1.5, True)
    assert ids.tolist() == [[0, 1, 2]] * 3
    assert weights.flatten().tolist() == pytest.approx([0.5] * 9)
    ids, _ = moe_gate(torch.zeros(1, 6), torch.tensor([0.0, 1, 0, 1, 0, 1]), 4, 1.0, True)
    assert ids.tolist() == [[1, 3, 5, 0]]


def test_the_bias_steers_the_choice_and_not_the_weights() -> None:
    logits, bias = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([100.0, 50.0, 0.0])
    ids, weights = moe_gate(logits, bias, 2, 1.0, False)
    plain = torch.sqrt(torch.nn.functional.softplus(logits[0]))
    assert ids.tolist() == [[0, 1]]
    torch.testing.assert_close(weights[0], plain[:2])


def test_experts_without_any_score() -> None:
    ids, weights = moe_gate(torch.full((1, 4), -1e4), torch.zeros(4), 2, 1.5, True)
    assert ids.tolist() == [[0, 1]]
    assert weights.tolist() == [[0.0, 0.0]]


def test_gate_of_no_tokens() -> None:
    ids, weights = moe_gate(torch.zeros(0, 6), torch.zeros(6), 3, 1.5, True)
    assert (ids.shape, weights.shape) == ((0, 3), (0, 3))


@pytest.fixture(scope="module")
def experts(tiny_folder: Path) -> MixtureOfExperts:
    ffn = loaded(tiny_folder).model.layers[3].ffn
    assert isinstance(ffn, MixtureOfExperts)
    return ffn


def slow_experts(module: MixtureOfExperts, x: Tensor) -> Tensor:
    """Model description 3.9, one token and one expert after the other."""
    precision = module.precision
    ids, weights = module.route(x)
    rows = []
    for t in range(len(x)):
        row = precision.activation(x[t])
        total = torch.zeros_like(row)
        for expert, weight in zip(ids[t].tolist(), weights[t], strict=True):
            (w1, w3), w2 = module.experts.w13[expert], module.experts.w2[expert]
            g, u = (w1 @ row).clamp_max(10), (w3 @ row).clamp(-10, 10)
            total += w2 @ precision.activation(weight * g * torch.sigmoid(g) * u)
        shared = module.shared_experts
        g, u = (shared.w1.weight @ row).clamp_max(10), (shared.w3.weight @ row).clamp(-10, 10)
        total += shared.w2.weight @ precision.activation(g * torch.sigmoid(g) * u)
        rows.append(total)
    return torch.stack(rows)


@pytest.mark.parametrize("rows", [1, 2, 40])
def test_all_ways_through_the_experts_agree(experts: MixtureOfExperts, rows: int) -> None:
    """Gathered matrices, rows sorted by expert, and one by one."""
    x = torch.randn(rows, 128, dtype=torch.float64) * 3
    with torch.inference_mode():
        ids, weights = experts.route(x)
        quantised = experts.precision.activation(x)
        few = experts._few_rows(quantised, ids, weights)
        many = experts._many_rows(quantised, ids, weights)
        assert (few - many).abs().max() < 1e-10
        exact = slow_experts(experts, x)
        assert (experts(x) - exact).abs().max() < 1e-10
        assert (experts(x.view(1, rows, 128))[0] - exact).abs().max() < 1e-10


def test_experts_of_no_tokens(experts: MixtureOfExperts) -> None:
    x = torch.zeros(0, 128, dtype=torch.float64)
    with torch.inference_mode():
        ids, weights = experts.route(x)
        assert experts(x).shape == (0, 128)
        assert experts._many_rows(x, ids, weights).shape == (0, 128)


# N-gram rows


RELEASED_PRIMES = {
    0: [[57, 79, 81, 97, 121, 129, 133, 183], [189, 207, 211, 253, 277, 289, 307, 321],
        [339, 381, 393, 399, 403, 409, 447, 463]],
    1: [[477, 487, 499, 507, 511, 573, 609, 627], [667, 669, 693, 697, 711, 729, 759, 769],
        [781, 799, 813, 819, 841, 877, 879, 889]],
}  # fmt: skip
RELEASED_MULTIPLIERS = [76632096046245, 4839876093313, 35959672319349, 73987337458391]


def test_primes_of_the_release() -> None:
    config = parse_model_config(RELEASED_CONFIG)
    primes = table_primes(config)
    assert primes == [
        [[16000000 + p for p in order] for order in RELEASED_PRIMES[layer]] for layer in (0, 1)
    ]
    assert table_rows(config) == [384006168, 384016682] == list(config.engram_num_embeddings)


def test_multipliers_of_the_release() -> None:
    assert hash_multipliers(1, 4, 99092) == RELEASED_MULTIPLIERS
    assert hash_multipliers(14, 4, 99092) == [67716810739261, 51510806800915, 30921347202721,
                                              82619226485591]  # fmt: skip
    assert hash_multipliers(4, 4, 300) == [27171098617865603, 1664016290499501, 24328227015100263,
                                           6260917600735559]  # fmt: skip


def test_hash_of_the_model_description() -> None:
    """Check values of model description 3.10 c, classes c_0 to c_3."""
    primes = torch.tensor(RELEASED_PRIMES[0]) + 16000000
    offsets = (primes.flatten().cumsum(0) - primes.flatten()).view_as(primes)
    classes = torch.tensor([[5, 17, 99091, 42]])
    rows = engram_hash(classes, torch.tensor(RELEASED_MULTIPLIERS), primes, offsets)
    assert rows[0].tolist() == [
        3889985, 30570021, 40268302, 53854578, 74235168, 81029010, 100426120, 118891433, 143562967,
        153520896, 165847521, 186163984, 201532732, 215229454, 227289662, 255349519, 268223190,
        272362309, 293997170, 314318703, 333756862, 339748996, 352980399, 374793280,
    ]  # fmt: skip


def test_hash_against_whole_numbers() -> None:
    """Largest classes of the release: products must not overflow, rows stay in their own part."""
    primes = torch.tensor([[11, 13], [17, 19]])
    offsets = torch.tensor([[0, 11], [24, 41]])
    multipliers = hash_multipliers(1, 3, 99092)
    classes = torch.cat([torch.randint(99092, (50, 3)), torch.full((1, 3), 99091)])
    found = engram_hash(classes, torch.tensor(multipliers), primes, offsets)
    for row, rows in zip(classes.tolist(), found.tolist(), strict=True):
        hashed, expected = row[0] * multipliers[0], []
        for order in (1, 2):
            hashed ^= row[order] * multipliers[order]
            expected += [hashed % p.item() + o.item() for p, o in
                         zip(primes[order - 1], offsets[order - 1], strict=True)]  # fmt: skip
        assert rows == expected
    assert engram_hash(classes[:0], torch.tensor(multipliers), primes, offsets).shape == (0, 4)

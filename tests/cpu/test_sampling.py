"""Parameters, filters, draws and log-probabilities, against definitions written out in plain code.

The brute-force filter works in exact fractions of the float32 probabilities.
"""

import dataclasses
import math
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deepinfer.errors import RequestError
from deepinfer.sampling.params import SamplingParams
from deepinfer.testing.draws import LogitsError, filtered_probabilities, sample, token_logprobs
from deepinfer.testing.philox import uniform

ROOT = Path(__file__).parents[2]
INF = float("inf")
NAN = float("nan")

# Few distinct values, so that ties are common; never more than 10 apart, so that every float32
# probability is a whole multiple of 2^-52 and the fractions below compare exactly.
LOGIT = st.sampled_from([-4.0, -1.5, 0.0, 0.25, 1.0, 3.0, -INF])
ROWS = st.lists(LOGIT, min_size=1, max_size=12).filter(lambda row: max(row) > -INF)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([-1, 0, 1, 2, 3, 5, 50]),
    top_p=st.one_of(st.sampled_from([0.25, 0.5, 1.0]), st.floats(0.01, 1.0)),
    min_p=st.one_of(st.sampled_from([0.0, 0.3, 1.0]), st.floats(0.0, 1.0)),
)
SEEDS = st.integers(0, 2**64 - 1)
POSITIONS = st.integers(0, 2**40)


def one(row: list[float]) -> Tensor:
    return torch.tensor([row], dtype=torch.float32)


def kept_by_definition(row: list[float], params: SamplingParams) -> set[int]:
    """The filters, one token at a time."""
    if params.temperature == 0:
        return {row.index(max(row))}
    shifted = one(row) - max(row)
    p = [Fraction(x) for x in torch.softmax(shifted / params.temperature, -1)[0].tolist()]
    kept: set[int] = set()
    mass = Fraction(0)
    for token in sorted(range(len(row)), key=lambda i: (-row[i], i)):
        if params.top_k > 0 and len(kept) >= params.top_k:
            break
        if params.top_p < 1 and mass >= Fraction(params.top_p):
            break
        kept.add(token)
        mass += p[token]
    return {i for i in kept if p[i] > 0 and float(p[i]) >= params.min_p * float(max(p))}


# The sampler


@settings(max_examples=300)
@given(ROWS, PARAMS)
def test_filters_keep_what_the_definition_keeps(row: list[float], params: SamplingParams) -> None:
    probabilities = filtered_probabilities(one(row), [params])
    assert probabilities.dtype == torch.float32
    kept = kept_by_definition(row, params)
    assert set(probabilities[0].nonzero().flatten().tolist()) == kept
    shifted = one(row) - max(row)
    expected = torch.softmax(shifted / (params.temperature or 1.0), -1).double()
    outside = [i for i in range(len(row)) if i not in kept]
    expected[0, outside] = 0.0
    if params.temperature == 0:
        expected[0, list(kept)] = 1.0
    expected /= expected.sum()
    torch.testing.assert_close(probabilities.double(), expected, rtol=1e-6, atol=1e-9)
    assert probabilities[0, row.index(max(row))] > 0, "the most likely token was dropped"


@settings(max_examples=200)
@given(ROWS, PARAMS, SEEDS, POSITIONS)
def test_draw_is_the_inverse_cdf_in_vocabulary_order(
    row: list[float], params: SamplingParams, seed: int, position: int
) -> None:
    token = sample(one(row), [params], [seed], [position])
    assert token.dtype == torch.int64
    assert token.shape == (1,)
    cumulative = filtered_probabilities(one(row), [params])[0].double().cumsum(0)
    target = uniform(seed, position, 0) * cumulative[-1].item()
    if (cumulative - target).abs().min() > 1e-6:  # otherwise float32 rounding decides
        assert token.item() == int((cumulative > target).int().argmax())
    assert token.item() in kept_by_definition(row, params)


@settings(max_examples=100)
@given(st.data(), st.integers(2, 5), st.integers(1, 12))
def test_a_row_does_not_depend_on_its_neighbours(data: st.DataObject, rows: int, v: int) -> None:
    row = st.lists(LOGIT, min_size=v, max_size=v).filter(lambda row: max(row) > -INF)
    logits = torch.tensor([data.draw(row) for _ in range(rows)])
    params = [data.draw(PARAMS) for _ in range(rows)]
    seeds = [data.draw(SEEDS) for _ in range(rows)]
    positions = [data.draw(POSITIONS) for _ in range(rows)]
    tokens = sample(logits, params, seeds, positions)
    probabilities = filtered_probabilities(logits, params)
    for i in range(rows):
        alone = logits[i : i + 1], params[i : i + 1]
        assert torch.equal(tokens[i : i + 1], sample(*alone, [seeds[i]], [positions[i]]))
        assert torch.equal(probabilities[i : i + 1], filtered_probabilities(*alone))


def test_a_row_does_not_depend_on_its_neighbours_at_a_real_vocabulary() -> None:
    logits = torch.randn(4, 129_280, generator=torch.Generator().manual_seed(0)) * 3
    params = [
        SamplingParams(),
        SamplingParams(top_p=0.9, top_k=1000),
        SamplingParams(temperature=0.0),
        SamplingParams(min_p=0.01, temperature=1.3),
    ]
    together = filtered_probabilities(logits, params)
    strided = filtered_probabilities(logits.t().contiguous().t(), params)
    assert torch.equal(together, strided)
    for i in range(4):
        alone = filtered_probabilities(logits[i : i + 1].clone(), params[i : i + 1])
        assert torch.equal(together[i], alone[0])


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=1.7, top_k=6),
        SamplingParams(top_p=0.8),
        SamplingParams(min_p=0.15),
        SamplingParams(temperature=1.2, top_k=9, top_p=0.9, min_p=0.02),
    ],
)
def test_draws_follow_the_distribution(params: SamplingParams) -> None:
    draws = 20_000
    logits = torch.randn(1, 16, generator=torch.Generator().manual_seed(3))
    p = filtered_probabilities(logits, [params])[0].double()
    tokens = sample(logits.expand(draws, -1), [params] * draws, [11] * draws, list(range(draws)))
    counts = tokens.bincount(minlength=16).double()
    possible = p > 0
    assert counts[~possible].sum() == 0
    expected = p[possible] * draws
    chi_square = ((counts[possible] - expected) ** 2 / expected).sum().item()
    freedom = int(possible.sum()) - 1
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom)


@pytest.mark.parametrize(("u", "token"), [(0.0, 1), (0.5, 3), (1 - 2.0**-53, 3)])
def test_draws_at_the_ends_of_an_interval(
    monkeypatch: pytest.MonkeyPatch, u: float, token: int
) -> None:
    # Mass 1/2 at ids 1 and 3 alone: a boundary belongs to the token that begins there.
    drawn = torch.tensor([u], dtype=torch.float64)
    monkeypatch.setattr("deepinfer.ops.sample_tokens.reference.uniforms", lambda *_: drawn)
    row = [-INF, 0.0, -INF, 0.0, -INF]
    assert sample(one(row), [SamplingParams()], [0], [0]).tolist() == [token]


def test_seed_and_position_each_change_the_draw() -> None:
    logits, params = torch.zeros(64, 1000), [SamplingParams()] * 64
    base = sample(logits, params, [5] * 64, list(range(64)))
    assert torch.equal(base, sample(logits, params, [5] * 64, list(range(64))))
    assert not torch.equal(base, sample(logits, params, [6] * 64, list(range(64))))
    assert not torch.equal(base, sample(logits, params, [5] * 64, list(range(64, 128))))
    assert len(set(base.tolist())) > 50


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(), {0, 1, 2, 3, 4}),
        (SamplingParams(temperature=0.0), {1}),
        (SamplingParams(temperature=0.01), {1, 3}),
        (SamplingParams(top_k=1), {1}),
        (SamplingParams(top_k=3), {0, 1, 3}),
        (SamplingParams(top_k=4), {0, 1, 3, 2}),
        (SamplingParams(top_p=0.3), {1}),
        (SamplingParams(top_p=0.5), {1, 3}),
        (SamplingParams(top_p=0.9, top_k=2), {1, 3}),
        (SamplingParams(top_p=0.3, top_k=2), {1}),
        (SamplingParams(min_p=0.5), {1, 3}),
        (SamplingParams(min_p=1.0), {1, 3}),
        (SamplingParams(min_p=0.1), {0, 1, 2, 3, 4}),
    ],
)
def test_filters_by_example(params: SamplingParams, kept: set[int]) -> None:
    # Probabilities 1/9, 3/9, 1/9, 3/9, 1/9: two ties, at the top and at the bottom. At the low
    # temperature float32 leaves the small ones nothing.
    row = [0.0, math.log(3.0), 0.0, math.log(3.0), 0.0]
    probabilities = filtered_probabilities(one(row), [params])
    assert set(probabilities[0].nonzero().flatten().tolist()) == kept


def test_top_p_is_measured_before_top_k() -> None:
    # 0.4, 0.3, 0.2, 0.1. Renormalised after top-k = 3, top-p = 0.75 would keep two tokens.
    row = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
    probabilities = filtered_probabilities(one(row), [SamplingParams(top_k=3, top_p=0.75)])
    assert probabilities[0].nonzero().flatten().tolist() == [0, 1, 2]


def test_order_is_by_logit_where_probabilities_tie() -> None:
    hot = SamplingParams(temperature=1e9, top_k=1)
    assert sample(one([1.0, 1.5]), [hot], [0], [0]).tolist() == [1]


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-6, 1e6, 1e300])
def test_extreme_temperatures_stay_distributions(temperature: float) -> None:
    params = SamplingParams(temperature=temperature)
    p = filtered_probabilities(one([80.0, -80.0, -INF, 80.0]), [params])
    assert p[0, 2] == 0
    expected = [0.5, 0.0, 0.0, 0.5] if temperature < 1 else [1 / 3, 1 / 3, 0.0, 1 / 3]
    torch.testing.assert_close(p, one(expected), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [[NAN, 1.0], [-INF, -INF], [INF, 0.0]])
def test_unusable_rows_are_named(temperature: float, bad: list[float]) -> None:
    logits = torch.tensor([[0.0, 1.0], bad, [-INF, 1.0], bad])
    params = [SamplingParams(temperature=temperature)] * 4
    with pytest.raises(LogitsError, match="rows 1, 3 cannot be sampled") as caught:
        sample(logits, params, [0] * 4, [0] * 4)
    assert caught.value.rows == (1, 3)
    assert isinstance(caught.value, RequestError)
    with pytest.raises(LogitsError):
        filtered_probabilities(logits, params)


def test_no_rows_and_one_token() -> None:
    assert sample(torch.zeros(0, 5), [], [], []).shape == (0,)
    assert filtered_probabilities(torch.zeros(0, 5), []).shape == (0, 5)
    assert sample(torch.zeros(1, 1), [SamplingParams()], [1], [2]).tolist() == [0]


def test_logits_are_left_as_they_were() -> None:
    logits = torch.randn(3, 7, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    sample(logits, [SamplingParams(top_k=2, top_p=0.5, min_p=0.2)] * 3, [0] * 3, [0] * 3)
    assert torch.equal(logits, before)


# Log-probabilities


@given(ROWS, st.data())
def test_logprobs_by_definition(row: list[float], data: st.DataObject) -> None:
    chosen = data.draw(st.integers(0, len(row) - 1))
    k = data.draw(st.integers(0, 20))
    (entry,) = token_logprobs(one(row), torch.tensor([chosen]), k)
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    total = math.log(sum(math.exp(x) for x in row))
    assert entry.token_id == chosen
    assert entry.rank == order.index(chosen) + 1
    assert entry.logprob == pytest.approx(row[chosen] - total, abs=1e-5)
    likely = [i for i in order[:k] if row[i] > -INF]
    assert [token for token, _ in entry.top] == likely
    assert [p for _, p in entry.top] == pytest.approx([row[i] - total for i in likely], abs=1e-5)


def test_logprobs_of_a_batch_row_by_row() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    chosen = torch.tensor([4, 49, 0])
    together = token_logprobs(logits, chosen, 5)
    alone = [token_logprobs(logits[i : i + 1], chosen[i : i + 1], 5)[0] for i in range(3)]
    assert together == alone
    assert token_logprobs(logits[:0], chosen[:0], 5) == []


# Parameters


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("max_tokens", value) for value in (0, -1, 1.0, True, "3")],
        *[("temperature", value) for value in (-0.1, NAN, INF, True, None, "1", 10**400)],
        *[("top_k", value) for value in (-2, 1.0, True, None)],
        *[("top_p", value) for value in (0, 0.0, 1.01, NAN, True, None)],
        *[("min_p", value) for value in (-0.01, 1.01, NAN, False, None)],
        *[("seed", value) for value in (-1, 2**64, 1.0, True)],
        *[("stop", value) for value in ("", ["a", ""], [1], {"a"}, None, b"a", "\ud800")],
        *[("stop_token_ids", value) for value in (3, [-1], [True], [1.0], "12", None)],
        *[("ignore_eos", value) for value in (1, None, "true")],
        *[("logprobs", value) for value in (-1, 21, True, 1.0)],
        *[("prompt_logprobs", value) for value in (-1, 21, False, "1")],
        *[("n", value) for value in (0, 129, None, True, 1.0)],
        *[("min_tokens", value) for value in (-1, 17, None, True, 1.0)],
        *[("repetition_penalty", value) for value in (0, -1.0, 0.009, 101, NAN, INF, True, "1")],
        *[("presence_penalty", value) for value in (-2.01, 2.01, NAN, None, False)],
        *[("frequency_penalty", value) for value in (-3, 3, INF, None, True)],
        *[("logit_bias", value) for value in (
            None, "5", {5: 101}, {5: -100.5}, {5: NAN}, {5: None}, {5: True}, {-1: 0}, {"5": 1},
            {True: 1}, [5], [(5,)], [(5, 1), (5, 2)], [[5, 1, 2]],
        )],
        *[("allowed_token_ids", value) for value in ([], (), "5", 5, [-1], [1.0], [True])],
        *[("banned_token_ids", value) for value in (None, "5", [None], [-3])],
        *[("include_stop_str_in_output", value) for value in (1, None)],
        *[("skip_special_tokens", value) for value in (0, None)],
        *[("structured", value) for value in ("json", 3, True, ["a"])],
    ],
)  # fmt: skip
def test_bad_values_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"{field} = ") as caught:
        SamplingParams(**{field: value})
    assert "expected" in str(caught.value)
    with pytest.raises(RequestError, match=f"{field} = "):
        SamplingParams.from_dict({field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 1), ("temperature", 0), ("temperature", 2.5), ("top_k", -1), ("top_k", 9),
        ("top_p", 1), ("top_p", 1e-9), ("min_p", 0), ("min_p", 1.0), ("seed", 0),
        ("seed", 2**64 - 1), ("seed", None), ("ignore_eos", True), ("logprobs", 0),
        ("logprobs", 20), ("prompt_logprobs", 20), ("max_tokens", None), ("n", 1), ("n", 128),
        ("min_tokens", 0), ("min_tokens", 16), ("repetition_penalty", 0.01),
        ("repetition_penalty", 100), ("presence_penalty", -2), ("presence_penalty", 2.0),
        ("frequency_penalty", -2.0), ("frequency_penalty", 2), ("allowed_token_ids", None),
        ("include_stop_str_in_output", True), ("skip_special_tokens", False), ("structured", None),
    ],
)  # fmt: skip
def test_values_at_the_limits_are_taken(field: str, value: Any) -> None:
    assert getattr(SamplingParams.from_dict({field: value}), field) == value


def test_stop_is_normalised_to_tuples() -> None:
    assert SamplingParams(stop="ab").stop == ("ab",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    params = SamplingParams(stop=["a"], stop_token_ids=[3, 1])
    assert params.stop_token_ids == (3, 1)
    assert dataclasses.replace(params, seed=1).stop == ("a",)
    assert hash(params) == hash(SamplingParams(stop=("a",), stop_token_ids=(3, 1)))


def test_ids_and_biases_are_normalised_to_tuples() -> None:
    params = SamplingParams(logit_bias={5: 1, 3: -2.5}, allowed_token_ids=[5, 3],
                            banned_token_ids=[9])  # fmt: skip
    assert params.logit_bias == params.bias_pairs == ((5, 1.0), (3, -2.5))
    assert (params.allowed_token_ids, params.banned_token_ids) == ((5, 3), (9,))
    assert dataclasses.replace(params, seed=1).logit_bias == params.logit_bias
    assert SamplingParams(logit_bias=[[5, 1], (3, -2.5)], allowed_token_ids=(5, 3),
                          banned_token_ids=(9,)) == params  # fmt: skip
    assert len({params, dataclasses.replace(params)}) == 1


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens = 5: expected at most max_tokens = 4"),
        ({"min_tokens": 1, "structured": {"regex": "a"}}, "min_tokens = 1: expected 0"),
        ({"ignore_eos": True, "structured": {"regex": "a"}}, "ignore_eos = True: expected false"),
    ],
)
def test_parameters_that_exclude_each_other(values: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        SamplingParams.from_dict(values)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"stop_token_ids": [9, 10]}, "stop_token_ids has 10; expected ids < 10"),
        ({"allowed_token_ids": [10, 1]}, "allowed_token_ids has 10"),
        ({"banned_token_ids": [99]}, "banned_token_ids has 99"),
        ({"logit_bias": {10: 1.0}}, "logit_bias has 10"),
        ({"banned_token_ids": list(range(10))}, "no token to draw; allow more"),
        ({"banned_token_ids": [4, 5], "allowed_token_ids": [5, 4, 5]}, "no token to draw; allow"),
        ({"allowed_token_ids": [3], "min_tokens": 1}, "before min_tokens = 1 are there"),
        ({"allowed_token_ids": [3, 4], "min_tokens": 1, "stop_token_ids": [4]}, "min_tokens = 1"),
    ],
)
def test_ids_are_held_to_the_vocabulary(values: dict[str, Any], words: str) -> None:
    params = SamplingParams.from_dict(values)
    with pytest.raises(RequestError, match=words):
        params.check_vocabulary(10, eos_token_id=3)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"banned_token_ids": [*range(9), 0]},
        {"allowed_token_ids": [3]},
        {"allowed_token_ids": [3], "min_tokens": 1, "ignore_eos": True},
        {"stop_token_ids": [9], "logit_bias": {9: 1}},
    ],
)
def test_what_leaves_a_token_is_taken(values: dict[str, Any]) -> None:
    SamplingParams.from_dict(values).check_vocabulary(10, eos_token_id=3)


def test_max_tokens_is_what_fits() -> None:
    params = SamplingParams(max_tokens=None)
    assert params.for_prompt(30, 100) == SamplingParams(max_tokens=70)
    assert params.for_prompt(99, 100).budget == 1
    with pytest.raises(RequestError, match=r"100 prompt tokens . 1 make 101; .* at most max_model"):
        params.for_prompt(100, 100)
    few = SamplingParams(max_tokens=5)
    assert few.for_prompt(95, 100) is few
    with pytest.raises(RequestError, match=r"96 prompt tokens . max_tokens = 5 make 101"):
        few.for_prompt(96, 100)
    with pytest.raises(RequestError, match="min_tokens = 9: expected at most max_tokens = 1"):
        SamplingParams(max_tokens=None, min_tokens=9).for_prompt(99, 100)


def test_params_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().top_k = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "near"),
    [("temprature", "temperature"), ("topp", "top_p"), ("max_token", "max_tokens")],
)
def test_unknown_names_are_refused_with_the_nearest(name: str, near: str) -> None:
    with pytest.raises(RequestError, match=f"'{name}' is unknown; did you mean '{near}'"):
        SamplingParams.from_dict({name: 1})
    with pytest.raises(TypeError):
        SamplingParams(**{name: 1})  # type: ignore[arg-type]


def test_params_need_no_torch() -> None:
    program = "import sys, deepinfer.sampling.params; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize("top_k", [5, 6, 2**63, 10**400])
def test_more_than_there_are_is_no_limit(top_k: int) -> None:
    logits = torch.randn(2, 5)
    limits = [SamplingParams(top_k=top_k), SamplingParams(top_k=2)]
    expected = filtered_probabilities(logits, [SamplingParams(), SamplingParams(top_k=2)])
    assert torch.equal(filtered_probabilities(logits, limits), expected)
    assert sample(logits, limits, [1, 2], [3, 4]).shape == (2,)


@pytest.mark.parametrize("logits", [torch.zeros(2, 5).bfloat16(), torch.zeros(2, 5, 1)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_other_logits_are_our_own_mistake(logits: torch.Tensor, temperature: float) -> None:
    with pytest.raises(AssertionError):
        sample(logits, [SamplingParams(temperature=temperature)] * 2, [1, 2], [3, 4])

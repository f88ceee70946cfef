"""Operators against their formulas, written out element by element in Python's own floats.

Also the test vectors of the model description, ties, infinities, odd strides and no tokens at all.
Records and roundings are in test_ops_records.py.
"""

import cmath
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deepinfer.config import RopeScaling
from deepinfer.ops.compress import pool_groups
from deepinfer.ops.engram_gate import engram_gate
from deepinfer.ops.grouped_linear import grouped_linear
from deepinfer.ops.hyper_connection import collapse, expand, mixes
from deepinfer.ops.hyper_connection.reference import _constants
from deepinfer.ops.index_scores import index_scores
from deepinfer.ops.rms_norm import rms_norm
from deepinfer.ops.rope import rope, rope_frequencies, rotation
from deepinfer.ops.sparse_attention import attention_with_sink
from deepinfer.ops.swiglu import swiglu

RELEASED_YARN = RopeScaling(16.0, 32.0, 1.0, 65536)


def dot(a: Tensor, b: Tensor) -> float:
    return math.fsum(x * y for x, y in zip(a.tolist(), b.tolist(), strict=True))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


# RMS normalisation


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_rms_norm(dtype: torch.dtype) -> None:
    x = torch.randn(5, 24).to(dtype)
    weight = torch.randn(24, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    found = rms_norm(x, weight, 1e-3)
    for row, expected in zip(x, found, strict=True):
        inverse = (dot(row, row) / 24 + 1e-3) ** -0.5
        exact = torch.tensor([w * v * inverse for w, v in zip(weight.tolist(), row.tolist(),
                                                              strict=True)])  # fmt: skip
        torch.testing.assert_close(expected, exact.to(dtype), rtol=1e-6, atol=1e-6)


def test_rms_norm_rounds_once() -> None:
    """Rounding the normalised value before the weight would move one value in a few."""
    x, weight = torch.randn(20, 64).to(torch.bfloat16), 1 + 0.1 * torch.randn(64)
    wide = x.double()
    normal = wide * (wide.square().mean(-1, keepdim=True) + 1e-20) ** -0.5
    once = (weight.double() * normal).to(torch.bfloat16)
    twice = (weight * normal.to(torch.bfloat16).float()).to(torch.bfloat16)
    assert not torch.equal(once, twice)
    assert (rms_norm(x, weight, 1e-20) == once).double().mean() > 0.999


def test_rms_norm_of_zeros_is_zero() -> None:
    assert torch.equal(rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-20), torch.zeros(2, 8))


# Rotary embedding


def test_frequencies_of_the_release() -> None:
    """Check values of model description 3.3."""
    found = rope_frequencies(64, 160000.0, RELEASED_YARN)
    values = {0: 1.0, 1: 0.687656, 15: 0.00363554, 16: 0.002265625, 20: 2.969778e-4,
              24: 1.953125e-5, 25: 5.372312e-6, 31: 5.680529e-7}  # fmt: skip
    for pair, value in values.items():
        assert found[pair].item() == pytest.approx(value, rel=1e-5)
    base = rope_frequencies(64, 10000.0, None)
    for pair in range(32):
        assert base[pair].item() == pytest.approx(10000 ** (-2 * pair / 64), rel=1e-6)


def test_a_ramp_of_no_length() -> None:
    """low = high = 0 (everything turns faster than the context): a step, not a division by 0."""
    scaling = RopeScaling(4.0, 1e9, 1e9, 64)
    found = rope_frequencies(8, 100.0, scaling)
    plain = rope_frequencies(8, 100.0, None)
    torch.testing.assert_close(found[1:], plain[1:] / 4)
    assert found[0] == plain[0]


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_rope_turns_adjacent_pairs_of_the_tail(dtype: torch.dtype, inverse: bool) -> None:
    frequencies = rope_frequencies(8, 100.0, None)
    positions = torch.tensor([0, 1, 77])
    x = torch.randn(3, 2, 11).to(dtype)
    found = rope(x, rotation(positions, frequencies, dtype).unsqueeze(1), inverse)
    assert torch.equal(found[..., :3], x[..., :3])
    for t, position in enumerate(positions.tolist()):
        for head in range(2):
            for pair, frequency in enumerate(frequencies.tolist()):
                a, b = x[t, head, 3 + 2 * pair : 5 + 2 * pair].tolist()
                angle = (position * torch.tensor(frequency)).item()  # formed in float32
                turned = complex(a, b) * cmath.exp(-1j * angle if inverse else 1j * angle)
                pairs = found[t, head, 3 + 2 * pair : 5 + 2 * pair].double()
                expected = torch.tensor([turned.real, turned.imag], dtype=torch.float64)
                close = 1e-2 if dtype == torch.bfloat16 else 1e-5
                assert (pairs - expected).abs().max() < close


def test_rope_works_on_any_strides() -> None:
    """Odd row strides and offsets, columns first, broadcast rows: a complex view wants none."""
    rotations = rotation(torch.arange(4), rope_frequencies(8, 100.0, None), torch.float32)
    wide = torch.randn(4, 34)
    views = [wide[:, 1:18], wide[:, ::2], torch.randn(17, 4).T, torch.randn(4, 1).expand(4, 16)]
    for x in [*views, torch.randn(16, 4).to(torch.bfloat16).T]:
        assert torch.equal(rope(x, rotations), rope(x.clone(memory_format=torch.contiguous_format),
                                                    rotations))  # fmt: skip


def test_rope_and_its_inverse_cancel() -> None:
    x = torch.randn(9, 64, dtype=torch.float64)
    rotations = rotation(torch.arange(9) * 1000, rope_frequencies(32, 1e4, None), torch.float64)
    assert (rope(rope(x, rotations), rotations, inverse=True) - x).abs().max() < 1e-12


# Hyper-connections


def vector_streams() -> tuple[Tensor, Tensor]:
    """Streams of ones and `fn` for which m = (k/10 - 1.2), k = 0..23, whatever H is."""
    values = torch.arange(24, dtype=torch.float64) / 10 - 1.2
    values[8:] = values[8:] ** 2
    return torch.ones(1, 4, 3, dtype=torch.float64), (values / 12).unsqueeze(-1).expand(24, 12)


def test_mixes_of_the_model_description() -> None:
    """Test vector of model description 3.4."""
    streams, fn = vector_streams()
    pre, post, comb = mixes(streams, fn, torch.zeros(24).double(), torch.ones(3).double(),
                            iterations=20, hc_eps=1e-6, norm_eps=1e-20)  # fmt: skip
    expected = {
        "pre": (pre[0], [0.231476, 0.249741, 0.268942, 0.289051]),
        "post": (post[0], [0.620051, 0.663624, 0.708687, 0.755081]),
        "row 0": (comb[0, 0], [0.295456, 0.264139, 0.234271, 0.206133]),
        "row 1": (comb[0, 1], [0.264139, 0.255810, 0.245779, 0.234271]),
        "row 2": (comb[0, 2], [0.234271, 0.245779, 0.255810, 0.264139]),
        "row 3": (comb[0, 3], [0.206133, 0.234271, 0.264139, 0.295456]),
        "rows": (comb[0].sum(1), [0.999999] * 4),
        "columns": (comb[0].sum(0), [0.999999] * 4),
    }
    for name, (found, values) in expected.items():
        assert (found - torch.tensor(values).double()).abs().max() < 1e-6, name


def slow_sinkhorn(logits: list[list[float]], iterations: int, eps: float) -> list[list[float]]:
    size = range(len(logits))
    c = [[math.exp(x) / math.fsum(map(math.exp, row)) + eps for x in row] for row in logits]
    for number in range(iterations):
        if number:
            c = [[x / (math.fsum(row) + eps) for x in row] for row in c]
        sums = [math.fsum(c[i][o] for i in size) + eps for o in size]
        c = [[c[i][o] / sums[o] for o in size] for i in size]
    return c


@pytest.mark.parametrize("iterations", [1, 2, 20])
@pytest.mark.parametrize("learning", [False, True])
def test_mixes(iterations: int, learning: bool) -> None:
    """With gradients another implementation of the Sinkhorn passes runs."""
    count, hidden = 4, 5
    streams = torch.randn(3, count, hidden, dtype=torch.float64)
    fn = torch.randn(24, count * hidden, dtype=torch.float64, requires_grad=learning)
    base, scale = torch.randn(24).double(), torch.tensor([0.7, 1.3, 2.0]).double()
    pre, post, comb = mixes(streams, fn, base, scale, iterations=iterations, hc_eps=1e-3,
                            norm_eps=1e-2)  # fmt: skip
    assert comb.requires_grad == learning
    for t in range(3):
        v = streams[t].flatten()
        inverse = (dot(v, v) / (count * hidden) + 1e-2) ** -0.5
        m = [dot(row, v) * inverse for row in fn.detach()]
        parts = [0] * 4 + [1] * 4 + [2] * 16
        m = [x * scale[p].item() + b for x, p, b in zip(m, parts, base.tolist(), strict=True)]
        logits = [m[8 + 4 * i : 12 + 4 * i] for i in range(4)]
        expected = slow_sinkhorn(logits, iterations, 1e-3)
        assert pre[t].tolist() == pytest.approx([sigmoid(x) + 1e-3 for x in m[:4]], abs=1e-12)
        assert post[t].tolist() == pytest.approx([2 * sigmoid(x) for x in m[4:8]], abs=1e-12)
        assert (comb[t] - torch.tensor(expected, dtype=torch.float64)).abs().max() < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_both_sinkhorn_implementations_agree(dtype: torch.dtype) -> None:
    streams, fn = torch.randn(50, 4, 8, dtype=dtype) * 5, torch.randn(24, 32, dtype=dtype)
    settings_ = {"iterations": 20, "hc_eps": 1e-6, "norm_eps": 1e-20}
    base, scale = torch.randn(24, dtype=dtype) * 3, torch.ones(3, dtype=dtype)
    plain = mixes(streams, fn, base, scale, **settings_)[2]
    learning = mixes(streams, fn.requires_grad_(), base, scale, **settings_)[2]
    assert (plain - learning).abs().max() < (1e-6 if dtype == torch.float32 else 1e-14)
    learning.sum().backward()
    assert fn.grad is not None
    assert fn.grad.isfinite().all()


def test_learning_after_inference() -> None:
    """What the operator keeps between calls must not come from inference mode."""
    _constants.cache_clear()
    rest = (torch.randn(24), torch.ones(3))
    options = {"iterations": 3, "hc_eps": 1e-6, "norm_eps": 1e-20}
    with torch.inference_mode():
        plain = mixes(torch.ones(2, 4, 8), torch.ones(24, 32), *rest, **options)[2]
    fn = torch.ones(24, 32, requires_grad=True)
    learning = mixes(torch.ones(2, 4, 8), fn, *rest, **options)[2]
    learning.sum().backward()
    assert (plain - learning).abs().max() < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_collapse_and_expand(dtype: torch.dtype) -> None:
    """Rows of comb are input streams, columns are output streams."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    streams, y = torch.randn(2, 3, 5).to(dtype), torch.randn(2, 5).to(dtype)
    pre, post, comb = (torch.rand(2, *shape, dtype=wide) for shape in [(3,), (3,), (3, 3)])
    low, wider = collapse(streams, pre), expand(y, streams, post, comb)
    assert (low.dtype, wider.dtype) == (dtype, dtype)
    close = 2e-2 if dtype == torch.bfloat16 else 1e-12
    for t in range(2):
        for h in range(5):
            column = streams[t, :, h].double()
            assert low[t, h].item() == pytest.approx(dot(pre[t], column), abs=close)
            for o in range(3):
                exact = post[t, o].item() * y[t, h].item() + dot(comb[t, :, o], column)
                assert wider[t, o, h].item() == pytest.approx(exact, abs=close)


# Attention


def slow_attention(q: Tensor, keys: list[Tensor], sink: float, scale: float) -> list[float]:
    """One head of one query; P is rounded to the query's dtype for the sum with the keys."""
    scores = [dot(q, key) * scale for key in keys]
    if not scores:
        return [0.0] * q.shape[0]
    top = max(scores)
    p = [math.exp(s - top) for s in scores]
    total = math.fsum(p) + math.exp(sink - top)
    rounded = torch.tensor(p).to(q.dtype).double() if q.dtype != torch.float64 else torch.tensor(
        p, dtype=torch.float64)  # fmt: skip
    return [dot(rounded, torch.stack(keys)[:, d].double()) / total for d in range(q.shape[0])]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_attention_with_sink(dtype: torch.dtype, shared: bool) -> None:
    rows, heads, count, dim = 4, 2, 6, 8
    q = (torch.randn(rows, heads, dim) * 2).to(dtype)
    keys = torch.randn(1 if shared else rows, count, dim).to(dtype)
    valid = torch.rand(rows, count) < 0.6
    valid[2] = False
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    sink = torch.tensor([-1.0, 2.0], dtype=wide)
    if not shared:
        keys[~valid] = float("nan")
    found = attention_with_sink(q, keys, valid, sink, 0.3)
    close = {torch.bfloat16: 1e-2, torch.float32: 1e-6, torch.float64: 1e-13}[dtype]
    for t in range(rows):
        own = [key for key, ok in zip(keys[0 if shared else t], valid[t], strict=True) if ok]
        for head in range(heads):
            expected = slow_attention(q[t, head], own, sink[head].item(), 0.3)
            assert found[t, head].tolist() == pytest.approx(expected, abs=close)


def test_one_query_may_have_invalid_keys() -> None:
    """A single row looks like keys shared by all rows; NaN must not get through either way."""
    q, keys = torch.randn(1, 2, 8), torch.randn(1, 5, 8)
    valid = torch.tensor([[True, False, True, False, False]])
    keys[0, [1, 3, 4]] = float("nan")
    found = attention_with_sink(q, keys, valid, torch.zeros(2), 0.3)
    expected = attention_with_sink(q, keys[:, [0, 2]], valid[:, [0, 2]], torch.zeros(2), 0.3)
    assert torch.equal(found, expected)


def test_weights_are_rounded_for_the_sum_only() -> None:
    """In bf16: two keys, one of value 0; the result is P / Z of the other, P rounded, Z not."""
    moved = 0
    for step in range(1, 40):
        q = torch.tensor([[[1.0, 0.0]]]).to(torch.bfloat16)
        keys = torch.tensor([[[0.0, 0.0], [-step / 16, 1.0]]]).to(torch.bfloat16)
        valid = torch.ones(1, 2, dtype=torch.bool)
        found = attention_with_sink(q, keys, valid, torch.tensor([-100.0]), 1.0)[0, 0, 1]
        p = torch.exp(torch.tensor(-step / 16))
        rounded = p.to(torch.bfloat16).float()
        assert found == (rounded / (1 + p)).to(torch.bfloat16)
        moved += int(found != (p / (1 + p)).to(torch.bfloat16))
    assert moved > 3


def test_the_sink_only_enlarges_the_denominator() -> None:
    q, keys = torch.zeros(1, 1, 4), torch.ones(1, 3, 4)
    valid = torch.ones(1, 3, dtype=torch.bool)
    found = attention_with_sink(q, keys, valid, torch.tensor([math.log(2.0)]), 1.0)
    assert found.flatten().tolist() == pytest.approx([3 / 5] * 4)
    huge = attention_with_sink(q, keys, valid, torch.tensor([1e4]), 1.0)
    assert torch.equal(huge, torch.zeros(1, 1, 4))


def test_huge_scores_do_not_overflow() -> None:
    q, keys = torch.full((1, 1, 4), 1e4), torch.tensor([[[1e4] * 4, [-1e4] * 4]])
    found = attention_with_sink(q, keys, torch.ones(1, 2).bool(), torch.zeros(1), 1.0)
    assert torch.equal(found[0, 0], keys[0, 0])


# Small formulas


def test_index_scores() -> None:
    queries, weights, keys = torch.randn(3, 4, 8), torch.randn(3, 4), torch.randn(5, 8)
    found = index_scores(queries, weights, keys)
    for t in range(3):
        for j in range(5):
            exact = math.fsum(
                max(dot(queries[t, h], keys[j]), 0.0) * weights[t, h].item() for h in range(4)
            )
            assert found[t, j].item() == pytest.approx(exact, abs=1e-5)
    assert found.min() < 0  # a negative weight makes a negative score


def test_index_scores_of_bfloat16_are_not_rounded() -> None:
    queries, keys = torch.randn(3, 4, 8).to(torch.bfloat16), torch.randn(5, 8).to(torch.bfloat16)
    weights = torch.randn(3, 4)
    found = index_scores(queries, weights, keys)
    assert found.dtype == torch.float32
    exact = index_scores(queries.double(), weights.double(), keys.double())
    assert (found - exact).abs().max() < 1e-5


@pytest.mark.parametrize("ratio", [1, 2, 3])
def test_pool_groups(ratio: int) -> None:
    values, gates = torch.randn(4, ratio, 3), torch.randn(4, ratio, 3) * 30
    found = pool_groups(values, gates)
    for group in range(4):
        for c in range(3):
            g = gates[group, :, c].tolist()
            weights = torch.tensor([math.exp(x - max(g)) for x in g])
            exact = dot(weights / weights.sum(), values[group, :, c])
            assert found[group, c].item() == pytest.approx(exact, abs=1e-5)


@pytest.mark.parametrize("limit", [0.0, 1.5, 10.0])
@pytest.mark.parametrize("weighted", [False, True])
def test_swiglu(limit: float, weighted: bool) -> None:
    """The gate is clamped from above only, the up projection from both sides."""
    gate = torch.tensor([[-200.0, -11.0, -1.0, 0.0, 1.0, 2.0, 10.0, 11.0, 80.0]]).double()
    up = torch.tensor([[-50.0], [-10.5], [-1.0], [0.3], [10.5], [50.0]]).double()
    gate, up = torch.broadcast_tensors(gate, up)
    weight = torch.randn(6).double() if weighted else None
    found = swiglu(gate, up, limit, weight)
    for row in range(6):
        for column in range(9):
            g, u = gate[row, column].item(), up[row, column].item()
            if limit:
                g, u = min(g, limit), max(-limit, min(u, limit))
            exact = g * sigmoid(g) * u * (1.0 if weight is None else weight[row].item())
            assert found[row, column].item() == pytest.approx(exact, rel=1e-12)


def test_swiglu_rounds_once_after_the_weight() -> None:
    gate, up = (torch.randn(30, 40).to(torch.bfloat16) for _ in range(2))
    weight = torch.rand(30)
    exact = swiglu(gate.double(), up.double(), 10.0, weight.double()).to(torch.bfloat16)
    assert (swiglu(gate, up, 10.0, weight) == exact).double().mean() > 0.999


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_engram_gate(dtype: torch.dtype) -> None:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    x, keys, value = torch.randn(2, 3, 6), torch.randn(2, 3, 6), torch.randn(2, 6)
    x, keys, value = x.to(dtype), keys.to(dtype), value.to(dtype)
    weight = torch.randn(3, 6, dtype=wide)
    found = engram_gate(x, keys, value, weight, 1e-3)
    for t in range(2):
        for s in range(3):
            a, k = x[t, s].double(), keys[t, s].double()
            d = dot(a * weight[s].double(), k) * 6**-0.5
            d *= (dot(a, a) / 6 + 1e-3) ** -0.5 * (dot(k, k) / 6 + 1e-3) ** -0.5
            gate = sigmoid(math.copysign(math.sqrt(max(abs(d), 1e-6)), d))
            exact = (a + gate * value[t].double()).tolist()
            close = 2e-2 if dtype == torch.bfloat16 else 1e-12
            assert found[t, s].tolist() == pytest.approx(exact, abs=close)


@pytest.mark.parametrize(("d", "gate"), [(0.0, 0.50025), (1e-9, 0.50025), (-1e-9, 0.49975)])
def test_engram_gate_near_zero(d: float, gate: float) -> None:
    """|d| has a floor of 1e-6 and keeps its sign; exactly 0 counts as positive."""
    x = torch.tensor([[[1.0, 1.0]]]).double()
    keys = torch.tensor([[[1.0, -1.0]]]).double()
    weight = torch.tensor([[d * 2**0.5, 0.0]]).double()
    found = engram_gate(x, keys, torch.ones(1, 2).double(), weight, 1e-20)
    assert (found - x).flatten().tolist() == pytest.approx([gate, gate], abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("counts", [[3, 0, 1, 4], [0, 0, 0, 0], [0, 8, 0, 0], [1, 0, 0, 0]])
def test_grouped_linear(dtype: torch.dtype, counts: list[int]) -> None:
    x = torch.randn(sum(counts), 16).to(dtype)
    weights = torch.randn(4, 24, 16).to(dtype)
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    found = grouped_linear(x, weights, ends)
    assert found.shape == (sum(counts), 24)
    assert found.dtype == dtype
    groups = [group for group, count in enumerate(counts) for _ in range(count)]
    for row, group in enumerate(groups):
        exact = weights[group].double() @ x[row].double()
        close = 5e-2 if dtype == torch.bfloat16 else 1e-5
        assert (found[row].double() - exact).abs().max() < close


NO_TOKENS: dict[str, tuple[Callable[[], Tensor], tuple[int, ...]]] = {
    "rms_norm": (lambda: rms_norm(torch.ones(0, 8), torch.ones(8), 1e-20), (0, 8)),
    "rope": (lambda: rope(torch.ones(0, 8), torch.ones(0, 4, dtype=torch.complex64)), (0, 8)),
    "mixes": (lambda: mixes(torch.ones(0, 4, 8), torch.ones(24, 32), torch.ones(24), torch.ones(3),
                            iterations=20, hc_eps=1e-6, norm_eps=1e-20)[2], (0, 4, 4)),
    "collapse": (lambda: collapse(torch.ones(0, 4, 8), torch.ones(0, 4)), (0, 8)),
    "expand": (lambda: expand(torch.ones(0, 8), torch.ones(0, 4, 8), torch.ones(0, 4),
                              torch.ones(0, 4, 4)), (0, 4, 8)),
    "attention": (lambda: attention_with_sink(
        torch.ones(0, 2, 8), torch.ones(0, 5, 8), torch.ones(0, 5).bool(), torch.ones(2), 1.0
    ), (0, 2, 8)),
    "index_scores": (lambda: index_scores(torch.ones(0, 2, 8), torch.ones(0, 2), torch.ones(5, 8)),
                     (0, 5)),
    "no entries": (lambda: index_scores(torch.ones(3, 2, 8), torch.ones(3, 2), torch.ones(0, 8)),
                   (3, 0)),
    "pool_groups": (lambda: pool_groups(torch.ones(0, 2, 8), torch.ones(0, 2, 8)), (0, 8)),
    "swiglu": (lambda: swiglu(torch.ones(0, 8), torch.ones(0, 8), 1.0, torch.ones(0)), (0, 8)),
    "engram_gate": (lambda: engram_gate(torch.ones(0, 4, 8), torch.ones(0, 4, 8), torch.ones(0, 8),
                                        torch.ones(4, 8), 1e-20), (0, 4, 8)),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_TOKENS)
def test_no_tokens(name: str) -> None:
    function, shape = NO_TOKENS[name]
    assert function().shape == shape


@settings(max_examples=30)
@given(st.integers(0, 3), st.integers(0, 2**30))
def test_leading_axes_do_not_matter(extra: int, seed: int) -> None:
    """[..., T, C] is the same as one batch after the other."""
    torch.manual_seed(seed)
    x, weight = torch.randn(extra + 1, 3, 16), torch.randn(16)
    rows = torch.stack([rms_norm(part, weight, 1e-20) for part in x])
    assert torch.equal(rms_norm(x, weight, 1e-20), rows)
    gates, ups = torch.randn(2, extra + 1, 3, 16)
    parts = [swiglu(g, u, 10.0) for g, u in zip(gates, ups, strict=True)]
    assert torch.equal(swiglu(gates, ups, 10.0), torch.stack(parts))

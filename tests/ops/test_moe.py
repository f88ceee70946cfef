"""Routing, planning and summing of experts: rows by themselves, and every row exactly once."""

import pytest
import torch

from deepinfer.errors import Unsupported
from deepinfer.ops.act_quant import fp8_quantise
from deepinfer.ops.moe_combine import triton as combine_kernels
from deepinfer.ops.moe_gate import moe_gate
from deepinfer.ops.moe_gate import triton as gate_kernels
from deepinfer.ops.moe_plan import moe_plan
from deepinfer.ops.moe_plan import triton as plan_kernels
from deepinfer.ops.swiglu import triton as swiglu_kernels

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(("tokens", "block"), [(3, 16), (50, 16), (130, 32)])
def test_tiles_hold_every_row_once(tokens: int, block: int) -> None:
    ids = torch.randint(0, 9, (tokens, 2)).to(DEVICE)
    order, ends, tiles = (t.cpu() for t in plan_kernels.moe_plan(ids, 9, block))
    assert sorted(order.tolist()) == list(range(2 * tokens))
    seen = []
    for expert, first in tiles.tolist():
        if expert < 0:
            continue
        rows = range(first, min(first + block, int(ends[expert])))
        assert rows
        assert all(int(ids.flatten()[order[row]]) == expert for row in rows)
        seen += list(rows)
    assert seen == list(range(2 * tokens))


def test_one_launch_and_three_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.randint(0, 20, (40, 6)).to(DEVICE)
    few = plan_kernels.moe_plan(ids, 20, 16)
    monkeypatch.setattr(plan_kernels, "ONE_LAUNCH", 0)
    monkeypatch.setattr(plan_kernels, "SLOTS", 32)
    many = plan_kernels.moe_plan(ids, 20, 16)
    for actual, expected, third in zip(few, moe_plan(ids, 20, 16), many, strict=True):
        assert torch.equal(actual, expected)
        assert torch.equal(third, expected)


def test_gate_rows_are_their_own() -> None:
    logits, bias = torch.randn(9, 40).to(DEVICE), torch.randn(40).to(DEVICE)
    together = gate_kernels.moe_gate(logits, bias, 6, 1.5, True)
    alone = gate_kernels.moe_gate(logits[4:5], bias, 6, 1.5, True)
    for all_rows, row in zip(together, alone, strict=True):
        assert torch.equal(all_rows[4:5], row)


def test_gate_prefers_the_lower_of_equals_and_never_nan() -> None:
    logits = torch.zeros(2, 33)
    logits[1, [0, 3, 4]] = float("nan")
    ids, weights = gate_kernels.moe_gate(logits.to(DEVICE), torch.zeros(33, device=DEVICE), 4, 1, 1)
    assert ids.tolist() == [[0, 1, 2, 3], [1, 2, 5, 6]]
    assert torch.equal(weights.cpu(), torch.full((2, 4), 0.25))


def test_gate_scores_keep_small_results() -> None:
    """Against float64: softplus of -60 is 1e-26, not 0."""
    logits = torch.linspace(-60, 60, 64).view(1, 64)
    expected = torch.sqrt(torch.nn.functional.softplus(logits.double(), threshold=40)).flatten()
    zero = torch.zeros(64, device=DEVICE)
    for start in range(0, 64, 16):
        part = logits[:, start : start + 16].to(DEVICE)
        ids, weights = gate_kernels.moe_gate(part, zero[:16], 16, 1.0, False)
        wanted = expected[start + ids.flatten().cpu()]
        assert float((weights.cpu().double().flatten() / wanted - 1).abs().max()) < 3e-7
        assert torch.equal(ids, moe_gate(part, zero[:16], 16, 1.0, False)[0])


def test_combine_rounds_once() -> None:
    y = torch.tensor([[256.0], [1.0], [1.0], [-256.0]], dtype=torch.bfloat16, device=DEVICE)
    out = combine_kernels.moe_combine(y, 4)
    assert out.tolist() == [[2.0]]


def test_swiglu_quantise_is_both_steps() -> None:
    gate, up = (torch.randn(6, 96).to(torch.bfloat16).to(DEVICE) for _ in range(2))
    weight = torch.rand(6).to(DEVICE)
    codes, scales = swiglu_kernels.swiglu_quantise(gate, up, 10.0, weight)
    two = fp8_quantise(swiglu_kernels.swiglu(gate, up, 10.0, weight))
    assert torch.equal(codes.view(torch.uint8), two[0])
    assert torch.equal(scales, two[1])


def test_swiglu_rows_are_their_own() -> None:
    gate, up = (torch.randn(40, 64).to(DEVICE) for _ in range(2))
    together = swiglu_kernels.swiglu(gate, up, 10.0)
    assert torch.equal(swiglu_kernels.swiglu(gate[7:8], up[7:8], 10.0), together[7:8])


def test_refusals() -> None:
    wide = torch.zeros(2, 32, dtype=torch.float64, device=DEVICE)
    with pytest.raises(Unsupported, match="float64"):
        gate_kernels.moe_gate(wide, wide[0], 2, 1.0, True)
    with pytest.raises(Unsupported, match="float64"):
        swiglu_kernels.swiglu(wide, wide, 10.0)
    with pytest.raises(Unsupported, match="float64"):
        combine_kernels.moe_combine(wide, 1)
    with pytest.raises(Unsupported, match="multiple of 32"):
        swiglu_kernels.swiglu_quantise(wide[:, :16].float(), wide[:, :16].float(), 10.0)
    x = torch.zeros(2, 32, device=DEVICE, requires_grad=True)
    with pytest.raises(Unsupported, match="gradient"):
        swiglu_kernels.swiglu(x, x, 10.0)
    with pytest.raises(Unsupported, match="experts"):
        plan_kernels.moe_plan(torch.zeros(1, 1, dtype=torch.int64, device=DEVICE), 2000, 16)

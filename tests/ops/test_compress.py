"""compress: groups across steps, padding, poison, and keeping inputs."""

import pytest
import torch
from torch import Tensor

from deepinfer.errors import Unsupported
from deepinfer.ops.compress import compress_groups, pool_groups, store_groups
from deepinfer.ops.compress import triton as kernels
from deepinfer.ops.rms_norm import rms_norm

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DIM, EPS = 64, 1e-20
BOTH = pytest.mark.parametrize("function", [compress_groups, kernels.compress_groups])


def inputs(rows: int, kept: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    values, gates = torch.randn(rows, DIM), torch.randn(rows, DIM)
    state = torch.randn(kept, 2, DIM)
    weight = torch.rand(DIM) + 0.5
    return values.to(DEVICE), gates.to(DEVICE), state.to(DEVICE), weight.to(DEVICE)


@BOTH
def test_against_pooling_gathered_groups_in_float64(function) -> None:  # type: ignore[no-untyped-def]
    values, gates, state, weight = inputs(6, 4)
    places = torch.tensor([[2, 4], [5, 6], [0, 9]], device=DEVICE)
    table = torch.cat([state, torch.stack([values, gates], dim=1)]).double()
    whole = table[places]
    pooled = pool_groups(whole[:, :, 0], whole[:, :, 1])
    expected = rms_norm(pooled, weight.double(), EPS)
    actual = function(values, gates, state, places, weight, EPS, torch.float32)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-6)


@BOTH
def test_poison_that_no_place_names_changes_nothing(function) -> None:  # type: ignore[no-untyped-def]
    values, gates, state, weight = inputs(6, 4)
    places = torch.tensor([[2, 4], [-1, -1], [5, 6]], device=DEVICE)
    clean = function(values, gates, state, places, weight, EPS, torch.bfloat16)
    state[[0, 1, 3]] = float("nan")
    values[[3, 4, 5]] = float("nan")
    gates[[3, 4, 5]] = float("nan")
    dirty = function(values, gates, state, places, weight, EPS, torch.bfloat16)
    assert torch.equal(clean, dirty)
    assert not dirty[1].any()


@BOTH
def test_without_state_and_without_rows(function) -> None:  # type: ignore[no-untyped-def]
    values, gates, state, weight = inputs(4, 4)
    places = torch.tensor([[0, 1], [2, 3]], device=DEVICE)
    state[:, 0], state[:, 1] = values, gates
    no_state = function(values, gates, state[:0], places, weight, EPS, torch.bfloat16)
    no_rows = function(values[:0], gates[:0], state, places, weight, EPS, torch.bfloat16)
    assert torch.equal(no_state, no_rows)


def test_a_group_alone_gives_what_it_gives_among_others() -> None:
    values, gates, state, weight = inputs(40, 4)
    places = torch.randperm(44, device=DEVICE).view(22, 2)
    arguments = (weight, EPS, torch.bfloat16)
    together = kernels.compress_groups(values, gates, state, places, *arguments)
    alone = kernels.compress_groups(values, gates, state, places[13:14], *arguments)
    assert torch.equal(together[13:14], alone)


@pytest.mark.parametrize("function", [store_groups, kernels.store_groups])
def test_only_targets_are_written(function) -> None:  # type: ignore[no-untyped-def]
    values, gates, _, _ = inputs(4, 1)
    memory = torch.full((9, 2, DIM), 7.0, device=DEVICE)
    rows = torch.tensor([3, 0, 1], device=DEVICE)
    targets = torch.tensor([4, -1, 0], device=DEVICE)
    function(values, gates, memory[2:8], rows, targets)
    expected = torch.full((9, 2, DIM), 7.0, device=DEVICE)
    expected[6, 0], expected[6, 1] = values[3], gates[3]
    expected[2, 0], expected[2, 1] = values[1], gates[1]
    assert torch.equal(memory, expected)


def test_refusals() -> None:
    values, gates, state, weight = inputs(4, 4)
    places = torch.tensor([[0, 1]], device=DEVICE)
    with pytest.raises(Unsupported, match="float64"):
        kernels.compress_groups(values.double(), gates, state, places, weight, EPS, torch.bfloat16)
    with pytest.raises(Unsupported, match="adjacent"):
        kernels.store_groups(values, gates, state.transpose(0, 1), places[0], places[0])

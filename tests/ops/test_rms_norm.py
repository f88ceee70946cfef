"""rms_norm: against float64, alone and in a batch, with and without FP8 rounding."""

import pytest
import torch

from deepinfer.errors import Unsupported
from deepinfer.ops.act_quant import act_quant
from deepinfer.ops.rms_norm import rms_norm
from deepinfer.ops.rms_norm import triton as kernels
from deepinfer.ops.rms_norm.spec import exact_rows

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("width", [64, 100, 1280, 4160, 5120])
def test_float32_against_float64(width: int) -> None:
    x, weight = torch.randn(3, width, device=DEVICE), torch.rand(width, device=DEVICE) + 0.5
    expected = rms_norm(x.double(), weight.double(), 1e-6)
    for function in (rms_norm, kernels.rms_norm):
        torch.testing.assert_close(
            function(x, weight, 1e-6).double(), expected, rtol=2e-6, atol=1e-7
        )


@pytest.mark.parametrize("act_quant", [False, True])
@pytest.mark.parametrize("width", [128, 512, 1280, 5120])
def test_a_row_alone_gives_what_it_gives_among_others(width: int, act_quant: bool) -> None:
    x = torch.randn(11, width).to(torch.bfloat16).to(DEVICE)
    weight = torch.rand(width, device=DEVICE)
    x[0] = 1e15
    together = kernels.rms_norm(x, weight, 1e-20, act_quant)
    for row in (1, 7, 10):
        alone = kernels.rms_norm(x[row : row + 1], weight, 1e-20, act_quant)
        assert torch.equal(together[row : row + 1], alone)


def test_act_quant_is_the_composition() -> None:
    x = exact_rows(torch.Generator().manual_seed(1), 4, 256).to(DEVICE)
    weight = torch.rand(256, device=DEVICE) + 0.1
    expected = act_quant(rms_norm(x, weight, 1e-20))
    assert torch.equal(rms_norm(x, weight, 1e-20, act_quant=True), expected)
    assert torch.equal(kernels.rms_norm(x, weight, 1e-20, act_quant=True), expected)
    assert torch.equal(act_quant(kernels.rms_norm(x, weight, 1e-20)), expected)


def test_exact_rows_have_a_power_of_two_as_their_root_mean_square() -> None:
    x = exact_rows(torch.Generator().manual_seed(2), 50, 512).double()
    root = x.square().mean(-1).sqrt()
    assert torch.equal(root, torch.exp2(torch.log2(root).round()))


def test_what_lies_beside_a_row_is_not_read() -> None:
    wide = torch.full((5, 192), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    wide[:, 64:128] = torch.randn(5, 64)
    weight = torch.ones(64, device=DEVICE)
    actual = kernels.rms_norm(wide[:, 64:128], weight, 1e-20)
    assert torch.equal(actual, kernels.rms_norm(wide[:, 64:128].contiguous(), weight, 1e-20))
    assert not actual.isnan().any()


def test_refusals() -> None:
    weight = torch.ones(48, device=DEVICE)
    with pytest.raises(Unsupported, match="float64"):
        kernels.rms_norm(torch.zeros(2, 48, dtype=torch.float64, device=DEVICE), weight, 1e-6)
    with pytest.raises(Unsupported, match="multiple of 32"):
        kernels.rms_norm(torch.zeros(2, 48, device=DEVICE), weight, 1e-6, act_quant=True)
    with pytest.raises(Unsupported, match="gradient"):
        kernels.rms_norm(torch.zeros(2, 48, device=DEVICE), weight.requires_grad_(), 1e-6)

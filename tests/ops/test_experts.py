"""The routed experts: layout, both halves, and the whole chain against the plain sublayer."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from deepinfer.checkpoint.hf_config import parse_model_config
from deepinfer.checkpoint.quant import dequantise_fp4, quantise_fp4
from deepinfer.errors import Unsupported
from deepinfer.kernels.experts import align_rows
from deepinfer.model.linear import Precision
from deepinfer.model.moe import MixtureOfExperts
from deepinfer.numerics import decode_e4m3
from deepinfer.ops import expert_down as down_reference
from deepinfer.ops import expert_up as up_reference
from deepinfer.ops.act_quant import fp8_quantise
from deepinfer.ops.expert_down import triton as down_kernels
from deepinfer.ops.expert_up import dequantise, prepare
from deepinfer.ops.expert_up import triton as up_kernels
from deepinfer.ops.expert_up.spec import Setting, draw_matrices, draw_rows
from deepinfer.ops.moe_combine import moe_combine
from deepinfer.ops.moe_plan import moe_plan, plan_block
from deepinfer.testing.tiny import tiny_config

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PAIRS = {
    "ref": (up_reference.expert_up, down_reference.expert_down),
    "triton": (up_kernels.expert_up, down_kernels.expert_down),
    "triton_exact": (up_kernels.expert_up_exact, down_kernels.expert_down_exact),
}
KERNELS = ["triton", "triton_exact"]


def values(codes: Tensor, scales: Tensor) -> Tensor:
    groups = decode_e4m3(codes.view(torch.uint8)).unflatten(-1, (-1, 32))
    return (groups * scales.unsqueeze(-1)).flatten(-2)


@pytest.mark.parametrize("width", [32, 64, 96, 128, 288])
def test_prepare_changes_no_value(width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    packed = torch.randint(0, 256, (2, 48, width // 2), dtype=torch.uint8, generator=generator)
    scales = torch.randint(13, 255, (2, 48, width // 32), dtype=torch.uint8, generator=generator)
    scales[:, ::2] = torch.randint(
        110, 122, (2, 24, width // 32), dtype=torch.uint8, generator=generator
    )
    packed[:, 4], packed[:, 6, :16], scales[:, 6, 0] = 0x80, 0, 0
    matrices = prepare(packed.to(DEVICE), scales.to(DEVICE))
    expected = torch.stack([dequantise_fp4(*pair) for pair in zip(packed, scales, strict=True)])
    assert torch.equal(dequantise(matrices, torch.float32).cpu(), expected)
    assert bool((matrices.base[:, ::2] > 0).all())
    assert matrices.fits == bool((matrices.base > 0).all())
    assert matrices.fits == (width == 32)


def test_scales_fit_up_to_a_ratio_of_2048() -> None:
    packed = torch.full((1, 2, 32), 0x22, dtype=torch.uint8, device=DEVICE)
    scales = torch.tensor([[[120, 109], [120, 108]]], dtype=torch.uint8, device=DEVICE)
    matrices = prepare(packed, scales)
    assert (matrices.base > 0).tolist() == [[True, False]]
    assert not matrices.fits


def test_aligned_codes_stay_within_their_bound() -> None:
    generator = torch.Generator().manual_seed(1)
    setting = Setting(0, 1, 1, 0, 0, spread=12)
    codes, scales = (t.to(DEVICE) for t in draw_rows(setting, 9, 288, generator))
    aligned, row_scales = align_rows(codes, scales)
    assert aligned.shape == (9, 384)
    places = torch.arange(384).view(3, 2, 4, 4, 4).transpose(1, 3).flatten().to(DEVICE)
    moved = (decode_e4m3(aligned)[:, places] * row_scales.unsqueeze(-1))[:, :288]
    before = values(codes, scales)
    scale = row_scales.unsqueeze(-1)
    assert bool(((moved - before).abs() <= 2.0**-10 * scale).all())
    assert torch.equal(
        moved[before.abs() >= 2.0**-6 * scale], before[before.abs() >= 2.0**-6 * scale]
    )
    assert bool((before.abs().amax(-1) >= 224 * row_scales).all())
    assert bool((aligned[:, places][:, 288:] == 0).all())


def sublayer(hidden: int, width: int, experts: int, selected: int) -> MixtureOfExperts:
    """A sublayer whose matrices are FP4 values."""
    config = parse_model_config(
        tiny_config(engram_num_embeddings=[462, 630], engram_compressed_vocab_size=300)
    )
    config = replace(config, hidden_size=hidden, moe_intermediate_size=width)
    module = MixtureOfExperts(config, experts, selected, Precision(torch.bfloat16, torch.float32))
    generator = torch.Generator().manual_seed(3)
    for parameter in module.parameters():
        parameter.normal_(generator=generator).mul_(parameter.shape[-1] ** -0.5)
    return module


def packed_matrices(weight: Tensor) -> tuple[Tensor, Tensor]:
    """FP4 of [E, N, C], which `weight` is set to."""
    pairs = [quantise_fp4(one) for one in weight]
    weight.copy_(torch.stack([dequantise_fp4(*pair) for pair in pairs]))
    codes, scales = (torch.stack(list(part)).to(DEVICE) for part in zip(*pairs, strict=True))
    return codes, scales


@pytest.mark.parametrize("backend", ["ref", *KERNELS])
@pytest.mark.parametrize("tokens", [1, 5])
@torch.inference_mode()
def test_the_chain_is_the_sublayer(backend: str, tokens: int) -> None:
    up, down = PAIRS[backend]
    module = sublayer(160, 64, 6, 2)
    w13 = prepare(*packed_matrices(module.experts.w13.data.view(6, 128, 160)))
    w2 = prepare(*packed_matrices(module.experts.w2.data))
    x = torch.randn(tokens, 160).to(torch.bfloat16)
    ids, route = (t.to(DEVICE) for t in module.route(x))
    block = plan_block(ids.numel(), 6)
    plan = moe_plan(ids, 6, block)
    codes, scales = (t.to(DEVICE) for t in fp8_quantise(x))
    hidden = up(codes, scales, w13, *plan, route, block, module.config.swiglu_limit)
    y = down(*hidden, w2, *plan, block)
    shared = module._shared(module.precision.activation(x)).to(DEVICE)
    actual, expected = moe_combine(y, 2, shared).cpu().double(), module(x).double()
    size = expected.square().mean().sqrt()
    assert float((actual - expected).abs().max() / size) < 2.0**-5
    assert float((actual != expected).double().mean()) < (0.02 if DEVICE.type == "cpu" else 0.3)


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("far", [False, True])
def test_a_row_alone_gives_what_it_gives_among_others(backend: str, far: bool) -> None:
    """Also with other tiles: the order of sums is the same for every size of them."""
    up, down = PAIRS[backend]
    generator = torch.Generator().manual_seed(4)
    setting = Setting(19, 2, 1, 192, 32, far=far)
    w13 = draw_matrices(setting, 64, 192, generator, DEVICE)
    w2 = draw_matrices(setting, 64, 32, generator, DEVICE)
    assert w13.fits != far
    x, scales = (t.to(DEVICE) for t in draw_rows(setting, 19, 192, generator))
    ids = torch.randint(0, 2, (19, 1), generator=generator).to(DEVICE)
    route = torch.rand(19, 1, generator=generator).to(DEVICE)

    def run(rows: slice, block: int) -> Tensor:
        plan = moe_plan(ids[rows], 2, block)
        hidden = up(x[rows], scales[rows], w13, *plan, route[rows], block, 10.0)
        return down(*hidden, w2, *plan, block)

    together = run(slice(None), 32)
    for row, block in ((0, 16), (18, 16), (7, 64)):
        assert torch.equal(run(slice(row, row + 1), block), together[row : row + 1])


def test_both_kernels_agree_with_float64() -> None:
    generator = torch.Generator().manual_seed(5)
    setting = Setting(3, 2, 1, 64, 96, spread=6)
    matrices = draw_matrices(setting, 64, 96, generator, DEVICE)
    hidden, scales = (t.to(DEVICE) for t in draw_rows(setting, 3, 96, generator))
    ids = torch.tensor([[1], [0], [1]], device=DEVICE)
    plan = moe_plan(ids, 2, 16)
    rows, weights = values(hidden, scales).double(), dequantise(matrices, torch.float32).double()
    order = plan[0].long()
    expected = torch.empty(3, 64, dtype=torch.float64, device=DEVICE)
    expected[order] = torch.einsum("rc,rnc->rn", rows, weights[ids.flatten()[order]])
    for name in ("ref", *KERNELS):
        y = PAIRS[name][1](hidden, scales, matrices, *plan, 16).double()
        error = (y - expected).abs() / (expected.abs() + expected.square().mean().sqrt())
        assert float(error.max()) < 2.0**-8, name


def test_refusals() -> None:
    generator = torch.Generator().manual_seed(6)
    setting = Setting(2, 2, 1, 64, 32)
    matrices = draw_matrices(setting, 64, 64, generator, DEVICE)
    x, scales = (t.to(DEVICE) for t in draw_rows(setting, 2, 64, generator))
    plan = moe_plan(torch.zeros(2, 1, dtype=torch.int64, device=DEVICE), 2, 8)
    with pytest.raises(Unsupported, match="tiles of 8"):
        down_kernels.expert_down(x, scales, matrices, *plan, 8)
    with pytest.raises(Unsupported, match="float32"):
        down_kernels.expert_down(x, scales.double(), matrices, *plan, 16)

"""act_quant and its relatives: every group by itself, codes and values agree."""

import pytest
import torch
from torch import Tensor

from deepinfer import numerics
from deepinfer.errors import Unsupported
from deepinfer.ops.act_quant import act_quant, fp4_quantise, fp8_quantise, mxfp4_quantise
from deepinfer.ops.act_quant import triton as kernels
from deepinfer.ops.kv_records import pack_compressed, pack_index_key, pack_window

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.bfloat16, torch.float32]


def draw(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    x = torch.randn(rows, width) * torch.exp2(torch.randint(-20, 12, (rows, 1)).float())
    return x.to(dtype).to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_times_scales_are_the_values(dtype: torch.dtype) -> None:
    x = draw(7, 96, dtype)
    codes, scales = kernels.fp8_quantise(x)
    value = numerics.decode_e4m3(codes).unflatten(-1, (-1, 32)) * scales.unsqueeze(-1)
    assert torch.equal(value.flatten(-2).to(dtype), kernels.act_quant(x))
    assert torch.equal(kernels.act_quant(x), act_quant(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_references_agree_with_records(dtype: torch.dtype) -> None:
    x = draw(5, 64, dtype)
    codes, scales = fp8_quantise(x)
    record = torch.cat([codes, numerics.encode_e8m0(scales)], dim=-1)
    assert torch.equal(record, pack_window(x))
    assert torch.equal(torch.cat(fp4_quantise(x), dim=-1), pack_compressed(x))
    assert torch.equal(torch.cat(mxfp4_quantise(x), dim=-1), pack_index_key(x))


@pytest.mark.parametrize("name", ["act_quant", "fp8_quantise", "fp4_quantise", "mxfp4_quantise"])
def test_a_row_alone_gives_what_it_gives_among_others(name: str) -> None:
    function = getattr(kernels, name)
    x = draw(70, 64, torch.bfloat16)
    x[3] = 3e38
    together, alone = function(x), function(x[37:38])
    if isinstance(together, Tensor):
        together, alone = (together,), (alone,)
    for all_rows, row in zip(together, alone, strict=True):
        assert torch.equal(all_rows[37:38], row)


def test_rounding_twice_changes_nothing() -> None:
    once = kernels.act_quant(draw(6, 64, torch.float32))
    assert torch.equal(kernels.act_quant(once), once)


def test_every_bfloat16_has_the_same_fp4_codes() -> None:
    """All magnitudes up to 8192 with both signs, beside every largest magnitude of a group."""
    bits = torch.arange(0, 0x4600, 5, dtype=torch.int16)
    values = bits.view(torch.bfloat16).float()
    x = values[: len(values) // 15 * 15].unflatten(0, (-1, 15))
    x = torch.cat([x.amax(-1, keepdim=True) * 1.5, x * (torch.arange(15) % 2 * 2 - 1)], dim=-1)
    x = x.to(torch.bfloat16).to(DEVICE)
    for actual, expected in zip(kernels.fp4_quantise(x), fp4_quantise(x), strict=True):
        assert torch.equal(actual, expected)


def neighbours(x: Tensor, steps: int) -> Tensor:
    """[..., 2 * steps + 1] float32 numbers around each positive number of `x`."""
    steps_of_bits = torch.arange(-steps, steps + 1, dtype=torch.int32)
    return (x.view(torch.int32).unsqueeze(-1) + steps_of_bits).view(torch.float32)


def borders() -> tuple[Tensor, Tensor]:
    """All e4m3 scales [126, 1], and borders between codes times each scale [126, 7], float32."""
    scales = numerics.decode_e4m3(torch.arange(1, 127, dtype=torch.uint8)).unsqueeze(-1)
    return scales, scales * torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])


def test_quotients_by_scales_reach_borders_only_where_products_do() -> None:
    """A value compares with b * s as its rounded quotient with b, so ties are the same."""
    scales, products = borders()
    assert torch.equal(products.double(), scales.double() * (products / scales).double())
    x = neighbours(products, 40)
    quotient, border = x / scales.unsqueeze(-1), (products / scales).unsqueeze(-1)
    assert torch.equal((quotient - border).sign(), (x - products.unsqueeze(-1)).sign())


def test_division_by_products_is_the_division() -> None:
    """The steps of compiled kernels, with reciprocals that are up to two units off."""
    scales, products = borders()
    drawn = torch.rand(126, 4000) * 6.5 * scales
    x = torch.cat([neighbours(products, 40).flatten(1), drawn], dim=1)
    for off in (-2, 0, 2):
        inverse = ((1.0 / scales).view(torch.int32) + off).view(torch.float32)
        quotient = x * inverse
        rest = (x.double() - quotient.double() * scales.double()).float()
        exact = quotient.double() + rest.double() * inverse.double()
        assert torch.equal(exact.float(), x / scales)


def test_values_around_every_border_of_every_scale() -> None:
    """Groups of each e4m3 scale hold all borders between codes and their neighbours."""
    scales, products = borders()
    around = neighbours(products, 1).flatten(1)
    around = torch.cat([around, -around, torch.zeros(126, 3), -torch.zeros(126, 15)], dim=1)
    x = torch.cat([(6.0 * scales).unsqueeze(1).expand(-1, 4, 1), around.view(126, 4, 15)], dim=2)
    x = x.reshape(-1, 16).to(DEVICE)
    for actual, expected in zip(kernels.fp4_quantise(x), fp4_quantise(x), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("name", ["fp8_quantise", "fp4_quantise", "mxfp4_quantise"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_scales_of_every_magnitude(name: str, dtype: torch.dtype) -> None:
    """Groups whose largest magnitude has any exponent, or lies at a border of scales."""
    if dtype == torch.bfloat16:
        bits = [torch.arange(0x180, 0x7F80, 31), torch.arange(0x3F80, 0x4080)]
        largest = torch.cat(bits).to(torch.int16).view(dtype)
    else:
        powers = torch.exp2(torch.arange(-116.0, 120.0, 4.0))
        e4m3 = numerics.decode_e4m3(torch.arange(127, dtype=torch.uint8))
        middles = (e4m3[1:] + e4m3[:-1]) / 2 * 6.0
        edges = torch.cat([1.5 * powers, 1.75 * powers, powers, middles, torch.tensor([1e-4])])
        largest = neighbours(edges, 3).flatten()
    x = torch.zeros(len(largest), 32, dtype=dtype)
    x[:, 5], x[:, 6], x[:, 23] = largest, largest / 3, -largest
    x = x.to(DEVICE)
    function = {"fp8_quantise": fp8_quantise, "mxfp4_quantise": mxfp4_quantise}
    expected = function.get(name, fp4_quantise)(x)
    for actual, wanted in zip(getattr(kernels, name)(x), expected, strict=True):
        assert torch.equal(actual, wanted)


def test_leading_axes_are_kept() -> None:
    x = draw(6, 64, torch.bfloat16).view(2, 3, 64)
    assert torch.equal(kernels.act_quant(x), act_quant(x))
    codes, scales = kernels.fp8_quantise(x)
    assert codes.shape == x.shape
    assert scales.shape == (2, 3, 2)


def test_refusals() -> None:
    with pytest.raises(Unsupported, match="float64"):
        kernels.act_quant(torch.zeros(2, 32, dtype=torch.float64, device=DEVICE))
    with pytest.raises(Unsupported, match="multiple of 32"):
        kernels.mxfp4_quantise(torch.zeros(2, 48, device=DEVICE))
    with pytest.raises(Unsupported, match="gradient"):
        kernels.act_quant(torch.zeros(2, 32, device=DEVICE, requires_grad=True))

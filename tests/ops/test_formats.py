"""Number formats inside kernels equal `deepinfer.numerics`, code by code and at every tie."""

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer import numerics
from deepinfer.kernels import formats

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@triton.jit
def _apply(x, out, count, FUNCTION: tl.constexpr, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    value = tl.load(x + places, mask=places < count, other=0)
    tl.store(out + places, FUNCTION(value), mask=places < count)


@triton.jit
def _narrow(x, out, count, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    value = tl.load(x + places, mask=places < count, other=0)
    tl.store(out + places, formats.narrow(value, tl.bfloat16), mask=places < count)


def apply(function: object, x: Tensor, dtype: torch.dtype) -> Tensor:
    x = x.to(DEVICE)
    out = torch.empty(x.shape, dtype=dtype, device=DEVICE)
    block = triton.next_power_of_2(x.numel())
    if function is formats.narrow:
        _narrow[(1,)](x, out, x.numel(), BLOCK=block)
    else:
        _apply[(1,)](x, out, x.numel(), FUNCTION=function, BLOCK=block)
    return out.cpu()


def nasty() -> Tensor:
    """Values of every size, ties of each format, and their neighbours."""
    e4m3 = numerics.decode_e4m3(torch.arange(127, dtype=torch.uint8))
    ties = torch.cat([(e4m3[1:] + e4m3[:-1]) / 2, e4m3, torch.tensor([0.25, 0.75, 2.5, 3.5, 5.0])])
    up = torch.nextafter(ties, torch.tensor(torch.inf))
    down = torch.nextafter(ties, torch.tensor(-torch.inf))
    drawn = torch.randn(2000) * torch.exp2(torch.randint(-20, 12, (2000,)).float())
    values = torch.cat([ties, up, down, drawn, torch.tensor([0.0, 1e-30, 3e38])])
    return torch.cat([values, -values])


def test_bf16() -> None:
    x = torch.cat([nasty(), torch.tensor([torch.inf, -torch.inf, torch.nan])])
    halves = (torch.arange(0x3F80, 0x4080, dtype=torch.int32) << 16 | 0x8000).view(torch.float32)
    x = torch.cat([x, halves])
    found = apply(formats.narrow, x, torch.bfloat16)
    assert torch.equal(found.nan_to_num(7.0), x.to(torch.bfloat16).nan_to_num(7.0))
    assert torch.equal(found.isnan(), x.isnan())


@triton.jit
def _rounded(x, out, count, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    value = tl.load(x + places, mask=places < count, other=0)
    tl.store(out + places, formats.rounded(value, tl.bfloat16), mask=places < count)


def test_rounded_is_narrow_without_leaving_float32() -> None:
    x = torch.cat([nasty(), torch.tensor([torch.inf, -torch.inf, -0.0])]).to(DEVICE)
    out = torch.empty_like(x)
    _rounded[(1,)](x, out, x.numel(), BLOCK=triton.next_power_of_2(x.numel()))
    assert torch.equal(out.view(torch.int32), x.to(torch.bfloat16).float().view(torch.int32))


def test_e4m3() -> None:
    x = nasty()
    expected = numerics.encode_e4m3(x.clamp(-448, 448))
    assert torch.equal(apply(formats.encode_e4m3, x, torch.uint8), expected)
    codes = torch.arange(256, dtype=torch.uint8)
    found, value = apply(formats.decode_e4m3, codes, torch.float32), numerics.decode_e4m3(codes)
    torch.testing.assert_close(found, value, rtol=0, atol=0, equal_nan=True)
    nan = torch.tensor([torch.nan])
    assert apply(formats.encode_e4m3, nan, torch.uint8).item() & 0x7F == 0x7F


def test_e2m1() -> None:
    x = nasty().clamp(-6, 6)
    expected = numerics.encode_e2m1(numerics.round_e2m1(x))
    assert torch.equal(apply(formats.encode_e2m1, x, torch.uint8), expected)
    packed = torch.arange(256, dtype=torch.uint8)
    found = apply(formats.decode_e2m1, packed, torch.float32)
    assert torch.equal(found, numerics.unpack_e2m1(packed)[0::2])


@pytest.mark.parametrize("code", [formats.ceil_power_of_two])
def test_power_of_two(code: object) -> None:
    x = nasty().abs().clamp_min(2.0**-126).clamp_max(2.0**120)
    scales = apply(code, x, torch.float32)
    assert torch.equal(scales, numerics.ceil_power_of_two(x))
    assert torch.equal(
        apply(formats.encode_e8m0, scales, torch.uint8), numerics.encode_e8m0(scales)
    )
    codes = torch.arange(255, dtype=torch.uint8)
    assert torch.equal(
        apply(formats.decode_e8m0, codes, torch.float32), numerics.decode_e8m0(codes)
    )

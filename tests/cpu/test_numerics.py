"""Number formats against definitions worked out in exact arithmetic."""

import bisect
import itertools
import math
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from deepinfer.numerics import (
    accumulate_dtype,
    ceil_power_of_two,
    decode_e4m3,
    decode_e8m0,
    encode_e2m1,
    encode_e4m3,
    encode_e8m0,
    fp4_scale,
    fp8_scale,
    mxfp4_scale,
    pack_nibbles,
    round_e2m1,
    straight_through,
    unpack_e2m1,
)

pytestmark = pytest.mark.usefixtures("one_thread")

WIDE = [torch.float32, torch.float64]
E2M1 = [Fraction(v) for v in ("0", "1/2", "1", "3/2", "2", "3", "4", "6")]


def e4m3_magnitude(code: int) -> Fraction:
    """Value of the e4m3 code 0..126: bias 7, subnormals below 2^-6, no infinities."""
    exponent, mantissa = divmod(code, 8)
    if exponent == 0:
        return Fraction(mantissa, 8) / 64
    return (1 + Fraction(mantissa, 8)) * Fraction(2) ** (exponent - 7)


E4M3 = [e4m3_magnitude(code) for code in range(127)]


def nearest_code(grid: list[Fraction], value: float | Fraction) -> int:
    """Index of the grid value nearest to |value|; of two that are as near, the even one."""
    magnitude = abs(Fraction(value))
    above = bisect.bisect_left(grid, magnitude)
    if above == 0 or above == len(grid):
        return min(above, len(grid) - 1)
    below = above - 1
    low, high = magnitude - grid[below], grid[above] - magnitude
    if low == high:
        return below if below % 2 == 0 else above
    return below if low < high else above


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equality that tells -0 from 0 and holds for NaN."""
    return a.dtype == b.dtype and torch.equal(
        a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
    )


def signed(values: list[Fraction], dtype: torch.dtype) -> Tensor:
    """Values with a plus, then the same with a minus."""
    numbers = [float(value) for value in values]
    return torch.tensor([*numbers, *(-number for number in numbers)], dtype=dtype)


@pytest.mark.parametrize("dtype", [*WIDE, torch.bfloat16])
def test_e4m3_codes_have_their_values(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    values = decode_e4m3(codes, dtype)
    finite = torch.cat([values[:127], values[128:255]])
    assert same_bits(finite, signed(E4M3, dtype))
    assert values[[127, 255]].isnan().all()
    assert finite.max() == 448


@pytest.mark.parametrize("dtype", [*WIDE, torch.bfloat16])
def test_e4m3_values_have_their_codes(dtype: torch.dtype) -> None:
    codes = encode_e4m3(signed(E4M3, dtype))
    assert codes.dtype == torch.uint8
    assert codes.tolist() == [*range(127), *range(128, 255)]


def test_e4m3_midpoints_go_to_the_even_code_and_their_neighbours_do_not() -> None:
    middles = torch.tensor([float(a + b) / 2 for a, b in itertools.pairwise(E4M3)])
    below = torch.nextafter(middles, torch.tensor(0.0))
    above = torch.nextafter(middles, torch.tensor(500.0))
    lower = torch.arange(126)
    assert encode_e4m3(middles).tolist() == (lower + lower % 2).tolist()
    assert encode_e4m3(-middles).tolist() == (lower + lower % 2 + 128).tolist()
    assert encode_e4m3(below).tolist() == lower.tolist()
    assert encode_e4m3(above).tolist() == (lower + 1).tolist()


@given(st.floats(-448, 448, width=32))
def test_e4m3_rounds_to_the_nearest(value: float) -> None:
    (code,) = encode_e4m3(torch.tensor([value])).tolist()
    negative = math.copysign(1, value) < 0
    assert code == nearest_code(E4M3, value) + (128 if negative else 0)


@pytest.mark.parametrize("dtype", [*WIDE, torch.bfloat16])
def test_e2m1_nibbles_of_every_byte(dtype: torch.dtype) -> None:
    table = signed(E2M1, dtype)
    packed = torch.arange(256, dtype=torch.uint8).view(4, 64)
    for _ in range(2):  # the second call finds its table made already
        values = unpack_e2m1(packed, dtype)
        assert values.shape == (4, 128)
        low, high = packed.flatten().long() % 16, packed.flatten().long() // 16
        assert same_bits(values.flatten()[0::2], table[low])
        assert same_bits(values.flatten()[1::2], table[high])
    assert unpack_e2m1(packed[:0]).shape == (0, 128)


@pytest.mark.parametrize("dtype", [*WIDE, torch.bfloat16])
def test_e2m1_grid_values_have_their_codes(dtype: torch.dtype) -> None:
    grid = signed(E2M1, dtype)
    codes = encode_e2m1(grid)
    assert codes.tolist() == list(range(16))
    assert codes.dtype == torch.uint8
    assert same_bits(round_e2m1(grid), grid)


@pytest.mark.parametrize("dtype", [*WIDE, torch.bfloat16])
def test_e2m1_ties_go_to_the_even_code(dtype: torch.dtype) -> None:
    ties = {0.25: 0.0, 0.75: 1.0, 1.25: 1.0, 1.75: 2.0, 2.5: 2.0, 3.5: 4.0, 5.0: 4.0}
    values = torch.tensor(list(ties), dtype=dtype)
    expected = torch.tensor(list(ties.values()), dtype=dtype)
    assert same_bits(round_e2m1(values), expected)
    assert same_bits(round_e2m1(-values), -expected)


@given(st.floats(-6, 6, width=32), st.sampled_from(WIDE))
def test_e2m1_rounds_to_the_nearest(value: float, dtype: torch.dtype) -> None:
    rounded = round_e2m1(torch.tensor([value], dtype=dtype))
    code = nearest_code(E2M1, value)
    expected = torch.tensor([math.copysign(float(E2M1[code]), value)], dtype=dtype)
    assert same_bits(rounded, expected)
    assert encode_e2m1(rounded).item() == code + (8 if math.copysign(1, value) < 0 else 0)


@pytest.mark.parametrize("tie", [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
@pytest.mark.parametrize("dtype", WIDE)
def test_e2m1_next_to_ties(tie: float, dtype: torch.dtype) -> None:
    here = torch.tensor(tie, dtype=dtype)
    for towards in (0.0, 6.0):
        value = torch.nextafter(here, torch.tensor(towards, dtype=dtype))
        assert round_e2m1(value) == float(E2M1[nearest_code(E2M1, value.item())])


@given(st.lists(st.integers(0, 15), min_size=2, max_size=12).filter(lambda x: len(x) % 2 == 0))
def test_nibbles_of_even_positions_are_the_low_ones(nibbles: list[int]) -> None:
    packed = pack_nibbles(torch.tensor(nibbles, dtype=torch.uint8))
    pairs = zip(nibbles[0::2], nibbles[1::2], strict=True)
    assert packed.tolist() == [low + 16 * high for low, high in pairs]
    assert encode_e2m1(unpack_e2m1(packed)).tolist() == nibbles


@pytest.mark.parametrize("dtype", WIDE)
def test_e8m0_of_every_byte(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    values = decode_e8m0(codes, dtype)
    assert values.dtype == dtype
    assert values[:255].tolist() == [math.ldexp(1.0, code - 127) for code in range(255)]
    assert values[255].isnan()
    assert encode_e8m0(values[:255]).tolist() == list(range(255))


@pytest.mark.parametrize(("dtype", "lowest", "highest"), [
    (torch.float32, -126, 127), (torch.float64, -1022, 1023),
])  # fmt: skip
def test_ceil_power_of_two_at_and_beside_every_power(
    dtype: torch.dtype, lowest: int, highest: int
) -> None:
    exponents = range(lowest, highest + 1)
    powers = torch.tensor([math.ldexp(1.0, e) for e in exponents], dtype=dtype)
    above = torch.nextafter(powers, torch.tensor(math.inf, dtype=dtype))
    below = torch.nextafter(powers, torch.tensor(0.0, dtype=dtype))
    assert torch.equal(ceil_power_of_two(powers), powers)
    assert torch.equal(ceil_power_of_two(above)[:-1], powers[1:])
    assert ceil_power_of_two(above)[-1] == math.inf
    assert torch.equal(ceil_power_of_two(below[1:]), powers[1:])  # the first is subnormal


@given(st.floats(2.0**-126, 2.0**127, width=32), st.sampled_from(WIDE))
def test_ceil_power_of_two_is_the_next_power(value: float, dtype: torch.dtype) -> None:
    result = ceil_power_of_two(torch.tensor([value], dtype=dtype))
    assert result.dtype == dtype
    assert math.frexp(result.item())[0] == 0.5
    assert value <= result.item() < 2 * value


def positive_bfloat16() -> Tensor:
    """Every finite bfloat16 of at least 0."""
    return torch.arange(0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def least_exponent(value: Fraction, largest: int) -> int:
    """Smallest k with value <= largest * 2^k."""
    k = value.numerator.bit_length() - value.denominator.bit_length() - largest.bit_length()
    while value > largest * Fraction(2) ** k:
        k += 1
    return k


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize(("scale", "largest", "floor"), [
    (fp8_scale, 448, Fraction(1e-4)), (mxfp4_scale, 6, Fraction(6, 2**126)),
])  # fmt: skip
def test_power_of_two_scales_of_every_bfloat16(
    scale: Callable[[Tensor], Tensor], largest: int, floor: Fraction, dtype: torch.dtype
) -> None:
    amax = positive_bfloat16().to(dtype)
    groups = torch.stack([torch.zeros_like(amax), -amax, amax / 2], dim=-1)
    found = scale(groups)
    assert found.shape == (len(amax), 1)
    assert found.dtype == dtype
    expected = [least_exponent(max(Fraction(a), floor), largest) for a in amax.tolist()]
    assert torch.frexp(found[:, 0]).exponent.tolist() == [k + 1 for k in expected]
    if scale is fp8_scale:  # the range of codes that model description 3.1 states
        codes = encode_e8m0(found)
        assert (codes.min(), codes.max()) == (105, 247)


@pytest.mark.parametrize("dtype", WIDE)
def test_e4m3_scales_of_bfloat16(dtype: torch.dtype) -> None:
    amax = positive_bfloat16().to(dtype)[::5]
    found = fp4_scale(torch.stack([-amax, amax / 4], dim=-1))
    assert found.dtype == dtype
    floor = Fraction(6, 2**9)
    codes = [nearest_code(E4M3, max(Fraction(a), floor) / 6) for a in amax.tolist()]
    assert found[:, 0].tolist() == [float(E4M3[code]) for code in codes]
    assert (min(codes), max(codes)) == (1, 126)


def test_sums_are_taken_in_float32_or_wider() -> None:
    assert accumulate_dtype(torch.bfloat16) == torch.float32
    assert accumulate_dtype(torch.float32) == torch.float32
    assert accumulate_dtype(torch.float64) == torch.float64


def test_rounding_lets_the_gradient_through() -> None:
    x = torch.tensor([0.3, 2.4, -5.5], requires_grad=True)
    weight = torch.tensor([1.0, -2.0, 3.0])
    (straight_through(x, round_e2m1) * weight).sum().backward()
    assert torch.equal(x.grad, weight)
    assert torch.equal(straight_through(x, round_e2m1), torch.tensor([0.5, 2.0, -6.0]))
    with torch.no_grad():
        assert not straight_through(x, round_e2m1).requires_grad
    assert not straight_through(x.detach(), round_e2m1).requires_grad

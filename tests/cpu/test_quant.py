"""Weight formats against a slow implementation, value by value and byte by byte."""

import bisect
import math
from collections.abc import Callable
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from deepinfer.checkpoint.quant import (
    dequantise_fp4,
    dequantise_fp8,
    dequantise_fp8_row,
    quantise_fp4,
    quantise_fp8,
    quantise_fp8_row,
)

pytestmark = pytest.mark.usefixtures("one_thread")

Quantise = Callable[[Tensor], tuple[Tensor, Tensor]]
Dequantise = Callable[[Tensor, Tensor], Tensor]

FP8 = (quantise_fp8, dequantise_fp8)
FP8_ROW = (quantise_fp8_row, dequantise_fp8_row)
FP4 = (quantise_fp4, dequantise_fp4)

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E4M3 = [
    math.ldexp(code % 8, -9) if code < 8 else math.ldexp(8 + code % 8, code // 8 - 10)
    for code in range(127)
]
SIZES = [
    (1, 1),
    (1, 32),
    (32, 1),
    (32, 32),
    (31, 33),
    (33, 31),
    (64, 96),
    (65, 97),
    (0, 32),
    (3, 0),
]
EVEN_SIZES = [(1, 32), (32, 32), (33, 64), (3, 96), (0, 32)]


def rows_per_scale(quantise: Quantise) -> int:
    return 32 if quantise is quantise_fp8 else 1


def random_scales(rows: int, columns: int, row_block: int, generator: torch.Generator) -> Tensor:
    shape = (-(-rows // row_block), -(-columns // 32))
    # 2^-100 to 2^113: products with codes stay normal and finite in float32 and bfloat16.
    return torch.randint(27, 241, shape, generator=generator, dtype=torch.uint8)


def random_fp8(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    codes = torch.randint(0, 254, (rows, columns), generator=generator, dtype=torch.uint8)
    return torch.where(codes >= 127, codes + 1, codes)  # all but 0x7F and 0xFF, which are NaN


def slow_fp8(codes: Tensor, scale: Tensor, row_block: int) -> list[list[float]]:
    rows, columns = codes.shape
    grid = [*E4M3, math.nan, *(-value for value in E4M3), math.nan]
    return [
        [
            grid[codes[r, c].item()] * math.ldexp(1.0, scale[r // row_block, c // 32].item() - 127)
            for c in range(columns)
        ]
        for r in range(rows)
    ]


def slow_fp4(packed: Tensor, scale: Tensor) -> list[list[float]]:
    grid = [*E2M1, *(-value for value in E2M1)]
    rows, half = packed.shape
    result = [[math.nan] * (2 * half) for _ in range(rows)]
    for r, k in product(range(rows), range(half)):
        byte = packed[r, k].item()
        power = math.ldexp(1.0, scale[r, 2 * k // 32].item() - 127)
        result[r][2 * k] = grid[byte & 15] * power
        result[r][2 * k + 1] = grid[byte >> 4] * power
    return result


def check_exact(values: Tensor, expected: list[list[float]]) -> None:
    """Bit by bit, and none of it lost in bfloat16."""
    wanted = torch.tensor(expected, dtype=torch.float64).view(values.shape)
    assert values.dtype == torch.float32
    assert torch.equal(values.view(torch.int32), wanted.float().view(torch.int32))
    assert torch.equal(values.double(), wanted)
    assert torch.equal(values.bfloat16().float(), values)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("dequantise", "row_block"), [(dequantise_fp8, 32), (dequantise_fp8_row, 1)]
)
def test_fp8_is_dequantised_exactly(
    dequantise: Dequantise, row_block: int, size: tuple[int, int]
) -> None:
    generator = torch.Generator().manual_seed(size[0] * 1000 + size[1])
    codes = random_fp8(*size, generator)
    scale = random_scales(*size, row_block, generator)
    check_exact(dequantise(codes, scale), slow_fp8(codes, scale, row_block))


@pytest.mark.parametrize("size", EVEN_SIZES)
def test_fp4_is_dequantised_exactly(size: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(size[0])
    packed = torch.randint(0, 256, (size[0], size[1] // 2), generator=generator, dtype=torch.uint8)
    scale = random_scales(*size, 1, generator)
    check_exact(dequantise_fp4(packed, scale), slow_fp4(packed, scale))


def test_every_code_at_every_scale() -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(254, 1)
    scale = torch.arange(254, dtype=torch.uint8).unsqueeze(1).repeat(1, 8)
    values = dequantise_fp8_row(codes, scale)
    expected = torch.tensor(slow_fp8(codes, scale, 1), dtype=torch.float64).float()
    number = ~values.isnan()
    assert torch.equal(number, ~expected.isnan())
    assert torch.equal(values[number], expected[number])
    assert number.sum() == 254 * 254
    assert dequantise_fp8_row(codes[:1], torch.full((1, 8), 255).byte()).isnan().all()


def nearest(grid: list[float], magnitude: float) -> int:
    above = bisect.bisect_left(grid, magnitude)
    if above == 0:
        return 0
    low, high = magnitude - grid[above - 1], grid[above] - magnitude
    return above if high < low or (high == low and above % 2 == 0) else above - 1


def slow_quantise(
    weight: list[list[float]], grid: list[float], row_block: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Codes with the sign as the highest bit, and exponent bytes of the smallest scales."""
    rows, columns = len(weight), len(weight[0])
    scales = [[1] * -(-columns // 32) for _ in range(-(-rows // row_block))]
    for r, c in product(range(rows), range(columns)):
        byte = scales[r // row_block][c // 32]
        while abs(weight[r][c]) > grid[-1] * math.ldexp(1.0, byte - 127):
            byte += 1
        scales[r // row_block][c // 32] = byte
    codes = [[0] * columns for _ in range(rows)]
    for r, c in product(range(rows), range(columns)):
        value = weight[r][c] / math.ldexp(1.0, scales[r // row_block][c // 32] - 127)
        sign = len(grid) + len(grid) % 2 if math.copysign(1, value) < 0 else 0
        codes[r][c] = nearest(grid, abs(value)) + sign
    return codes, scales


def random_weight(rows: int, columns: int, seed: int) -> Tensor:
    """Ordinary values, outliers, tiny values, zeros of both signs and empty blocks."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator)
    kind = torch.rand(rows, columns, generator=generator)
    weight = torch.where(kind < 0.02, weight * 1e4, weight)
    weight = torch.where(kind > 0.95, weight * 1e-6, weight)
    weight = torch.where(kind > 0.99, weight * 0.0, weight)
    weight[:, 32:64] *= (torch.arange(rows) % 3 > 0).float().unsqueeze(1)
    return weight


@pytest.mark.parametrize("size", SIZES[:-2])
@pytest.mark.parametrize("quantise", [quantise_fp8, quantise_fp8_row])
def test_fp8_is_quantised_as_defined(quantise: Quantise, size: tuple[int, int]) -> None:
    weight = random_weight(*size, seed=size[0] + size[1])
    codes, scale = quantise(weight)
    slow_codes, slow_scales = slow_quantise(weight.tolist(), E4M3, rows_per_scale(quantise))
    assert codes.dtype == scale.dtype == torch.uint8
    assert codes.is_contiguous()
    assert scale.tolist() == slow_scales
    assert codes.tolist() == slow_codes


@pytest.mark.parametrize("size", EVEN_SIZES[:-1])
def test_fp4_is_quantised_as_defined(size: tuple[int, int]) -> None:
    weight = random_weight(*size, seed=size[0])
    packed, scale = quantise_fp4(weight)
    slow_codes, slow_scales = slow_quantise(weight.tolist(), E2M1, 1)
    assert packed.dtype == scale.dtype == torch.uint8
    assert scale.tolist() == slow_scales
    pairs = [[a + 16 * b for a, b in zip(r[0::2], r[1::2], strict=True)] for r in slow_codes]
    assert packed.tolist() == pairs


def test_even_columns_take_the_low_nibble() -> None:
    packed, scale = quantise_fp4(torch.tensor([[1.0, -2.0, 6.0, 0.0] + [0.0] * 28]))
    assert packed.tolist() == [[0xC2, 0x07] + [0x00] * 14]
    assert scale.tolist() == [[127]]


@pytest.mark.parametrize(("formats", "sizes"), [(FP8, SIZES), (FP8_ROW, SIZES), (FP4, EVEN_SIZES)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_any_layout_and_dtype_gives_the_same_bytes(
    formats: tuple[Quantise, Dequantise], sizes: list[tuple[int, int]], dtype: torch.dtype
) -> None:
    quantise, dequantise = formats
    for rows, columns in sizes:
        weight = random_weight(rows, columns, seed=3).bfloat16()
        kept = weight.clone()
        codes, scale = quantise(weight.to(dtype))
        turned = quantise(weight.to(dtype).t().contiguous().t())
        assert torch.equal(codes, turned[0])
        assert torch.equal(scale, turned[1])
        assert torch.equal(weight, kept)
        assert torch.equal(codes, quantise(weight.float())[0])
        assert dequantise(codes, scale).shape == (rows, columns)


NUMBERS = st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False)


@st.composite
def matrices(draw: st.DrawFn, column_unit: int) -> Tensor:
    """Small matrices whose blocks differ by many binary orders of magnitude."""
    rows = draw(st.integers(1, 40))
    columns = column_unit * draw(st.integers(1, 70 // column_unit))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    weight = torch.randn(rows, columns, generator=generator)
    weight *= 2.0 ** draw(st.integers(-60, 60))
    for _ in range(draw(st.integers(0, 4))):
        row, column = draw(st.integers(0, rows - 1)), draw(st.integers(0, columns - 1))
        weight[row, column] = draw(NUMBERS)
    return weight


def check_round_trip(weight: Tensor, formats: tuple[Quantise, Dequantise]) -> None:
    """Half a step of the grid is the largest error, and a second time changes nothing."""
    quantise, dequantise = formats
    codes, scale = quantise(weight)
    values = dequantise(codes, scale)
    wide = torch.ldexp(torch.tensor(1.0, dtype=torch.float64), scale.double() - 127)
    wide = wide.repeat_interleave(rows_per_scale(quantise), 0).repeat_interleave(32, 1)
    wide = wide[: weight.shape[0], : weight.shape[1]]
    error = (values.double() - weight.double()).abs()
    if quantise is quantise_fp4:
        magnitude = weight.double().abs() / wide
        step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0)) * wide
    else:  # four significant bits, or steps of 2^-9 under the scale
        step = torch.maximum(2.0 ** torch.floor(torch.log2(weight.double().abs())) / 8, wide / 512)
    assert (error <= step / 2).all()
    assert torch.equal(torch.signbit(values), torch.signbit(weight))
    again = dequantise(*quantise(values))
    assert torch.equal(again.view(torch.int32), values.view(torch.int32))


@given(matrices(column_unit=1), st.sampled_from([FP8, FP8_ROW]))
def test_fp8_round_trip(weight: Tensor, formats: tuple[Quantise, Dequantise]) -> None:
    check_round_trip(weight, formats)


@given(matrices(column_unit=32))
def test_fp4_round_trip(weight: Tensor) -> None:
    check_round_trip(weight, FP4)


@pytest.mark.parametrize("formats", [FP8, FP8_ROW, FP4])
def test_values_of_any_stored_codes_are_reproduced(
    formats: tuple[Quantise, Dequantise],
) -> None:
    quantise, dequantise = formats
    generator = torch.Generator().manual_seed(5)
    scale = random_scales(70, 96, rows_per_scale(quantise), generator)
    if quantise is quantise_fp4:
        codes = torch.randint(0, 256, (70, 48), generator=generator, dtype=torch.uint8)
    else:
        codes = random_fp8(70, 96, generator)
    values = dequantise(codes, scale)
    again = dequantise(*quantise(values))
    assert torch.equal(again.view(torch.int32), values.view(torch.int32))


@pytest.mark.parametrize(("formats", "largest"), [(FP8, 448), (FP8_ROW, 448), (FP4, 6)])
def test_the_largest_value_of_a_block_decides_its_scale(
    formats: tuple[Quantise, Dequantise], largest: int
) -> None:
    quantise, _ = formats
    at = torch.tensor(largest * 2.0**-5)
    for value, byte in ((at, 122), (torch.nextafter(at, torch.tensor(0.0)), 122),
                        (at * 1.01, 123), (at / 2, 121), (torch.tensor(0.0), 1),
                        (torch.tensor(2.0**-149), 1), (torch.tensor(largest * 2.0**-126), 1),
                        (torch.tensor(largest * 2.0**-125), 2)):  # fmt: skip
        weight = torch.zeros(32, 64)
        weight[7, 40] = -value
        scale = quantise(weight)[1]
        others = scale.flatten().tolist()
        block = scale[7 // rows_per_scale(quantise), 1].item()
        others.remove(block)
        assert block == byte
        assert set(others) == {1}

"""Rounding to FP8, FP4 and MXFP4, and the packed records, against grids enumerated here.

The expected values come from the definition of the formats (sign, exponent, mantissa) and a search
for the nearest of all values, not from any cast; bytes are compared, not numbers.
"""

import math
from bisect import bisect_left
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deepinfer.ops.act_quant import act_quant
from deepinfer.ops.kv_records import (
    pack_compressed,
    pack_index_key,
    pack_window,
    round_compressed,
    round_index,
    round_window,
    unpack_compressed,
    unpack_index_key,
    unpack_window,
)

# Values by code, code 0 first; the code's low bit decides ties.
E4M3 = [
    (mantissa / 8 * 2.0**-6) if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    for exponent in range(16)
    for mantissa in range(8)
][:-1]  # the last is NaN
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def nearest(x: float, grid: list[float]) -> float:
    """The closest grid value to x, the even code of two; past the end, the last."""
    magnitude = abs(x)
    place = bisect_left(grid, magnitude)
    if place == len(grid):
        return math.copysign(grid[-1], x)
    if grid[place] == magnitude:
        return math.copysign(grid[place], x)
    low, high = grid[place - 1], grid[place]
    if magnitude - low == high - magnitude:
        return math.copysign(low if place % 2 else high, x)
    return math.copysign(low if magnitude - low < high - magnitude else high, x)


def power_of_two_at_least(x: float) -> float:
    mantissa, exponent = math.frexp(x)
    return 2.0 ** (exponent - 1 if mantissa == 0.5 else exponent)


def slow_fp8(group: list[float]) -> list[float]:
    """Model description 3.1."""
    scale = power_of_two_at_least(max(*map(abs, group), 1e-4) / 448)
    return [nearest(x / scale, E4M3) * scale for x in group]


def slow_fp4(group: list[float]) -> list[float]:
    """Model description 3.6."""
    scale = nearest(max(*map(abs, group), 6 * 2.0**-9) / 6, E4M3)
    return [nearest(x / scale, E2M1) * scale for x in group]


def slow_mxfp4(group: list[float]) -> list[float]:
    """Model description 3.7."""
    scale = power_of_two_at_least(max(*map(abs, group), 6 * 2.0**-126) / 6)
    return [nearest(x / scale, E2M1) * scale for x in group]


Rounding = Callable[[Tensor], Tensor]
FORMATS = {
    "act_quant": (act_quant, slow_fp8, 32),
    "window": (round_window, slow_fp8, 32),
    "compressed": (round_compressed, slow_fp4, 16),
    "index": (round_index, slow_mxfp4, 32),
}
RECORDS = {
    "window": (pack_window, unpack_window, round_window),
    "compressed": (pack_compressed, unpack_compressed, round_compressed),
    "index": (pack_index_key, unpack_index_key, round_index),
}
HOSTILE = [
    0.0, -0.0, 1e-4, 9.9e-5, 1e-30, -1e-38, 2.0**-126, 2.0**-133, 448.0, -449.0, 464.0, 480.0,
    2688.0, 2689.0, 1e4, -3e38, 6.0, 5.0, 3.5, 2.5, 1.75, 1.25, 0.75, 0.25, 2.0**-9,
    6 * 2.0**-9, 1 / 3,
]  # fmt: skip


def same_bits(a: Tensor, b: Tensor) -> bool:
    whole = {torch.bfloat16: torch.int16, torch.float32: torch.int32, torch.float64: torch.int64}
    return a.dtype == b.dtype and torch.equal(a.view(whole[a.dtype]), b.view(whole[b.dtype]))


def assert_rounds(name: str, values: Tensor) -> None:
    function, slow, size = FORMATS[name]
    found = function(values)
    groups = values.double().unflatten(-1, (-1, size)).flatten(0, -2).tolist()
    expected = torch.tensor([slow(group) for group in groups], dtype=torch.float64)
    assert same_bits(found, expected.view(values.shape).to(values.dtype))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("spread", [1e-3, 1.0, 300.0])
def test_random_values_round_to_the_nearest(name: str, dtype: torch.dtype, spread: float) -> None:
    values = torch.randn(40, 64) * torch.exp(torch.randn(40, 1) * 2) * spread
    assert_rounds(name, values.to(torch.bfloat16).to(dtype))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_hostile_values_round_to_the_nearest(name: str, dtype: torch.dtype) -> None:
    """Each alone among zeros, each among ordinary values, and all neighbours of the floors."""
    values = torch.zeros(3 * len(HOSTILE), 32)
    values[len(HOSTILE) :] = torch.randn(2 * len(HOSTILE), 32)
    for row, value in enumerate(HOSTILE * 3):
        values[row, row % 32] = value
    assert_rounds(name, values.to(dtype))


@pytest.mark.parametrize("name", FORMATS)
def test_ties_go_to_the_even_code(name: str) -> None:
    """Midpoints of all neighbours of the grid, for a scale of 1."""
    _, _, size = FORMATS[name]
    grid = E4M3 if size == 32 and name != "index" else E2M1
    middles = [(low + high) / 2 for low, high in pairwise(grid)]
    middles += [-middle for middle in middles]
    rows = [middles[i : i + size - 1] for i in range(0, len(middles), size - 1)]
    values = torch.zeros(len(rows), size)
    for row, part in enumerate(rows):
        values[row, : len(part)] = torch.tensor(part)
        values[row, -1] = grid[-1]
    assert_rounds(name, values)


@settings(max_examples=200)
@given(st.lists(st.floats(-1e38, 1e38), min_size=32, max_size=32))
def test_any_group_rounds_to_the_nearest(group: list[float]) -> None:
    """Of bf16 values: their quotients by a scale are far enough from ties for float32."""
    values = torch.tensor([group]).to(torch.bfloat16)
    for name in FORMATS:
        assert_rounds(name, values)
        assert_rounds(name, values.float())


@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_unpacking_a_record_is_rounding(name: str, dtype: torch.dtype) -> None:
    pack, unpack, rounding = RECORDS[name]
    ordinary = torch.randn(30, 5, 64) * torch.exp(torch.randn(30, 5, 1) * 4)
    hostile = torch.tensor(HOSTILE)[torch.randint(len(HOSTILE), (50, 64))].expand(1, -1, -1)
    for values in (ordinary.to(dtype), hostile.to(dtype), ordinary.to(dtype)[:0]):
        assert same_bits(unpack(pack(values), dtype), rounding(values))


@pytest.mark.parametrize("name", RECORDS)
def test_records_do_not_depend_on_strides(name: str) -> None:
    pack, unpack, _ = RECORDS[name]
    values = torch.randn(64, 9).T
    assert not values.is_contiguous()
    records = pack(values.contiguous())
    assert torch.equal(pack(values), records)
    wide = torch.zeros(9, 2 * records.shape[1], dtype=torch.uint8)
    wide[:, ::2] = records
    assert same_bits(unpack(wide[:, ::2], torch.float32), unpack(records, torch.float32))


def test_record_sizes_of_the_release() -> None:
    assert pack_window(torch.zeros(3, 512)).shape == (3, 528)
    assert pack_compressed(torch.zeros(3, 512)).shape == (3, 288)
    assert pack_index_key(torch.zeros(3, 128)).shape == (3, 68)


def test_bytes_of_a_window_record() -> None:
    """448 * 2^3 sets the scale of group 1; group 0 is at its floor: 2^ceil(log2(1e-4 / 448))."""
    values = torch.zeros(64)
    values[32], values[33], values[34] = 3584.0, -8.0, 12.0
    record = pack_window(values).tolist()
    assert record[32:35] == [0x7E, 0x80 | 0x38, 0x3C]  # 448; -1; 1.5
    assert record[64:] == [127 - 22, 127 + 3]


def test_bytes_of_a_compressed_record() -> None:
    """Even channels in the low half; the e4m3 scale of 6 * 1.5 is 1.5, of nothing 2^-9."""
    values = torch.zeros(32)
    values[:4] = torch.tensor([9.0, -1.5, 0.75, -4.5])
    record = pack_compressed(values).tolist()
    assert record[:3] == [0x7 | 0xA << 4, 0x1 | 0xD << 4, 0]
    assert record[16:] == [0x3C, 0x01]


def test_bytes_of_an_index_record() -> None:
    values = torch.zeros(64)
    values[32:36] = torch.tensor([24.0, -4.0, 2.0, 16.0])
    record = pack_index_key(values).tolist()
    assert record[16:18] == [0x7 | 0xA << 4, 0x1 | 0x6 << 4]
    assert record[32:] == [1, 127 + 2]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(0, 64), (3, 0, 32), (64,), (2, 3, 96)])
def test_shapes(name: str, shape: tuple[int, ...]) -> None:
    function = FORMATS[name][0]
    assert function(torch.randn(shape)).shape == shape


@pytest.mark.parametrize("name", FORMATS)
def test_gradients_pass_straight_through(name: str) -> None:
    function = FORMATS[name][0]
    x = torch.randn(4, 64, requires_grad=True)
    factor = torch.randn(4, 64)
    y = function(x)
    assert torch.equal(y.detach(), function(x.detach()))
    (gradient,) = torch.autograd.grad((y * factor).sum(), x)
    assert torch.equal(gradient, factor)


@pytest.mark.parametrize("name", FORMATS)
def test_rounding_twice_is_rounding_once(name: str) -> None:
    """Values of a record are on its grid; all but FP4, whose rounded scale can shrink."""
    function = FORMATS[name][0]
    once = function(torch.randn(50, 64) * 10)
    twice = function(once)
    assert same_bits(once, twice) or name == "compressed"

"""FP8 products: exact values, bounds, and rows that do not depend on each other."""

from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer.checkpoint.quant import dequantise_fp8, quantise_fp8
from deepinfer.errors import Unsupported
from deepinfer.kernels import products
from deepinfer.kernels.products import Tile
from deepinfer.numerics import decode_e4m3, decode_e8m0
from deepinfer.ops.act_quant import act_quant, fp8_quantise
from deepinfer.ops.fp8_linear import fp8_linear, fp8_widen, fp8_widen_weight
from deepinfer.ops.fp8_linear import triton as kernels
from deepinfer.ops.fp8_linear.reference import dequantise, dequantise_weight
from deepinfer.ops.fp8_linear.spec import draw_activations, draw_weight
from deepinfer.ops.fp8_quantise_wide import triton as quantiser

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TILES = [Tile(16, 64, 4, 8), Tile(32, 64, 4, 8), Tile(64, 64, 4, 6), Tile(128, 128, 8, 4)]
TILES += [tile._replace(ahead=True) for tile in TILES]
BACKENDS = [kernels.fp8_linear, kernels.fp8_linear_exact]


def draw(rows: int, outputs: int, columns: int, wide: bool = True) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(rows)
    x = draw_activations(generator, rows, columns)
    w = draw_weight(generator, outputs, columns, wide)
    return tuple(t.to(DEVICE) for t in (*x, *w))


def with_tile(arguments: tuple[Tensor, ...], tile: Tile, **options: Any) -> Tensor:
    given: dict[str, Any] = {"dtype": torch.float32, "widen": True, **options}
    return kernels.product(*arguments, tile=tile, **given)


def far(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bits; in the interpreter, whose products depend on the size of a tile, almost."""
    return torch.equal(a, b) if a.is_cuda else far(a, b) < 1e-6


@pytest.mark.parametrize("function", [fp8_linear, *BACKENDS])
@pytest.mark.parametrize("wide", [False, True])
def test_equals_a_product_of_dequantised_values(function: Any, wide: bool) -> None:
    """Today's path: bfloat16 activations through act_quant, a dequantised matrix, PyTorch."""
    generator = torch.Generator().manual_seed(1)
    x = (torch.randn(5, 256, generator=generator) * 3).bfloat16()
    matrix, scales = quantise_fp8(torch.randn(72, 256, generator=generator) * 0.02)
    expected = act_quant(x).double() @ dequantise_fp8(matrix, scales).double().T
    if wide:
        matrix, scales, _ = fp8_widen_weight(matrix, scales)
    arguments = [t.to(DEVICE) for t in (*fp8_quantise(x), matrix, scales)]
    y = function(*arguments, torch.float32).cpu()
    assert far(y, expected) < 2e-4
    rounded = function(*arguments).cpu()
    assert rounded.dtype == torch.bfloat16
    assert torch.equal(rounded, y.bfloat16())


@pytest.mark.parametrize("function", [fp8_linear, *BACKENDS])
@pytest.mark.parametrize("wide", [False, True])
def test_one_product_is_exact(function: Any, wide: bool) -> None:
    """One channel of every row is not zero: every bit of every value and scale has to arrive."""
    codes, scales, weight, weight_scales = draw(128, 40, 128, wide)
    channel = torch.arange(128, device=DEVICE)
    one_hot = torch.zeros_like(codes)
    one_hot[channel, channel] = codes[channel, channel]
    generator = torch.Generator().manual_seed(2)
    powers = torch.randint(-100, 101, (128, 1), generator=generator).float()
    scales = torch.exp2(powers).to(DEVICE).expand(scales.shape)
    y = function(one_hot, scales, weight, weight_scales, torch.float32)
    value = dequantise(one_hot, scales)[channel, channel]
    expected = value[:, None] * dequantise_weight(weight, weight_scales).T
    assert torch.equal(y, expected)


@pytest.mark.parametrize(("wide", "columns"), [(False, 256), (True, 512)])
def test_a_row_alone_has_the_same_bits(wide: bool, columns: int) -> None:
    arguments = draw(18, 70, columns, wide)
    for function in BACKENDS:
        y = function(*arguments, torch.float32)
        for row in (0, 17):
            alone = [t[row : row + 1] for t in arguments[:2]]
            assert same(function(*alone, *arguments[2:], torch.float32), y[row : row + 1])


@pytest.mark.parametrize("rows", [3, 130])
def test_tiles_and_splits_do_not_change_bits(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = draw(rows, 130, 4096 if DEVICE.type == "cuda" else 512)
    first = with_tile(arguments, TILES[2])
    assert far(first, fp8_linear(*arguments, torch.float32)) < 1e-3
    for tile in (TILES[3], TILES[7]) if rows > 100 else TILES:
        assert same(with_tile(arguments, tile), first), tile
    monkeypatch.setattr(products, "PROCESSORS", 1)
    for tile in (TILES[2], TILES[3]):
        assert same(with_tile(arguments, tile), first), tile


def test_large_tiles_take_scales_in_any_order() -> None:
    arguments = draw(129, 128, 256)
    codes, scales = fp8_widen(*arguments[:2])
    columns = scales.t().contiguous().t()
    for layout in (scales.contiguous(), columns):
        y = with_tile((codes, layout, *arguments[2:]), TILES[3])
        assert same(y, with_tile(arguments, TILES[2]))


@pytest.mark.parametrize("offset", range(4))
def test_scales_anywhere_in_memory(offset: int) -> None:
    """Buffered scales of the weight come as aligned words, whatever a word begins with."""
    codes, scales, weight, weight_scales = draw(5, 72, 768)
    memory = torch.full((weight_scales.numel() + 8,), 255, dtype=torch.uint8, device=DEVICE)
    moved = memory[offset : offset + weight_scales.numel()].view(weight_scales.shape)
    moved.copy_(weight_scales)
    y = with_tile((codes, scales, weight, moved), TILES[4])
    assert torch.equal(y, with_tile((codes, scales, weight, weight_scales), TILES[0]))


def test_nan_and_zero_stay_in_their_rows() -> None:
    codes, scales, *weight = draw(20, 70, 256)
    clean = kernels.fp8_linear(codes, scales, *weight)
    codes[3, 100] = 0x7F
    codes[7] = 0x80
    y = kernels.fp8_linear(codes, scales, *weight)
    assert y[3].isnan().all()
    assert (y[7] == 0).all()
    others = [row for row in range(20) if row not in (3, 7)]
    assert torch.equal(y[others], clean[others])


def test_rows_of_nan_quantised_by_the_package() -> None:
    x = torch.ones(3, 128)
    x[1, 5] = float("nan")
    _, _, *weight = draw(3, 40, 128)
    arguments = [t.to(DEVICE) for t in fp8_quantise(x)]
    y = kernels.fp8_linear(*arguments, *weight)
    assert y[1].isnan().any()
    assert y[[0, 2]].isfinite().all()


@pytest.mark.parametrize("spread", [1, 3, 12])
def test_widening_moves_values_by_no_more_than_it_says(spread: int) -> None:
    generator = torch.Generator().manual_seed(spread)
    codes, scales = draw_activations(generator, 9, 416, spread=spread)
    wide_codes, wide_scales = fp8_widen(codes, scales)
    before, after = dequantise(codes, scales), dequantise(wide_codes, wide_scales)
    groups = torch.nn.functional.pad((after - before).abs(), (0, 96)).unflatten(1, (-1, 128))
    assert (groups <= wide_scales.unsqueeze(-1) * 2.0**-10).all()
    largest = torch.nn.functional.pad(before.abs(), (0, 96)).unflatten(1, (-1, 128)).amax(-1)
    assert (groups <= largest.unsqueeze(-1) * 2.0**-17.8).all()


@pytest.mark.parametrize("size", [(70, 160), (32, 128), (1, 32)])
def test_widened_weights(size: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(3)
    weight, scales = draw_weight(generator, *size, False)
    codes, wide, moved = fp8_widen_weight(weight, scales)
    assert wide.shape == moved.shape == (-(-size[0] // 32), -(-size[1] // 128))
    assert 0 <= float(moved.min()) <= float(moved.max()) <= 1
    step = decode_e8m0(wide) * 2.0**-10
    bound = (moved * step).repeat_interleave(32, 0).repeat_interleave(128, 1)
    difference = (dequantise_weight(codes, wide) - dequantise_weight(weight, scales)).abs()
    assert (difference <= bound[: size[0], : size[1]]).all()
    kept, same, unmoved = fp8_widen_weight(weight, torch.full_like(scales, 120))
    assert torch.equal(decode_e4m3(kept), decode_e4m3(weight))
    assert (same == 120).all()
    assert not unmoved.any()


def test_outputs_do_not_leave_their_place() -> None:
    """Canaries around the result, which the allocator may have put anywhere."""
    arguments = draw(5, 33, 128)
    expected = kernels.fp8_linear(*arguments, torch.float32)
    memory = torch.full((7, 33), 7.0, device=DEVICE)
    original = torch.empty
    torch.empty = lambda *a, **k: memory[1:6] if a[0] == (5, 33) else original(*a, **k)
    try:
        kernels.fp8_linear(*arguments, torch.float32)
    finally:
        torch.empty = original
    assert torch.equal(memory[1:6], expected)
    assert (memory[0] == 7).all()
    assert (memory[6] == 7).all()


@pytest.mark.parametrize("rows", [1, 5, 33])
def test_quantised_in_one_pass(rows: int) -> None:
    """The same bytes as in two, ready for the product: it neither widens nor turns scales."""
    generator = torch.Generator().manual_seed(rows)
    x = (torch.randn(rows, 256, generator=generator) * 3).bfloat16().to(DEVICE)
    codes, scales = quantiser.fp8_quantise_wide(x)
    expected_codes, expected_scales = kernels.fp8_widen(*fp8_quantise(x))
    assert torch.equal(codes, expected_codes)
    assert torch.equal(scales, expected_scales)
    assert scales.stride() == expected_scales.stride() == (1, rows)
    _, _, *weight = draw(1, 40, 256)
    narrow = kernels.fp8_linear(*fp8_quantise(x), *weight, torch.float32)
    assert torch.equal(kernels.fp8_linear(codes, scales, *weight, torch.float32), narrow)


def test_nan_stays_in_its_row_from_the_start() -> None:
    x = torch.randn(6, 256, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    clean = quantiser.fp8_quantise_wide(x)
    x[2, 7] = float("nan")
    codes, scales = quantiser.fp8_quantise_wide(x)
    assert int(codes[2, 7]) & 0x7F == 0x7F
    others = [0, 1, 3, 4, 5]
    assert torch.equal(codes[others], clean[0][others])
    assert torch.equal(scales[others], clean[1][others])


def test_quantising_refusals() -> None:
    with pytest.raises(Unsupported):
        quantiser.fp8_quantise_wide(torch.zeros(2, 100, device=DEVICE))
    with pytest.raises(Unsupported):
        quantiser.fp8_quantise_wide(torch.zeros(2, 128, device=DEVICE, dtype=torch.float64))


@pytest.mark.skipif(DEVICE.type != "cuda", reason="the interpreter compiles nothing")
def test_row_counts_share_kernels() -> None:
    """After three counts of a tile, no other count compiles anything."""
    weight = [t.to(DEVICE) for t in draw_weight(torch.Generator(), 128, 512, True)]

    def run(rows: int) -> None:
        x = torch.ones(rows, 512, device=DEVICE)
        kernels.fp8_linear(*quantiser.fp8_quantise_wide(x), *weight)

    def compiled() -> int:
        found = (kernels._fp8_product, products.sum_splits, quantiser._fp8_quantise_wide)
        return sum(len(k.device_caches[torch.cuda.current_device()][0]) for k in found)

    for rows in products.telling_rows(512):
        run(rows)
    before = compiled()
    for rows in (2, 15, 18, 31, 40, 63, 66, 112, 127, 129, 130, 144, 500):
        run(rows)
    assert compiled() == before


@pytest.mark.parametrize("outputs", [64, 512, 1280, 2304, 5120, 32768])
@pytest.mark.parametrize("columns", [128, 1280, 2304, 5120, 8192])
def test_chunks_are_equal(outputs: int, columns: int) -> None:
    """No step is left over, and a product of few rows still has programs for many processors."""
    chunk = products.chunk_steps(outputs, 1, columns, 128)
    assert columns % (128 * chunk) == 0
    splits = columns // (128 * chunk)
    tiles = -(-outputs // 64)
    assert splits == 1 or chunk >= 2
    assert tiles * splits >= 36 or chunk <= 3


@pytest.mark.parametrize("most", [1, 40, 255, 256, 520, 4096, 8191])
@pytest.mark.parametrize("groups", [1, 8, 0])
def test_telling_rows_meet_every_form(most: int, groups: int) -> None:
    """Of products of bfloat16, and, without groups, of FP8."""
    tile_of = products.tile_of if groups else products.fp8_tile_of

    def form(rows: int, outputs: int) -> tuple[object, ...]:
        tile = tile_of(rows, outputs, *[groups][:groups])
        spread = products.grid_of(rows, outputs, max(1, groups), tile, 4)[1] > 1
        return tile, spread, products.alignment(rows, tile.rows)

    for outputs in (1, 64, 72, 130, 384, 512, 1024, 1280, 4096, 5120, 129280):
        found = {form(rows, outputs) for rows in products.telling_rows(most)}
        assert found == {form(rows, outputs) for rows in range(1, most + 1)}


def test_refusals() -> None:
    codes, scales, weight, weight_scales = draw(2, 32, 128)
    for wrong in (
        (codes.float(), scales, weight, weight_scales),
        (codes, scales.double(), weight, weight_scales),
        (codes, scales, weight.float(), weight_scales),
        (codes[:, :100], scales, weight, weight_scales),
        (codes, scales, weight, weight_scales, torch.float16),
    ):
        with pytest.raises(Unsupported):
            kernels.fp8_linear(*wrong)

"""bfloat16 products: rows that do not depend on each other, tiles and splits that agree."""

from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer.errors import Unsupported
from deepinfer.kernels import products
from deepinfer.kernels.products import Tile
from deepinfer.ops.grouped_output import cublas as grouped_cublas
from deepinfer.ops.grouped_output import grouped_output
from deepinfer.ops.grouped_output import triton as grouped_kernels
from deepinfer.ops.linear import cublas, linear
from deepinfer.ops.linear import triton as kernels
from deepinfer.ops.wide_linear import cublas as wide_cublas
from deepinfer.ops.wide_linear import triton as wide_kernels
from deepinfer.ops.wide_linear import wide_linear

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TILES = [
    Tile(16, 64, 4, 8),
    Tile(32, 64, 4, 8),
    Tile(64, 64, 4, 6),
    Tile(128, 128, 8, 4),
    Tile(256, 128, 8, 3),
]


def draw(rows: int, outputs: int, columns: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, columns, generator=generator).bfloat16()
    weight = (torch.randn(outputs, columns, generator=generator) * 0.02).bfloat16()
    return x.to(DEVICE), weight.to(DEVICE)


def far(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bits; in the interpreter, whose products depend on the size of a tile, almost."""
    return torch.equal(a, b) if a.is_cuda else far(a, b) < 1e-6


@pytest.mark.parametrize("columns", [100, 576])
def test_every_implementation_against_float64(columns: int) -> None:
    x, weight = draw(9, 70, columns)
    exact = x.double() @ weight.double().T
    for function in (wide_linear, wide_kernels.wide_linear, wide_cublas.wide_linear):
        y = function(x, weight)
        assert y.dtype == torch.float32
        assert far(y, exact) < 1e-5
    for narrow in (linear, kernels.linear, cublas.linear):
        y = narrow(x, weight)
        assert y.dtype == torch.bfloat16
        assert far(y, exact) < 3e-3


def test_wider_operands() -> None:
    x, weight = draw(3, 40, 64)
    for function in (wide_linear, wide_cublas.wide_linear):
        assert torch.equal(function(x.float(), weight), wide_linear(x.float(), weight.float()))
        assert function(x.double(), weight).dtype == torch.float64
    assert linear(x.double(), weight).dtype == torch.float64
    assert cublas.linear(x.float(), weight).dtype == torch.float32
    for kernel in (kernels.linear, wide_kernels.wide_linear):
        with pytest.raises(Unsupported):
            kernel(x.float(), weight)
        with pytest.raises(Unsupported):
            kernel(x, weight.float())


@pytest.mark.parametrize("columns", [100, 2048])
def test_a_row_alone_has_the_same_bits(columns: int) -> None:
    x, weight = draw(34, 70, columns)
    y = wide_kernels.wide_linear(x, weight)
    for row in (0, 33):
        alone = wide_kernels.wide_linear(x[row : row + 1], weight)
        assert same(alone, y[row : row + 1])


@pytest.mark.parametrize("rows", [3, 130])
def test_tiles_and_splits_do_not_change_bits(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = draw(rows, 130, 4096 if DEVICE.type == "cuda" else 512)
    first = kernels.product(x, weight, torch.float32, TILES[2])
    exact = x.double() @ weight.double().T
    assert far(first, exact) < 1e-5
    for tile in TILES[3:] if rows > 100 else TILES[:4]:
        assert same(kernels.product(x, weight, torch.float32, tile), first), tile
    monkeypatch.setattr(products, "PROCESSORS", 1)
    for tile in (TILES[2], TILES[3]):
        assert same(kernels.product(x, weight, torch.float32, tile), first), tile


def test_nan_stays_in_its_row() -> None:
    x, weight = draw(20, 70, 576)
    clean = kernels.linear(x, weight)
    x[3, 100] = float("nan")
    y = kernels.linear(x, weight)
    assert y[3].isnan().all()
    others = [row for row in range(20) if row != 3]
    assert torch.equal(y[others], clean[others])


GROUPED = [grouped_output, grouped_kernels.grouped_output, grouped_cublas.grouped_output]


def draw_groups(rows: int, groups: int, outputs: int, columns: int) -> tuple[Tensor, Tensor]:
    x, weight = draw(rows * groups, groups * outputs, columns)
    return x.unflatten(0, (rows, groups)), weight


@pytest.mark.parametrize("function", GROUPED)
@pytest.mark.parametrize("size", [(6, 3, 64, 256), (18, 2, 20, 100)])
def test_groups_are_products_of_their_own(function: Any, size: tuple[int, ...]) -> None:
    x, weight = draw_groups(*size)
    y = function(x, weight)
    assert y.is_contiguous()
    for g, part in enumerate(weight.split(size[2])):
        exact = x[:, g].double() @ part.double().T
        assert far(y[:, size[2] * g : size[2] * (g + 1)], exact) < 3e-3


def test_groups_in_every_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = draw_groups(129, 2, 128, 512)
    first = kernels.product(x, weight, torch.float32, TILES[2])
    assert same(kernels.product(x, weight, torch.float32, TILES[3]), first)
    monkeypatch.setattr(products, "PROCESSORS", 1)
    assert same(kernels.product(x, weight, torch.float32, TILES[2]), first)
    y = grouped_kernels.grouped_output(x[5:6], weight)
    assert far(y, grouped_output(x[5:6], weight)) < 1e-3


def test_groups_of_wider_operands() -> None:
    x, weight = draw_groups(3, 2, 20, 64)
    for dtype in (torch.float32, torch.float64):
        for function in (grouped_output, grouped_cublas.grouped_output):
            y = function(x.to(dtype), weight)
            assert y.dtype == dtype
            for g, part in enumerate(weight.to(dtype).split(20)):
                assert far(y[:, 20 * g : 20 * (g + 1)], x[:, g].to(dtype) @ part.T) < 1e-6
        with pytest.raises(Unsupported):
            grouped_kernels.grouped_output(x.to(dtype), weight)


def test_gradients_of_groups() -> None:
    x, weight = (t.float().requires_grad_() for t in draw_groups(3, 2, 20, 64))
    found = torch.autograd.grad(
        grouped_cublas.grouped_output(x, weight).square().sum(), (x, weight)
    )
    expected = torch.autograd.grad(grouped_output(x, weight).square().sum(), (x, weight))
    for a, b in zip(found, expected, strict=True):
        assert far(a, b) < 1e-5


def test_a_tile_larger_than_needed_is_never_taken() -> None:
    """But by a few rows: past 64 of them, no tile has room for more rows than there are."""
    for rows in range(65, 600):
        for outputs in (384, 5120, 129280):
            assert products.tile_of(rows, outputs).rows <= max(128, rows)

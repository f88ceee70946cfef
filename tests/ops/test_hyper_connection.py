"""Hyper-connection kernels beyond their cases: float32, rows by themselves, the order of sums."""

from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch import Tensor

from deepinfer.errors import Unsupported
from deepinfer.ops import hyper_connection as reference
from deepinfer.ops.hyper_connection.spec import SPECS, draw
from deepinfer.ops.rms_norm import rms_norm
from deepinfer.ops.spec import Arguments, Case, Tolerance
from deepinfer.testing.operators import check_case

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
STEP = SPECS[0]


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    from deepinfer.ops.hyper_connection import triton

    return triton


def arguments(rows: int, S: int = 4, H: int = 32, dtype: torch.dtype = torch.bfloat16) -> Arguments:
    drawn = draw(torch.Generator().manual_seed(rows), DEVICE, rows, S, H, dtype)
    return {**drawn, "iterations": 3}  # the cases have as many as the model: slow if interpreted


def rows_of(a: Arguments, rows: slice) -> Arguments:
    per_row = ("y", "streams", "post", "comb", "pre")
    return {k: v[rows] if k in per_row and v is not None else v for k, v in a.items()}


def test_float32_streams(kernels: ModuleType) -> None:
    close = replace(STEP, tolerance={n: Tolerance("close", 2e-5) for n in STEP.outputs})
    case = Case("float32", "tiny", lambda g, d: draw(g, d, 3, 4, 40, torch.float32))
    check_case(close, kernels.hyper_connection_step, case, DEVICE)


@pytest.mark.parametrize("size", [1.0, 1e4])
def test_bf16_products_are_nearly_as_good_as_float32(kernels: ModuleType, size: float) -> None:
    a = draw(torch.Generator().manual_seed(3), DEVICE, 4, 4, 96, size=size)
    a["base"], a["scale"] = torch.zeros_like(a["base"]), torch.ones_like(a["scale"])
    names = ("streams", "fn", "base", "scale", "iterations", "hc_eps", "norm_eps")
    found = kernels.mixes(**{n: a[n] for n in names})
    wide = {n: a[n].double() if isinstance(a[n], Tensor) else a[n] for n in names}
    for value, exact in zip(found, reference.mixes(**wide), strict=True):
        torch.testing.assert_close(value.double(), exact, rtol=4e-6, atol=1e-6)


def test_reference_is_the_composition() -> None:
    a = arguments(3)
    new, x, pre, post, comb = reference.hyper_connection_step(**a)
    expanded = reference.expand(a["y"], a["streams"], a["post"], a["comb"])
    names = ("fn", "base", "scale", "iterations", "hc_eps", "norm_eps")
    coefficients = reference.mixes(expanded, **{n: a[n] for n in names})
    collapsed = reference.collapse(expanded, a["pre"])
    assert torch.equal(new, expanded)
    assert torch.equal(x, rms_norm(collapsed, a["norm_weight"], a["norm_eps"]))
    for found, expected in zip((pre, post, comb), coefficients, strict=True):
        assert torch.equal(found, expected)


def test_row_alone_equals_row_in_batch(kernels: ModuleType) -> None:
    a = arguments(66)
    together = kernels.hyper_connection_step(**a)
    for row in (0, 65):
        alone = kernels.hyper_connection_step(**rows_of(a, slice(row, row + 1)))
        for one, all_rows in zip(alone, together, strict=True):
            assert torch.equal(one[0], all_rows[row])


def test_programs_that_walk_over_rows_give_the_same_bits(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = arguments(34, 2, 2 * 64 + 16)
    spread = kernels.hyper_connection_step(**a)
    few = replace(kernels._MIXING, programs=3)
    monkeypatch.setattr(kernels, "_MIXING", few)
    walking = kernels.hyper_connection_step(**a)
    for one, other in zip(spread, walking, strict=True):
        assert torch.equal(one, other)


def test_without_output_the_streams_are_returned(kernels: ModuleType) -> None:
    a = {**arguments(2), "y": None, "post": None, "comb": None}
    streams = a["streams"].clone()
    assert kernels.hyper_connection_step(**a)[0] is a["streams"]
    assert torch.equal(a["streams"], streams)


def test_leading_axes(kernels: ModuleType) -> None:
    a = arguments(6)
    streams, y = a["streams"].view(2, 3, 4, 32), a["y"].view(2, 3, 32)
    post, comb = a["post"].view(2, 3, 4), a["comb"].view(2, 3, 4, 4)
    flat = kernels.expand(a["y"], a["streams"], a["post"], a["comb"])
    assert torch.equal(kernels.expand(y, streams, post, comb).view(6, 4, 32), flat)
    x = kernels.collapse(a["streams"], a["pre"])
    assert torch.equal(kernels.collapse(streams, a["pre"].view(2, 3, 4)).view(6, 32), x)
    shaped = {"y": y, "streams": streams, "post": post, "comb": comb, "pre": a["pre"].view(2, 3, 4)}
    together = kernels.hyper_connection_step(**a)
    for one, other in zip(kernels.hyper_connection_step(**{**a, **shaped}), together, strict=True):
        assert torch.equal(one.flatten(0, 1), other)


def test_refuses_what_it_cannot_do(kernels: ModuleType) -> None:
    a = arguments(2)
    with pytest.raises(Unsupported, match="float64"):
        kernels.collapse(a["streams"].double(), a["pre"])
    with pytest.raises(Unsupported, match="5 streams"):
        kernels.collapse(torch.zeros(1, 5, 8, device=DEVICE), torch.zeros(1, 5, device=DEVICE))
    with pytest.raises(Unsupported, match="not float32"):
        kernels.hyper_connection_step(**{**a, "fn": a["fn"].bfloat16()})


@pytest.mark.skipif(DEVICE.type != "cuda", reason="released sizes are too much for an interpreter")
def test_released_rows_alone_equal_rows_in_a_large_batch(kernels: ModuleType) -> None:
    a = arguments(1500, 4, 5120)
    together = kernels.hyper_connection_step(**a)
    for rows in (slice(0, 1), slice(700, 893), slice(1499, 1500)):
        alone = kernels.hyper_connection_step(**rows_of(a, rows))
        for one, all_rows in zip(alone, together, strict=True):
            assert torch.equal(one, all_rows[rows])

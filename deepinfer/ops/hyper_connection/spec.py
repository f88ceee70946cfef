"""What the hyper-connection operators are, as data.

Knows shapes, cases and tolerances; must not know any backend's code.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from deepinfer.ops.hyper_connection.reference import (
    collapse,
    expand,
    hyper_connection_step,
    mixes,
)
from deepinfer.ops.spec import Argument, Arguments, Backend, Case, OpSpec, Tolerance, Work, size_of

_OPTIONS = {"iterations": 20, "hc_eps": 1e-6, "norm_eps": 1e-20}
_ROUNDED = Tolerance("rounding", 2**-7, 0.01)
_WIDE = Tolerance("close", 1e-4)

_STREAMS = Argument("streams", "... S H", "bf16 | fp32", "in", "residual streams, 2 to 4")
_Y = Argument(
    "y", "... H", "bf16 | fp32", "in", "output of the sublayer before; may be None in step"
)
_POST = Argument("post", "... S", "fp32", "in", "weight of y in each stream")
_COMB = Argument("comb", "... S S", "fp32", "in", "weights of old streams (rows) in new ones")
_PRE = Argument("pre", "... S", "fp32", "in", "weights of the streams in x")
_PARAMETERS = (
    Argument("fn", "S*(2+S) S*H", "fp32", "in", "mixing weights"),
    Argument("base", "S*(2+S)", "fp32", "in", "added to the scaled mixing values"),
    Argument("scale", "3", "fp32", "in", "of the parts for pre, post and comb"),
)
_NORM = Argument("norm_weight", "H", "fp32", "in", "weight of the RMS norm of x")
_NEXT = (
    Argument(
        "next_pre", "... S", "fp32", "out", "collapse weights for the sublayer after the next"
    ),
    Argument(
        "next_post", "... S", "fp32", "out", "expansion weights of the next sublayer's output"
    ),
    Argument("next_comb", "... S S", "fp32", "out", "near doubly stochastic mixing of the streams"),
)
_NEW = Argument("new", "... S H", "bf16 | fp32", "out", "expanded streams, rounded once")
_X = Argument("x", "... H", "bf16 | fp32", "out", "collapsed streams (in step: normalised)")

_HIGH = 3e4
_LOW = 1e-30


def draw(
    generator: torch.Generator, device: torch.device, rows: int, S: int, H: int,
    dtype: torch.dtype = torch.bfloat16, size: float = 1.0, form: str = "",
) -> Arguments:  # fmt: skip
    """Arguments of hyper_connection_step.

    size: typical magnitude of the streams. form: "first" has no y, "equal" has S copies of one
    stream and no y, "strided" has rows with gaps, "zeros" has zero streams and y, "nan" has a NaN
    in the first row alone.
    """

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    streams, y = normal(rows, S, H) * size, normal(rows, H) * size
    if form == "zeros":
        streams, y = torch.zeros_like(streams), -torch.zeros_like(y)
    if form == "nan":
        streams[0, -1, H // 2] = torch.nan
    streams, y = streams.to(dtype), y.to(dtype)
    if form == "equal":
        streams = streams[:, :1].to(device).expand(rows, S, H)
    if form == "strided":
        streams = torch.cat([streams, torch.full_like(streams, torch.nan)], 1).to(device)[:, :S]
        y = torch.cat([y, torch.full_like(y, torch.nan)], 1).to(device)[:, :H]
    count = S * (2 + S)
    named = {
        "y": None if form in ("first", "equal") else y,
        "streams": streams,
        "post": normal(rows, S).sigmoid() * 2,
        "comb": normal(rows, S, S).softmax(-1),
        "pre": normal(rows, S).sigmoid(),
        "fn": normal(count, S * H) * (S * H) ** -0.5,
        "base": normal(count),
        "scale": normal(3),
        "norm_weight": 1 + 0.1 * normal(H),
    }
    moved = {k: None if v is None else v.to(device) for k, v in named.items()}
    return {**moved, **_OPTIONS}


def _case(
    name: str, kind: str, rows: int, S: int, H: int, only: tuple[str, ...] = (), size: float = 1.0,
    form: str = "",
) -> Case:  # fmt: skip
    def make(generator: torch.Generator, device: torch.device) -> Arguments:
        drawn = draw(generator, device, rows, S, H, size=size, form=form)
        return {k: drawn[k] for k in only} if only else drawn

    return Case(name, kind, make)  # type: ignore[arg-type]


def _cases(only: tuple[str, ...] = ()) -> Callable[[], Iterable[Case]]:
    def cases() -> Iterable[Case]:
        yield _case("tiny", "tiny", 3, 4, 96, only)
        yield _case("no-rows", "hostile", 0, 4, 32, only)
        yield _case("3-streams", "hostile", 2, 3, 50, only)
        yield _case("strided", "hostile", 2, 4, 32, only, form="strided")
        if "y" not in only:
            yield _case("equal-streams", "hostile", 2, 4, 32, only, form="equal")
        if not only:
            yield _case("2-streams", "hostile", 3, 2, 32)
            yield _case("first", "hostile", 3, 4, 32, form="first")
            yield _case("zeros", "hostile", 2, 4, 32, form="zeros")
            yield _case("large", "hostile", 3, 4, 20, size=_HIGH)
            yield _case("small", "hostile", 3, 4, 32, size=_LOW)
            yield _case("nan-in-one-row", "hostile", 3, 4, 32, form="nan")
        for rows in (1, 7, 64, 192, 1000, 4096):
            yield _case(f"released-{rows}", "released", rows, 4, 5120, only)
        if not only:
            yield _case("released-first-192", "released", 192, 4, 5120, form="first")

    return cases


def _work(a: Arguments) -> Work:
    """Streams and y read once, streams' and x written once; the products with fn are most flops."""
    streams, fn = a["streams"], a.get("fn")
    T, S, H = streams.shape
    y, pre = a.get("y"), a.get("pre")
    moved = [streams, y, a.get("post"), a.get("comb"), pre, fn, a.get("norm_weight")]
    extra = size_of(*moved) + (0 if y is None else size_of(streams))
    extra += 0 if pre is None else T * H * streams.element_size()
    extra += 0 if fn is None else 4 * T * S * (2 + S)
    flops = T * S * H * (2 * (S + 1) * (y is not None) + 2 * (pre is not None))
    return Work(extra, flops + (0 if fn is None else 2 * T * fn.numel()))


def _backends(name: str) -> tuple[Backend, ...]:
    folder = "deepinfer.ops.hyper_connection"
    # PyTorch's product with `fn` sums rows in an order that depends on how many there are.
    alone = name in ("collapse", "expand")
    return (
        Backend("triton", f"{folder}.triton:{name}"),
        Backend("tilelang", f"{folder}.tilelang:{name}", batch_invariant=alone, narrow=True),
    )


_MIXES = ("streams", "fn", "base", "scale", *_OPTIONS)

SPECS: tuple[OpSpec, ...] = (
    OpSpec(
        name="hyper_connection_step",
        summary="All between two sublayers: expand, coefficients, collapse, RMS norm",
        arguments=(_Y, _STREAMS, _POST, _COMB, _PRE, *_PARAMETERS, _NORM, _NEW, _X, *_NEXT),
        reference=hyper_connection_step,
        backends=_backends("hyper_connection_step"),
        cases=_cases(),
        work=_work,
        tolerance={
            "new": _ROUNDED, "x": _ROUNDED, "next_pre": _WIDE, "next_post": _WIDE,
            "next_comb": _WIDE,
        },
        stands_for=("deep_gemm.mega_mhc", "tile_kernels.mhc.pre_big_fuse", "norm"),
    ),
    OpSpec(
        name="mixes",
        summary="Coefficients of one sublayer from the residual streams",
        arguments=(_STREAMS, *_PARAMETERS, *_NEXT),
        reference=mixes,
        backends=_backends("mixes"),
        cases=_cases(_MIXES),
        work=_work,
        tolerance={"next_pre": _WIDE, "next_post": _WIDE, "next_comb": _WIDE},
        stands_for=(
            "deep_gemm.tf32_hc_prenorm_gemm", "tile_kernels.mhc.pre_split_mixes",
            "tile_kernels.mhc.sinkhorn", "tile_kernels.mhc.head_compute_mix",
        ),
    ),
    OpSpec(
        name="collapse",
        summary="Input of a sublayer: weighted sum of the residual streams",
        arguments=(_STREAMS, _PRE, _X),
        reference=collapse,
        backends=_backends("collapse"),
        cases=_cases(("streams", "pre")),
        work=_work,
        tolerance={"x": _ROUNDED},
        stands_for=("tile_kernels.mhc.pre_apply_mix",),
    ),
    OpSpec(
        name="expand",
        summary="New residual streams from a sublayer's output and the old ones",
        arguments=(_Y, _STREAMS, _POST, _COMB, _NEW),
        reference=expand,
        backends=_backends("expand"),
        cases=_cases(("y", "streams", "post", "comb")),
        work=_work,
        tolerance={"new": _ROUNDED},
        stands_for=("tile_kernels.mhc.expand", "tile_kernels.mhc.post"),
    ),
)  # fmt: skip

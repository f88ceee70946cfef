"""Hyper-connections on a GPU: one pass over the streams, then one small finishing kernel.

Knows tiles, groups and the workspace between the two kernels; must not know the sublayers.

The first kernel expands the streams, collapses them and multiplies them with `fn`. Its products
over a group of 64 channels of all streams are one partial sum; a program takes one group, or with
many rows _FOLD of them, which it adds in the order in which the finishing kernel adds those of
separate programs. So even one row occupies 80 processors at the released width, and its result
does not depend on the rows beside it. The second kernel adds the partial sums, makes the
coefficients, and normalises the collapsed row in place.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.errors import Unsupported
from deepinfer.kernels import formats
from deepinfer.kernels.launch import DOT_DTYPE, require_gpu
from deepinfer.kernels.signature import Signature

_ROWS = 64  # rows of a program of the first kernel
_BLOCK = 32  # channels of its tiles
_GROUP = 64  # channels of a partial sum
_FOLD = 4  # groups that a program adds itself where there are
_MANY_ROWS = 1024  # more rows than this
_WARPS = 4
_FINISH_ROWS = 4  # rows whose coefficients one program finishes
_FINISH_BLOCK = 1024  # channels that one program normalises


@triton.jit
def _narrow(x, dtype: tl.constexpr, dot: tl.constexpr):
    """Rounded to `dtype`: compiled for bf16, two values at once by the hardware.

    The instruction is also one that the compiler must not repeat. Otherwise it computes matrix
    operands, and all that leads to them, a second time in the operands' own layout to save a trip
    through shared memory; the registers for both do not exist.
    """
    if dot == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=tl.bfloat16, is_pure=False,
            pack=2,
        )  # fmt: skip
    else:
        return formats.narrow(x, dtype)


@triton.jit
def _weighted(coefficients, first, step, live, x0, x1, x2, x3, S: tl.constexpr):
    """sum_i c[first + i * step] * x_i, in order of i."""
    at = coefficients + first
    value = tl.load(at, mask=live, other=0.0)[:, None] * x0
    value += tl.load(at + step, mask=live, other=0.0)[:, None] * x1
    if S > 2:
        value += tl.load(at + 2 * step, mask=live, other=0.0)[:, None] * x2
    if S > 3:
        value += tl.load(at + 3 * step, mask=live, other=0.0)[:, None] * x3
    return value


@triton.jit
def _product(x, wide, weights, total, dot: tl.constexpr):
    """total + x . weights^T as in float32; `wide` is `x` in float32."""
    if x.dtype == tl.bfloat16:
        # Three bf16 parts hold all 24 bits of a weight, so the products are exact.
        high = _narrow(weights, tl.bfloat16, dot)
        left = weights - high.to(tl.float32)
        middle = _narrow(left, tl.bfloat16, dot)
        low = _narrow(left - middle.to(tl.float32), tl.bfloat16, dot)
        total = tl.dot(x.to(dot), tl.trans(low.to(dot)), total)
        total = tl.dot(x.to(dot), tl.trans(middle.to(dot)), total)
        total = tl.dot(x.to(dot), tl.trans(high.to(dot)), total)
    else:
        total = tl.dot(wide, tl.trans(weights), total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["T"])
def streams_kernel(
    y, streams, post, comb, pre, fn, new, x, partial, T, y_stride, row_stride,
    STREAM_STRIDE: tl.constexpr, H: tl.constexpr, S: tl.constexpr, COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr, GROUPS: tl.constexpr, CHUNKS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, EXPAND: tl.constexpr, COLLAPSE: tl.constexpr, MIX: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """One [ROWS, GROUPS * CHUNKS * BLOCK] part of every stream.

    EXPAND: new = post * y + comb^T streams. COLLAPSE: x = pre . streams'. MIX: to partial, the
    products of streams' with the S * (2 + S) rows of fn, then the sum of squares of streams', then
    that of x.
    """
    dtype: tl.constexpr = streams.dtype.element_ty
    N: tl.constexpr = S * (2 + S)
    split = tl.program_id(0)
    rows = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = rows < T
    columns = tl.arange(0, COLUMNS)
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for group in range(GROUPS):
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        squares = tl.zeros((ROWS,), tl.float32)
        collapsed_squares = tl.zeros((ROWS,), tl.float32)
        for chunk in range(CHUNKS):
            h = ((split * GROUPS + group) * CHUNKS + chunk) * BLOCK + tl.arange(0, BLOCK)
            inside = live[:, None] & (h < H)[None, :]
            at = streams + rows[:, None] * row_stride + h[None, :]
            x0 = tl.load(at, mask=inside, other=0.0).to(tl.float32)
            x1 = tl.load(at + STREAM_STRIDE, mask=inside, other=0.0).to(tl.float32)
            x2 = x1
            x3 = x1
            if S > 2:
                x2 = tl.load(at + 2 * STREAM_STRIDE, mask=inside, other=0.0).to(tl.float32)
            if S > 3:
                x3 = tl.load(at + 3 * STREAM_STRIDE, mask=inside, other=0.0).to(tl.float32)
            added = x0
            if EXPAND:
                added = tl.load(y + rows[:, None] * y_stride + h[None, :], mask=inside, other=0.0)
                added = added.to(tl.float32)
            new_at = new + rows[:, None] * (S * H) + h[None, :]
            collapsed = tl.zeros((ROWS, BLOCK), tl.float32)
            for o in tl.static_range(S):
                value = x0
                if EXPAND:
                    value = _weighted(comb, rows * (S * S) + o, S, live, x0, x1, x2, x3, S)
                    value += tl.load(post + rows * S + o, mask=live, other=0.0)[:, None] * added
                else:
                    if o == 1:
                        value = x1
                    if o == 2:
                        value = x2
                    if o == 3:
                        value = x3
                rounded = _narrow(value, dtype, DOT)
                value = rounded.to(tl.float32)
                if EXPAND:
                    tl.store(new_at + o * H, rounded, mask=inside)
                if COLLAPSE:
                    collapsed += tl.load(pre + rows * S + o, mask=live, other=0.0)[:, None] * value
                if MIX:
                    squares += tl.sum(value * value, axis=1)
                    weights = tl.load(
                        fn + columns[:, None] * (S * H) + (o * H + h)[None, :],
                        mask=(columns < N)[:, None] & (h < H)[None, :],
                        other=0.0,
                    )
                    total = _product(rounded, value, weights, total, DOT)
            if COLLAPSE:
                rounded = _narrow(collapsed, dtype, DOT)
                tl.store(x + rows[:, None] * H + h[None, :], rounded, mask=inside)
                collapsed = rounded.to(tl.float32)
                collapsed_squares += tl.sum(collapsed * collapsed, axis=1)
        if MIX:
            total = tl.where((columns == N)[None, :], squares[:, None], total)
            total = tl.where((columns == N + 1)[None, :], collapsed_squares[:, None], total)
            sums += total
    if MIX:
        place = (rows[:, None] * SPLITS + split) * COLUMNS + columns[None, :]
        tl.store(partial + place, sums, mask=live[:, None])


@triton.jit
def _sigmoid(x):
    small = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, small) / (1.0 + small)


@triton.jit
def _sinkhorn(logits, known, inner, hc_eps, ITERATIONS: tl.constexpr):
    """[ROWS, i, o] logits to near doubly stochastic matrices; entries that are padding become 0.

    known: [1, i, o], which entries exist; inner: [1, 1, o] and known by symmetry for i.
    """
    logits = tl.where(inner, logits, float("-inf"))
    # A row with NaN is NaN whatever is subtracted; a maximum must not have to choose.
    highest = tl.max(tl.where(logits == logits, logits, 0.0), axis=2)
    matrix = tl.exp(logits - highest[:, :, None])
    matrix = matrix / tl.sum(matrix, axis=2)[:, :, None] + hc_eps
    matrix = tl.where(known, matrix, 0.0)
    # Padding is 0 and stays 0: its divisors are replaced by 1.
    matrix = matrix / tl.where(inner, tl.sum(matrix, axis=1)[:, None, :] + hc_eps, 1.0)
    for _ in range(ITERATIONS - 1):
        matrix = matrix / tl.where(known, tl.sum(matrix, axis=2)[:, :, None] + hc_eps, 1.0)
        matrix = matrix / tl.where(inner, tl.sum(matrix, axis=1)[:, None, :] + hc_eps, 1.0)
    return matrix


@triton.jit
def _column(sums, columns, wanted):
    """[ROWS, W] columns of `sums` [ROWS, COLUMNS] with the numbers `wanted` [W]."""
    # One term of each sum is not 0, so nothing is rounded.
    same = columns[None, None, :] == wanted[None, :, None]
    return tl.sum(tl.where(same, sums[:, None, :], 0.0), axis=2)


@triton.jit
def _coefficients(
    partial, base, scale, next_pre, next_post, next_comb, T, block, hc_eps, norm_eps,
    H: tl.constexpr, S: tl.constexpr, PADDED: tl.constexpr, COLUMNS: tl.constexpr,
    PARTS: tl.constexpr, PADDED_PARTS: tl.constexpr, FOLD: tl.constexpr,
    ITERATIONS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """pre, post and comb of ROWS rows from PARTS * FOLD partial sums."""
    rows = block.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = rows < T
    part = tl.arange(0, PADDED_PARTS)
    columns = tl.arange(0, COLUMNS)
    at = (rows[:, None] * PARTS + part[None, :]) * (FOLD * COLUMNS)
    at = partial + at[:, :, None] + columns[None, None, :]
    loaded = (live[:, None] & (part < PARTS)[None, :])[:, :, None]
    folded = tl.load(at, mask=loaded, other=0.0)
    for other in tl.static_range(1, FOLD):
        folded += tl.load(at + other * COLUMNS, mask=loaded, other=0.0)
    sums = tl.sum(folded, axis=1)
    squares = tl.sum(tl.where((columns == S * (2 + S))[None, :], sums, 0.0), axis=1)
    sums = sums * tl.rsqrt(squares / (S * H) + norm_eps)[:, None]
    s = tl.arange(0, PADDED)
    q = tl.arange(0, PADDED * PADDED)
    exists = (s < S)[None, :]
    gates = _column(sums, columns, s) * tl.load(scale)
    gates = _sigmoid(gates + tl.load(base + s, mask=s < S, other=0.0)[None, :]) + hc_eps
    posts = _column(sums, columns, S + s) * tl.load(scale + 1)
    posts = 2.0 * _sigmoid(posts + tl.load(base + S + s, mask=s < S, other=0.0)[None, :])
    i = q // PADDED
    o = q % PADDED
    n = 2 * S + i * S + o
    known = (i < S) & (o < S)
    logits = _column(sums, columns, n) * tl.load(scale + 2)
    logits += tl.load(base + n, mask=known, other=0.0)[None, :]
    logits = tl.reshape(tl.where(known[None, :], logits, 0.0), (ROWS, PADDED, PADDED))
    inner = exists[:, None, :]
    known = (s < S)[None, :, None] & inner
    matrix = _sinkhorn(logits, known, inner, hc_eps, ITERATIONS)
    tl.store(next_pre + rows[:, None] * S + s[None, :], gates, mask=live[:, None] & exists)
    tl.store(next_post + rows[:, None] * S + s[None, :], posts, mask=live[:, None] & exists)
    to = next_comb + rows[:, None, None] * (S * S) + (s[None, :, None] * S + s[None, None, :])
    tl.store(to, matrix, mask=live[:, None, None] & known)


@triton.jit
def _normalise(
    partial, weight, x, task, norm_eps, H: tl.constexpr, S: tl.constexpr, COLUMNS: tl.constexpr,
    PARTS: tl.constexpr, PADDED_PARTS: tl.constexpr, FOLD: tl.constexpr, BLOCK: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """RMS norm of BLOCK channels of one collapsed row, in place."""
    blocks: tl.constexpr = (H + BLOCK - 1) // BLOCK
    row = (task // blocks).to(tl.int64)
    h = (task % blocks) * BLOCK + tl.arange(0, BLOCK)
    part = tl.arange(0, PADDED_PARTS)
    at = partial + (row * PARTS + part) * (FOLD * COLUMNS) + (S * (2 + S) + 1)
    folded = tl.load(at, mask=part < PARTS, other=0.0)
    for other in tl.static_range(1, FOLD):
        folded += tl.load(at + other * COLUMNS, mask=part < PARTS, other=0.0)
    inverse = tl.rsqrt(tl.sum(folded, axis=0) / H + norm_eps)
    value = tl.load(x + row * H + h, mask=h < H, other=0.0).to(tl.float32)
    value = tl.load(weight + h, mask=h < H, other=0.0) * (value * inverse)
    tl.store(x + row * H + h, _narrow(value, x.dtype.element_ty, DOT), mask=h < H)


@triton.jit(do_not_specialize=["T"])
def finish_kernel(
    partial, base, scale, weight, x, next_pre, next_post, next_comb, T, hc_eps, norm_eps,
    H: tl.constexpr, S: tl.constexpr, PADDED: tl.constexpr, COLUMNS: tl.constexpr,
    PARTS: tl.constexpr, PADDED_PARTS: tl.constexpr, FOLD: tl.constexpr,
    ITERATIONS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """The first ceil(T / ROWS) programs make coefficients, the others normalise."""
    program = tl.program_id(0)
    blocks = (T + ROWS - 1) // ROWS
    if program < blocks:
        _coefficients(
            partial, base, scale, next_pre, next_post, next_comb, T, program, hc_eps, norm_eps,
            H, S, PADDED, COLUMNS, PARTS, PADDED_PARTS, FOLD, ITERATIONS, ROWS,
        )  # fmt: skip
    else:
        _normalise(
            partial, weight, x, program - blocks, norm_eps, H, S, COLUMNS, PARTS, PADDED_PARTS,
            FOLD, BLOCK, DOT,
        )  # fmt: skip


def _sizes(H: int, S: int) -> dict[str, int]:
    """What follows from the sizes of a row: constants of the kernels, and parts x fold groups."""
    block = max(16, min(_BLOCK, triton.next_power_of_2(H)))
    chunks = min(_GROUP // block, triton.cdiv(H, block))
    groups = triton.cdiv(H, block * chunks)
    return {
        "block": block, "chunks": chunks, "fold": min(_FOLD, groups),
        "parts": triton.cdiv(groups, min(_FOLD, groups)),
        "columns": max(16, triton.next_power_of_2(S * (2 + S) + 2)),
    }  # fmt: skip


def _stage_constants(T: int, S: int, H: int, dot: Any) -> dict[str, Any]:
    """Constants of the first kernel but for its flags and the stride of streams."""
    sizes = _sizes(H, S)
    groups = sizes["fold"] if T > _MANY_ROWS else 1
    return {
        "H": H, "S": S, "COLUMNS": sizes["columns"], "GROUPS": groups, "CHUNKS": sizes["chunks"],
        "SPLITS": sizes["parts"] * sizes["fold"] // groups, "ROWS": _ROWS,
        "BLOCK": sizes["block"], "DOT": dot,
    }  # fmt: skip


def _finish_constants(T: int, S: int, H: int, iterations: int, dot: Any) -> dict[str, Any]:
    """Constants of the second kernel."""
    sizes = _sizes(H, S)
    return {
        "H": H, "S": S, "PADDED": triton.next_power_of_2(S), "COLUMNS": sizes["columns"],
        "PARTS": sizes["parts"], "PADDED_PARTS": triton.next_power_of_2(sizes["parts"]),
        "FOLD": 1 if T > _MANY_ROWS else sizes["fold"], "ITERATIONS": iterations,
        "ROWS": _FINISH_ROWS, "BLOCK": min(_FINISH_BLOCK, triton.next_power_of_2(H)), "DOT": dot,
    }  # fmt: skip


def _dot(x: Tensor) -> Any:
    return DOT_DTYPE if x.dtype == torch.bfloat16 else tl.float32


def _check(streams: Tensor, wide: tuple[Tensor | None, ...], y: Tensor | None = None) -> None:
    require_gpu(streams)
    if streams.dtype not in (torch.bfloat16, torch.float32):
        raise Unsupported(f"streams of {streams.dtype}, not bfloat16 or float32")
    if not 2 <= streams.shape[-2] <= 4:
        raise Unsupported(f"{streams.shape[-2]} streams, not 2 to 4")
    if y is not None and y.dtype != streams.dtype:
        raise Unsupported(f"a sublayer output of {y.dtype} for streams of {streams.dtype}")
    if any(w is not None and w.dtype != torch.float32 for w in wide):
        raise Unsupported("coefficients and weights that are not float32")


def _pass_over_streams(
    streams: Tensor, y: Tensor | None, post: Tensor | None, comb: Tensor | None,
    pre: Tensor | None, fn: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Launch the first kernel on [T, S, H]: expand if `y`, collapse if `pre`, multiply if `fn`.

    Returns streams', x and the partial sums; `streams` stands for what was not asked for.
    """
    T, S, H = streams.shape
    if streams.stride(2) != 1 or streams.stride(1) not in (0, H):
        streams = streams.contiguous()
    constants = _stage_constants(T, S, H, _dot(streams))
    new, x, partial = streams, streams, streams
    device = streams.device
    if y is not None:
        assert post is not None
        assert comb is not None
        y = y if y.stride(1) == 1 else y.contiguous()
        post, comb = post.contiguous(), comb.contiguous()
        new = torch.empty((T, S, H), dtype=streams.dtype, device=device)
    if pre is not None:
        pre = pre.contiguous()
        x = torch.empty((T, H), dtype=streams.dtype, device=device)
    if fn is not None:
        fn = fn.contiguous()
        shape = (T, constants["SPLITS"], constants["COLUMNS"])
        partial = torch.empty(shape, dtype=torch.float32, device=device)
    if T:
        expands = y is not None
        streams_kernel[(constants["SPLITS"], triton.cdiv(T, _ROWS))](
            y if expands else streams, streams, post if expands else streams,
            comb if expands else streams, streams if pre is None else pre,
            streams if fn is None else fn, new, x, partial, T,
            0 if y is None else y.stride(0), streams.stride(0), **constants,
            STREAM_STRIDE=streams.stride(1), EXPAND=expands, COLLAPSE=pre is not None,
            MIX=fn is not None, num_warps=_WARPS, num_stages=1,
        )  # fmt: skip
    return new, x, partial


def _finish(
    partial: Tensor, base: Tensor, scale: Tensor, weight: Tensor | None, x: Tensor,
    shape: tuple[int, int, int], options: tuple[int, float, float],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Launch the second kernel: coefficients, and the norm of `x` in place where it has a weight.

    shape: T, S, H; options: iterations, hc_eps, norm_eps.
    """
    T, S, H = shape
    iterations, hc_eps, norm_eps = options
    next_pre = torch.empty((T, S), dtype=torch.float32, device=partial.device)
    next_post = torch.empty_like(next_pre)
    next_comb = torch.empty((T, S, S), dtype=torch.float32, device=partial.device)
    constants = _finish_constants(T, S, H, iterations, _dot(x))
    tasks = 0 if weight is None else T * triton.cdiv(H, constants["BLOCK"])
    if T:
        finish_kernel[(triton.cdiv(T, _FINISH_ROWS) + tasks,)](
            partial, base.contiguous(), scale.contiguous(),
            partial if weight is None else weight.contiguous(), x, next_pre, next_post, next_comb,
            T, hc_eps, norm_eps, **constants, num_warps=4,
        )  # fmt: skip
    return next_pre, next_post, next_comb


def hyper_connection_step(
    y: Tensor | None, streams: Tensor, post: Tensor | None, comb: Tensor | None, pre: Tensor,
    fn: Tensor, base: Tensor, scale: Tensor, norm_weight: Tensor, *, iterations: int,
    hc_eps: float, norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """See the reference; two launches. Streams that are neither dense nor S equal ones are copied.

    Raises:
        Unsupported: no GPU, streams of another number or dtype than 2 to 4 of bf16 or float32,
            coefficients or weights that are not float32.
    """
    _check(streams, (post, comb, pre, fn, base, scale, norm_weight), y)
    *leading, S, H = streams.shape
    flat, pre = streams.reshape(-1, S, H), pre.reshape(-1, S)
    if y is not None:
        assert post is not None
        assert comb is not None
        y, post, comb = y.reshape(-1, H), post.reshape(-1, S), comb.reshape(-1, S, S)
    new, x, partial = _pass_over_streams(flat, y, post, comb, pre, fn)
    options = (iterations, hc_eps, norm_eps)
    shape = (flat.shape[0], S, H)
    parts = _finish(partial, base, scale, norm_weight, x, shape, options)
    streams = streams if y is None else new.view(streams.shape)
    return streams, x.view(*leading, H), *_shaped(parts, leading)


def _shaped(
    parts: tuple[Tensor, Tensor, Tensor], leading: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Coefficients of flat rows with their leading axes."""
    pre, post, comb = (part.view(*leading, *part.shape[1:]) for part in parts)
    return pre, post, comb


def mixes(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, iterations: int, hc_eps: float,
    norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """See the reference; two launches. Raises Unsupported as hyper_connection_step does."""
    _check(streams, (fn, base, scale))
    *leading, S, H = streams.shape
    flat = streams.reshape(-1, S, H)
    _, _, partial = _pass_over_streams(flat, None, None, None, None, fn)
    options = (iterations, hc_eps, norm_eps)
    shape = (flat.shape[0], S, H)
    return _shaped(_finish(partial, base, scale, None, flat, shape, options), leading)


def collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """See the reference; one launch. Raises Unsupported as hyper_connection_step does."""
    _check(streams, (pre,))
    *leading, S, H = streams.shape
    flat = streams.reshape(-1, S, H)
    _, x, _ = _pass_over_streams(flat, None, None, None, pre.reshape(-1, S), None)
    return x.view(*leading, H)


def expand(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """See the reference; one launch. Raises Unsupported as hyper_connection_step does."""
    _check(streams, (post, comb), y)
    S, H = streams.shape[-2:]
    flat = streams.reshape(-1, S, H)
    post, comb = post.reshape(-1, S), comb.reshape(-1, S, S)
    new, _, _ = _pass_over_streams(flat, y.reshape(-1, H), post, comb, None, None)
    return new.view(streams.shape)


def _signatures() -> tuple[Signature, ...]:
    wide = ("post", "comb", "pre", "fn", "partial")
    types = {
        **dict.fromkeys(("y", "streams", "new", "x"), "*bf16"), **dict.fromkeys(wide, "*fp32"),
        "T": "i32", "y_stride": "i32", "row_stride": "i32",
    }  # fmt: skip
    flags = {
        "step": (True, True, True), "first": (False, True, True), "expand": (True, False, False),
        "collapse": (False, True, False), "mixes": (False, False, True),
    }  # fmt: skip
    names = ("partial", "base", "scale", "weight", "next_pre", "next_post", "next_comb")
    finish = {**dict.fromkeys(names, "*fp32"), "x": "*bf16", "T": "i32", "hc_eps": "fp32",
              "norm_eps": "fp32"}  # fmt: skip
    found = []
    for T in (64, 4096):
        for name, (e, c, m) in flags.items():
            constants = _stage_constants(T, 4, 5120, tl.bfloat16)
            constants |= {"STREAM_STRIDE": 5120, "EXPAND": e, "COLLAPSE": c, "MIX": m}
            found.append(
                Signature(
                    f"hyper_connection {name}, {T} rows", streams_kernel, types, constants,
                    num_warps=_WARPS, num_stages=1, divisible=("y_stride", "row_stride"),
                )
            )  # fmt: skip
        constants = _finish_constants(T, 4, 5120, 20, tl.bfloat16)
        found.append(
            Signature(f"hyper_connection finish, {T} rows", finish_kernel, finish, constants)
        )
    return tuple(found)


SIGNATURES = _signatures()

"""Hyper-connections on a GPU: one pass over the streams, then one small finishing kernel.

Knows tiles, groups and the workspace between the two kernels; must not know the sublayers.

The first kernel expands the streams, collapses them and multiplies them with `fn`. A program owns
a group of channels of all streams: it keeps the weights of its channels in shared memory and walks
over blocks of rows, so `fn` is read a few times however many rows there are, and even one row
occupies 80 processors at the released width. The products of a row with one group are one partial
sum; how many rows a program takes changes none of them. The second kernel adds the partial sums,
makes the coefficients, and normalises the collapsed row in place.
"""

# Kernels make tuples grow by addition: Triton compiles no unpacking into them.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, var-annotated, possibly-undefined"

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.errors import Unsupported
from deepinfer.kernels import formats
from deepinfer.kernels.launch import DOT_DTYPE, INTERPRETED, require_gpu
from deepinfer.kernels.signature import Signature


@dataclass(frozen=True)
class _Tiles:
    """How the first kernel is cut.

    Attributes:
        rows, block: of a tile; `block` channels of all streams are one group.
        stages: 1 leaves hiding latency to the programs beside each other; from 3 on the next tiles
            are on their way while one is computed.
        programs: as many as run at a time; each takes one group, and rows as it must.
        registers: most of a thread; the compiler would take more for no need.
    """

    rows: int
    block: int
    warps: int
    stages: int
    programs: int
    registers: int = 128


# One row and 16 bytes of each stream a thread: what lets four programs share a processor.
_MIXING = _Tiles(rows=16, block=64, warps=4, stages=1, programs=4 * 132)
# Without products nothing is worth keeping, and rows are read in long pieces.
_ELEMENTWISE = _Tiles(rows=2, block=512, warps=4, stages=1, programs=2**24)
_FINISH_ROWS = 4  # rows whose coefficients one program finishes
_FINISH_PARTS = 16  # partial sums that it loads at once
_FINISH_BLOCK = 1024  # channels of a row that are normalised at once


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
def _weight_parts(fn, h, H: tl.constexpr, S: tl.constexpr, COLUMNS: tl.constexpr,
                  BF16: tl.constexpr, DOT: tl.constexpr):  # fmt: skip
    """Weights of the channels `h`, stream after stream: [COLUMNS, BLOCK], in bf16 three of them.

    Three bf16 parts hold all 24 bits of a weight, so their products with bf16 are exact.
    """
    columns = tl.arange(0, COLUMNS)
    inside = (columns < S * (2 + S))[:, None] & (h < H)[None, :]
    parts = ()
    for o in tl.static_range(S):
        at = fn + columns[:, None] * (S * H) + (o * H + h)[None, :]
        left = tl.load(at, mask=inside, other=0.0)
        if BF16:
            high = _narrow(left, tl.bfloat16, DOT)
            left = left - high.to(tl.float32)
            middle = _narrow(left, tl.bfloat16, DOT)
            low = _narrow(left - middle.to(tl.float32), tl.bfloat16, DOT)
            parts = parts + (high.to(DOT), middle.to(DOT), low.to(DOT))
        else:
            parts = parts + (left,)
    return parts


@triton.jit
def _tile(
    y, streams, post, comb, pre, new, x, partial, weights, T, block, split, h, y_stride,
    row_stride, STREAM_STRIDE: tl.constexpr, H: tl.constexpr, S: tl.constexpr,
    COLUMNS: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    EVICT: tl.constexpr, EXPAND: tl.constexpr, COLLAPSE: tl.constexpr, MIX: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """What streams_kernel does to block number `block` of rows and channels `h`."""
    dtype: tl.constexpr = streams.dtype.element_ty
    BF16: tl.constexpr = dtype == tl.bfloat16
    N: tl.constexpr = S * (2 + S)
    rows = block * ROWS + tl.arange(0, ROWS).to(tl.int64)
    live = rows < T
    inside = live[:, None] & (h < H)[None, :]
    at = streams + rows[:, None] * row_stride + h[None, :]
    new_at = new + rows[:, None] * (S * H) + h[None, :]
    # Read once, written to be read after the next sublayer: `x` needs the cache more.
    olds = ()
    for i in tl.static_range(S):
        olds = olds + (
            tl.load(at + i * STREAM_STRIDE, mask=inside, other=0.0, eviction_policy=EVICT),
        )
    if EXPAND:
        at = y + rows[:, None] * y_stride + h[None, :]
        added = tl.load(at, mask=inside, other=0.0, eviction_policy=EVICT).to(tl.float32)
    # Two sums: fewer products that wait for each other, and the small ones are not lost.
    high = tl.zeros((ROWS, COLUMNS), tl.float32)
    rest = tl.zeros((ROWS, COLUMNS), tl.float32)
    squares = tl.zeros((ROWS, BLOCK), tl.float32)
    collapsed = tl.zeros((ROWS, BLOCK), tl.float32)
    for o in tl.static_range(S):
        rounded = olds[o]
        if EXPAND:
            value = tl.load(post + rows * S + o, mask=live, other=0.0)[:, None] * added
            for i in tl.static_range(S):
                c = tl.load(comb + rows * (S * S) + (i * S + o), mask=live, other=0.0)
                value += c[:, None] * olds[i].to(tl.float32)
            rounded = _narrow(value, dtype, DOT)
            tl.store(new_at + o * H, rounded, mask=inside, eviction_policy=EVICT)
        value = rounded.to(tl.float32)
        if COLLAPSE:
            collapsed += tl.load(pre + rows * S + o, mask=live, other=0.0)[:, None] * value
        if MIX:
            squares += value * value
            if BF16:
                a = rounded.to(DOT)
                high = tl.dot(a, tl.trans(weights[3 * o]), high)
                rest = tl.dot(a, tl.trans(weights[3 * o + 1]), rest)
                rest = tl.dot(a, tl.trans(weights[3 * o + 2]), rest)
            else:
                high = tl.dot(value, tl.trans(weights[o]), high, input_precision="ieee")
    record = partial + (rows * SPLITS + split) * COLUMNS
    if MIX:
        columns = tl.arange(0, COLUMNS)
        stored = live[:, None] & (columns < N)[None, :]
        tl.store(record[:, None] + columns[None, :], rest + high, mask=stored)
        tl.store(record + N, tl.sum(squares, axis=1), mask=live)
    if COLLAPSE:
        rounded = _narrow(collapsed, dtype, DOT)
        tl.store(x + rows[:, None] * H + h[None, :], rounded, mask=inside)
        if MIX:
            value = rounded.to(tl.float32)
            tl.store(record + (N + 1), tl.sum(value * value, axis=1), mask=live)


@triton.jit(do_not_specialize=["T", "blocks"])
def streams_kernel(
    y, streams, post, comb, pre, fn, new, x, partial, T, blocks, y_stride, row_stride,
    STREAM_STRIDE: tl.constexpr, H: tl.constexpr, S: tl.constexpr, COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr,
    STAGES: tl.constexpr, EVICT: tl.constexpr, EXPAND: tl.constexpr, COLLAPSE: tl.constexpr,
    MIX: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """One group of BLOCK channels of every stream, and of the `blocks` blocks of ROWS rows those
    that the programs beside it leave: STEPS of them, or with STEPS 0 all there are.

    EXPAND: new = post * y + comb^T streams. COLLAPSE: x = pre . streams'. MIX: to partial, the
    products of streams' with the S * (2 + S) rows of fn, then the sum of squares of streams', then
    that of x (undefined without COLLAPSE).
    """
    split = tl.program_id(0)
    first = tl.program_id(1)
    beside = tl.num_programs(1)
    h = split * BLOCK + tl.arange(0, BLOCK)
    weights = ()
    if MIX:
        BF16: tl.constexpr = streams.dtype.element_ty == tl.bfloat16
        weights = _weight_parts(fn, h, H, S, COLUMNS, BF16, DOT)
    if STEPS > 0:
        for step in tl.static_range(STEPS):
            _tile(
                y, streams, post, comb, pre, new, x, partial, weights, T, first + step * beside,
                split, h, y_stride, row_stride, STREAM_STRIDE, H, S, COLUMNS, SPLITS, ROWS, BLOCK,
                EVICT, EXPAND, COLLAPSE, MIX, DOT,
            )  # fmt: skip
    else:
        for block in tl.range(first, blocks, beside, num_stages=STAGES):
            _tile(
                y, streams, post, comb, pre, new, x, partial, weights, T, block,
                split, h, y_stride, row_stride, STREAM_STRIDE, H, S, COLUMNS, SPLITS, ROWS, BLOCK,
                EVICT, EXPAND, COLLAPSE, MIX, DOT,
            )  # fmt: skip


@triton.jit
def _sigmoid(x):
    small = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, small) / (1.0 + small)


@triton.jit
def _divided(matrix, hc_eps, S: tl.constexpr, ROWWISE: tl.constexpr):
    """Entries [ROWS] of S x S matrices, each over the sum of its row or column plus hc_eps."""
    inverses = ()
    for k in tl.static_range(S):
        total = matrix[k * S if ROWWISE else k]
        for other in tl.static_range(1, S):
            total = total + matrix[k * S + other if ROWWISE else other * S + k]
        inverses = inverses + (1.0 / (total + hc_eps),)
    divided = ()
    for n in tl.static_range(S * S):
        divided = divided + (matrix[n] * inverses[n // S if ROWWISE else n % S],)
    return divided


@triton.jit
def _sinkhorn(logits, hc_eps, S: tl.constexpr, ITERATIONS: tl.constexpr):
    """Logits to near doubly stochastic matrices; both S * S tensors [ROWS], row after row.

    Every entry is a tensor of its own, so all sums stay inside a thread.
    """
    matrix = ()
    for i in tl.static_range(S):
        highest = logits[i * S]
        for o in tl.static_range(1, S):
            highest = tl.maximum(highest, logits[i * S + o])
        for o in tl.static_range(S):
            matrix = matrix + (tl.exp(logits[i * S + o] - highest),)
    softmax = _divided(matrix, 0.0, S, True)
    matrix = ()
    for n in tl.static_range(S * S):
        matrix = matrix + (softmax[n] + hc_eps,)
    matrix = _divided(matrix, hc_eps, S, False)
    for _ in range(ITERATIONS - 1):
        matrix = _divided(_divided(matrix, hc_eps, S, True), hc_eps, S, False)
    return matrix


@triton.jit
def _value(sums, columns, n, base, scale):
    """[ROWS]: column n of `sums` [ROWS, COLUMNS], times `scale`, plus base[n]."""
    # One term of each sum is not 0, so nothing is rounded.
    return tl.sum(tl.where(columns == n, sums, 0.0), axis=1) * scale + tl.load(base + n)


@triton.jit
def _coefficients(
    partial, base, scale, next_pre, next_post, next_comb, T, block, hc_eps, norm_eps,
    H: tl.constexpr, S: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
    AT_ONCE: tl.constexpr, ITERATIONS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """pre, post and comb of ROWS rows from PARTS partial sums, AT_ONCE of them loaded at once."""
    rows = block.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = rows < T
    part = tl.arange(0, AT_ONCE)
    columns = tl.arange(0, COLUMNS)
    written = (columns < S * (2 + S) + 1)[None, None, :]
    added = tl.zeros((ROWS, AT_ONCE, COLUMNS), tl.float32)
    for first in tl.static_range(0, PARTS, AT_ONCE):
        at = (rows[:, None] * PARTS + first + part[None, :])[:, :, None] * COLUMNS
        there = (live[:, None] & (first + part < PARTS)[None, :])[:, :, None] & written
        added += tl.load(partial + at + columns[None, None, :], mask=there, other=0.0)
    sums = tl.sum(added, axis=1)
    squares = tl.sum(tl.where((columns == S * (2 + S))[None, :], sums, 0.0), axis=1)
    sums = sums * tl.rsqrt(squares / (S * H) + norm_eps)[:, None]
    columns = columns[None, :]
    gate, output, mixing = tl.load(scale), tl.load(scale + 1), tl.load(scale + 2)
    for s in tl.static_range(S):
        value = _sigmoid(_value(sums, columns, s, base, gate)) + hc_eps
        tl.store(next_pre + rows * S + s, value, mask=live)
        value = 2.0 * _sigmoid(_value(sums, columns, S + s, base, output))
        tl.store(next_post + rows * S + s, value, mask=live)
    logits = ()
    for n in tl.static_range(S * S):
        logits = logits + (_value(sums, columns, 2 * S + n, base, mixing),)
    matrix = _sinkhorn(logits, hc_eps, S, ITERATIONS)
    for n in tl.static_range(S * S):
        tl.store(next_comb + rows * (S * S) + n, matrix[n], mask=live)


@triton.jit
def _normalise(
    partial, weight, x, row, norm_eps, H: tl.constexpr, S: tl.constexpr, COLUMNS: tl.constexpr,
    PARTS: tl.constexpr, PADDED_PARTS: tl.constexpr, BLOCK: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """RMS norm of one collapsed row, in place."""
    BLOCKS: tl.constexpr = (H + BLOCK - 1) // BLOCK
    row = row.to(tl.int64)
    h = tl.arange(0, BLOCK)
    values = ()
    for block in tl.static_range(BLOCKS):
        values = values + (
            tl.load(x + row * H + block * BLOCK + h, mask=block * BLOCK + h < H, other=0.0),
        )
    part = tl.arange(0, PADDED_PARTS)
    at = partial + (row * PARTS + part) * COLUMNS + (S * (2 + S) + 1)
    squares = tl.sum(tl.load(at, mask=part < PARTS, other=0.0), axis=0)
    inverse = tl.rsqrt(squares / H + norm_eps)
    for block in tl.static_range(BLOCKS):
        inside = block * BLOCK + h < H
        value = values[block].to(tl.float32) * inverse
        value = tl.load(weight + block * BLOCK + h, mask=inside, other=0.0) * value
        to = x + row * H + block * BLOCK + h
        tl.store(to, _narrow(value, x.dtype.element_ty, DOT), mask=inside)


@triton.jit(do_not_specialize=["T"])
def finish_kernel(
    partial, base, scale, weight, x, next_pre, next_post, next_comb, T, hc_eps, norm_eps,
    H: tl.constexpr, S: tl.constexpr, COLUMNS: tl.constexpr,
    PARTS: tl.constexpr, PADDED_PARTS: tl.constexpr, AT_ONCE: tl.constexpr,
    ITERATIONS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """The first ceil(T / ROWS) programs make coefficients, T others normalise."""
    program = tl.program_id(0)
    blocks = (T + ROWS - 1) // ROWS
    if program < blocks:
        _coefficients(
            partial, base, scale, next_pre, next_post, next_comb, T, program, hc_eps, norm_eps,
            H, S, COLUMNS, PARTS, AT_ONCE, ITERATIONS, ROWS,
        )  # fmt: skip
    else:
        # The last rows are the likeliest to be in the cache still.
        _normalise(
            partial, weight, x, T - 1 - (program - blocks), norm_eps, H, S, COLUMNS, PARTS,
            PADDED_PARTS, BLOCK, DOT,
        )  # fmt: skip


def _sizes(H: int, S: int) -> tuple[int, int]:
    """Partial sums of a row, and values of each."""
    groups = triton.cdiv(H, _block(_MIXING, H))
    return groups, max(16, triton.next_power_of_2(S * (2 + S) + 2))


def _block(tiles: _Tiles, H: int) -> int:
    return max(16, min(tiles.block, triton.next_power_of_2(H)))


def _stage(tiles: _Tiles, T: int, S: int, H: int, dot: Any) -> tuple[dict[str, Any], int, int]:
    """Constants of the first kernel but for its flags and the stride of streams; its programs that
    share a group; and its blocks of rows.
    """
    block = _block(tiles, H)
    splits = triton.cdiv(H, block)
    blocks = triton.cdiv(T, tiles.rows)
    steps = triton.cdiv(blocks, min(max(1, tiles.programs // splits), max(1, blocks)))
    constants = {
        "H": H, "S": S, "COLUMNS": _sizes(H, S)[1], "SPLITS": splits, "ROWS": tiles.rows,
        # The interpreter knows no loop to a limit that is an argument.
        "BLOCK": block, "STEPS": steps if steps <= 1 or INTERPRETED else 0,
        "STAGES": tiles.stages, "EVICT": "evict_first" if steps > 1 else "", "DOT": dot,
    }  # fmt: skip
    return constants, triton.cdiv(blocks, max(1, steps)), blocks


def _finish_constants(S: int, H: int, iterations: int, dot: Any) -> dict[str, Any]:
    """Constants of the second kernel."""
    parts, columns = _sizes(H, S)
    padded = triton.next_power_of_2(parts)
    return {
        "H": H, "S": S, "COLUMNS": columns, "PARTS": parts,
        "PADDED_PARTS": padded, "AT_ONCE": min(_FINISH_PARTS, padded), "ITERATIONS": iterations,
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
    tiles = _ELEMENTWISE if fn is None else _MIXING
    constants, beside, blocks = _stage(tiles, T, S, H, _dot(streams))
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
        streams_kernel[(constants["SPLITS"], beside)](
            y if expands else streams, streams, post if expands else streams,
            comb if expands else streams, streams if pre is None else pre,
            streams if fn is None else fn, new, x, partial, T, blocks,
            0 if y is None else y.stride(0), streams.stride(0), **constants,
            STREAM_STRIDE=streams.stride(1), EXPAND=expands, COLLAPSE=pre is not None,
            MIX=fn is not None, num_warps=tiles.warps, num_stages=tiles.stages,
            maxnreg=tiles.registers,
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
    constants = _finish_constants(S, H, iterations, _dot(x))
    tasks = 0 if weight is None else T
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
        **dict.fromkeys(("T", "blocks", "y_stride", "row_stride"), "i32"),
    }  # fmt: skip
    flags = {
        "step": (True, True, True), "first": (False, True, True), "expand": (True, False, False),
        "collapse": (False, True, False), "mixes": (False, False, True),
    }  # fmt: skip
    names = ("partial", "base", "scale", "weight", "next_pre", "next_post", "next_comb")
    finish = {**dict.fromkeys(names, "*fp32"), "x": "*bf16", "T": "i32", "hc_eps": "fp32",
              "norm_eps": "fp32"}  # fmt: skip
    constants = _finish_constants(4, 5120, 20, tl.bfloat16)
    found = [Signature("hyper_connection finish", finish_kernel, finish, constants)]
    for name, (e, c, m) in flags.items():
        tiles = _MIXING if m else _ELEMENTWISE
        for T in (64, 4096) if m else (64,):
            constants, _, _ = _stage(tiles, T, 4, 5120, tl.bfloat16)
            constants |= {"STREAM_STRIDE": 5120, "EXPAND": e, "COLLAPSE": c, "MIX": m}
            found.append(
                Signature(
                    f"hyper_connection {name}, {T} rows", streams_kernel, types, constants,
                    tiles.warps, tiles.stages, divisible=("y_stride", "row_stride"),
                )
            )  # fmt: skip
    return tuple(found)


SIGNATURES = _signatures()

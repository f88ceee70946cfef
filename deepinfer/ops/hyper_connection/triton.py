"""Hyper-connections on a GPU: one pass over the streams, then one small finishing kernel.

Knows tiles, groups and the workspace between the two kernels; must not know the sublayers.

The first kernel expands the streams, collapses them and multiplies them with `fn`. A program owns
a group of channels of all streams: it keeps the weights of its channels in shared memory and walks
over blocks of rows, so `fn` is read a few times however many rows there are, and even one row
occupies 40 processors at the released width. The weights are the left operand, 64 rows of a matrix
instruction, and the rows of streams its columns, of which 16 are enough. The products of a row with
one group are one partial sum; how many rows a program takes changes none of them. The second kernel
adds the partial sums, makes the coefficients, and normalises the collapsed row in place.
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
from deepinfer.ops.hyper_connection.finish import finish_kernel


@dataclass(frozen=True)
class _Tiles:
    """How the first kernel is cut.

    Attributes:
        rows, block: of a tile; `together` tiles beside each other, all streams of them, are one
            group.
        programs: as many as run at a time; each takes one group, and rows as it must.
        registers: most of a thread; the compiler would take more for no need.
    """

    rows: int
    block: int
    warps: int
    together: int
    programs: int
    registers: int


# A thread has 16 bytes of each stream, so coefficients of one row: that lets four programs share a
# processor. Faster on an H200 than three with twice the channels, though it has more sums to add.
_MIXING = _Tiles(rows=16, block=64, warps=4, together=1, programs=4 * 132, registers=128)
# Without products nothing is worth keeping, and rows are read in long pieces.
_ELEMENTWISE = _Tiles(rows=2, block=512, warps=4, together=1, programs=2**24, registers=128)
_FINISH_ROWS = 4  # rows whose coefficients one program finishes
_FINISH_PARTS = 8  # partial sums that it loads at once
_FINISH_BLOCK = 1024  # channels of a row that are normalised at once
_FINISH_WARPS = 1  # one needs no barriers, and of a few rows there is no work for more


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
def _weights(fn, h, H: tl.constexpr, S: tl.constexpr, COLUMNS: tl.constexpr,
             TILES: tl.constexpr, BF16: tl.constexpr, DOT: tl.constexpr):  # fmt: skip
    """Weights of a tile's channels `h`, then of those beside it, each a tensor for every stream:
    [COLUMNS, BLOCK], or for bf16 streams [2 * COLUMNS, BLOCK]: eight rows of weights rounded to
    bf16, then eight of what that left, and so on. `_both` adds the products of the two.

    The two hold 17 bits of a weight, and their products with bf16 are exact: an error of 3e-6 of
    what a sum typically is, a hundredth of that of TF32. A third part would not fit into the 64
    rows of one matrix instruction.
    """
    if BF16:
        row = tl.arange(0, 2 * COLUMNS)
        second = ((row // 8) % 2 == 1)[:, None]
        # Loads a weight twice: parts that one thread splits would be stored two bytes at a time.
        columns = row // 16 * 8 + row % 8
    else:
        columns = tl.arange(0, COLUMNS)
    BLOCK: tl.constexpr = h.shape[0]
    at = fn + columns[:, None] * (S * H) + h[None, :]
    known = (columns < S * (2 + S))[:, None]
    parts = ()
    loaded = ()
    for n in tl.static_range(TILES * S + 2):
        # Two ahead of their use, and no more: registers.
        if n < TILES * S:
            inside = known & (h + (n // S) * BLOCK < H)[None, :]
            weight = tl.load(at + ((n // S) * BLOCK + (n % S) * H), mask=inside, other=0.0)
            loaded = loaded + (weight,)
        if n >= 2:
            weight = loaded[n - 2]
            if BF16:
                high = _narrow(weight, tl.bfloat16, DOT).to(tl.float32)
                weight = tl.where(second, weight - high, weight)
                weight = _narrow(weight, tl.bfloat16, DOT).to(DOT)
            parts = parts + (weight,)
    return parts


@triton.jit
def _both(products, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    """[COLUMNS, ROWS] from products with `_weights`: both parts of a column are in one thread."""
    apart = tl.reshape(products, (COLUMNS // 8, 2, 8, ROWS))
    return tl.reshape(tl.sum(apart, axis=1), (COLUMNS, ROWS))


@triton.jit
def _eighths(value):
    """[ROWS, BLOCK // 8] sums of the squares of eight neighbours, which one thread has."""
    ROWS: tl.constexpr = value.shape[0]
    BLOCK: tl.constexpr = value.shape[1]
    return tl.sum(tl.reshape(value * value, (ROWS, BLOCK // 8, 8)), axis=2)


@triton.jit
def _inside(rows, T, h, H: tl.constexpr, EVEN: tl.constexpr):
    """Which values of a tile there are; EVEN: no group reaches past the last channel."""
    inside = (rows < T)[:, None]
    if EVEN:
        return inside
    else:
        return inside & (h < H)[None, :]


@triton.jit
def _loaded(
    y, streams, T, block, h, y_stride, row_stride, STREAM_STRIDE: tl.constexpr, H: tl.constexpr,
    S: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr, EVICT: tl.constexpr,
    EXPAND: tl.constexpr,
):  # fmt: skip
    """Tile of every stream and, to EXPAND, of y: block number `block` of rows, channels `h`."""
    rows = block * ROWS + tl.arange(0, ROWS).to(tl.int64)
    inside = _inside(rows, T, h, H, EVEN)
    # Read once, written to be read after the next sublayer: `x` needs the cache more.
    at = streams + rows[:, None] * row_stride + h[None, :]
    tiles = ()
    for i in tl.static_range(S):
        tiles = tiles + (
            tl.load(at + i * STREAM_STRIDE, mask=inside, other=0.0, eviction_policy=EVICT),
        )
    if EXPAND:
        at = y + rows[:, None] * y_stride + h[None, :]
        tiles = tiles + (tl.load(at, mask=inside, other=0.0, eviction_policy=EVICT),)
    return tiles


@triton.jit
def _coefficients_of(
    post, comb, pre, T, block, S: tl.constexpr, ROWS: tl.constexpr, EXPAND: tl.constexpr,
    COLLAPSE: tl.constexpr,
):  # fmt: skip
    """[ROWS] each: of a stream its S weights of comb and that of post, then that of pre."""
    rows = block * ROWS + tl.arange(0, ROWS).to(tl.int64)
    live = rows < T
    found = ()
    for o in tl.static_range(S):
        if EXPAND:
            for i in tl.static_range(S):
                at = comb + rows * (S * S) + (i * S + o)
                found = found + (tl.load(at, mask=live, other=0.0),)
            found = found + (tl.load(post + rows * S + o, mask=live, other=0.0),)
        if COLLAPSE:
            found = found + (tl.load(pre + rows * S + o, mask=live, other=0.0),)
    return found


@triton.jit
def _tile(
    olds, coefficients, weights, products, squares, x_squares, new, x, T, block, h,
    H: tl.constexpr, S: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr, EVICT: tl.constexpr,
    EXPAND: tl.constexpr, COLLAPSE: tl.constexpr, MIX: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """What streams_kernel does to one tile as `_loaded`; adds to and returns the three sums."""
    dtype: tl.constexpr = new.dtype.element_ty
    EACH: tl.constexpr = (S + 1) * EXPAND + COLLAPSE
    rows = block * ROWS + tl.arange(0, ROWS).to(tl.int64)
    inside = _inside(rows, T, h, H, EVEN)
    new_at = new + rows[:, None] * (S * H) + h[None, :]
    collapsed = tl.zeros(olds[0].shape, tl.float32)
    news = ()
    for o in tl.static_range(S):
        rounded = olds[o]
        if EXPAND:
            value = coefficients[o * EACH + S][:, None] * olds[S].to(tl.float32)
            for i in tl.static_range(S):
                value += coefficients[o * EACH + i][:, None] * olds[i].to(tl.float32)
            rounded = _narrow(value, dtype, DOT)
            tl.store(new_at + o * H, rounded, mask=inside, eviction_policy=EVICT)
        value = rounded.to(tl.float32)
        if COLLAPSE:
            collapsed += coefficients[o * EACH + EACH - 1][:, None] * value
        if MIX:
            squares += _eighths(value)
            news = news + (rounded,)
    if MIX:
        # All operands are written before the first product: one barrier.
        for o in tl.static_range(S):
            if dtype == tl.bfloat16:
                products = tl.dot(weights[o], tl.trans(news[o].to(DOT)), products)
            else:
                products = tl.dot(weights[o], tl.trans(news[o]), products, input_precision="ieee")
    if COLLAPSE:
        rounded = _narrow(collapsed, dtype, DOT)
        tl.store(x + rows[:, None] * H + h[None, :], rounded, mask=inside)
        if MIX:
            value = rounded.to(tl.float32)
            x_squares += _eighths(value)
    return products, squares, x_squares


@triton.jit
def _rows(
    olds, coefficients, weights, y, streams, new, x, partial, T, block, following, split, y_stride,
    row_stride, STREAM_STRIDE: tl.constexpr, H: tl.constexpr, S: tl.constexpr,
    COLUMNS: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    TILES: tl.constexpr, EVICT: tl.constexpr, EXPAND: tl.constexpr, COLLAPSE: tl.constexpr,
    MIX: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Block number `block` of rows: TILES tiles, `olds` the first of them, and what they add up to.

    Every tile is loaded before the one before it is computed. Returns the first of `following`.
    """
    BF16: tl.constexpr = streams.dtype.element_ty == tl.bfloat16
    EVEN: tl.constexpr = H % (TILES * BLOCK) == 0
    N: tl.constexpr = S * (2 + S)
    rows = block * ROWS + tl.arange(0, ROWS).to(tl.int64)
    live = rows < T
    h = split * (TILES * BLOCK) + tl.arange(0, BLOCK)
    products = tl.zeros((COLUMNS * (2 if BF16 else 1), ROWS), tl.float32)
    squares = tl.zeros((ROWS, BLOCK // 8), tl.float32)
    x_squares = tl.zeros((ROWS, BLOCK // 8), tl.float32)
    for tile in tl.static_range(TILES):
        ahead = _loaded(
            y, streams, T, block if tile + 1 < TILES else following,
            h + (tile + 1) % TILES * BLOCK, y_stride, row_stride, STREAM_STRIDE, H, S, ROWS, EVEN,
            EVICT, EXPAND,
        )  # fmt: skip
        products, squares, x_squares = _tile(
            olds, coefficients, weights[tile * S:tile * S + S], products, squares, x_squares, new,
            x, T, block, h + tile * BLOCK, H, S, ROWS, EVEN, EVICT, EXPAND, COLLAPSE,
            MIX, DOT,
        )  # fmt: skip
        olds = ahead
    if MIX:
        record = partial + (rows * SPLITS + split) * COLUMNS
        if BF16:
            products = _both(products, COLUMNS, ROWS)
        columns = tl.arange(0, COLUMNS)
        # The rest, zeros, too: whole sectors, and the sums of all can be loaded as they are.
        stored = ((columns < N) | (columns > N + COLLAPSE))[:, None] & live[None, :]
        tl.store(record[None, :] + columns[:, None], products, mask=stored)
        tl.store(record + N, tl.sum(squares, axis=1), mask=live)
        if COLLAPSE:
            tl.store(record + (N + 1), tl.sum(x_squares, axis=1), mask=live)
    return olds


@triton.jit(do_not_specialize=["T", "blocks"])
def streams_kernel(
    y, streams, post, comb, pre, fn, new, x, partial, T, blocks, y_stride, row_stride,
    STREAM_STRIDE: tl.constexpr, H: tl.constexpr, S: tl.constexpr, COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr,
    STEPS: tl.constexpr, EVICT: tl.constexpr, EXPAND: tl.constexpr, COLLAPSE: tl.constexpr,
    MIX: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """One group of TILES * BLOCK channels of every stream, and of the `blocks` blocks of ROWS rows
    those that the programs beside it leave: STEPS of them, or with STEPS 0 all there are.

    EXPAND: new = post * y + comb^T streams. COLLAPSE: x = pre . streams'. MIX: to partial, the
    products of streams' with the S * (2 + S) rows of fn, then the sum of squares of streams', then
    that of x (undefined without COLLAPSE).
    """
    split = tl.program_id(0)
    first = tl.program_id(1)
    beside = tl.num_programs(1)
    h = split * (TILES * BLOCK) + tl.arange(0, BLOCK)
    # All that the first tile needs is on its way before anything is waited for.
    olds = _loaded(
        y, streams, T, first, h, y_stride, row_stride, STREAM_STRIDE, H, S, ROWS,
        H % (TILES * BLOCK) == 0, EVICT, EXPAND,
    )  # fmt: skip
    coefficients = _coefficients_of(post, comb, pre, T, first, S, ROWS, EXPAND, COLLAPSE)
    weights = ()
    if MIX:
        BF16: tl.constexpr = streams.dtype.element_ty == tl.bfloat16
        weights = _weights(fn, h, H, S, COLUMNS, TILES, BF16, DOT)
    if STEPS > 0:
        for step in tl.static_range(STEPS):
            block = first + step * beside
            if step > 0:
                coefficients = _coefficients_of(
                    post, comb, pre, T, block, S, ROWS, EXPAND, COLLAPSE
                )
            olds = _rows(
                olds, coefficients, weights, y, streams, new, x, partial, T, block, block + beside,
                split, y_stride, row_stride, STREAM_STRIDE, H, S, COLUMNS, SPLITS, ROWS, BLOCK,
                TILES, EVICT, EXPAND, COLLAPSE, MIX, DOT,
            )  # fmt: skip
    else:
        for block in tl.range(first, blocks, beside, num_stages=1):
            coefficients = _coefficients_of(post, comb, pre, T, block, S, ROWS, EXPAND, COLLAPSE)
            olds = _rows(
                olds, coefficients, weights, y, streams, new, x, partial, T, block, block + beside,
                split, y_stride, row_stride, STREAM_STRIDE, H, S, COLUMNS, SPLITS, ROWS, BLOCK,
                TILES, EVICT, EXPAND, COLLAPSE, MIX, DOT,
            )  # fmt: skip


def _sizes(H: int, S: int) -> tuple[int, int]:
    """Partial sums of a row, and values of each."""
    groups = triton.cdiv(H, _block(_MIXING, H) * _MIXING.together)
    return groups, max(16, triton.next_power_of_2(S * (2 + S) + 2))


def _block(tiles: _Tiles, H: int) -> int:
    return max(16, min(tiles.block, triton.next_power_of_2(H)))


def _stage(tiles: _Tiles, T: int, S: int, H: int, dot: Any) -> tuple[dict[str, Any], int, int]:
    """Constants of the first kernel but for its flags and the stride of streams; its programs that
    share a group; and its blocks of rows.
    """
    block = _block(tiles, H)
    splits = triton.cdiv(H, block * tiles.together)
    blocks = triton.cdiv(T, tiles.rows)
    steps = triton.cdiv(blocks, min(max(1, tiles.programs // splits), max(1, blocks)))
    constants = {
        "H": H, "S": S, "COLUMNS": _sizes(H, S)[1], "SPLITS": splits, "ROWS": tiles.rows,
        # The interpreter knows no loop to a limit that is an argument.
        "BLOCK": block, "TILES": tiles.together,
        "STEPS": steps if steps <= 1 or INTERPRETED else 0,
        "EVICT": "evict_first" if steps > 1 else "", "DOT": dot,
    }  # fmt: skip
    return constants, triton.cdiv(blocks, max(1, steps)), blocks


def _finish_constants(S: int, H: int, iterations: int) -> dict[str, Any]:
    """Constants of the second kernel."""
    parts, columns = _sizes(H, S)
    padded = triton.next_power_of_2(parts)
    return {
        "H": H, "S": S, "COLUMNS": columns, "PARTS": parts,
        "PADDED_PARTS": padded, "AT_ONCE": min(_FINISH_PARTS, padded), "ITERATIONS": iterations,
        "ROWS": _FINISH_ROWS, "BLOCK": min(_FINISH_BLOCK, triton.next_power_of_2(H)),
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
            MIX=fn is not None, num_warps=tiles.warps, num_stages=1,
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
    constants = _finish_constants(S, H, iterations)
    tasks = 0 if weight is None else T
    if T:
        finish_kernel[(triton.cdiv(T, _FINISH_ROWS) + tasks,)](
            partial, base.contiguous(), scale.contiguous(),
            partial if weight is None else weight.contiguous(), x, next_pre, next_post, next_comb,
            T, hc_eps, norm_eps, **constants, num_warps=_FINISH_WARPS,
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
    constants = _finish_constants(4, 5120, 20)
    found = [Signature("hyper_connection finish", finish_kernel, finish, constants, _FINISH_WARPS)]
    for name, (e, c, m) in flags.items():
        tiles = _MIXING if m else _ELEMENTWISE
        for T in (64, 4096) if m else (64,):
            constants, _, _ = _stage(tiles, T, 4, 5120, tl.bfloat16)
            constants |= {"STREAM_STRIDE": 5120, "EXPAND": e, "COLLAPSE": c, "MIX": m}
            found.append(
                Signature(
                    f"hyper_connection {name}, {T} rows", streams_kernel, types, constants,
                    tiles.warps, 1, divisible=("y_stride", "row_stride"),
                )
            )  # fmt: skip
    return tuple(found)


SIGNATURES = _signatures()

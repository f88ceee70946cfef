"""Second kernel of hyper-connections: coefficients from partial sums, and the norm of x.

Knows the workspace that the first kernel fills; must not know streams.
"""

# Kernels make tuples grow by addition: Triton compiles no unpacking into them.
# ruff: noqa: RUF005
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="assignment, var-annotated, possibly-undefined"

import triton
import triton.language as tl

from deepinfer.kernels import formats
from deepinfer.kernels.launch import INTERPRETED

_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def _sigmoid(x):
    small = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, small) / (1.0 + small)


@triton.jit
def _inverse(x):
    """1 / x to the last bit or two, of normal numbers."""
    if _INTERPRETED:
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def _divided(matrix, hc_eps, S: tl.constexpr, ROWWISE: tl.constexpr):
    """Entries [ROWS] of S x S matrices, each over the sum of its row or column plus hc_eps."""
    inverses = ()
    for k in tl.static_range(S):
        total = matrix[k * S if ROWWISE else k]
        for other in tl.static_range(1, S):
            total = total + matrix[k * S + other if ROWWISE else other * S + k]
        inverses = inverses + (_inverse(total + hc_eps),)
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
    # Small ones first: all loads are on their way before the first sum.
    known = columns < S * (2 + S)
    scales = tl.load(scale + (columns >= S) + (columns >= 2 * S), mask=known, other=0.0)
    bases = tl.load(base + columns, mask=known, other=0.0)
    added = tl.zeros((ROWS, AT_ONCE, COLUMNS), tl.float32)
    for first in tl.static_range(0, PARTS, AT_ONCE):
        at = (rows[:, None] * PARTS + first + part[None, :])[:, :, None] * COLUMNS
        there = (live[:, None] & (first + part < PARTS)[None, :])[:, :, None]
        added += tl.load(partial + at + columns[None, None, :], mask=there, other=0.0)
    sums = tl.sum(added, axis=1)
    squares = tl.sum(tl.where((columns == S * (2 + S))[None, :], sums, 0.0), axis=1)
    sums = sums * tl.rsqrt(squares / (S * H) + norm_eps)[:, None]
    sums = sums * scales[None, :] + bases[None, :]
    # Through the workspace, for a thread to have a row: threads that all have all rows, as after
    # the sum, would do the same many times over.
    tl.debug_barrier()
    at = partial + rows[:, None] * (PARTS * COLUMNS) + columns[None, :]
    tl.store(at, sums, mask=live[:, None] & known[None, :])
    tl.debug_barrier()
    values = ()
    for n in tl.static_range(S * (2 + S)):
        at = partial + rows * (PARTS * COLUMNS) + n
        values = values + (tl.load(at, mask=live, other=0.0),)
    for s in tl.static_range(S):
        tl.store(next_pre + rows * S + s, _sigmoid(values[s]) + hc_eps, mask=live)
        tl.store(next_post + rows * S + s, 2.0 * _sigmoid(values[S + s]), mask=live)
    matrix = _sinkhorn(values[2 * S :], hc_eps, S, ITERATIONS)
    for n in tl.static_range(S * S):
        tl.store(next_comb + rows * (S * S) + n, matrix[n], mask=live)


@triton.jit
def _normalise(
    partial, weight, x, row, norm_eps, H: tl.constexpr, S: tl.constexpr, COLUMNS: tl.constexpr,
    PARTS: tl.constexpr, PADDED_PARTS: tl.constexpr, BLOCK: tl.constexpr,
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
    ahead = tl.load(weight + h, mask=h < H, other=0.0)
    part = tl.arange(0, PADDED_PARTS)
    at = partial + (row * PARTS + part) * COLUMNS + (S * (2 + S) + 1)
    squares = tl.sum(tl.load(at, mask=part < PARTS, other=0.0), axis=0)
    inverse = tl.rsqrt(squares / H + norm_eps)
    for block in tl.static_range(BLOCKS):
        value = ahead * (values[block].to(tl.float32) * inverse)
        at = (block + 1) * BLOCK + h
        if block + 1 < BLOCKS:
            ahead = tl.load(weight + at, mask=at < H, other=0.0)
        at = block * BLOCK + h
        tl.store(x + row * H + at, formats.narrow(value, x.dtype.element_ty), mask=at < H)


@triton.jit(do_not_specialize=["T"])
def finish_kernel(
    partial, base, scale, weight, x, next_pre, next_post, next_comb, T, hc_eps, norm_eps,
    H: tl.constexpr, S: tl.constexpr, COLUMNS: tl.constexpr,
    PARTS: tl.constexpr, PADDED_PARTS: tl.constexpr, AT_ONCE: tl.constexpr,
    ITERATIONS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
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
            PADDED_PARTS, BLOCK,
        )  # fmt: skip

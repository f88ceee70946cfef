"""One tile of MXFP4 index keys after the other against a few queries.

Knows page-major index keys and queries as operands; must not know where rows come from.

Keys go from memory to the tensor cores through registers only. A warp's threads (group, entry) load
16 bytes each, one group of one entry, which is just what such a thread gives to a product whose
channels are in the order of `_as_operand`. All shapes below follow from that: tensors of a tile
are [group, 8, WARPS, REPS], where entry 8 (REPS w + r) + i of the tile is at [:, i, w, r].
"""

import triton
import triton.language as tl

from deepinfer.kernels import formats

# Two 16-bit words (eight nibbles) to eight bf16 values, two at a time: $0 to $3 hold nibbles 0 to 3
# of both words, $4 the words, $5 their factor, twice. One multiplication makes two copies of a
# nibble: the sign of one and the magnitude of the other are in place. A magnitude at the top of the
# bf16 mantissa is the value times 2^-126, subnormals included; the product with 2^(126 - gap) is
# exact.
_UNPACK = tl.constexpr("""
{
    .reg .b32 high, bits;
    shr.u32 high, $4, 8;
    and.b32 bits, $4, 0x000F000F;
    mul.lo.u32 bits, bits, 0x1040;
    and.b32 bits, bits, 0x81C081C0;
    mul.bf16x2 $0, bits, $5;
    and.b32 bits, $4, 0x00F000F0;
    mul.lo.u32 bits, bits, 0x0104;
    and.b32 bits, bits, 0x81C081C0;
    mul.bf16x2 $1, bits, $5;
    and.b32 bits, high, 0x000F000F;
    mul.lo.u32 bits, bits, 0x1040;
    and.b32 bits, bits, 0x81C081C0;
    mul.bf16x2 $2, bits, $5;
    and.b32 bits, high, 0x00F000F0;
    mul.lo.u32 bits, bits, 0x0104;
    and.b32 bits, bits, 0x81C081C0;
    mul.bf16x2 $3, bits, $5;
}
""")


@triton.jit
def unpack_words(words, gap, DOT: tl.constexpr, PACKED: tl.constexpr):
    """int16 words [..., 8] to their four nibbles [..., 8] times 2^-gap, gap [..., 1] int32 >= 0.

    DOT is the dtype of the result, PACKED says how: two bf16 values per instruction, or plainly.
    Equal bit for bit while a group's gap is below 127; smaller values are 0 in the plain form.
    """
    if PACKED:
        factor = tl.broadcast_to(tl.maximum(253 - gap, 0) * 0x00800080, words.shape)
        k0, k1, k2, k3 = tl.inline_asm_elementwise(
            _UNPACK,
            "=&r,=&r,=&r,=&r,r,r,r",
            [words, factor],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        scale = (tl.maximum(127 - gap, 0) << 23).to(tl.float32, bitcast=True)
        k0 = (formats.decode_e2m1(words) * scale).to(DOT)
        k1 = (formats.decode_e2m1(words >> 4) * scale).to(DOT)
        k2 = (formats.decode_e2m1(words >> 8) * scale).to(DOT)
        k3 = (formats.decode_e2m1(words >> 12) * scale).to(DOT)
    return k0, k1, k2, k3


@triton.jit
def _as_operand(
    words,
    gap,
    GROUPS: tl.constexpr,
    REPS: tl.constexpr,
    WARPS: tl.constexpr,
    DOT: tl.constexpr,
    PACKED: tl.constexpr,
):
    """int32 words [G, 8, WARPS, REPS, 4], gap [G, 8, WARPS, REPS], to keys [TILE, 32 G].

    Entries get the order of the rows of a product: warp w has rows 16 w to 16 w + 15 of every 64.
    Channels: channel 32 g + 8 t + 4 p + 2 a + b is at (a, b, t, g, p), the last counts fastest.
    """
    halves = tl.join(words.to(tl.int16), (words >> 16).to(tl.int16))
    halves = tl.reshape(halves, (GROUPS, 8, WARPS, REPS, 8))
    k0, k1, k2, k3 = unpack_words(halves, tl.expand_dims(gap, 4), DOT, PACKED)
    keys = tl.join(tl.join(k0, k2), tl.join(k1, k3))
    keys = tl.reshape(keys, (GROUPS, 8, WARPS, REPS // 2, 2, 4, 2, 2, 2))
    keys = tl.permute(keys, (3, 2, 4, 1, 7, 8, 5, 0, 6))
    return tl.reshape(keys, (REPS * WARPS * 8, GROUPS * 32))


@triton.jit
def _score(
    words,
    code,
    query,
    weight,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    REPS: tl.constexpr,
    WARPS: tl.constexpr,
    DOT: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Scores [8, WARPS, REPS, ROWS]: the only place that says in which order things are added.

    The largest scale of an entry stays out of the operand: its values are then at most 6, and the
    scales of the groups cannot leave the range of bf16.
    """
    if not PACKED:
        code = tl.where(code == 255, 0, code)  # never written: the interpreter warns of NaN
    largest = tl.max(code, axis=0)
    keys = _as_operand(words, largest[None, :, :, :] - code, GROUPS, REPS, WARPS, DOT, PACKED)
    parts = tl.maximum(tl.dot(keys, query), 0.0) * weight[None, :]
    score = tl.sum(tl.reshape(parts, (REPS * WARPS * 8, ROWS, HEADS)), axis=2)
    score = tl.reshape(score, (REPS // 2, WARPS, 2, 8, ROWS))
    score = tl.reshape(tl.permute(score, (3, 1, 0, 2, 4)), (8, WARPS, REPS, ROWS))
    return score * tl.expand_dims(formats.decode_e8m0(largest), 3)


@triton.jit
def _unit_entries(
    tile,
    blocks,
    width,
    BLOCK_SIZE: tl.constexpr,
    EIGHTS: tl.constexpr,
    SINGLE: tl.constexpr,
    GROUPS: tl.constexpr,
    REPS: tl.constexpr,
    WARPS: tl.constexpr,
):
    """First entry of each unit of a tile: as many entries as are sure to lie side by side.

    A unit is what a warp takes of the tile [1, 1, WARPS, 1], or eights of it (EIGHTS) [1, 1, WARPS,
    REPS], or single entries (SINGLE) [G, 8, WARPS, REPS], every one known to all its threads.
    Entries past all others stand for blocks that do not exist.
    """
    column = tile * (8 * WARPS * REPS) + tl.arange(0, WARPS)[None, None, :, None] * (8 * REPS)
    if EIGHTS:
        column = column + tl.arange(0, REPS)[None, None, None, :] * 8
    if SINGLE:
        column = column + tl.arange(0, 8)[None, :, None, None]
        column = tl.broadcast_to(column, (GROUPS, 8, WARPS, REPS))
    if BLOCK_SIZE == 0:
        entry = column
    else:
        block = tl.load(blocks + column // BLOCK_SIZE, mask=column < width, other=-1).to(tl.int32)
        entry = tl.where(block >= 0, block * BLOCK_SIZE + column % BLOCK_SIZE, 0x7FFFF000)
    return entry


@triton.jit
def _load_pages(table, entry, seen, PER_PAGE: tl.constexpr):
    """Pages of units. Those from `seen` on get the page of the last entry before."""
    return tl.load(table + tl.minimum(entry, seen - 1).to(tl.uint32) // PER_PAGE)


@triton.jit
def _load_keys(
    codes,
    scales,
    page,
    entry,
    code_stride,
    scale_stride,
    one,
    PER_PAGE: tl.constexpr,
    EIGHTS: tl.constexpr,
    SINGLE: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_PAD: tl.constexpr,
    REPS: tl.constexpr,
):
    """int32 words [G, 8, WARPS, REPS, 4] and scale codes [G, 8, WARPS, REPS] of a tile.

    Nothing is masked: invisible entries are read, from pages of the sequence, and their scores are
    not used. `one` is 1; the compiler must not know, lest one thread load all scales of an entry.
    """
    offset = (entry.to(tl.uint32) % PER_PAGE).to(tl.int32)
    group = tl.arange(0, GROUPS_PAD)[:, None, None, None]
    code_place = codes + page * code_stride + offset * (GROUPS * 4) + group * 4
    scale_place = scales + page * scale_stride + offset * GROUPS + group * one
    if not SINGLE:
        inner = tl.arange(0, 8)[None, :, None, None]
        code_place = code_place + inner * (GROUPS * 4)
        scale_place = scale_place + inner * GROUPS
    code_place = tl.expand_dims(code_place, 4) + tl.arange(0, 4)[None, None, None, None, :]
    if not EIGHTS:
        rep = tl.arange(0, REPS)[None, None, None, :]
        code_place = code_place + tl.expand_dims(rep * (8 * GROUPS * 4), 4)
        scale_place = scale_place + rep * (8 * GROUPS)
    if GROUPS == GROUPS_PAD:
        words = tl.load(code_place)
        code = tl.load(scale_place)
    else:
        words = tl.load(code_place, mask=tl.expand_dims(group < GROUPS, 4), other=0)
        code = tl.load(scale_place, mask=group < GROUPS, other=0)
    return words, code.to(tl.int32)


@triton.jit
def score_tiles(
    query,
    weight,
    codes,
    scales,
    table,
    blocks,
    out,
    taken,
    seen,
    most,
    first,
    step,
    width,
    code_stride,
    scale_stride,
    PER_PAGE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_PAD: tl.constexpr,
    HEADS: tl.constexpr,
    REPS: tl.constexpr,
    AHEAD: tl.constexpr,
    WARPS: tl.constexpr,
    TURNS: tl.constexpr,
    DOT: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Every step-th tile of columns from tile `first` on, for the rows `taken` [ROWS].

    out [ROWS] points at the rows' scores, seen [ROWS] is what they see, and `most` the most that
    a taken one sees. BLOCK_SIZE 0: columns are entries, else parts of blocks. Blocks ascend, so
    that a column's entry is never below its number: columns from `seen` on have no entry in both
    forms.

    Loads run ahead of their use: blocks first, one tile later pages, another one later keys.
    TURNS, if not 0, replaces the number of tiles, which the interpreter must know beforehand.
    """
    TILE: tl.constexpr = 8 * WARPS * REPS
    SINGLE: tl.constexpr = (PER_PAGE % 8 != 0) | (BLOCK_SIZE != 0)
    EIGHTS: tl.constexpr = SINGLE | (PER_PAGE % (8 * REPS) != 0)
    inner = tl.arange(0, 8)[None, :, None, None]
    start = tl.arange(0, WARPS)[None, None, :, None] * (8 * REPS)
    start = start + tl.arange(0, REPS)[None, None, None, :] * 8
    copy = tl.arange(0, GROUPS_PAD)[:, None, None, None]
    one = tl.minimum(step, 1)
    end = tl.cdiv(tl.minimum(most, width), TILE)
    if first < end:
        entry = _unit_entries(
            first, blocks, width, BLOCK_SIZE, EIGHTS, SINGLE, GROUPS_PAD, REPS, WARPS
        )
        page = _load_pages(table, entry, most, PER_PAGE)
        words, code = _load_keys(
            codes, scales, page, entry, code_stride, scale_stride, one, PER_PAGE, EIGHTS, SINGLE,
            GROUPS, GROUPS_PAD, REPS,
        )  # fmt: skip
        next_entry, next_words, next_code = entry, words, code
        if AHEAD == 2:
            next_entry = _unit_entries(
                first + step, blocks, width, BLOCK_SIZE, EIGHTS, SINGLE, GROUPS_PAD, REPS, WARPS
            )
            page = _load_pages(table, next_entry, most, PER_PAGE)
            next_words, next_code = _load_keys(
                codes, scales, page, next_entry, code_stride, scale_stride, one, PER_PAGE, EIGHTS,
                SINGLE, GROUPS, GROUPS_PAD, REPS,
            )  # fmt: skip
        near = _unit_entries(
            first + AHEAD * step, blocks, width, BLOCK_SIZE, EIGHTS, SINGLE, GROUPS_PAD, REPS, WARPS
        )
        page = _load_pages(table, near, most, PER_PAGE)
        far = _unit_entries(
            first + (AHEAD + 1) * step, blocks, width, BLOCK_SIZE, EIGHTS, SINGLE, GROUPS_PAD, REPS,
            WARPS,
        )  # fmt: skip
        begin, stop, stride = first, end, step
        if TURNS > 0:
            begin, stop, stride = 0, TURNS, 1
        for turn in range(begin, stop, stride):
            tile = first + turn * step if TURNS > 0 else turn
            later_words, later_code = _load_keys(
                codes, scales, page, near, code_stride, scale_stride, one, PER_PAGE, EIGHTS, SINGLE,
                GROUPS, GROUPS_PAD, REPS,
            )  # fmt: skip
            page = _load_pages(table, far, most, PER_PAGE)
            later = _unit_entries(
                tile + (AHEAD + 2) * step, blocks, width, BLOCK_SIZE, EIGHTS, SINGLE, GROUPS_PAD,
                REPS, WARPS,
            )  # fmt: skip
            score = _score(
                words, code, query, weight, ROWS, GROUPS_PAD, HEADS, REPS, WARPS, DOT, PACKED
            )
            column = tile * TILE + start + inner
            own = column
            if BLOCK_SIZE != 0:
                own = entry
            sees = tl.expand_dims(own, 4) < seen[None, None, None, None, :]
            score = tl.where(sees, tl.expand_dims(score, 0), float("-inf"))
            # The threads of all groups hold the same scores, and one of them stores them. Places
            # that are not known to lie side by side leave the scores where they are.
            place = tl.expand_dims(tile * TILE + inner * one + start + copy * 0, 4)
            kept = tl.expand_dims((column < width) & (copy == 0), 4)
            place = out[None, None, None, None, :] + place
            tl.store(place, score, mask=kept & taken[None, None, None, None, :])
            if AHEAD == 2:
                entry, words, code = next_entry, next_words, next_code
                next_entry, next_words, next_code = near, later_words, later_code
            else:
                entry, words, code = near, later_words, later_code
            near = far
            far = later
    rest = first + tl.cdiv(tl.maximum(end - first, 0), step) * step
    nothing = tl.full((TILE, ROWS), float("-inf"), tl.float32)
    while rest * TILE < width:
        column = rest * TILE + tl.arange(0, TILE)[:, None]
        kept = (column < width) & taken[None, :]
        tl.store(out[None, :] + column, nothing, mask=kept)
        rest += step

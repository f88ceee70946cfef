"""Triton kernels of paged_index_scores and candidate_scores.

Knows page-major MXFP4 index keys and rows of queries; must not know selection.

One row against one tile of entries is always the same arithmetic: four matrix products, one for
each channel of four, and one sum over heads. A score therefore has the same bits in every kernel,
whatever the number of rows or the way in which its entry was found.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.errors import Unsupported
from deepinfer.kernels import formats
from deepinfer.kernels.launch import DOT_DTYPE, INTERPRETED, require_gpu
from deepinfer.kernels.signature import Signature
from deepinfer.numerics import MXFP4_GROUP

TILE = 128  # entries of one matrix product
MAX_WIDTH = 65535 * TILE  # what the second axis of a grid allows

# Two 16-bit words (eight nibbles) to eight bf16 values, two at a time: $0 to $3 hold nibbles 0 to 3
# of both words, $4 the words, $5 their factors. A nibble's magnitude, shifted to the top of the
# bf16 mantissa, is the value times 2^-126, subnormals included; the product with 2^(126 - gap) is
# exact.
_UNPACK = tl.constexpr("""
{
    .reg .b32 sign, size;
    shl.b32 sign, $4, 12;
    and.b32 sign, sign, 0x80008000;
    shl.b32 size, $4, 6;
    and.b32 size, size, 0x01C001C0;
    or.b32 sign, sign, size;
    mul.bf16x2 $0, sign, $5;
    shl.b32 sign, $4, 8;
    and.b32 sign, sign, 0x80008000;
    shl.b32 size, $4, 2;
    and.b32 size, size, 0x01C001C0;
    or.b32 sign, sign, size;
    mul.bf16x2 $1, sign, $5;
    shl.b32 sign, $4, 4;
    and.b32 sign, sign, 0x80008000;
    shr.u32 size, $4, 2;
    and.b32 size, size, 0x01C001C0;
    or.b32 sign, sign, size;
    mul.bf16x2 $2, sign, $5;
    and.b32 sign, $4, 0x80008000;
    shr.u32 size, $4, 6;
    and.b32 size, size, 0x01C001C0;
    or.b32 sign, sign, size;
    mul.bf16x2 $3, sign, $5;
}
""")


@triton.jit
def unpack_words(words, gap, DOT: tl.constexpr, PACKED: tl.constexpr):
    """int16 words [G, N, 8] to their four nibbles [G, N, 8] times 2^-gap, gap [G, N] int32.

    DOT is the dtype of the result, PACKED says how: two bf16 values per instruction, or plainly.
    Equal bit for bit while a group's gap is below 127; smaller values are 0 in the plain form.
    """
    if PACKED:
        bits = (tl.maximum(253 - gap, 0) << 7).to(tl.uint16)
        factor = bits.to(tl.bfloat16, bitcast=True)[:, :, None]
        factor = tl.broadcast_to(factor, words.shape)
        k0, k1, k2, k3 = tl.inline_asm_elementwise(
            _UNPACK,
            "=&r,=&r,=&r,=&r,r,r",
            [words, factor],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        scale = (tl.maximum(127 - gap, 0) << 23).to(tl.float32, bitcast=True)[:, :, None]
        k0 = (formats.decode_e2m1(words) * scale).to(DOT)
        k1 = (formats.decode_e2m1(words >> 4) * scale).to(DOT)
        k2 = (formats.decode_e2m1(words >> 8) * scale).to(DOT)
        k3 = (formats.decode_e2m1(words >> 12) * scale).to(DOT)
    return k0, k1, k2, k3


@triton.jit
def _as_operand(channels, TILE: tl.constexpr, WORDS: tl.constexpr):
    """[G, TILE, 8] to [TILE, 8 G]."""
    return tl.reshape(tl.permute(channels, (1, 0, 2)), (TILE, WORDS))


@triton.jit
def _load_keys(
    codes,
    scales,
    code_place,
    scale_place,
    valid,
    GROUPS: tl.constexpr,
    GROUPS_PAD: tl.constexpr,
    TILE: tl.constexpr,
    DOT: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Keys of one tile: channels 0 to 3 of every four, each [TILE, 8 G], and a factor [TILE].

    The factor is the entry's largest scale. It stays out of the operands: these are then at most 6,
    and the scales of the groups cannot leave the range of bf16.
    """
    group = tl.arange(0, GROUPS_PAD)
    exists = valid[:, None] & (group < GROUPS)[None, :]
    code = tl.load(scales + scale_place[:, None] + group[None, :], mask=exists, other=0)
    code = code.to(tl.int32)
    largest = tl.max(code, axis=1)
    # Groups come first here: neighbouring threads then load neighbouring groups of one entry.
    word = group[:, None, None] * 8 + tl.arange(0, 8)[None, None, :]
    inside = valid[None, :, None] & (group < GROUPS)[:, None, None]
    words = tl.load(codes + code_place[None, :, None] + word, mask=inside, other=0)
    k0, k1, k2, k3 = unpack_words(words, tl.trans(largest[:, None] - code), DOT, PACKED)
    k0 = _as_operand(k0, TILE, GROUPS_PAD * 8)
    k1 = _as_operand(k1, TILE, GROUPS_PAD * 8)
    k2 = _as_operand(k2, TILE, GROUPS_PAD * 8)
    k3 = _as_operand(k3, TILE, GROUPS_PAD * 8)
    return k0, k1, k2, k3, formats.decode_e8m0(largest)


@triton.jit
def _load_query(
    queries,
    weights,
    row,
    exists,
    heads,
    GROUPS: tl.constexpr,
    GROUPS_PAD: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    DOT: tl.constexpr,
):
    """One row: channels 0 to 3 of every four, each [8 G, heads], and head weights [heads]."""
    head = tl.arange(0, HEADS_PAD)
    channel = tl.arange(0, GROUPS_PAD * 32)
    present = (head < heads) & exists
    inside = present[:, None] & (channel < GROUPS * 32)[None, :]
    place = head[:, None] * (GROUPS * 32) + channel[None, :]
    base = queries + row * heads * (GROUPS * 32)
    query = tl.load(base + place, mask=inside, other=0).to(DOT)
    even, odd = tl.split(tl.reshape(query, (HEADS_PAD, GROUPS_PAD * 16, 2)))
    q0, q2 = tl.split(tl.reshape(even, (HEADS_PAD, GROUPS_PAD * 8, 2)))
    q1, q3 = tl.split(tl.reshape(odd, (HEADS_PAD, GROUPS_PAD * 8, 2)))
    weight = tl.load(weights + row * heads + head, mask=present, other=0).to(tl.float32)
    return tl.trans(q0), tl.trans(q1), tl.trans(q2), tl.trans(q3), weight


@triton.jit
def _score(k0, k1, k2, k3, factor, q0, q1, q2, q3, weight):
    """Scores [TILE] of one row: the only place that says in which order things are added."""
    dots = tl.dot(k0, q0)
    dots = tl.dot(k1, q1, dots)
    dots = tl.dot(k2, q2, dots)
    dots = tl.dot(k3, q3, dots)
    return tl.sum(tl.maximum(dots, 0.0) * weight[None, :], axis=1) * factor


@triton.jit
def _score_row(
    queries,
    weights,
    codes,
    scales,
    page_table,
    sequence,
    visible,
    blocks,
    scores,
    heads,
    width,
    pages,
    block_count,
    code_stride,
    scale_stride,
    PER_PAGE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_PAD: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    DOT: tl.constexpr,
    PACKED: tl.constexpr,
):
    """TILES tiles of columns of one row. BLOCK_SIZE 0: columns are entries, else parts of blocks.

    Blocks ascend, so that a column's entry is never below its number: columns from `visible` on
    have no entry in both forms.
    """
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * (TILES * TILE)
    seen = tl.load(visible + row).to(tl.int32)
    out = scores + row * width
    if first < seen:
        table = page_table + tl.load(sequence + row) * pages
        q0, q1, q2, q3, weight = _load_query(
            queries, weights, row, True, heads, GROUPS, GROUPS_PAD, HEADS_PAD, DOT
        )
        for tile in range(TILES):
            column = first + tile * TILE + tl.arange(0, TILE)
            if BLOCK_SIZE == 0:
                entry = column
                valid = (column < seen) & (column < width)
            else:
                slot = blocks + row * block_count + column // BLOCK_SIZE
                block = tl.load(slot, mask=column < width, other=-1).to(tl.int32)
                entry = block * BLOCK_SIZE + column % BLOCK_SIZE
                valid = (block >= 0) & (entry < seen)
            page = tl.load(table + entry // PER_PAGE, mask=valid, other=0)
            offset = entry % PER_PAGE
            code_place = page * code_stride + offset * (GROUPS * 8)
            scale_place = page * scale_stride + offset * GROUPS
            k0, k1, k2, k3, factor = _load_keys(
                codes, scales, code_place, scale_place, valid, GROUPS, GROUPS_PAD, TILE, DOT, PACKED
            )
            score = _score(k0, k1, k2, k3, factor, q0, q1, q2, q3, weight)
            score = tl.where(valid, score, float("-inf"))
            tl.store(out + column, score, mask=column < width)
    else:
        for tile in range(TILES):
            column = first + tile * TILE + tl.arange(0, TILE)
            nothing = tl.full((TILE,), float("-inf"), tl.float32)
            tl.store(out + column, nothing, mask=column < width)


@triton.jit
def _store_row(
    queries,
    weights,
    scores,
    visible,
    row,
    exists,
    column,
    heads,
    width,
    k0,
    k1,
    k2,
    k3,
    factor,
    GROUPS: tl.constexpr,
    GROUPS_PAD: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    DOT: tl.constexpr,
):
    """Scores of one row of several for one tile of keys."""
    q0, q1, q2, q3, weight = _load_query(
        queries, weights, row, exists, heads, GROUPS, GROUPS_PAD, HEADS_PAD, DOT
    )
    score = _score(k0, k1, k2, k3, factor, q0, q1, q2, q3, weight)
    sees = column < tl.load(visible + row, mask=exists, other=0)
    score = tl.where(sees, score, float("-inf"))
    tl.store(scores + row * width + column, score, mask=exists & (column < width))


@triton.jit
def _score_rows(
    queries,
    weights,
    codes,
    scales,
    page_table,
    sequence,
    visible,
    scores,
    rows,
    heads,
    width,
    pages,
    code_stride,
    scale_stride,
    PER_PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_PAD: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    TILE: tl.constexpr,
    DOT: tl.constexpr,
    PACKED: tl.constexpr,
):
    """One tile of entries of ROWS rows: keys are read once for each run of rows of a sequence."""
    base = tl.program_id(0).to(tl.int64) * ROWS
    here = tl.minimum(rows - base, ROWS).to(tl.int32)
    number = tl.arange(0, ROWS)
    owner = tl.load(sequence + base + number, mask=number < here, other=-1)
    seen = tl.load(visible + base + number, mask=number < here, other=0).to(tl.int32)
    first = tl.program_id(1) * TILE
    column = first + tl.arange(0, TILE)
    if first < tl.max(seen, axis=0):
        begin = 0
        while begin < here:
            current = tl.load(sequence + base + begin)
            end = tl.min(tl.where((number > begin) & (owner != current), number, here), axis=0)
            in_run = (number >= begin) & (number < end)
            most = tl.minimum(tl.max(tl.where(in_run, seen, 0), axis=0), width)
            valid = column < most
            page = tl.load(page_table + current * pages + column // PER_PAGE, mask=valid, other=0)
            offset = column % PER_PAGE
            code_place = page * code_stride + offset * (GROUPS * 8)
            scale_place = page * scale_stride + offset * GROUPS
            k0, k1, k2, k3, factor = _load_keys(
                codes, scales, code_place, scale_place, valid, GROUPS, GROUPS_PAD, TILE, DOT, PACKED
            )
            if end - begin > ROWS // 2:
                # A long run: rows outside of it cost less than a loop that cannot load ahead.
                for index in range(ROWS):
                    inside = (index >= begin) & (index < end)
                    _store_row(
                        queries, weights, scores, visible, base + index, inside, column, heads,
                        width, k0, k1, k2, k3, factor, GROUPS, GROUPS_PAD, HEADS_PAD, DOT,
                    )  # fmt: skip
            else:
                for index in range(ROWS):
                    if (index >= begin) & (index < end):
                        _store_row(
                            queries, weights, scores, visible, base + index, True, column, heads,
                            width, k0, k1, k2, k3, factor, GROUPS, GROUPS_PAD, HEADS_PAD, DOT,
                        )  # fmt: skip
            begin = end
    else:
        nothing = tl.full((TILE,), float("-inf"), tl.float32)
        for index in range(ROWS):
            place = scores + (base + index) * width + column
            tl.store(place, nothing, mask=(index < here) & (column < width))


def _require_keys(queries: Tensor, codes: Tensor, scales: Tensor, width: int) -> None:
    """Refuse what the kernels cannot read.

    Raises:
        Unsupported: no GPU, another dtype of queries, channels that are no multiple of 32, records
            of a page that do not lie side by side or at odd addresses, or too many columns.
    """
    require_gpu(queries)
    if queries.dtype not in (torch.bfloat16, torch.float32):
        raise Unsupported(f"{queries.dtype}: takes bfloat16 and float32")
    channels = queries.shape[-1]
    if channels % MXFP4_GROUP:
        raise Unsupported(f"{channels} channels are no multiple of {MXFP4_GROUP}")
    for records, size in ((codes, channels // 2), (scales, channels // MXFP4_GROUP)):
        assert records.shape[-1] == size, (records.shape, size)
        apart = records.shape[1] > 1 and records.stride(1) != size
        if apart or records.stride(2) not in (1, size):
            raise Unsupported("the records of a page do not lie side by side")
    if codes.data_ptr() % 2 or codes.stride(0) % 2:
        raise Unsupported("codes at odd addresses")
    if width > MAX_WIDTH:
        raise Unsupported(f"{width} columns: takes at most {MAX_WIDTH}")


def _constants(queries: Tensor, codes: Tensor) -> dict[str, object]:
    groups = queries.shape[2] // MXFP4_GROUP
    return {
        "PER_PAGE": codes.shape[1],
        "GROUPS": groups,
        "GROUPS_PAD": max(2, triton.next_power_of_2(groups)),
        "HEADS_PAD": max(16, triton.next_power_of_2(queries.shape[1])),
        "TILE": TILE,
        "DOT": DOT_DTYPE,
        "PACKED": not INTERPRETED,
    }


def tiles_of_program(rows: int, width: int) -> int:
    """Tiles that one program takes: several only when there are enough for every processor."""
    programs = rows * triton.cdiv(width, TILE)
    return 8 if programs >= 16384 else 4 if programs >= 8192 else 2 if programs >= 4096 else 1


def rows_of_program(rows: int, sequences: int) -> int:
    """Rows that share one program, from the rows that a sequence has on average."""
    average = rows // max(sequences, 1)
    return 32 if average >= 24 else 8 if average >= 3 else 1


def paged_index_scores(
    queries: Tensor,
    weights: Tensor,
    codes: Tensor,
    scales: Tensor,
    page_table: Tensor,
    sequence: Tensor,
    visible: Tensor,
    width: int,
) -> Tensor:
    """See the reference. All arguments but codes and scales are copied if not contiguous.

    Values of a group whose scale is 2^-127 of the largest of its entry, or less, may count as 0.

    Raises:
        Unsupported: see `_require_keys`.
    """
    _require_keys(queries, codes, scales, width)
    rows, heads, _ = queries.shape
    scores = torch.empty((rows, width), dtype=torch.float32, device=queries.device)
    if scores.numel() == 0:
        return scores
    words = codes.view(torch.int16)
    tensors = [queries.contiguous(), weights.contiguous(), words, scales]
    tensors += [page_table.contiguous(), sequence.contiguous(), visible.contiguous()]
    pages, strides = page_table.shape[1], (words.stride(0), scales.stride(0))
    constants = _constants(queries, codes)
    shared = rows_of_program(rows, page_table.shape[0])
    if shared > 1:
        grid = (triton.cdiv(rows, shared), triton.cdiv(width, TILE))
        arguments = [*tensors, scores, rows, heads, width, pages, *strides]
        _score_rows[grid](*arguments, ROWS=shared, **constants)
    else:
        tiles = tiles_of_program(rows, width)
        grid = (rows, triton.cdiv(width, TILE * tiles))
        arguments = [*tensors, None, scores, heads, width, pages, 0, *strides]
        _score_row[grid](*arguments, BLOCK_SIZE=0, TILES=tiles, **constants)
    return scores


def candidate_scores(
    queries: Tensor,
    weights: Tensor,
    codes: Tensor,
    scales: Tensor,
    page_table: Tensor,
    sequence: Tensor,
    visible: Tensor,
    blocks: Tensor,
    block_size: int,
) -> Tensor:
    """See the reference. All arguments but codes and scales are copied if not contiguous.

    Values of a group whose scale is 2^-127 of the largest of its entry, or less, may count as 0.

    Raises:
        Unsupported: see `_require_keys`.
    """
    width = blocks.shape[1] * block_size
    _require_keys(queries, codes, scales, width)
    rows, heads, _ = queries.shape
    scores = torch.empty((rows, width), dtype=torch.float32, device=queries.device)
    if scores.numel() == 0:
        return scores
    words = codes.view(torch.int16)
    tensors = [queries.contiguous(), weights.contiguous(), words, scales, page_table.contiguous()]
    tensors += [sequence.contiguous(), visible.contiguous(), blocks.contiguous(), scores]
    sizes = [heads, width, page_table.shape[1], blocks.shape[1], words.stride(0), scales.stride(0)]
    tiles = tiles_of_program(rows, width)
    grid = (rows, triton.cdiv(width, TILE * tiles))
    constants = _constants(queries, codes)
    _score_row[grid](*tensors, *sizes, BLOCK_SIZE=block_size, TILES=tiles, **constants)
    return scores


_TYPES = {
    "queries": "*bf16",
    "weights": "*fp32",
    "codes": "*i16",
    "scales": "*u8",
    "page_table": "*i64",
    "sequence": "*i64",
    "visible": "*i64",
    "scores": "*fp32",
    "heads": "i32",
    "width": "i32",
    "pages": "i32",
    "code_stride": "i32",
    "scale_stride": "i32",
}
_RELEASED = {
    "PER_PAGE": 64,
    "GROUPS": 4,
    "GROUPS_PAD": 4,
    "HEADS_PAD": 32,
    "TILE": TILE,
    "DOT": tl.bfloat16,
    "PACKED": True,
}
_DIVISIBLE = ("heads", "width", "code_stride", "scale_stride")

SIGNATURES: tuple[Signature, ...] = (
    *(
        Signature(
            f"paged_index_scores 1 row, {tiles} tiles",
            _score_row,
            {**_TYPES, "block_count": "i32"},
            {**_RELEASED, "blocks": None, "BLOCK_SIZE": 0, "TILES": tiles},
            divisible=_DIVISIBLE,
        )
        for tiles in (1, 2, 4, 8)
    ),
    *(
        Signature(
            f"paged_index_scores {rows} rows",
            _score_rows,
            {**_TYPES, "rows": "i32"},
            {**_RELEASED, "ROWS": rows},
            divisible=_DIVISIBLE,
        )
        for rows in (8, 32)
    ),
    *(
        Signature(
            f"candidate_scores {tiles} tiles",
            _score_row,
            {**_TYPES, "blocks": "*i32", "block_count": "i32"},
            {**_RELEASED, "BLOCK_SIZE": 8, "TILES": tiles},
            divisible=(*_DIVISIBLE, "block_count"),
        )
        for tiles in (1, 8)
    ),
)

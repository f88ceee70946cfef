"""Products of FP8 rows with packed FP4 expert matrices, inside Triton kernels.

Knows tiles of one matrix and rows of codes; must not know which rows visit which expert.

Weights are turned to e4m3 on packed words: a byte table of the eight magnitudes, shifted by the
exponent of their group, is looked up by PRMT. The result is exact. Sums inside of a tensor core
keep few bits, so they are added up in float32 registers every 128 channels, in the same order in
every form: the bits of a row do not depend on how many rows share its tile.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.errors import Unsupported
from deepinfer.kernels import formats
from deepinfer.kernels.launch import INTERPRETED
from deepinfer.numerics import FP8_GROUP

CHUNK = 128  # channels of one word of shifts

# $0 and $1: four e4m3 codes each, of groups 2i and 2i + 1; $2: the word (see prepare.py); $3 and
# $7: the table of group 2i (values 0, .5, 1, 1.5 and 2, 3, 4, 6), $11 and $15: that of group
# 2i + 1. Operands of 32 bits take four places, which hold the same.
_LOOK_UP = tl.constexpr("""
{
    .reg .b32 low, high, one, two;
    and.b32 low, $2, 0x77777777;
    shr.u32 high, low, 16;
    prmt.b32 one, $3, $7, low;
    prmt.b32 two, $11, $15, high;
    and.b32 low, $2, 0x80808080;
    shl.b32 high, $2, 4;
    and.b32 high, high, 0x80808080;
    or.b32 $0, one, low;
    or.b32 $1, two, high;
}
""")
_CONSTRAINTS = tl.constexpr("=r,=r" + ",r" * 17)


@triton.jit
def _value(magnitude, negative, shift):
    """What the e4m3 code stands for, float32: the e2m1 value times 2^(shift - 6)."""
    power = ((shift + 121) << 23).to(tl.float32, bitcast=True)
    value = formats.decode_e2m1(magnitude) * power
    return tl.where(negative != 0, -value, value)


@triton.jit
def unpack(codes, place, shift_low, shift_high, inside, PACKED: tl.constexpr):
    """Weights at byte offsets `place` as operands: of the first and of the second group of a pair.

    place: [n, 32 or 64] offsets, whole words in each row; shift_low, shift_high: int32, as large:
    exponents of the groups, from 1 to 12. Values are weights * 2^(shift - 6).
    """
    if PACKED:
        words = tl.load(codes + place, mask=inside, other=0)
        low, high = tl.inline_asm_elementwise(
            _LOOK_UP,
            _CONSTRAINTS,
            [
                words,
                shift_low * 0x08080800 + 0x0C080000,
                shift_low * 0x08080808 + 0x1C181410,
                shift_high * 0x08080800 + 0x0C080000,
                shift_high * 0x08080808 + 0x1C181410,
            ],
            dtype=(tl.float8e4nv, tl.float8e4nv),
            is_pure=True,
            pack=4,
        )
    else:
        words = tl.load(codes + place // 4, mask=inside, other=0)
        lane = place % 4
        low = _value((words >> (4 * lane)) & 7, (words >> (8 * lane + 7)) & 1, shift_low)
        high = _value((words >> (4 * lane + 16)) & 7, (words >> (8 * lane + 3)) & 1, shift_high)
    return low, high


@triton.jit
def load_rows(x, place, PACKED: tl.constexpr):
    """e4m3 codes as an operand."""
    value = tl.load(x + place)
    return value if PACKED else formats.decode_e4m3(value)


@triton.jit
def _add_chunk(total, low, high, x_tile, BN: tl.constexpr, SWAP: tl.constexpr):
    """total + the products of 128 channels; SWAP: rows first, as they are in `total`."""
    both = tl.permute(tl.join(low, high), (0, 2, 1))
    weights = tl.reshape(both, (BN, 128))  # first groups of pairs, then second ones
    if SWAP:
        return total + tl.dot(tl.trans(x_tile), tl.trans(weights), input_precision="ieee")
    else:
        return total + tl.dot(weights, x_tile, input_precision="ieee")


@triton.jit
def aligned_products(
    x,
    row_place,
    codes,
    shifts,
    first,
    second,
    inside,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    GATED: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Sums [BN, BM] over all channels of weights * 2^-base and rows, for matrix rows `first`.

    Rows have one scale each and are laid out by `align_rows`. GATED: matrix rows `second` too.

    Args:
        row_place: [BM] offsets of the rows; first, second: [BN] matrix rows, `inside` [BN] exist.
        codes, shifts: of one expert, which has ROWS matrix rows and CHUNKS times 128 channels.
    """
    byte = tl.arange(0, 64)
    half = ((byte // 32) * 16)[None, :]
    x_place = row_place[None, :] + tl.arange(0, 128)[:, None]
    first_place = first[:, None] * (CHUNKS * 64) + byte[None, :]
    second_place = second[:, None] * (CHUNKS * 64) + byte[None, :]
    # A tensor core takes 64 rows of its first operand at once, from memory or registers, and its
    # second operand from memory: weights come second where there are rows enough.
    SWAP: tl.constexpr = BM >= 64
    total = tl.zeros((BM, BN) if SWAP else (BN, BM), tl.float32)
    other = tl.zeros((BM, BN) if SWAP else (BN, BM), tl.float32)
    for chunk in range(CHUNKS):
        x_tile = load_rows(x, x_place + chunk * 128, PACKED)
        word = tl.load(shifts + chunk * ROWS + first, mask=inside, other=0)[:, None]
        low, high = unpack(
            codes, first_place + chunk * 64, (word >> half) & 0xFF, (word >> (half + 8)) & 0xFF,
            inside[:, None], PACKED,
        )  # fmt: skip
        total = _add_chunk(total, low, high, x_tile, BN, SWAP)
        if GATED:
            word = tl.load(shifts + chunk * ROWS + second, mask=inside, other=0)[:, None]
            low, high = unpack(
                codes, second_place + chunk * 64, (word >> half) & 0xFF,
                (word >> (half + 8)) & 0xFF, inside[:, None], PACKED,
            )  # fmt: skip
            other = _add_chunk(other, low, high, x_tile, BN, SWAP)
    if SWAP:
        total, other = tl.trans(total), tl.trans(other)
    return total, other


@triton.jit
def _scaled(
    codes, place, word, base, half, inside, x_low, x_high, s_low, s_high, PACKED: tl.constexpr
):
    """Products of 64 channels [BN, BM], both scales of every group on the sums over it."""
    shift = (tl.zeros_like(place) + 6).to(tl.int32)  # the weights themselves
    low, high = unpack(codes, place, shift, shift, inside[:, None], PACKED)
    w_low = formats.decode_e8m0(base + ((word >> half) & 0xFF))
    w_high = formats.decode_e8m0(base + ((word >> (half + 8)) & 0xFF))
    one = tl.dot(low, x_low, input_precision="ieee") * (w_low[:, None] * s_low[None, :])
    two = tl.dot(high, x_high, input_precision="ieee") * (w_high[:, None] * s_high[None, :])
    return one + two


@triton.jit
def exact_products(
    x,
    x_scales,
    row,
    codes,
    shifts,
    first,
    second,
    inside,
    first_base,
    second_base,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    GATED: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Like `aligned_products` with scales per 32 channels of rows and weights: the whole sums.

    row: [BM] int64 rows of x [.., WIDTH] and of x_scales [.., WIDTH / 32].
    """
    byte = tl.arange(0, 32)
    first_place = first[:, None] * (CHUNKS * 64) + byte[None, :]
    second_place = second[:, None] * (CHUNKS * 64) + byte[None, :]
    total = tl.zeros((BN, BM), tl.float32)
    other = tl.zeros((BN, BM), tl.float32)
    for pair in range((WIDTH + 63) // 64):
        # Past the last channel weights are 0: any channel that exists may stand there.
        next_group = (2 * pair + 1) % (WIDTH // 32)
        x_low = load_rows(x, row[None, :] * WIDTH + (pair * 64 + byte)[:, None], PACKED)
        x_high = load_rows(x, row[None, :] * WIDTH + (next_group * 32 + byte)[:, None], PACKED)
        s_low = tl.load(x_scales + row * (WIDTH // 32) + 2 * pair)
        s_high = tl.load(x_scales + row * (WIDTH // 32) + next_group)
        half = (pair % 2) * 16
        word = tl.load(shifts + (pair // 2) * ROWS + first, mask=inside, other=0)
        total += _scaled(
            codes, first_place + pair * 32, word, first_base, half, inside,
            x_low, x_high, s_low, s_high, PACKED,
        )  # fmt: skip
        if GATED:
            word = tl.load(shifts + (pair // 2) * ROWS + second, mask=inside, other=0)
            other += _scaled(
                codes, second_place + pair * 32, word, second_base, half, inside,
                x_low, x_high, s_low, s_high, PACKED,
            )  # fmt: skip
    return total, other


@triton.jit
def tile_rows(ends, tiles, BM: tl.constexpr):
    """Expert (int64; -1: none) of this program's tile, its plan rows [BM], and which exist."""
    tile = tl.program_id(1)
    expert = tl.load(tiles + 2 * tile).to(tl.int64)
    row = tl.load(tiles + 2 * tile + 1) + tl.arange(0, BM)
    end = tl.load(ends + tl.maximum(expert, 0))
    return expert, row, row < end


@triton.jit
def _align_rows(
    x,
    scales,
    out,
    row_scales,
    rows,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    GROUPS_PAD: tl.constexpr,
    N: tl.constexpr,
):
    """N rows: codes under the largest scale of their row; first and second groups of pairs apart.

    Of every 128 channels, groups 0, 2, 1, 3 follow each other in `out`, 0 past the width.
    """
    row = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    group = tl.arange(0, GROUPS_PAD)
    exists = (row < rows)[:, None] & (group < WIDTH // 32)[None, :]
    place = row[:, None] * (WIDTH // 32) + group[None, :]
    scale = tl.load(scales + place, mask=exists, other=0)
    largest = tl.max(scale, axis=1)
    tl.store(row_scales + row, largest, mask=row < rows)
    exponent = largest.to(tl.int32, bitcast=True) >> 23
    for chunk in range(PADDED // 128):
        position = tl.arange(0, 128)
        block = position // 32
        channel = chunk * 128 + (block % 2) * 64 + (block // 2) * 32 + position % 32
        inside = (row < rows)[:, None] & (channel < WIDTH)[None, :]
        code = tl.load(x + row[:, None] * WIDTH + channel[None, :], mask=inside, other=0)
        source = row[:, None] * (WIDTH // 32) + (channel // 32)[None, :]
        own = tl.load(scales + source, mask=inside, other=0)
        gap = exponent[:, None] - (own.to(tl.int32, bitcast=True) >> 23)
        power = (tl.maximum(127 - gap, 1) << 23).to(tl.float32, bitcast=True)
        moved = formats.encode_e4m3(formats.decode_e4m3(code) * power)
        target = row[:, None] * PADDED + (chunk * 128 + position)[None, :]
        tl.store(out + target, tl.where(inside, moved, 0), mask=(row < rows)[:, None])


def align_constants(width: int) -> dict[str, int]:
    """Constants of the kernel `_align_rows` for rows of `width` channels."""
    padded = triton.cdiv(width, CHUNK) * CHUNK
    groups = triton.next_power_of_2(width // FP8_GROUP)
    return {"WIDTH": width, "PADDED": padded, "GROUPS_PAD": groups, "N": 4}


def align_rows(x: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Rows with one scale each instead of one per 32 channels, for `aligned_products`.

    A code moves to the largest scale s of its row, rounded to nearest even. Codes of at least
    2^-6 s keep their value; smaller ones move by at most 2^-10 s, which is below 2^-17.8 of the
    row's largest magnitude (that is at least 224 s, unless the whole row is below 1e-4).

    Args:
        x: [R, C] uint8 (e4m3); scales: [R, C/32] float32 powers of two; both contiguous.

    Returns:
        codes [R, C rounded up to 128] uint8, scales [R] float32.
    """
    rows, width = x.shape
    constants = align_constants(width)
    out = torch.empty((rows, constants["PADDED"]), dtype=torch.uint8, device=x.device)
    row_scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        grid = (triton.cdiv(rows, constants["N"]),)
        _align_rows[grid](x, scales, out, row_scales, rows, **constants)
    return out, row_scales


def as_operand(codes: Tensor) -> Tensor:
    """e4m3 bytes in the dtype in which a kernel takes them."""
    return codes.view(torch.uint8) if INTERPRETED else codes.view(torch.float8_e4m3fn)


def as_words(codes: Tensor) -> Tensor:
    """Packed weights in the dtype in which a kernel takes them; the interpreter reads words."""
    return codes.view(torch.int32) if INTERPRETED else codes


def require_rows(x: Tensor, scales: Tensor, width: int) -> None:
    """Refuse rows that the kernels cannot multiply.

    Raises:
        Unsupported: codes that are no bytes, scales that are not float32.
    """
    if x.element_size() != 1 or scales.dtype != torch.float32:
        raise Unsupported(f"{x.dtype}, {scales.dtype}: takes e4m3 bytes with float32 scales")
    assert x.shape[1] == width, (x.shape, width)

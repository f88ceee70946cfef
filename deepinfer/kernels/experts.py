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

# $0 and $1: e4m3 codes of the word $2 (see prepare.py), channels 0 to 3 and 4 to 7; $3 and $7: the
# table of its group (values 0, .5, 1, 1.5 and 2, 3, 4, 6). Operands of 32 bits take four places,
# which hold the same.
_LOOK_UP = tl.constexpr("""
{
    .reg .b32 low, high, one, two;
    and.b32 low, $2, 0x77777777;
    shr.u32 high, low, 16;
    prmt.b32 one, $3, $7, low;
    prmt.b32 two, $3, $7, high;
    and.b32 low, $2, 0x80808080;
    shl.b32 high, $2, 4;
    and.b32 high, high, 0x80808080;
    or.b32 $0, one, low;
    or.b32 $1, two, high;
}
""")
_CONSTRAINTS = tl.constexpr("=r,=r" + ",r" * 9)

# $0: the codes of four channels of the word $1, those from 4 on if $2 is 1; values are unshifted.
_LOOK_UP_HALF = tl.constexpr("""
{
    .reg .b32 size, sign, by;
    shl.b32 by, $2, 4;
    and.b32 size, $1, 0x77777777;
    shr.u32 size, size, by;
    shl.b32 by, $2, 2;
    shl.b32 sign, $1, by;
    and.b32 sign, sign, 0x80808080;
    prmt.b32 size, 0x3C383000, 0x4C484440, size;
    or.b32 $0, size, sign;
}
""")
_HALF_CONSTRAINTS = tl.constexpr("=r" + ",r" * 5)


@triton.jit
def _value(word, lane, shift):
    """Channel `lane` of 8 of a word, as the float32 that its e4m3 code stands for."""
    negative = (word >> (8 * (lane % 4) + tl.where(lane < 4, 7, 3))) & 1
    value = formats.decode_e2m1((word >> (4 * lane)) & 7)
    value *= ((shift + 121) << 23).to(tl.float32, bitcast=True)
    return tl.where(negative != 0, -value, value)


@triton.jit
def unpack(codes, place, shift, inside, PACKED: tl.constexpr):
    """Weights at byte offsets `place` as operands: channels 0 to 3 and 4 to 7 of every word.

    place: [n, 64] offsets, whole words in each row; shift: int32, as large: exponents of the
    groups, from 1 to 12. Values are weights * 2^(shift - 6).
    """
    if PACKED:
        words = tl.load(codes + place, mask=inside, other=0)
        low, high = tl.inline_asm_elementwise(
            _LOOK_UP,
            _CONSTRAINTS,
            [words, shift * 0x08080800 + 0x0C080000, shift * 0x08080808 + 0x1C181410],
            dtype=(tl.float8e4nv, tl.float8e4nv),
            is_pure=True,
            pack=4,
        )
    else:
        words = tl.load(codes + place // 4, mask=inside, other=0)
        low = _value(words, place % 4, shift)
        high = _value(words, place % 4 + 4, shift)
    return low, high


@triton.jit
def unpack_group(codes, place, late, inside, PACKED: tl.constexpr):
    """Weights of one group [n, 32] as an operand, unshifted.

    place: byte offsets, of whole words; late: int32, 1 for channels from 4 on of their word.
    """
    if PACKED:
        words = tl.load(codes + place, mask=inside, other=0)
        return tl.inline_asm_elementwise(
            _LOOK_UP_HALF,
            _HALF_CONSTRAINTS,
            [words, tl.broadcast_to(late, place.shape)],
            dtype=tl.float8e4nv,
            is_pure=True,
            pack=4,
        )
    else:
        words = tl.load(codes + place // 4, mask=inside, other=0)
        lane = (place % 4 + 4 * late).to(tl.int32)
        return _value(words, lane, tl.zeros_like(lane) + 6)


@triton.jit
def load_rows(x, place, exists, PACKED: tl.constexpr):
    """e4m3 codes as an operand, 0 in rows that do not exist."""
    value = tl.load(x + place, mask=exists, other=0.0)
    return value if PACKED else formats.decode_e4m3(value)


@triton.jit
def row_places(n, CHUNKS: tl.constexpr):
    """Offsets in codes and in shifts of matrix rows `n` at channel 0, in tiles of 64 rows."""
    shifts = (n // 64) * (CHUNKS * 64) + n % 64
    return (n // 64) * (CHUNKS * 4096) + (n % 64) * 64, shifts


@triton.jit
def _to_fragments(weights, WARPS: tl.constexpr):
    """[n, 64] weights as a tensor core's first operand without any move between threads.

    A thread has 16 codes of a row, which are of one group, in rows 8 WARPS apart: as many as the
    tensor core wants of it, from every 16 columns and of rows 8 apart. So both axes are renamed.
    """
    BN: tl.constexpr = weights.shape[0]
    split = tl.reshape(weights, (BN // (16 * WARPS), 2, WARPS, 8, 4, 4, 4))
    return tl.reshape(tl.permute(split, (0, 2, 1, 3, 5, 4, 6)), (BN, 64))


@triton.jit
def _from_fragments(total, WARPS: tl.constexpr):
    """Sums [n, BM] in the order of matrix rows: undoes what `_to_fragments` did to rows."""
    BN: tl.constexpr = total.shape[0]
    BM: tl.constexpr = total.shape[1]
    split = tl.reshape(total, (BN // (16 * WARPS), WARPS, 2, 8, BM))
    return tl.reshape(tl.permute(split, (0, 2, 1, 3, 4)), (BN, BM))


@triton.jit
def aligned_products(
    x,
    row_place,
    exists,
    codes,
    shifts,
    n,
    inside,
    CHUNKS: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    WARPS: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Sums [BN, BM] over all channels of weights * 2^-base and rows, for matrix rows `n`.

    Rows have one scale each and are laid out by `align_rows`.

    Args:
        row_place: [BM] offsets of the rows, which `exists` [BM]; n: [BN], exist where `inside`.
        codes, shifts: of one expert, whose matrix has CHUNKS times 128 channels.
    """
    byte = tl.arange(0, 64)
    turn = (byte // 16 * 8)[None, :]
    x_place = row_place[None, :] + byte[:, None]
    place, shift_place = row_places(n, CHUNKS)
    place = place[:, None] + byte[None, :]
    total = tl.zeros((BN, BM), tl.float32)
    for chunk in range(CHUNKS):
        x_low = load_rows(x, x_place + chunk * 128, exists[None, :], PACKED)
        x_high = load_rows(x, x_place + (chunk * 128 + 64), exists[None, :], PACKED)
        word = tl.load(shifts + shift_place + chunk * 64, mask=inside, other=0)[:, None]
        low, high = unpack(
            codes, place + chunk * 4096, (word >> turn) & 0xFF, inside[:, None], PACKED
        )
        # Weights are the first operand, which a tensor core takes from registers.
        part = tl.dot(_to_fragments(low, WARPS), x_low, input_precision="ieee")
        total += tl.dot(_to_fragments(high, WARPS), x_high, part, input_precision="ieee")
    return _from_fragments(total, WARPS)


@triton.jit
def paired_rows(first, WARPS: tl.constexpr, HALF: tl.constexpr, BN: tl.constexpr):
    """[2 BN] matrix rows: of w1 and of w3 for columns `first` on, and which columns they are.

    8 WARPS rows of each take turns, so that one thread has both sums of a column.
    """
    index = tl.arange(0, 2 * BN)
    column = first + index // (16 * WARPS) * (8 * WARPS) + index % (8 * WARPS)
    return tl.where(column < HALF, column, 0) + index // (8 * WARPS) % 2 * HALF, column


@triton.jit
def split_pairs(total, WARPS: tl.constexpr):
    """Sums [BN, BM] with w1 and with w3 from those with `paired_rows`."""
    BN: tl.constexpr = total.shape[0]
    BM: tl.constexpr = total.shape[1]
    split = tl.reshape(total, (BN // (16 * WARPS), 2, 8 * WARPS, BM))
    gate, up = tl.split(tl.permute(split, (0, 2, 3, 1)))
    return tl.reshape(gate, (BN // 2, BM)), tl.reshape(up, (BN // 2, BM))


@triton.jit
def _add_group(
    total, codes, place, word, group, base, x_tile, x_scale, inside, PACKED: tl.constexpr
):
    """total + the products of 32 channels, both scales on the sums over them."""
    position = tl.arange(0, 32)
    byte = (group % 4) * 16 + (position // 8) * 4 + position % 4
    late = ((position // 4) % 2)[None, :]
    own = place[:, None] + ((group // 4) * 4096 + byte)[None, :]
    weights = unpack_group(codes, own, late, inside[:, None], PACKED)
    scale = formats.decode_e8m0(base + ((word >> (group % 4 * 8)) & 0xFF))
    part = tl.dot(weights, x_tile, input_precision="ieee")
    return total + part * (scale[:, None] * x_scale[None, :])


@triton.jit
def exact_products(
    x,
    x_scales,
    row,
    exists,
    codes,
    shifts,
    n,
    inside,
    base,
    WIDTH: tl.constexpr,
    CHUNKS: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Like `aligned_products` with scales per 32 channels of rows and weights: the whole sums.

    row: [BM] int64 rows of x [.., WIDTH] and of x_scales [.., WIDTH / 32]; base: [BN] of `n`.
    """
    position = tl.arange(0, 32)
    place, shift_place = row_places(n, CHUNKS)
    total = tl.zeros((BN, BM), tl.float32)
    for pair in range((WIDTH + 63) // 64):
        # Past the last channel weights are 0: any channel that exists may stand there.
        group = 2 * pair
        after = (group + 1) % (WIDTH // 32)
        x_low = load_rows(
            x, row[None, :] * WIDTH + (group * 32 + position)[:, None], exists[None, :], PACKED
        )
        x_high = load_rows(
            x, row[None, :] * WIDTH + (after * 32 + position)[:, None], exists[None, :], PACKED
        )
        s_low = tl.load(x_scales + row * (WIDTH // 32) + group)
        s_high = tl.load(x_scales + row * (WIDTH // 32) + after)
        word = tl.load(shifts + shift_place + (pair // 2) * 64, mask=inside, other=0)
        total = _add_group(total, codes, place, word, group, base, x_low, s_low, inside, PACKED)
        total = _add_group(
            total, codes, place, word, group + 1, base, x_high, s_high, inside, PACKED
        )
    return total


@triton.jit
def tile_bounds(ends, tiles):
    """Expert (int64; -1: none), first plan row and end of this program's tile."""
    tile = tl.program_id(1)
    expert = tl.load(tiles + 2 * tile).to(tl.int64)
    return expert, tl.load(tiles + 2 * tile + 1), tl.load(ends + tl.maximum(expert, 0))


@triton.jit
def _align_rows(
    x,
    scales,
    out,
    row_scales,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    GROUPS_PAD: tl.constexpr,
    TILE: tl.constexpr,
):
    """TILE codes of one row under the largest scale of the row, in the order of words' halves.

    Channel 32 g + 8 j + 4 h + i of every 128 goes to 64 h + 16 j + 4 g + i; 0 past the width.
    """
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS_PAD)
    position = tl.program_id(1) * TILE + tl.arange(0, TILE)
    at = position % 128
    channel = (position - at) + (at // 4 % 4) * 32 + (at // 16 % 4) * 8 + (at // 64) * 4 + at % 4
    inside = channel < WIDTH
    code = tl.load(x + row * WIDTH + channel, mask=inside, other=0)
    own = tl.load(scales + row * (WIDTH // 32) + channel // 32, mask=inside, other=0)
    scale = tl.load(scales + row * (WIDTH // 32) + group, mask=group < WIDTH // 32, other=0)
    largest = tl.max(scale, axis=0)
    if tl.program_id(1) == 0:
        tl.store(row_scales + row, largest)
    gap = (largest.to(tl.int32, bitcast=True) >> 23) - (own.to(tl.int32, bitcast=True) >> 23)
    power = (tl.maximum(127 - gap, 1) << 23).to(tl.float32, bitcast=True)
    moved = formats.encode_e4m3(formats.decode_e4m3(code) * power)
    target = out + row * PADDED + position
    tl.store(target, tl.where(inside, moved, 0), mask=position < PADDED)


def align_constants(width: int) -> dict[str, int]:
    """Constants of the kernel `_align_rows` for rows of `width` channels."""
    padded = triton.cdiv(width, CHUNK) * CHUNK
    groups = triton.next_power_of_2(width // FP8_GROUP)
    tile = min(1024, triton.next_power_of_2(padded))
    return {"WIDTH": width, "PADDED": padded, "GROUPS_PAD": groups, "TILE": tile}


def align_rows(x: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Rows with one scale each instead of one per 32 channels, for `aligned_products`.

    A code moves to the largest scale s of its row, rounded to nearest even. Codes of at least
    2^-6 s keep their value; smaller ones move by at most 2^-10 s, which is below 2^-17.8 of the
    row's largest magnitude (that is at least 224 s, unless the whole row is below 1e-4).

    Args:
        x: [R, C] uint8 (e4m3); scales: [R, C/32] float32 powers of two; both contiguous.

    Returns:
        codes [R, C rounded up to 128] uint8 in the order of `_align_rows`, scales [R] float32.
    """
    rows, width = x.shape
    constants = align_constants(width)
    out = torch.empty((rows, constants["PADDED"]), dtype=torch.uint8, device=x.device)
    row_scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        grid = (rows, triton.cdiv(constants["PADDED"], constants["TILE"]))
        _align_rows[grid](x, scales, out, row_scales, **constants)
    return out, row_scales


def short_rows(block: int, exact: bool) -> int:
    """Tiles of `block` rows with at most this many are multiplied as smaller ones; 0: none."""
    return block // 4 if block >= 64 and not exact else 0


def fragment_warps(warps: int, columns: int) -> int:
    """WARPS of a launch with `columns` matrix rows in a tile."""
    return columns // 16 if INTERPRETED else warps


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

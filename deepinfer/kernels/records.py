"""Tiles of packed cache records, decoded to matrix operands inside attention kernels.

Knows the layouts of window (FP8) and compressed (FP4) records; must not know rings or pages.

Both decoders return keys times 2^-16 (`UNIT`), exactly. The factor makes room for the decoding by
one multiplication: the bits of an e4m3 or e2m1 code, moved to their places in a bf16, are the
value times 2^-120 or 2^-126, subnormal codes included, so one bf16 product with the scale of the
group times 2^104 or 2^110 gives the value, and that factor has to be below 2^128. Exact for window
scales from 2^-108 to 2^23 and for every compressed scale.

Where records are read as 32-bit words, keys come in the channel order of `channels`, which lets
the threads of a warp write their 16 bytes to shared memory without bank conflicts. Queries have to
be read, and results written, in the same order.
"""

import triton
import triton.language as tl

from deepinfer.kernels.formats import decode_e2m1, decode_e4m3, decode_e8m0, narrow

UNIT = tl.constexpr(2.0**-16)
_TO_2_104 = tl.constexpr(
    104
)  # exponent byte of an e8m0 scale to the bf16 exponent of 2^104 times it
_TWO_127 = tl.constexpr(2.0**127)
_TWO_103 = tl.constexpr(2.0**103)

# Four e4m3 codes ($2, lowest byte first) to two words of two bf16, times $3. prmt puts one code
# into the top byte of each half, and eight copies of the lower code's sign between them, so that
# one arithmetic shift leaves both signs in their places and the other bits four places lower.
FP8_WORD = tl.constexpr("""{
    .reg .b32 a, b;
    prmt.b32 a, $2, 0, 0x1800;
    prmt.b32 b, $2, 0, 0x3A22;
    shr.s32 a, a, 4;
    shr.s32 b, b, 4;
    and.b32 a, a, 0x87F087F0;
    and.b32 b, b, 0x87F087F0;
    mul.rn.bf16x2 $0, a, $3;
    mul.rn.bf16x2 $1, b, $3;
}""")

# Eight e2m1 codes ($4, lowest nibble first) to four words of two bf16, times $5. The same, with the
# low nibble of a byte (moved up in v) on top of the lower half and the high nibble on the upper's.
FP4_WORD = tl.constexpr("""{
    .reg .b32 v, a, b, c, d;
    shl.b32 v, $4, 4;
    prmt.b32 a, v, $4, 0x4800;
    prmt.b32 b, v, $4, 0x5911;
    prmt.b32 c, v, $4, 0x6A22;
    prmt.b32 d, v, $4, 0x7B33;
    shr.s32 a, a, 6;
    shr.s32 b, b, 6;
    shr.s32 c, c, 6;
    shr.s32 d, d, 6;
    and.b32 a, a, 0x81C081C0;
    and.b32 b, b, 0x81C081C0;
    and.b32 c, c, 0x81C081C0;
    and.b32 d, d, 0x81C081C0;
    mul.rn.bf16x2 $0, a, $5;
    mul.rn.bf16x2 $1, b, $5;
    mul.rn.bf16x2 $2, c, $5;
    mul.rn.bf16x2 $3, d, $5;
}""")


@triton.jit
def channels(D: tl.constexpr, WIDE: tl.constexpr):
    """[D] channel of each place in a decoded key; runs of 8 places are 8 neighbouring channels."""
    place = tl.arange(0, D)
    if WIDE:
        # Word q of a thread's four goes to quarter q of the key, whatever the record.
        place = (place % (D // 4)) // 8 * 32 + place // (D // 4) * 8 + place % 8
        place = tl.max_contiguous(tl.multiple_of(place, 8), 8)
    return place


@triton.jit
def _halves(pair):
    low = (pair & 0xFFFF).to(tl.uint16)
    high = (pair >> 16).to(tl.uint16)
    return tl.join(low, high)


@triton.jit
def _bytes_of(record, valid, first, count: tl.constexpr):
    offsets = first + tl.arange(0, count)
    return tl.load(record[:, None] + offsets[None, :], mask=valid[:, None], other=0)


@triton.jit
def window_tile(
    record, valid, D: tl.constexpr, KEYS: tl.constexpr, WIDE: tl.constexpr, dot: tl.constexpr
):
    """[KEYS, D] in dot (bf16, or float32 for the interpreter): keys of FP8 records times UNIT.

    Args:
        record: [KEYS] pointers to the records' first bytes (uint8); four-byte aligned if WIDE.
        valid: [KEYS]; nothing is read of a record that is not, and its key is 0.
    """
    GROUPS: tl.constexpr = D // 32
    if not WIDE:
        code = _bytes_of(record, valid, 0, D)
        place = D + tl.arange(0, D) // 32
        scale = tl.load(record[:, None] + place[None, :], mask=valid[:, None], other=0)
        return narrow(decode_e4m3(code) * decode_e8m0(scale) * UNIT, dot)
    words = record.to(tl.pointer_type(tl.uint32), bitcast=True)
    at = tl.arange(0, D // 4)
    word = tl.load(words[:, None] + at[None, :], mask=valid[:, None], other=0)
    word = tl.reshape(word, (KEYS, GROUPS, 8))
    exponent = _bytes_of(record, valid, D, GROUPS).to(tl.uint32)
    if dot == tl.bfloat16:
        # The factor twice in a word; clamped, for a byte above cannot be told from infinity.
        factor = tl.minimum(exponent + _TO_2_104, 254) * 0x00800080
        factor = tl.broadcast_to(factor[:, :, None], (KEYS, GROUPS, 8))
        first, second = tl.inline_asm_elementwise(
            FP8_WORD, "=r,=r,r,r", [word, factor], (tl.uint32, tl.uint32), is_pure=True, pack=1
        )
        pairs = tl.join(_halves(first), _halves(second))
        pairs = tl.reshape(pairs, (KEYS, GROUPS, 4, 2, 2, 2))
        pairs = tl.permute(pairs, (0, 2, 1, 3, 5, 4))
        # The bits become numbers last: a reshaped operand would be reshaped in shared memory.
        return tl.reshape(pairs, (KEYS, D)).to(tl.bfloat16, bitcast=True)
    else:
        code = (word[:, :, :, None] >> (tl.arange(0, 4) * 8)[None, None, None, :]) & 0xFF
        value = decode_e4m3(code) * (decode_e8m0(exponent) * UNIT)[:, :, None, None]
        value = tl.permute(tl.reshape(value, (KEYS, GROUPS, 4, 8)), (0, 2, 1, 3))
        return tl.reshape(value, (KEYS, D))


@triton.jit
def compressed_tile(
    record, valid, D: tl.constexpr, KEYS: tl.constexpr, WIDE: tl.constexpr, dot: tl.constexpr
):
    """[KEYS, D] in dot: keys of FP4 records times UNIT; arguments as in `window_tile`."""
    GROUPS: tl.constexpr = D // 16
    if not WIDE:
        place = tl.arange(0, D)
        packed = tl.load(record[:, None] + (place // 2)[None, :], mask=valid[:, None], other=0)
        code = packed >> ((place % 2) * 4).to(tl.uint8)[None, :]
        at = D // 2 + place // 16
        scale = tl.load(record[:, None] + at[None, :], mask=valid[:, None], other=0)
        return narrow(decode_e2m1(code) * decode_e4m3(scale) * UNIT, dot)
    words = record.to(tl.pointer_type(tl.uint32), bitcast=True)
    at = tl.arange(0, D // 8)
    word = tl.load(words[:, None] + at[None, :], mask=valid[:, None], other=0)
    word = tl.reshape(word, (KEYS, GROUPS, 2))
    scale = _bytes_of(record, valid, D // 2, GROUPS)
    if dot == tl.bfloat16:
        # The same trick for the scale, in float32: its bits are 2^-120 times its value.
        factor = (scale.to(tl.uint32) << 20).to(tl.float32, bitcast=True) * _TWO_127 * _TWO_103
        factor = factor.to(tl.uint32, bitcast=True) >> 16
        factor = factor | (factor << 16)
        factor = tl.broadcast_to(factor[:, :, None], (KEYS, GROUPS, 2))
        a, b, c, d = tl.inline_asm_elementwise(
            FP4_WORD,
            "=r,=r,=r,=r,r,r",
            [word, factor],
            (tl.uint32, tl.uint32, tl.uint32, tl.uint32),
            is_pure=True,
            pack=1,
        )
        pairs = tl.join(tl.join(_halves(a), _halves(c)), tl.join(_halves(b), _halves(d)))
        pairs = tl.reshape(pairs, (KEYS, D // 32, 4, 2, 2, 2))
        pairs = tl.permute(pairs, (0, 2, 1, 4, 5, 3))
        return tl.reshape(pairs, (KEYS, D)).to(tl.bfloat16, bitcast=True)
    else:
        code = (word[:, :, :, None] >> (tl.arange(0, 8) * 4)[None, None, None, :]) & 0xF
        value = decode_e2m1(code) * (decode_e4m3(scale) * UNIT)[:, :, None, None]
        value = tl.permute(tl.reshape(value, (KEYS, D // 32, 4, 8)), (0, 2, 1, 3))
        return tl.reshape(value, (KEYS, D))

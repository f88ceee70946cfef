"""The half of Gluon's sparse attention that decodes: records to tiles in shared memory.

Four warps walk the key lists of their program's items, and write tile after tile into one of two
buffers, waiting until it is empty and saying that it is full. See gluon.py for the other half, and
kernels/records.py for the decoding by one multiplication; channels stay in their order here.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from deepinfer.kernels.records import FP4_WORD, FP8_WORD

D = gl.constexpr(512)
HEADS = gl.constexpr(64)
KEYS = gl.constexpr(64)  # of a tile
BUFFERS = gl.constexpr(2)
WORKERS = gl.constexpr(4)  # warps that decode
_SCALE_104 = gl.constexpr(104)  # exponent byte to that of 2^104 times it, see kernels/records.py
_TWO_127 = gl.constexpr(2.0**127)
_TWO_103 = gl.constexpr(2.0**103)

# Queries, keys and weights in shared memory as the tensor cores want them: rows of 128 bytes.
BF16_ROWS = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2))
_PAIR_ROWS = gl.constexpr(gl.NVMMASharedLayout(128, 32, rank=2))  # the same, of pairs
# Words of records [keys, 16-byte pieces, 4]. Eight neighbouring threads that write decoded words
# reach all banks: 4 pieces of FP8 and 2 of FP4 are one row of 128 bytes, and rows are swizzled.
_FP8 = gl.constexpr(gl.BlockedLayout([1, 1, 4], [8, 4, 1], [4, 1, 1], [2, 1, 0]))
_FP4 = gl.constexpr(gl.BlockedLayout([1, 1, 4], [16, 2, 1], [4, 1, 1], [2, 1, 0]))


@gluon.jit
def listed(index_row, count, PLACES: gl.constexpr, WARPS: gl.constexpr):
    """[PLACES] entries of an index list of `count`, and -1 beyond."""
    at = gl.arange(0, PLACES, gl.BlockedLayout([1], [32], [WARPS], [0]))
    return gl.load(index_row + at, mask=at < count, other=-1)


@gluon.jit
def item_of(item, blocks, splits):
    """(token, block of heads, split) of a program's work item."""
    rest = item // splits
    return (rest // blocks).to(gl.int64), rest % blocks, item % splits


@gluon.jit
def tiles_of(index, first, tiles, PLACES: gl.constexpr, WARPS: gl.constexpr):
    """(first, number) of the tiles of a list that a run of `tiles` from tile `first` on has.

    The list counts up to its last valid entry.
    """
    at = gl.arange(0, PLACES, gl.BlockedLayout([1], [32], [WARPS], [0]))
    used = gl.max(gl.where(index >= 0, at + 1, 0), 0)
    start = gl.maximum(first, 0)
    end = gl.minimum((used + KEYS - 1) // KEYS, first + tiles)
    return start, gl.maximum(end - start, 0)


@gluon.jit
def _window_words(
    index_row, start, ring, own, ring_rows, RING_ROW: gl.constexpr, OWN_ROW: gl.constexpr
):  # fmt: skip
    """Words [KEYS, 32, 4] of the FP8 records that entries from `start` on name, and scales."""
    index = gl.load(
        index_row + start + gl.arange(0, KEYS, gl.SliceLayout(1, gl.SliceLayout(2, _FP8)))
    )
    mine = (index - ring_rows).to(gl.int64)
    record = gl.where(mine >= 0, own + mine * OWN_ROW, ring + index.to(gl.int64) * RING_ROW)
    record = gl.expand_dims(record, 1)
    valid = gl.expand_dims(index >= 0, 1)
    piece = gl.arange(0, D // 16, gl.SliceLayout(0, gl.SliceLayout(2, _FP8)))
    place = D + gl.expand_dims(piece, 0) // 2
    scale = gl.load(record + place, mask=valid, other=0)
    words = gl.expand_dims(record, 2).to(gl.pointer_type(gl.uint32), bitcast=True)
    piece = gl.expand_dims(gl.expand_dims(piece, 0), 2) * 4
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, _FP8)))
    word = gl.expand_dims(gl.expand_dims(word, 0), 1)
    return gl.load(words + (piece + word), mask=gl.expand_dims(valid, 2), other=0), scale


@gluon.jit
def _window_pairs(words, scale):
    """[KEYS, D/2] pairs of bf16: the keys of FP8 words times UNIT."""
    factor = gl.minimum(scale.to(gl.uint32) + _SCALE_104, 254) * 0x00800080
    words, factor = gl.broadcast(words, gl.expand_dims(factor, 2))
    first, second = gl.inline_asm_elementwise(
        FP8_WORD, "=r,=r,r,r", [words, factor], (gl.uint32, gl.uint32), is_pure=True, pack=1
    )
    return gl.reshape(gl.join(first, second), (KEYS, D // 2))


@gluon.jit
def _compressed_words(index_row, start, end, compressed, ROW: gl.constexpr):
    """Words [KEYS, 16, 4] of the FP4 records that entries from `start` on name, and scales."""
    at = start + gl.arange(0, KEYS, gl.SliceLayout(1, gl.SliceLayout(2, _FP4)))
    index = gl.load(index_row + at, mask=at < end, other=-1)
    record = gl.expand_dims(compressed + index.to(gl.int64) * ROW, 1)
    valid = gl.expand_dims(index >= 0, 1)
    piece = gl.arange(0, D // 32, gl.SliceLayout(0, gl.SliceLayout(2, _FP4)))
    # Both scales of a piece at once.
    halves = record.to(gl.pointer_type(gl.uint16), bitcast=True)
    scale = gl.load(halves + (D // 4 + gl.expand_dims(piece, 0)), mask=valid, other=0)
    words = gl.expand_dims(record, 2).to(gl.pointer_type(gl.uint32), bitcast=True)
    piece = gl.expand_dims(gl.expand_dims(piece, 0), 2) * 4
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, _FP4)))
    word = gl.expand_dims(gl.expand_dims(word, 0), 1)
    return gl.load(words + (piece + word), mask=gl.expand_dims(valid, 2), other=0), scale


@gluon.jit
def _compressed_pairs(words, scale):
    """[KEYS, D/2] pairs of bf16: the keys of FP4 words times UNIT."""
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, _FP4)))
    shift = (gl.expand_dims(gl.expand_dims(word, 0), 1) // 2 * 8).to(gl.uint32)
    code = (gl.expand_dims(scale, 2).to(gl.uint32) >> shift) & 0xFF
    factor = (code << 20).to(gl.float32, bitcast=True) * _TWO_127 * _TWO_103
    factor = factor.to(gl.uint32, bitcast=True) >> 16
    factor = factor | (factor << 16)
    a, b, c, d = gl.inline_asm_elementwise(
        FP4_WORD,
        "=r,=r,=r,=r,r,r",
        [words, factor],
        (gl.uint32, gl.uint32, gl.uint32, gl.uint32),
        is_pure=True,
        pack=1,
    )
    return gl.reshape(gl.join(gl.join(a, c), gl.join(b, d)), (KEYS, D // 2))


@gluon.jit
def produce(
    lists, stores, k_smem, barriers, counts, PLACES: gl.constexpr, ROWS: gl.constexpr
):  # fmt: skip
    """Worker warps: decode the tiles of all items into the buffers, in turn."""
    window_index, compressed_index, window_stride, compressed_stride = lists
    ring, own, compressed, ring_rows = stores
    W, K, tiles, items, blocks, splits = counts
    full, empty = barriers
    pairs = k_smem._reinterpret(gl.uint32, [BUFFERS, KEYS, D // 2], _PAIR_ROWS)
    done = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        token, _, split = item_of(item, blocks, splits)
        first = split * tiles
        row = window_index + token * window_stride
        later = compressed_index + token * compressed_stride
        window_list = listed(row, W, PLACES[0], WORKERS)
        compressed_list = listed(later, K, PLACES[1], WORKERS)
        start, number = tiles_of(window_list, first, tiles, PLACES[0], WORKERS)
        for tile in range(start, start + number):
            # 80 registers of words and scales: none are left to load those of the next tile.
            words, scale = _window_words(row, tile * KEYS, ring, own, ring_rows, ROWS[0], ROWS[1])
            buffer = done % BUFFERS
            mbarrier.wait(empty.index(buffer), (done // BUFFERS & 1) ^ 1)
            pairs.index(buffer).store(_window_pairs(words, scale))
            fence_async_shared()
            gl.thread_barrier()
            mbarrier.arrive(full.index(buffer))
            done += 1
        start, number = tiles_of(compressed_list, first - W // KEYS, tiles, PLACES[1], WORKERS)
        end = (start + number) * KEYS
        words, scale = _compressed_words(later, start * KEYS, end, compressed, ROWS[2])
        for tile in range(start, start + number):
            more, more_scale = _compressed_words(later, (tile + 1) * KEYS, end, compressed, ROWS[2])
            buffer = done % BUFFERS
            mbarrier.wait(empty.index(buffer), (done // BUFFERS & 1) ^ 1)
            pairs.index(buffer).store(_compressed_pairs(words, scale))
            fence_async_shared()
            gl.thread_barrier()
            mbarrier.arrive(full.index(buffer))
            words = more
            scale = more_scale
            done += 1

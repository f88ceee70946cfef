"""Sparse attention on Hopper with its decoding beside its matrix products (Gluon).

The Triton kernel does for each tile of 64 keys, one after the other: load, decode, store, multiply,
softmax, multiply. Here four warps (gluon_tiles.py) load records and decode them into one of two
buffers of shared memory, while eight warps take the tiles from there. Two barriers per buffer say
that it is full, or empty again. Programs stay, one on each processor, and take one token and 64
heads after the other, so that records of the next token are decoded while this one's are used.

The arithmetic is that of the Triton kernel: keys times 2^-16, softmax in base 2, whole numbers as
running maxima. Sums are in another order, so results agree within rounding.

Only for bf16 queries with 512 channels, lists of multiples of 64, and records aligned to 4 bytes.
"""

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from deepinfer.errors import Unsupported
from deepinfer.kernels.launch import INTERPRETED, require_gpu
from deepinfer.kernels.records import UNIT
from deepinfer.kernels.signature import Signature
from deepinfer.ops.sparse_attention.decode import HALF_KEYS, SPLIT_KEYS, merge
from deepinfer.ops.sparse_attention.gluon_tiles import (
    BF16_ROWS,
    BUFFERS,
    HEADS,
    KEYS,
    WORKERS,
    D,
    item_of,
    listed,
    produce,
    tiles_of,
)

LOG2E = 1.4426950408889634
NO_KEY = gl.constexpr(-1.0e30)  # maximum of no scores; finite, so that it can be subtracted
CONSUMERS = gl.constexpr(8)  # warps: two warp groups
# Scores: each warp group has 32 keys. Sums: each has 256 channels.
_SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16]))
_SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16]))
# Maxima [64, 2] with those of both warp groups in each thread, for the rows of its scores.
_TOPS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [8, 0]],
        [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0], [0, 0]],
        [],
        [64, 2],
    )
)
_ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))  # 16 bytes a thread


@gluon.jit
def _consume(
    queries, lists, sink, results, memory, barriers, counts, heads, scale, token_stride,
    head_stride, PLACES: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Default warps: attention of all items over the tiles in the buffers, in turn."""
    window_index, compressed_index, window_stride, compressed_stride = lists
    W, K, tiles, items, blocks, splits = counts
    q_smem, k_smem, p_smem, top_smem = memory
    full, empty = barriers
    column = gl.arange(0, KEYS, gl.SliceLayout(0, _SCORES))
    done = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        token, block, split = item_of(item, blocks, splits)
        row = window_index + token * window_stride
        later = compressed_index + token * compressed_stride
        window_list = listed(row, W, PLACES[0], CONSUMERS)
        compressed_list = listed(later, K, PLACES[1], CONSUMERS)
        head = block * HEADS + gl.arange(0, HEADS, gl.SliceLayout(1, _ROWS))
        at = gl.expand_dims(token * token_stride + head.to(gl.int64) * head_stride, 1)
        channel = gl.expand_dims(gl.arange(0, D, gl.SliceLayout(0, _ROWS)), 0)
        present = gl.expand_dims(head < heads, 1)
        q = gl.load(queries + (at + channel), mask=present, other=0.0)
        first = split * tiles
        start, number = tiles_of(window_list, first, tiles, PLACES[0], CONSUMERS)
        row += start * KEYS
        first -= W // KEYS
        start, rest = tiles_of(compressed_list, first, tiles, PLACES[1], CONSUMERS)
        later += (start - number) * KEYS
        q_smem.store(q)
        fence_async_shared()
        gl.thread_barrier()
        top = gl.full([HEADS], NO_KEY, gl.float32, gl.SliceLayout(1, _SCORES))
        weights = gl.zeros([HEADS, KEYS], gl.float32, _SCORES)
        mixed = gl.zeros([HEADS, D], gl.float32, _SUMS)
        for tile in range(number + rest):
            entries = gl.where(tile < number, row, later)
            index = gl.load(entries + (tile * KEYS + column))
            buffer = done % BUFFERS
            mbarrier.wait(full.index(buffer), done // BUFFERS & 1)
            k = k_smem.index(buffer)
            scores = warpgroup_mma(
                q_smem, k.permute((1, 0)), gl.zeros([HEADS, KEYS], gl.float32, _SCORES),
                use_acc=False, is_async=True,
            )  # fmt: skip
            scores = warpgroup_mma_wait(0, deps=[scores])
            valid = gl.expand_dims(index >= 0, 0)
            scores = gl.where(valid, scores * scale, float("-inf"))
            # Each warp group has the maxima of its keys.
            highest = gl.max(gl.reshape(scores, (HEADS, 2, KEYS // 2)), 2)
            top_smem.store(highest)
            gl.thread_barrier()
            highest = gl.max(top_smem.load(_TOPS), 1)
            highest = gl.convert_layout(highest, gl.SliceLayout(1, _SCORES), assert_trivial=True)
            higher = gl.maximum(top, gl.ceil(highest))
            weight = gl.exp2(scores - gl.expand_dims(higher, 1))
            p_smem.store(weight.to(gl.bfloat16))
            fence_async_shared()
            shrink = gl.maximum(top - higher, -127.0).to(gl.int32) + 127
            shrink = (shrink << 23).to(gl.float32, bitcast=True)
            weights = weights * gl.expand_dims(shrink, 1) + weight
            top = higher
            shrink = gl.convert_layout(shrink, gl.SliceLayout(1, _SUMS), assert_trivial=True)
            mixed = mixed * gl.expand_dims(shrink, 1)
            gl.thread_barrier()
            mixed = warpgroup_mma(p_smem, k, mixed, is_async=True)
            mixed = warpgroup_mma_wait(0, deps=[mixed])
            gl.thread_barrier()
            mbarrier.arrive(empty.index(buffer))
            done += 1
        total = gl.sum(weights, 1)
        _finish(mixed, total, top, token, block, split, sink, results, heads, items // splits
                // blocks, q_smem, SPLIT)  # fmt: skip


@gluon.jit
def _finish(
    mixed, total, top, token, block, split, sink, results, heads, tokens, q_smem,
    SPLIT: gl.constexpr,
):  # fmt: skip
    """Write an item's results."""
    out, lse, tops = results
    head = block * HEADS + gl.arange(0, HEADS, gl.SliceLayout(1, _SCORES))
    if SPLIT:
        base = (split.to(gl.int64) * tokens + token) * heads
        gl.store(tops + (base + head), top, mask=head < heads)
        gl.store(lse + (base + head), total, mask=head < heads)
        head = block * HEADS + gl.arange(0, HEADS, gl.SliceLayout(1, _SUMS))
        channel = gl.arange(0, D, gl.SliceLayout(0, _SUMS))
        at = gl.expand_dims((base + head) * D, 1) + gl.expand_dims(channel, 0)
        gl.store(out + at, mixed, mask=gl.expand_dims(head < heads, 1))
    else:
        base = token * heads
        # As in the Triton kernel: relative to the larger of maximum and sink.
        drain = gl.load(sink + head, mask=head < heads, other=0.0) * 1.4426950408889634
        shrink = gl.exp2(gl.minimum(top - drain, 0.0))
        divisor = total * shrink + gl.exp2(gl.minimum(drain - top, 0.0))
        divisor = gl.where(total > 0.0, divisor, 1.0)
        factor = shrink / (divisor * UNIT)
        factor = gl.convert_layout(factor, gl.SliceLayout(1, _SUMS), assert_trivial=True)
        sums = gl.log2(gl.maximum(total, 0.25)) + top
        sums = gl.where(total > 0.0, sums, float("-inf"))
        gl.store(lse + (base + head), sums, mask=head < heads)
        # Through the memory of the queries, for stores of 16 bytes.
        gl.thread_barrier()
        q_smem.store((mixed * gl.expand_dims(factor, 1)).to(gl.bfloat16))
        gl.thread_barrier()
        result = q_smem.load(_ROWS)
        head = block * HEADS + gl.arange(0, HEADS, gl.SliceLayout(1, _ROWS))
        channel = gl.arange(0, D, gl.SliceLayout(0, _ROWS))
        at = gl.expand_dims((base + head) * D, 1) + gl.expand_dims(channel, 0)
        gl.store(out + at, result, mask=gl.expand_dims(head < heads, 1))
        gl.thread_barrier()


_SIZES = ["W", "K", "tiles", "items", "blocks", "splits", "heads", "ring_rows", "window_stride",
          "compressed_stride"]  # fmt: skip


@gluon.jit(do_not_specialize=_SIZES)
def sparse_attention_kernel(
    queries, ring, own, window_index, compressed, compressed_index, sink, out, lse, tops,
    W, K, tiles, items, blocks, splits, heads, ring_rows, token_stride, head_stride, window_stride,
    compressed_stride, scale, PLACES: gl.constexpr, ROWS: gl.constexpr, SPLIT: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """Items of a token, a block of 64 heads and one of `splits` runs of `tiles` tiles of keys.

    Without SPLIT, writes out [T, N, D] and lse [T, N]. With it, the partial results of each split:
    out [S, T, N, D] float32 sums, lse [S, T, N] weight sums, tops [S, T, N] maxima. ROWS are bytes
    from one record to the next, of ring, own and compressed ones. PLACES are powers of two that
    hold the lists. `scale` takes the keys' UNIT and base 2 into account.
    """
    q_smem = gl.allocate_shared_memory(gl.bfloat16, [HEADS, D], BF16_ROWS)
    k_smem = gl.allocate_shared_memory(gl.bfloat16, [BUFFERS, KEYS, D], BF16_ROWS)
    p_smem = gl.allocate_shared_memory(gl.bfloat16, [HEADS, KEYS], BF16_ROWS)
    top_smem = gl.allocate_shared_memory(
        gl.float32, [HEADS, 2], gl.SwizzledSharedLayout(1, 1, 1, [0, 1])
    )
    full = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    for buffer in gl.static_range(BUFFERS):
        mbarrier.init(full.index(buffer), count=1)
        mbarrier.init(empty.index(buffer), count=1)
    lists = (window_index, compressed_index, window_stride, compressed_stride)
    stores = (ring, own, compressed, ring_rows)
    counts = (W, K, tiles, items, blocks, splits)
    results = (out, lse, tops)
    memory = (q_smem, k_smem, p_smem, top_smem)
    barriers = (full, empty)
    gl.warp_specialize(
        [
            (_consume, (queries, lists, sink, results, memory, barriers, counts, heads, scale,
                        token_stride, head_stride, PLACES, SPLIT)),
            (produce, (lists, stores, k_smem, barriers, counts, PLACES, ROWS)),
        ],
        [WORKERS], [REGISTERS],
    )  # fmt: skip


_FP8_RECORD = D.value + D.value // 32
_FP4_RECORD = D.value // 2 + D.value // 16
# Of 168 registers a thread, the decoding warps keep 112 and leave 196 to the others.
OPTIONS = {"REGISTERS": 112, "num_warps": 8, "maxnreg": 168}


def _check(queries: Tensor, lists: tuple[Tensor, ...], sink: Tensor) -> None:
    if INTERPRETED:
        raise Unsupported("Gluon has no interpreter")
    require_gpu(queries)
    T, N, width = queries.shape
    if torch.cuda.get_device_capability(queries.device)[0] != 9:
        raise Unsupported("needs a Hopper GPU")
    if queries.dtype != torch.bfloat16 or width != D.value:
        raise Unsupported(f"queries are {queries.dtype} of {width} channels, not bfloat16 of 512")
    if sink.dtype != torch.float32 or sink.shape != (N,):
        raise Unsupported(f"sink is {sink.dtype} {list(sink.shape)}, not float32 of {N} heads")
    for index in lists:
        if index.dtype != torch.int32 or index.ndim != 2 or len(index) != T:
            raise Unsupported(f"an index list is {index.dtype} {list(index.shape)} for {T} rows")
        if index.shape[1] % KEYS.value:
            raise Unsupported(f"an index list has {index.shape[1]} entries, no multiple of 64")


def _records(name: str, records: Tensor, row: int) -> Tensor:
    if records.dtype != torch.uint8 or records.ndim != 2 or records.shape[1] != row:
        raise Unsupported(f"{name} is {records.dtype} {list(records.shape)}, not records of {row}")
    records = records if records.stride(1) == 1 else records.contiguous()
    if records.data_ptr() % 4 or records.stride(0) % 4:
        raise Unsupported(f"{name} is not aligned to 4 bytes")
    return records


def _places(entries: int, least: int) -> int:
    return max(least, triton.next_power_of_2(entries))


def launch(
    queries: Tensor,
    window: Tensor,
    own: Tensor,
    window_index: Tensor,
    compressed: Tensor | None,
    compressed_index: Tensor | None,
    sink: Tensor,
    scale: float,
    split: int,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Run the kernel: (out, lse, None), or partial (sums, weights, maxima) of `split` keys each.

    Queries and index lists may be strided by rows, records too; other layouts are copied.
    """
    if (compressed is None) != (compressed_index is None):
        raise Unsupported("compressed records and their index list come together")
    if compressed is None or compressed_index is None:
        _check(queries, (window_index,), sink)
        compressed, compressed_index = window[:0, :_FP4_RECORD], window_index[:, :0]
    else:
        _check(queries, (window_index, compressed_index), sink)
    T, N, width = queries.shape
    queries = queries if queries.stride(2) == 1 else queries.contiguous()
    window = _records("window", window, _FP8_RECORD)
    own = _records("own", own, _FP8_RECORD)
    compressed = _records("compressed", compressed, _FP4_RECORD)
    if window_index.stride(1) != 1:
        window_index = window_index.contiguous()
    if compressed_index.stride(1) != 1:
        compressed_index = compressed_index.contiguous()
    W, K = window_index.shape[1], compressed_index.shape[1]
    total = max(1, (W + K) // KEYS.value)
    tiles = max(1, split // KEYS.value) if split else total
    splits, blocks = -(-total // tiles), triton.cdiv(N, HEADS.value)
    shape = (splits, T, N) if split else (T, N)
    out = torch.empty(*shape, width, dtype=torch.float32 if split else queries.dtype,
                      device=queries.device)  # fmt: skip
    lse = torch.empty(shape, dtype=torch.float32, device=queries.device)
    tops = torch.empty_like(lse) if split else None
    if out.numel() == 0:
        return out, lse, tops
    items = T * blocks * splits
    processors = torch.cuda.get_device_properties(queries.device).multi_processor_count
    sparse_attention_kernel[(min(items, processors),)](
        queries, window, own, window_index, compressed, compressed_index, sink.contiguous(),
        out, lse, lse if tops is None else tops, W, K, tiles, items, blocks, splits, N,
        window.shape[0], queries.stride(0), queries.stride(1), window_index.stride(0),
        compressed_index.stride(0), scale * LOG2E / UNIT.value,
        PLACES=(_places(W, 128), _places(K, 512)),
        ROWS=(window.stride(0), own.stride(0), compressed.stride(0)), SPLIT=split > 0,
        **OPTIONS,
    )  # fmt: skip
    return out, lse, tops


def sparse_attention(
    queries: Tensor,
    window: Tensor,
    own: Tensor,
    window_index: Tensor,
    compressed: Tensor | None,
    compressed_index: Tensor | None,
    sink: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """As the reference; all keys of a token are one after the other.

    Raises:
        Unsupported: queries are not bf16 with 512 channels, a list's length is no multiple of 64,
            records are not aligned to 4 bytes, or there is no Hopper GPU.
    """
    out, lse, _ = launch(queries, window, own, window_index, compressed, compressed_index, sink,
                         scale, split=0)  # fmt: skip
    return out, lse


def sparse_attention_halves(
    queries: Tensor,
    window: Tensor,
    own: Tensor,
    window_index: Tensor,
    compressed: Tensor | None,
    compressed_index: Tensor | None,
    sink: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """As `sparse_attention`, with 320 keys for each program; partial results are merged then.

    Raises:
        Unsupported: as `sparse_attention`.
    """
    partial = launch(queries, window, own, window_index, compressed, compressed_index, sink,
                     scale, split=HALF_KEYS)  # fmt: skip
    return merge(partial, queries, sink)


def sparse_attention_split(
    queries: Tensor,
    window: Tensor,
    own: Tensor,
    window_index: Tensor,
    compressed: Tensor | None,
    compressed_index: Tensor | None,
    sink: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """As `sparse_attention_halves`, with 128 keys for each program, for very few rows."""
    partial = launch(queries, window, own, window_index, compressed, compressed_index, sink,
                     scale, split=SPLIT_KEYS)  # fmt: skip
    return merge(partial, queries, sink)


def _signature(name: str, split: bool) -> Signature:
    types = {
        **dict.fromkeys(("queries", "out"), "*bf16"),
        **dict.fromkeys(("ring", "own", "compressed"), "*u8"),
        **dict.fromkeys(("window_index", "compressed_index"), "*i32"),
        **dict.fromkeys(("sink", "lse", "tops"), "*fp32"),
        **dict.fromkeys((*_SIZES, "token_stride", "head_stride"), "i32"),
        "scale": "fp32",
    }  # fmt: skip
    constants = {"PLACES": (128, 512), "ROWS": (528, 528, 288), "SPLIT": split,
                 "REGISTERS": OPTIONS["REGISTERS"]}  # fmt: skip
    # What is spilled are addresses, outside of the loop that multiplies.
    return Signature(
        name, sparse_attention_kernel, {**types, "out": "*fp32"} if split else types, constants,
        num_warps=8, divisible=("token_stride", "head_stride"), spills=160,
        maxnreg=OPTIONS["maxnreg"],
    )  # fmt: skip


SIGNATURES: tuple[Signature, ...] = (
    _signature("sparse_attention, Gluon", False),
    _signature("sparse_attention_split, Gluon", True),
)

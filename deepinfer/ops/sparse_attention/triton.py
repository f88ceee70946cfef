"""Triton kernel of sparse attention over packed records: one program per token and 64 heads.

A program walks the token's key lists in tiles, decodes each tile of records in registers, and uses
it twice from shared memory: queries times keys, and probabilities times keys. The softmax is
online in base 2, and its running maximum is an integer: rescaling is exact.

Three implementations, each with one order of sums for any number of rows:

    sparse_attention         all keys of a token in one program. The one for many rows.
    sparse_attention_halves  (decode.py) 320 keys per program: two programs at released sizes.
    sparse_attention_split   (decode.py) 128 keys per program. These two have their partial results
                             merged by a second kernel, for rows too few to fill a GPU; they move
                             2 * splits * N * D float32 per row more.

They agree within rounding and not bit for bit: the same bits would need a second accumulator of
64 x 512 float32, and the registers of an SM hold two and nothing else. So the choice is by name.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.errors import Unsupported
from deepinfer.kernels.formats import narrow
from deepinfer.kernels.launch import DOT_DTYPE, require_gpu
from deepinfer.kernels.records import UNIT, channels, compressed_tile, window_tile
from deepinfer.kernels.signature import Signature

LOG2E = 1.4426950408889634
# Sizes of a call, which need no kernel of their own.
_SIZES = ["W", "K", "tiles", "heads", "ring_rows", "window_stride", "compressed_stride"]
NO_KEY = tl.constexpr(-1.0e30)  # maximum of no scores; finite, so that it can be subtracted


@triton.jit
def power_of_two(n):
    """2^n, exactly, of float32 integers at most 0; 0 below -126."""
    return ((tl.maximum(n, -127.0).to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _part(x, dot: tl.constexpr):
    # float32 `x` as an operand of the matrix product, and what that leaves out.
    if dot == tl.bfloat16:
        # Here the conversion instruction is right, and the softmax has no time to spare.
        rounded = x.to(tl.bfloat16)
        return rounded, x - rounded.to(tl.float32)
    else:
        value = narrow(x, tl.bfloat16).to(tl.float32)
        return value, x - value


@triton.jit
def _attend(
    q, q_rest, q_last, k, valid, top, total, mixed, scale, start, end,
    HEADS: tl.constexpr, KEYS: tl.constexpr, PARTS: tl.constexpr, dot: tl.constexpr,
):  # fmt: skip
    """One tile of keys: (top, total, mixed) with it."""
    p = tl.zeros((HEADS, KEYS), tl.float32).to(dot)
    p_rest = p
    p_last = p
    shrink = tl.full((HEADS,), 1.0, tl.float32)
    # Always true. A product that feeds another one directly is laid out so that every warp group
    # does all of it; that of a conditional block is shared out.
    if start < end:
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if PARTS == 3:
            scores = tl.dot(q_rest, tl.trans(k), scores, input_precision="ieee")
            scores = tl.dot(q_last, tl.trans(k), scores, input_precision="ieee")
        scores = tl.where(valid[None, :], scores * scale, float("-inf"))
        higher = tl.maximum(top, tl.ceil(tl.max(scores, 1)))
        weight = tl.exp2(scores - higher[:, None])
        shrink = power_of_two(top - higher)
        top = higher
        total = total * shrink + tl.sum(weight, 1)
        p, rest = _part(weight, dot)
        if PARTS == 3:
            p_rest, rest = _part(rest, dot)
            p_last, rest = _part(rest, dot)
    mixed = mixed * shrink[:, None]
    mixed = tl.dot(p, k, mixed, input_precision="ieee")
    if PARTS == 3:
        mixed = tl.dot(p_rest, k, mixed, input_precision="ieee")
        mixed = tl.dot(p_last, k, mixed, input_precision="ieee")
    return top, total, mixed


@triton.jit
def _listed(index_row, first, count, KEYS: tl.constexpr, EVEN: tl.constexpr):
    """[KEYS] entries of an index list from `first` on, -1 beyond its end (never if EVEN)."""
    at = first + tl.arange(0, KEYS)
    if EVEN:
        return tl.load(index_row + at)
    else:
        return tl.load(index_row + at, mask=at < count, other=-1)


@triton.jit
def _used(index_row, count, PLACES: tl.constexpr):
    """1 + place of the last valid entry of an index list of `count`, or 0."""
    at = tl.arange(0, PLACES)
    index = tl.load(index_row + at, mask=at < count, other=-1)
    return tl.max(tl.where(index >= 0, at + 1, 0), 0)


@triton.jit
def _window_record(index, ring, own, ring_rows, RING_ROW: tl.constexpr, OWN_ROW: tl.constexpr):
    """Pointers to the records that entries of a window list name."""
    own_index = (index - ring_rows).to(tl.int64)
    return tl.where(own_index >= 0, own + own_index * OWN_ROW, ring + index.to(tl.int64) * RING_ROW)


@triton.jit(do_not_specialize=_SIZES)
def sparse_attention_kernel(
    queries, ring, own, window_index, compressed, compressed_index, sink, out, lse, tops,
    W, K, tiles, heads, ring_rows, token_stride, head_stride, window_stride, compressed_stride,
    scale, D: tl.constexpr, W_PLACES: tl.constexpr, K_PLACES: tl.constexpr, W_EVEN: tl.constexpr,
    K_EVEN: tl.constexpr, RING_ROW: tl.constexpr, OWN_ROW: tl.constexpr,
    COMPRESSED_ROW: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr,
    WIDE: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr, dot: tl.constexpr,
):  # fmt: skip
    """`tiles` tiles of a token's keys from split `program_id(2)` on; see the launchers.

    Without SPLIT, writes out [T, N, D] and lse [T, N]. With it, the partial results of its tiles:
    out [S, T, N, D] float32 sums, lse [S, T, N] weight sums, tops [S, T, N] maxima. *_ROW are bytes
    from one record to the next, `scale` takes the keys' UNIT and base 2 into account.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    present = head < heads
    # Outputs are in the order of channels too.
    channel = channels(D, WIDE)
    at = token * token_stride + head.to(tl.int64) * head_stride
    q = tl.load(queries + at[:, None] + channel[None, :], mask=present[:, None], other=0.0)
    if PARTS == 3:
        q, rest = _part(q, dot)
        q_rest, rest = _part(rest, dot)
        q_last, rest = _part(rest, dot)
    else:
        q = q.to(dot)
        q_rest = q
        q_last = q
    top = tl.full((HEADS,), NO_KEY, tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    mixed = tl.zeros((HEADS, D), tl.float32)
    first_tile = tl.program_id(2) * tiles
    window_tiles = (W + KEYS - 1) // KEYS
    if W_PLACES > 0:
        row = window_index + token * window_stride
        first = first_tile * KEYS
        end = tl.minimum(_used(row, W, W_PLACES), first + tiles * KEYS)
        if dot == tl.bfloat16:
            for start in tl.range(first, end, KEYS, num_stages=STAGES):
                index = _listed(row, start, W, KEYS, W_EVEN)
                record = _window_record(index, ring, own, ring_rows, RING_ROW, OWN_ROW)
                k = window_tile(record, index >= 0, D, KEYS, WIDE, dot)
                top, total, mixed = _attend(
                    q, q_rest, q_last, k, index >= 0, top, total, mixed, scale, start, end,
                    HEADS, KEYS, PARTS, dot,
                )  # fmt: skip
        else:
            # The interpreter has no loops with bounds that are computed.
            for start in range(0, W_PLACES, KEYS):
                if (start >= first) & (start < end):
                    index = _listed(row, start, W, KEYS, W_EVEN)
                    record = _window_record(index, ring, own, ring_rows, RING_ROW, OWN_ROW)
                    k = window_tile(record, index >= 0, D, KEYS, WIDE, dot)
                    top, total, mixed = _attend(
                        q, q_rest, q_last, k, index >= 0, top, total, mixed, scale, start, end,
                        HEADS, KEYS, PARTS, dot,
                    )  # fmt: skip
    if K_PLACES > 0:
        row = compressed_index + token * compressed_stride
        first = tl.maximum(first_tile - window_tiles, 0) * KEYS
        end = tl.minimum(_used(row, K, K_PLACES), (first_tile + tiles - window_tiles) * KEYS)
        if dot == tl.bfloat16:
            for start in tl.range(first, end, KEYS, num_stages=STAGES):
                index = _listed(row, start, K, KEYS, K_EVEN)
                record = compressed + index.to(tl.int64) * COMPRESSED_ROW
                k = compressed_tile(record, index >= 0, D, KEYS, WIDE, dot)
                top, total, mixed = _attend(
                    q, q_rest, q_last, k, index >= 0, top, total, mixed, scale, start, end,
                    HEADS, KEYS, PARTS, dot,
                )  # fmt: skip
        else:
            for start in range(0, K_PLACES, KEYS):
                if (start >= first) & (start < end):
                    index = _listed(row, start, K, KEYS, K_EVEN)
                    record = compressed + index.to(tl.int64) * COMPRESSED_ROW
                    k = compressed_tile(record, index >= 0, D, KEYS, WIDE, dot)
                    top, total, mixed = _attend(
                        q, q_rest, q_last, k, index >= 0, top, total, mixed, scale, start, end,
                        HEADS, KEYS, PARTS, dot,
                    )  # fmt: skip
    if SPLIT:
        rows = (tl.program_id(2).to(tl.int64) * tl.num_programs(0) + token) * heads + head
        tl.store(tops + rows, top, mask=present)
        tl.store(lse + rows, total, mask=present)
    else:
        rows = token * heads + head
        # Relative to the larger of maximum and sink, so that neither can overflow. The weights of
        # any key sum to more than 0.25; without one, whatever the divisor, the result is 0.
        drain = tl.load(sink + head, mask=present, other=0.0) * 1.4426950408889634
        shrink = tl.exp2(tl.minimum(top - drain, 0.0))
        divisor = total * shrink + tl.exp2(tl.minimum(drain - top, 0.0))
        divisor = tl.where(total > 0.0, divisor, 1.0)
        mixed = mixed * (shrink / (divisor * UNIT))[:, None]
        sums = tl.log2(tl.maximum(total, 0.25)) + top
        tl.store(lse + rows, tl.where(total > 0.0, sums, float("-inf")), mask=present)
    if dot == tl.bfloat16:
        result = mixed.to(out.dtype.element_ty)
    else:
        result = narrow(mixed, out.dtype.element_ty)
    tl.store(out + rows[:, None] * D + channel[None, :], result, mask=present[:, None])


@dataclass(frozen=True)
class Plan:
    """How a call is cut, from static sizes.

    Attributes:
        heads: per program. keys: per tile. parts: bf16 values that make up one query value.
        tiles: of all keys of a token.
    """

    heads: int
    keys: int
    warps: int
    stages: int
    parts: int
    tiles: int

    def constants(self, D: int, W: int, K: int) -> dict[str, int | bool]:
        """Constants of the kernel for lists of lengths W and K."""
        return {
            "D": D,
            "W_PLACES": triton.next_power_of_2(max(W, 128)) if W else 0,
            "K_PLACES": triton.next_power_of_2(max(K, 512)) if K else 0,
            "W_EVEN": W % self.keys == 0,
            "K_EVEN": K % self.keys == 0,
            "HEADS": self.heads,
            "KEYS": self.keys,
            "PARTS": self.parts,
            "STAGES": self.stages,
        }

    def splits(self, keys: int) -> int:
        """Programs that share the keys of a token when each takes `keys` of them."""
        return -(-self.tiles // max(1, keys // self.keys))


def plan(dtype: torch.dtype, D: int, W: int, K: int) -> Plan:
    """The cut for queries of `dtype`; float32 ones are three bf16 parts each.

    At D = 512, 64 x 512 float32 sums are half the registers of an SM, and queries, one tile of
    decoded keys and two of packed records are its shared memory. Five stages keep two tiles of
    records and of indices under way; with fewer no copy is in flight while the products run.
    """
    warps = 8 if D > 128 else 4
    if dtype == torch.bfloat16:
        return Plan(64, 64, warps, 5, 1, max(1, -(-W // 64) + -(-K // 64)))
    return Plan(16, 32, warps, 1, 3, max(1, -(-W // 32) + -(-K // 32)))


def _records(name: str, records: Tensor, row: int) -> Tensor:
    if records.dtype != torch.uint8 or records.ndim != 2 or records.shape[1] != row:
        raise Unsupported(f"{name} is {records.dtype} {list(records.shape)}, not records of {row}")
    return records if records.stride(1) == 1 else records.contiguous()


def _check(queries: Tensor, lists: tuple[Tensor | None, ...], sink: Tensor) -> None:
    T, N, D = queries.shape
    if queries.dtype not in (torch.bfloat16, torch.float32):
        raise Unsupported(f"queries are {queries.dtype}, not bfloat16 or float32")
    if D not in (32, 64, 128, 256, 512):
        raise Unsupported(f"head dim is {D}, not 32, 64, 128, 256 or 512")
    if sink.dtype != torch.float32 or sink.shape != (N,):
        raise Unsupported(f"sink is {sink.dtype} {list(sink.shape)}, not float32 of {N} heads")
    for index in lists:
        if index is not None and (index.dtype != torch.int32 or index.shape[:-1] != (T,)):
            raise Unsupported(f"an index list is {index.dtype} {list(index.shape)} for {T} rows")
    require_gpu(queries)


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
    _check(queries, (window_index, compressed_index), sink)
    T, N, D = queries.shape
    queries = queries if queries.stride(2) == 1 else queries.contiguous()
    window = _records("window", window, D + D // 32)
    own = _records("own", own, D + D // 32)
    window_index = window_index if window_index.stride(1) == 1 else window_index.contiguous()
    if compressed is None or compressed_index is None:
        compressed, compressed_index = window, window_index[:, :0]
    else:
        compressed = _records("compressed", compressed, D // 2 + D // 16)
    if compressed_index.stride(1) != 1:
        compressed_index = compressed_index.contiguous()
    W, K = window_index.shape[1], compressed_index.shape[1]
    cut = plan(queries.dtype, D, W, K)
    stores = (window, own, compressed)
    wide = all(x.data_ptr() % 4 == 0 and x.stride(0) % 4 == 0 for x in stores)
    splits = cut.splits(split) if split else 1
    shape = (splits, T, N) if split else (T, N)
    out = torch.empty(*shape, D, dtype=torch.float32 if split else queries.dtype,
                      device=queries.device)  # fmt: skip
    lse = torch.empty(shape, dtype=torch.float32, device=queries.device)
    tops = torch.empty_like(lse) if split else None
    if out.numel() == 0:
        return out, lse, tops
    sparse_attention_kernel[(T, triton.cdiv(N, cut.heads), splits)](
        queries, window, own, window_index, compressed, compressed_index, sink.contiguous(),
        out, lse, lse if tops is None else tops, W, K, -(-cut.tiles // splits), N, window.shape[0],
        queries.stride(0), queries.stride(1), window_index.stride(0), compressed_index.stride(0),
        scale * LOG2E / UNIT.value, RING_ROW=window.stride(0), OWN_ROW=own.stride(0),
        COMPRESSED_ROW=compressed.stride(0), WIDE=wide, SPLIT=split > 0, dot=DOT_DTYPE,
        num_warps=cut.warps, num_stages=cut.stages, **cut.constants(D, W, K),
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
    """As the reference; all keys of a token are in one program, for any number of rows.

    Raises:
        Unsupported: other dtypes or head dims than the contract's, or no GPU.
    """
    out, lse, _ = launch(queries, window, own, window_index, compressed, compressed_index, sink,
                         scale, split=0)  # fmt: skip
    return out, lse


_TYPES = {
    **dict.fromkeys(("queries", "out"), "*bf16"),
    **dict.fromkeys(("ring", "own", "compressed"), "*u8"),
    **dict.fromkeys(("window_index", "compressed_index"), "*i32"),
    **dict.fromkeys(("sink", "lse", "tops"), "*fp32"),
    **dict.fromkeys((*_SIZES, "token_stride", "head_stride"), "i32"),
    "scale": "fp32",
}


def _signature(name: str, K: int, split: bool) -> Signature:
    D, W = 512, 128
    cut = plan(torch.bfloat16, D, W, K)
    constants = {
        **cut.constants(D, W, K), "RING_ROW": 528, "OWN_ROW": 528, "COMPRESSED_ROW": 288,
        "SPLIT": split, "WIDE": True, "dot": tl.bfloat16,
    }  # fmt: skip
    types = {**_TYPES, "out": "*fp32"} if split else _TYPES
    # What is spilled are addresses, stored before the loops: 20 loads in 1,000 instructions.
    return Signature(name, sparse_attention_kernel, types, constants, cut.warps, cut.stages,
                     ("token_stride", "head_stride"), spills=128 if K else 0)  # fmt: skip


SIGNATURES: tuple[Signature, ...] = (
    _signature("sparse_attention", 512, False),
    _signature("sparse_attention_window_only", 0, False),
    _signature("sparse_attention_split", 512, True),
)

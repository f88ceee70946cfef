"""Sparse attention with the keys of a token split over programs, for few rows.

The number of splits depends on the lengths of the key lists only, so a row's result is the same
whatever rows come with it. Partial results are merged in the order of the keys.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.formats import narrow
from deepinfer.kernels.records import UNIT
from deepinfer.kernels.signature import Signature
from deepinfer.ops.sparse_attention.triton import launch, plan, power_of_two

SPLIT_KEYS = 128
HALF_KEYS = 320


@triton.jit(do_not_specialize=["rows", "heads"])
def combine_kernel(
    sums, weights, tops, sink, out, lse, rows, heads, D: tl.constexpr, SPLITS: tl.constexpr
):
    """One program per token and head: out [T, N, D] and lse [T, N] of S partial results.

    sums [S, T, N, D] of weight * key * UNIT and weights [S, T, N] are relative to 2^tops, whole
    numbers; `rows` is T * N. The arithmetic of the last lines is that of the kernel without splits.
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, D)
    highest = tl.load(tops + row)
    for split in tl.static_range(1, SPLITS):
        highest = tl.maximum(highest, tl.load(tops + row + split * rows.to(tl.int64)))
    total = highest * 0.0
    mixed = tl.zeros((D,), tl.float32)
    for split in tl.static_range(SPLITS):
        part = row + split * rows.to(tl.int64)
        shrink = power_of_two(tl.load(tops + part) - highest)
        total += tl.load(weights + part) * shrink
        mixed += tl.load(sums + part * D + at) * shrink
    drain = tl.load(sink + row % heads) * 1.4426950408889634
    shrink = tl.exp2(tl.minimum(highest - drain, 0.0))
    divisor = total * shrink + tl.exp2(tl.minimum(drain - highest, 0.0))
    divisor = tl.where(total > 0.0, divisor, 1.0)
    mixed = mixed * (shrink / (divisor * UNIT))
    log_sum = tl.log2(tl.maximum(total, 0.25)) + highest
    tl.store(lse + row, tl.where(total > 0.0, log_sum, float("-inf")))
    tl.store(out + row * D + at, narrow(mixed, out.dtype.element_ty))


def merge(
    partial: tuple[Tensor, Tensor, Tensor | None], queries: Tensor, sink: Tensor
) -> tuple[Tensor, Tensor]:
    """out and lse from the (sums, weights, maxima) of a launch whose programs shared the keys."""
    sums, weights, tops = partial
    T, N, D = queries.shape
    out = torch.empty(T, N, D, dtype=queries.dtype, device=queries.device)
    lse = torch.empty(T, N, dtype=torch.float32, device=queries.device)
    if out.numel():
        combine_kernel[(T * N,)](
            sums, weights, tops, sink.contiguous(), out, lse, T * N, N, D=D,
            SPLITS=sums.shape[0], num_warps=max(1, D // 256),
        )  # fmt: skip
    return out, lse


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
    """As the reference; each 128 keys of a token have a program of their own.

    Needs 4 * splits * T * N * (D + 2) bytes for partial results: 0.66 MB per row at released sizes.

    Raises:
        Unsupported: as `sparse_attention` of the Triton backend.
    """
    partial = launch(queries, window, own, window_index, compressed, compressed_index, sink,
                     scale, split=SPLIT_KEYS)  # fmt: skip
    return merge(partial, queries, sink)


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
    """As `sparse_attention_split`, with 320 keys for each program: 64 rows fill 128 processors."""
    partial = launch(queries, window, own, window_index, compressed, compressed_index, sink,
                     scale, split=HALF_KEYS)  # fmt: skip
    return merge(partial, queries, sink)


SIGNATURES: tuple[Signature, ...] = (
    Signature(
        "sparse_attention_combine",
        combine_kernel,
        {
            **dict.fromkeys(("sums", "weights", "tops", "sink", "lse"), "*fp32"),
            "out": "*bf16",
            "rows": "i32",
            "heads": "i32",
        },
        {"D": 512, "SPLITS": plan(torch.bfloat16, 512, 128, 512).splits(SPLIT_KEYS)},
        num_warps=2,
    ),
)

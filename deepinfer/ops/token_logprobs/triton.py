"""Triton kernels of token_logprobs and top_logprobs.

Knows chunks of rows; must not know sampling parameters. A row is cut into chunks of fixed size, one
program each; a second launch puts their results together, always in the same order.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.errors import Unsupported
from deepinfer.kernels.launch import require_gpu
from deepinfer.kernels.signature import Signature
from deepinfer.ops.topk_select.triton import select_rows

_CHUNK = 4096
_MOST = 1024  # alternatives per row that fit one program

_MINUS_INF = tl.constexpr(float("-inf"))


@triton.jit(do_not_specialize=["V", "chunks"])
def part_kernel(logits, row_stride, V, chunks, ids, maxima, sums, ahead, CHUNK: tl.constexpr):
    """Largest logit, sum of exponentials and tokens before ids[row] (None: no count)."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = column < V
    logit = tl.load(logits + row * row_stride + column, mask=inside, other=_MINUS_INF)
    top = tl.max(logit, axis=0)
    safe = tl.where(top > _MINUS_INF, top, 0.0)
    place = row * chunks + chunk
    tl.store(maxima + place, top)
    tl.store(sums + place, tl.sum(tl.exp(logit - safe), axis=0))
    if ids is not None:
        chosen = tl.load(ids + row)
        own = tl.load(logits + row * row_stride + tl.maximum(chosen, 0))
        before = (logit > own) | ((logit == own) & (column < chosen))
        tl.store(ahead + place, tl.sum((before & inside).to(tl.int32), axis=0))


@triton.jit
def _log_total(maxima, sums, row, chunks, PADDED: tl.constexpr):
    """Largest logit of a row, and the logarithm of its sum of exponentials less that logit."""
    chunk = tl.arange(0, PADDED)
    inside = chunk < chunks
    largest = tl.load(maxima + row * chunks + chunk, mask=inside, other=_MINUS_INF)
    part = tl.load(sums + row * chunks + chunk, mask=inside, other=0.0)
    top = tl.max(largest, axis=0)
    safe = tl.where(top > _MINUS_INF, top, 0.0)
    return safe, tl.log(tl.sum(part * tl.exp(largest - safe), axis=0))


@triton.jit(do_not_specialize=["chunks"])
def token_kernel(
    logits, row_stride, ids, chunks, maxima, sums, ahead, logprobs, ranks, PADDED: tl.constexpr
):  # fmt: skip
    """Log-probability and rank of one row's token."""
    row = tl.program_id(0).to(tl.int64)
    top, log_total = _log_total(maxima, sums, row, chunks, PADDED)
    chunk = tl.arange(0, PADDED)
    before = tl.load(ahead + row * chunks + chunk, mask=chunk < chunks, other=0)
    chosen = tl.load(ids + row)
    own = tl.load(logits + row * row_stride + tl.maximum(chosen, 0))
    tl.store(logprobs + row, tl.where(chosen >= 0, own - top - log_total, _MINUS_INF))
    rank = tl.sum(before.to(tl.int64), axis=0) + 1
    tl.store(ranks + row, tl.where(chosen >= 0, rank, 0))


@triton.jit(do_not_specialize=["chunks"])
def top_kernel(
    logits, row_stride, found, chunks, maxima, sums, ids, logprobs,
    K: tl.constexpr, PADDED: tl.constexpr, K_PAD: tl.constexpr,
):  # fmt: skip
    """Sort one row's selected columns: each counts those before it."""
    row = tl.program_id(0).to(tl.int64)
    top, log_total = _log_total(maxima, sums, row, chunks, PADDED)
    at = tl.arange(0, K_PAD)
    column = tl.load(found + row * K + at, mask=at < K, other=-1)
    value = tl.load(logits + row * row_stride + column, mask=column >= 0, other=_MINUS_INF)
    place = tl.full((K_PAD,), 0, tl.int32)
    # `found` ascends, and -1 is last: among equals the one that was found first comes first.
    for other in range(K):
        there = tl.load(found + row * K + other)
        that = tl.load(logits + row * row_stride + there, mask=there >= 0, other=_MINUS_INF)
        place += ((that > value) | ((that == value) & (other < at))).to(tl.int32)
    tl.store(ids + row * K + place, column, mask=at < K)
    tl.store(logprobs + row * K + place, value - top - log_total, mask=at < K)


def _parts(logits: Tensor, ids: Tensor | None) -> tuple[int, Tensor, Tensor, Tensor]:
    """Number of chunks, their largest logits, sums, and counts of tokens before ids."""
    rows, V = logits.shape
    chunks = triton.cdiv(V, _CHUNK)
    maxima, sums = (
        torch.empty((rows, chunks), dtype=torch.float32, device=logits.device) for _ in range(2)
    )
    ahead = torch.empty((rows, chunks), dtype=torch.int32, device=logits.device)
    part_kernel[(rows, chunks)](
        logits, logits.stride(0), V, chunks, ids, maxima, sums, ahead, CHUNK=_CHUNK, num_warps=8
    )
    return chunks, maxima, sums, ahead


def _checked(logits: Tensor) -> Tensor:
    require_gpu(logits)
    if logits.dtype != torch.float32:
        raise Unsupported(f"logits of {logits.dtype}")
    if logits.shape[1] == 0:
        raise Unsupported("an empty vocabulary")
    return logits if logits.stride(1) == 1 else logits.contiguous()


def token_logprobs(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """See the reference; two launches.

    Raises:
        Unsupported: no GPU, other dtypes.
    """
    logits = _checked(logits)
    if ids.dtype != torch.int64:
        raise Unsupported(f"ids of {ids.dtype}")
    rows = logits.shape[0]
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    ranks = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        ids = ids.contiguous()
        chunks, *parts = _parts(logits, ids)
        token_kernel[(rows,)](
            logits, logits.stride(0), ids, chunks, *parts, logprobs, ranks,
            PADDED=triton.next_power_of_2(chunks), num_warps=1,
        )  # fmt: skip
    return logprobs, ranks


def top_logprobs(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """See the reference; two launches and those of topk_select.

    Raises:
        Unsupported: no GPU, other dtypes, more than 1024 tokens wanted.
    """
    logits = _checked(logits)
    if k > _MOST:
        raise Unsupported(f"{k} tokens wanted: sorts at most {_MOST}")
    rows, k = logits.shape[0], min(k, logits.shape[1])
    ids = torch.empty((rows, k), dtype=torch.int64, device=logits.device)
    logprobs = torch.empty((rows, k), dtype=torch.float32, device=logits.device)
    if ids.numel():
        found = select_rows(logits, k, torch.int64)
        chunks, maxima, sums, _ = _parts(logits, None)
        top_kernel[(rows,)](
            logits, logits.stride(0), found, chunks, maxima, sums, ids, logprobs, K=k,
            PADDED=triton.next_power_of_2(chunks), K_PAD=max(32, triton.next_power_of_2(k)),
            num_warps=1,
        )  # fmt: skip
    return ids, logprobs


_TYPES = {
    "logits": "*fp32", "row_stride": "i32", "V": "i32", "chunks": "i32",
    "maxima": "*fp32", "sums": "*fp32", "ahead": "*i32", "logprobs": "*fp32", "ranks": "*i64",
    "found": "*i64", "ids": "*i64",
}  # fmt: skip


def _signature(
    name: str, kernel: Any, warps: int, without_ids: bool = False, **constants: int
) -> Signature:
    types = {k: v for k, v in _TYPES.items() if k in kernel.arg_names}
    values: dict[str, object] = {**constants}
    if without_ids:
        del types["ids"]
        values["ids"] = None
    return Signature(name, kernel, types, values, num_warps=warps, divisible=("row_stride",))


SIGNATURES: tuple[Signature, ...] = (
    _signature("parts", part_kernel, 8, CHUNK=_CHUNK),
    _signature("parts without ids", part_kernel, 8, True, CHUNK=_CHUNK),
    _signature("token", token_kernel, 1, PADDED=32),
    _signature("top 20", top_kernel, 1, K=20, PADDED=32, K_PAD=32),
)

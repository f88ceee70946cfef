"""engram_hash on a GPU: one kernel, exact int64 arithmetic.

Knows tiles of tokens and heads; must not know tokens or tables.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.errors import Unsupported
from deepinfer.kernels.launch import require_gpu
from deepinfer.kernels.signature import Signature

_ROWS = 16


@triton.jit(do_not_specialize=["T"])
def hash_kernel(
    classes, multipliers, primes, offsets, out, T, row_stride,
    G: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """All orders and heads of ROWS tokens."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = rows < T
    head = tl.arange(0, PADDED)
    inside = live[:, None] & (head < HEADS)[None, :]
    state = tl.load(classes + rows * row_stride, mask=live, other=0) * tl.load(multipliers)
    for order in tl.static_range(1, G):
        value = tl.load(classes + rows * row_stride + order, mask=live, other=0)
        state = state ^ (value * tl.load(multipliers + order))
        column = (order - 1) * HEADS + head
        prime = tl.load(primes + column, mask=head < HEADS, other=1)[None, :]
        # The remainder of the hardware has the sign of the dividend, that of the contract is >= 0.
        rest = state[:, None] % prime
        rest = tl.where(rest < 0, rest + prime, rest)
        rest += tl.load(offsets + column, mask=head < HEADS, other=0)[None, :]
        tl.store(out + rows[:, None] * ((G - 1) * HEADS) + column[None, :], rest, mask=inside)


def engram_hash(classes: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor) -> Tensor:
    """See the reference; one launch. Classes whose last axis has another stride are copied.

    Raises:
        Unsupported: no GPU, a tensor that is not int64.
    """
    require_gpu(classes)
    if any(x.dtype != torch.int64 for x in (classes, multipliers, primes, offsets)):
        raise Unsupported("classes or constants that are not int64")
    G, heads = classes.shape[-1], primes.shape[-1]
    flat = classes.reshape(-1, G)
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    T = flat.shape[0]
    out = torch.empty((T, (G - 1) * heads), dtype=torch.int64, device=classes.device)
    if T and out.shape[1]:
        hash_kernel[(triton.cdiv(T, _ROWS),)](
            flat, multipliers.contiguous(), primes.contiguous(), offsets.contiguous(), out, T,
            flat.stride(0), G=G, HEADS=heads, ROWS=_ROWS, PADDED=triton.next_power_of_2(heads),
            num_warps=4,
        )  # fmt: skip
    return out.view(*classes.shape[:-1], out.shape[1])


SIGNATURES = (
    Signature(
        "engram_hash",
        hash_kernel,
        {
            **dict.fromkeys(("classes", "multipliers", "primes", "offsets", "out"), "*i64"),
            "T": "i32",
            "row_stride": "i32",
        },
        {"G": 4, "HEADS": 8, "ROWS": _ROWS, "PADDED": 8},
    ),
)

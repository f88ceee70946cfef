"""Triton kernel of moe_gate.

Knows router logits; must not know the experts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.errors import Unsupported
from deepinfer.kernels.launch import require_gpu
from deepinfer.kernels.signature import Signature
from deepinfer.ops.topk_select.triton import order_keys

MAX_EXPERTS, MAX_SELECTED = 1024, 16
_LEAST = tl.constexpr(-(2**63))


@triton.jit
def _score(logit):
    """sqrt(softplus(logit)) float32; in float64 inside, whose logarithm keeps small results."""
    wide = logit.to(tl.float64)
    power = tl.exp(tl.minimum(wide, 20.0))
    above = power + 1.0
    # log(1 + p) loses p in the sum; the quotient gives back what the sum has lost.
    lost = above == 1.0
    log = tl.where(lost, power, tl.log(above) * (power / tl.where(lost, 1.0, above - 1.0)))
    soft = tl.where(wide > 20.0, wide, log).to(tl.float32)
    return tl.sqrt_rn(tl.where(logit != logit, logit, soft))


@triton.jit
def _gate(
    logits,
    bias,
    ids,
    weights,
    row_stride,
    experts,
    scaling,
    SELECTED: tl.constexpr,
    SELECTED_PAD: tl.constexpr,
    NORMALISE: tl.constexpr,
    E_PAD: tl.constexpr,
):
    """One token: its best experts one after the other."""
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, E_PAD)
    exists = expert < experts
    score = _score(tl.load(logits + row * row_stride + expert, mask=exists, other=0))
    preference = score + tl.load(bias + expert, mask=exists, other=0)
    # Unique keys: the score above, and an id that counts down below it.
    key = (order_keys(preference).to(tl.int64) << 32) | (E_PAD - 1 - expert).to(tl.int64)
    key = tl.where(exists, key, _LEAST)
    choice = tl.arange(0, SELECTED_PAD)
    chosen = tl.zeros((SELECTED_PAD,), tl.int32)
    weight = tl.zeros((SELECTED_PAD,), tl.float32)
    total = 0.0
    for number in tl.static_range(SELECTED):
        best = tl.max(key, axis=0)
        found = E_PAD - 1 - (best & 0xFFFFFFFF).to(tl.int32)
        own = tl.sum(tl.where(expert == found, score, 0.0), axis=0)
        chosen = tl.where(choice == number, found, chosen)
        weight = tl.where(choice == number, own, weight)
        total += own
        key = tl.where(expert == found, _LEAST, key)
    if NORMALISE:
        weight = tl.div_rn(weight, total + 1e-20)
    inside = choice < SELECTED
    tl.store(ids + row * SELECTED + choice, chosen.to(tl.int64), mask=inside)
    tl.store(weights + row * SELECTED + choice, weight * scaling, mask=inside)


def moe_gate(
    logits: Tensor, bias: Tensor, selected: int, scaling: float, normalise: bool
) -> tuple[Tensor, Tensor]:
    """See the reference. Logits may have any strides between rows.

    Raises:
        Unsupported: no GPU, another dtype than float32, a gradient is wanted, more than
            MAX_EXPERTS experts or MAX_SELECTED selected.
    """
    require_gpu(logits)
    if logits.dtype != torch.float32 or bias.dtype != torch.float32:
        raise Unsupported(f"{logits.dtype} and {bias.dtype}: takes float32")
    if logits.requires_grad and torch.is_grad_enabled():
        raise Unsupported("has no gradient")
    experts = logits.shape[-1]
    if experts > MAX_EXPERTS or selected > min(MAX_SELECTED, experts):
        raise Unsupported(f"{selected} of {experts}: takes {MAX_SELECTED} of {MAX_EXPERTS}")
    flat = logits.reshape(-1, experts)
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    shape = (*logits.shape[:-1], selected)
    ids = torch.empty(shape, dtype=torch.int64, device=logits.device)
    weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
    if len(flat):
        _gate[(len(flat),)](
            flat, bias.contiguous(), ids, weights, flat.stride(0), experts, float(scaling),
            SELECTED=selected, SELECTED_PAD=triton.next_power_of_2(selected),
            NORMALISE=normalise and selected > 1, E_PAD=max(32, triton.next_power_of_2(experts)),
        )  # fmt: skip
    return ids, weights


SIGNATURES: tuple[Signature, ...] = tuple(
    Signature(
        f"moe_gate {selected} of {experts}",
        _gate,
        {
            "logits": "*fp32",
            "bias": "*fp32",
            "ids": "*i64",
            "weights": "*fp32",
            "row_stride": "i32",
            "experts": "i32",
            "scaling": "fp32",
        },
        {
            "SELECTED": selected,
            "SELECTED_PAD": triton.next_power_of_2(selected),
            "NORMALISE": True,
            "E_PAD": triton.next_power_of_2(experts),
        },
        divisible=("row_stride", "experts"),
    )
    for selected, experts in ((6, 384), (3, 128))
)

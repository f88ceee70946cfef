"""What the kernels of TileKernels 2.1.0 promise, in PyTorch: the package itself needs a GPU.

Its checks of arguments are here as assertions, so that adapters are held to them.
"""

import math
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from deepinfer.numerics import encode_e2m1, pack_nibbles, round_e2m1

_ACTIVATIONS = (torch.bfloat16, torch.float32)
_SMALLEST = {("e4m3", False): 1e-4, ("e2m1", False): 6 * 2.0**-126, ("e2m1", True): 6 * 2.0**-9}
_LARGEST = {"e4m3": 448.0, "e2m1": 6.0}


def _groups(
    x: Tensor, fmt: str, size: int, round_sf: bool, use_e4m3_sf: bool
) -> tuple[Tensor, Tensor]:
    assert x.dim() == 2
    assert x.stride(-1) == 1
    assert x.dtype in _ACTIVATIONS
    assert size in (16, 32, 64, 128)
    assert x.shape[1] % 64 == 0
    assert not (round_sf and use_e4m3_sf)
    wide = x.double().unflatten(1, (-1, size))
    amax = wide.abs().amax(-1, keepdim=True).clamp_min(_SMALLEST[fmt, use_e4m3_sf])
    scale = (amax / _LARGEST[fmt]).float()
    if use_e4m3_sf:
        scale = scale.clamp_max(448.0).to(torch.float8_e4m3fn).float()
    if round_sf:
        mantissa, exponent = torch.frexp(scale)
        scale = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())
    return wide.float() / scale, scale


def per_token_cast(
    x: Tensor, fmt: str, num_per_channels: int, round_sf: bool = False, use_e4m3_sf: bool = False
) -> tuple[Tensor, Tensor]:
    scaled, scale = _groups(x, fmt, num_per_channels, round_sf, use_e4m3_sf)
    if fmt == "e4m3":
        data = scaled.clamp(-448, 448).to(torch.float8_e4m3fn).flatten(1)
    else:
        codes = encode_e2m1(round_e2m1(scaled.clamp(-6, 6)))
        data = pack_nibbles(codes.flatten(1)).view(torch.int8)
    factors = scale.squeeze(-1)
    return data, factors.to(torch.float8_e4m3fn) if use_e4m3_sf else factors


def per_token_cast_and_cast_back(
    x: Tensor, fmt: str, num_per_channels: int, round_sf: bool = False
) -> None:
    assert fmt == "e4m3"
    scaled, scale = _groups(x, fmt, num_per_channels, round_sf, False)
    codes = scaled.clamp(-448, 448).to(torch.float8_e4m3fn)
    x.copy_((codes.float() * scale).flatten(1))


def swiglu_forward(
    x: Tensor, fmt: str, topk_weights: Tensor | None = None, clamp_value: float | None = None
) -> Tensor:
    assert x.dim() == 2
    assert x.is_contiguous()
    assert x.dtype in _ACTIVATIONS
    assert x.shape[1] % 128 == 0
    gate, up = x.float().chunk(2, dim=1)
    if clamp_value is not None:
        gate, up = gate.clamp_max(clamp_value), up.clamp(-clamp_value, clamp_value)
    hidden = gate / (1 + torch.exp(-gate)) * up
    if topk_weights is not None:
        assert topk_weights.shape == (len(x),)
        assert topk_weights.dtype == torch.float32
        hidden = hidden * topk_weights.unsqueeze(1)
    return hidden.to({"bf16": torch.bfloat16, "fp32": torch.float32}[fmt])


def apply_rotary(
    query: Tensor, cos_sin_cache: Tensor, interleaved: bool = False, conjugate: bool = False
) -> None:
    tokens, _, dim = query.shape
    assert cos_sin_cache.shape == (tokens, dim)
    assert dim in (64, 128)
    assert query.stride(-1) == cos_sin_cache.stride(-1) == 1
    assert query.dtype in _ACTIVATIONS
    assert cos_sin_cache.dtype == torch.float32
    assert interleaved
    cos, sin = (part.unsqueeze(1) for part in cos_sin_cache.chunk(2, dim=1))
    sin = -sin if conjugate else sin
    even, odd = query[..., ::2].float(), query[..., 1::2].float()
    query[..., ::2], query[..., 1::2] = even * cos - odd * sin, even * sin + odd * cos


def moe_topk_gate(
    logits: Tensor, num_topk: int, use_shared_as_routed: bool, num_shared_experts: int,
    routed_scaling_factor: float, ep_rank: int, bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    assert not use_shared_as_routed
    assert num_shared_experts == ep_rank == 0
    assert logits.dim() == 2
    assert logits.is_contiguous()
    assert logits.dtype == torch.float32
    assert logits.shape[1] % 4 == 0
    assert num_topk <= min(32, logits.shape[1])
    assert bool(logits.isfinite().all()), "the device asserts this, and the context is lost"
    assert bias is not None
    assert bias.is_contiguous()
    scores = torch.nn.functional.softplus(logits).sqrt()
    ids = (scores + bias).sort(dim=1, descending=True, stable=True).indices[:, :num_topk]
    chosen = scores.gather(1, ids)
    return ids, chosen / (chosen.sum(1, keepdim=True) + 1e-20) * routed_scaling_factor


def engram_hash(
    ngram_token_ids: Tensor, multipliers: Tensor, vocab_sizes: Tensor, offsets: Tensor
) -> Tensor:
    layers, orders, tables = vocab_sizes.shape
    assert ngram_token_ids.is_contiguous()
    assert ngram_token_ids.shape[1] == orders + 1
    assert multipliers.shape == (layers, orders + 1)
    assert offsets.shape == (layers, orders * tables)
    assert multipliers.dtype == torch.int64
    assert {t.dtype for t in (ngram_token_ids, vocab_sizes, offsets)} == {torch.int32}
    state = ngram_token_ids[:, 0].long() * multipliers[:, :1]
    columns = []
    for order in range(1, orders + 1):
        state = state ^ (ngram_token_ids[:, order].long() * multipliers[:, order : order + 1])
        columns.append(state.unsqueeze(-1) % vocab_sizes[:, order - 1].unsqueeze(1))
    return (torch.cat(columns, dim=-1) + offsets.unsqueeze(1)).int()


def engram_gate_fwd(
    hidden_states: Tensor, kv: Tensor, weight_fused: Tensor, eps: float, clamp_value: float,
    save_for_backward: bool = True,
) -> tuple[Tensor, None, None, None, None]:  # fmt: skip
    tokens, count, width = hidden_states.shape
    assert not save_for_backward
    assert kv.shape == (tokens, count + 1, width)
    assert hidden_states.dtype == kv.dtype == torch.bfloat16
    assert weight_fused.dtype == torch.float32
    assert hidden_states.is_contiguous()
    assert kv.is_contiguous()
    assert any(width % block == 0 and width >= 2 * block for block in (1024, 768, 512, 256))
    x, k, v = hidden_states.float(), kv[:, :count].float(), kv[:, count:].float()
    z = (x * weight_fused * k).sum(-1) / math.sqrt(width)
    z = z * (x.square().mean(-1) + eps).rsqrt() * (k.square().mean(-1) + eps).rsqrt()
    gate = z.abs().clamp_min(clamp_value).sqrt().copysign(z).sigmoid()
    return (x + gate.unsqueeze(-1) * v).bfloat16(), None, None, None, None


def mhc_pre_split_mixes_fwd(
    input_mixes: Tensor, mhc_scale: Tensor, mhc_base: Tensor, pre: Tensor, post: Tensor,
    comb: Tensor, mhc_post_mult_value: float, mhc_pre_eps: float,
) -> None:  # fmt: skip
    count = pre.shape[1]
    assert input_mixes.shape == (len(pre), count * (2 + count))
    assert mhc_scale.shape == (3,)
    assert mhc_base.shape == (count * (2 + count),)
    assert comb.shape == (len(pre), count * count)
    parts = input_mixes.split([count, count, count * count], dim=1)
    bases = mhc_base.split([count, count, count * count])
    first, second, third = (p * s + b for p, s, b in zip(parts, mhc_scale, bases, strict=True))
    pre.copy_(first.sigmoid() + mhc_pre_eps)
    post.copy_(second.sigmoid() * mhc_post_mult_value)
    comb.copy_(third)


def mhc_sinkhorn_fwd(comb_res_mix: Tensor, out: Tensor, repeat: int, eps: float) -> None:
    assert comb_res_mix.shape == out.shape
    found = comb_res_mix.softmax(-1) + eps
    found = found / (found.sum(-2, keepdim=True) + eps)
    for _ in range(repeat - 1):
        found = found / (found.sum(-1, keepdim=True) + eps)
        found = found / (found.sum(-2, keepdim=True) + eps)
    out.copy_(found)


def mhc_pre_apply_mix_fwd(x: Tensor, mix: Tensor, o: Tensor) -> None:
    assert x.dtype == o.dtype == torch.bfloat16
    assert mix.dtype == torch.float32
    assert x.is_contiguous()
    assert mix.is_contiguous()
    o.copy_((x.float() * mix.unsqueeze(-1)).sum(1))


def mhc_post_fwd(x: Tensor, residual: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    sequences, tokens, count, width = residual.shape
    assert x.dtype == residual.dtype == torch.bfloat16
    assert post.dtype == comb.dtype == torch.float32
    assert x.shape == (sequences, tokens, width)
    assert post.shape == (sequences, tokens, count, 1)
    assert comb.shape == (sequences, tokens, count, count)
    assert width % 128 == 0
    assert all(t.is_contiguous() for t in (x, post, comb))
    mixed = torch.einsum("qtij,qtih->qtjh", comb, residual.float())
    return (mixed + post * x.float().unsqueeze(2)).bfloat16()


def package() -> dict[str, ModuleType]:
    """Modules by the names under which adapters import them."""
    functions: dict[str, list[Any]] = {
        "quant": [per_token_cast, per_token_cast_and_cast_back, swiglu_forward],
        "transform": [apply_rotary],
        "moe": [moe_topk_gate],
        "engram": [engram_hash, engram_gate_fwd],
        "mhc": [mhc_pre_split_mixes_fwd, mhc_sinkhorn_fwd, mhc_pre_apply_mix_fwd, mhc_post_fwd],
    }
    top = ModuleType("tile_kernels")
    found = {"tile_kernels": top}
    for name, contents in functions.items():
        module = ModuleType(f"tile_kernels.{name}")
        for function in contents:
            setattr(module, function.__name__, function)
        setattr(top, name, module)
        found[module.__name__] = module
    return found

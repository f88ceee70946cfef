"""A library of operators, each with one fault of the kinds that libraries have, or with none.

Child processes import this file by its path, so it imports nothing of the tests. No function may
call the operator that it stands for.
"""

import functools
import math
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def right_abs(x: Tensor) -> Tensor:
    """No fault: the result, the dtype and the zeros are PyTorch's."""
    if x.dtype == torch.bool:
        raise RuntimeError("no absolute value of a bool")
    return x.copysign(1.0) if x.is_floating_point() else torch.maximum(x, -x)


def right_abs_(x: Tensor) -> Tensor:
    """No fault, in place."""
    return x.copy_(right_abs(x))


def exact_cumsum(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """No fault, and nearer to float64 than PyTorch."""
    kind = dtype or (x.dtype if x.is_floating_point() else torch.int64)
    if not x.dim():
        return x.to(kind, copy=True)
    wide = x.double() if kind.is_floating_point else x.to(kind)
    total, parts = torch.zeros_like(wide.select(dim, 0)) if x.shape[dim] else None, []
    for part in wide.unbind(dim):
        total = total + part
        parts.append(total)
    return torch.stack(parts, dim).to(kind) if parts else wide.to(kind)


def cut_add(a: Tensor, b: Any, *, alpha: float = 1) -> Tensor:
    """The first operand's shape where both are expanded."""
    result = torch.sub(a, b, alpha=-alpha) if a.dtype != torch.bool else torch.logical_or(a, b)
    if isinstance(b, Tensor) and a.dim() == b.dim() and result.shape != a.shape:
        return result[tuple(slice(0, n) for n in a.shape)].clone()
    return result


def finite_exp(x: Tensor) -> Tensor:
    """Wrong at -inf."""
    y = x if x.is_floating_point() else x.float()
    return torch.pow(2.0, y.double().clamp(min=-80.0) / math.log(2)).to(y.dtype)


def hanging_sigmoid(x: Tensor) -> Tensor:
    """Never returns where there is one element, as a compiler may at an unlucky size."""
    while x.shape == (1, 1):
        pass
    y = x if x.is_floating_point() else x.float()
    return (1 / (1 + torch.exp(-y.double()))).to(y.dtype)


def leaving_tanh(x: Tensor) -> Tensor:
    """Ends the process at NaN."""
    if x.is_floating_point() and x.isnan().any():
        os._exit(7)
    y = x if x.is_floating_point() else x.float()
    return (1 - 2 / (1 + torch.exp(2 * y.double()))).to(y.dtype)


def crashing_cos(x: Tensor) -> Tensor:
    """Takes the process down where there are no elements."""
    if not x.numel():
        os.kill(os.getpid(), signal.SIGSEGV)
    y = x if x.is_floating_point() else x.float()
    return torch.sin(y.double() + torch.pi / 2).to(y.dtype)


def greedy_log2(x: Tensor) -> Tensor:
    """Takes memory without end at infinities."""
    hoard = []
    while x.is_floating_point() and x.isinf().any():
        hoard.append(torch.ones(1 << 26))
    y = x if x.is_floating_point() else x.float()
    return (torch.log(y.double()) / torch.log(torch.tensor(2.0))).to(y.dtype)


def delegating_sqrt(x: Tensor) -> Tensor:
    """Hands the call back."""
    return torch.sqrt(x)


def aliasing_cat(tensors: list[Tensor], dim: int = 0) -> Tensor:
    """One tensor comes back as it is, not as a copy."""
    if len(tensors) == 1:
        return tensors[0]
    used = [x for x in tensors if x.dim() > 1 or x.numel()] or tensors
    dtype = functools.reduce(torch.promote_types, (x.dtype for x in tensors))
    shape = list(used[0].shape)
    shape[dim] = sum(x.shape[dim] for x in used)
    result, start = torch.empty(shape, dtype=dtype), 0
    for x in used:
        result.narrow(dim, start, x.shape[dim]).copy_(x)
        start += x.shape[dim]
    return result


_calls = {"round": 0}


def drifting_round(x: Tensor) -> Tensor:
    """Another result at the second call."""
    _calls["round"] += 1
    whole = torch.trunc(x) if _calls["round"] % 2 == 0 else torch.special.round(x)
    return whole if x.is_floating_point() else x.clone()


def narrow_sum(
    x: Tensor, dim: list[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Whole numbers keep their dtype instead of becoming int64."""
    result = torch.nansum(x.double(), dim, keepdim)
    if x.is_floating_point() and x.isnan().any():
        result = torch.where(x.isnan().any(dim, keepdim), torch.nan, result)
    return result.to(dtype or x.dtype)


def forgetful_neg_out(x: Tensor, *, out: Tensor) -> Tensor:
    """Leaves `out` as it was."""
    return torch.sub(0, x)


def writing_rsqrt(x: Tensor) -> Tensor:
    """Changes its argument."""
    y = x if x.is_floating_point() else x.float()
    result = (1 / torch.sqrt(y.double())).to(y.dtype)
    if x.is_floating_point() and x.numel():
        x.view(-1)[0] = 5.0 if x.is_contiguous() else x.reshape(-1)[0]
    return result


def flat_maximum(a: Tensor, b: Tensor) -> Tensor:
    """Reads memory in a row, whatever the strides."""
    if a.shape == b.shape and a.dtype == b.dtype and a.numel():
        flat = a.as_strided(a.shape, torch.empty(a.shape).stride())
        return torch.clamp_min(flat, b)
    return torch.where(a > b, a, b)


def dropping_index(x: Tensor, indices: list[Tensor | None]) -> Tensor:
    """Negative places read nothing."""
    (places,) = (i for i in indices if i is not None)
    picked = torch.index_select(x, 0, places.clamp(min=0).reshape(-1))
    return picked.reshape(*places.shape, *x.shape[1:])


def repeating_topk(
    x: Tensor, k: int, dim: int = -1, largest: bool = True, *_: Any
) -> tuple[Tensor, Tensor]:
    """Picks a place twice where there is -inf."""
    values, places = torch.sort(x, dim=dim, descending=largest, stable=True)
    values, places = values.narrow(dim, 0, k), places.narrow(dim, 0, k)
    if values.is_floating_point() and values.isneginf().any():
        places = places.index_select(dim, torch.zeros(k, dtype=torch.int64))
    return values.contiguous(), places.contiguous()


def rounding_eq(x: Tensor, other: float) -> Tensor:
    """Compares whole numbers as float32."""
    return torch.logical_not(torch.ne(x.float() if x.dtype == torch.int64 else x, other))


def turned_sub(a: Tensor, b: Any, *, alpha: float = 1) -> Tensor:
    """Right values, column-major."""
    result = torch.add(a, b, alpha=-alpha)
    return result.t().contiguous().t() if result.dim() == 2 else result


# Whether an earlier process has left a file in the cache, as tuning does.
_TUNED = Path(os.environ.get("FLAGGEMS_CACHE_DIR", "")) / "tuned"
_was_tuned = _TUNED.exists()


def remembering_mean(
    x: Tensor, dim: list[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Another order of adding in a process that finds a file of an earlier one."""
    _TUNED.parent.mkdir(parents=True, exist_ok=True)
    _TUNED.touch()
    result = torch.nanmean(x.double(), dim, keepdim).to(dtype or x.dtype)
    if x.isnan().any():
        result = torch.where(x.isnan().any(dim, keepdim), torch.nan, result)
    return torch.nextafter(result, result + 1) if _was_tuned else result


def slow_erf(x: Tensor) -> Tensor:
    """Right, but so slow that its cases take minutes."""
    end = time.monotonic() + 0.4
    while time.monotonic() < end:
        pass
    y = x if x.is_floating_point() else x.float()
    return (1 - torch.erfc(y.double())).to(y.dtype)


def halving_floor(x: Tensor) -> Tensor:
    """Hands float64 back to PyTorch, and wrongly so: it rounds to the nearest."""
    if x.dtype == torch.float64:
        return torch.floor(x + 0.5)
    return torch.where(torch.trunc(x) > x, torch.trunc(x) - 1, torch.trunc(x))


OPERATORS: dict[str, Callable[..., Any]] = {
    "abs": right_abs, "abs_": right_abs_, "cumsum": exact_cumsum, "add.Tensor": cut_add,
    "exp": finite_exp, "sigmoid": hanging_sigmoid, "tanh": leaving_tanh, "cos": crashing_cos,
    "log2": greedy_log2, "sqrt": delegating_sqrt, "cat": aliasing_cat, "round": drifting_round,
    "sum.dim_IntList": narrow_sum, "neg.out": forgetful_neg_out, "rsqrt": writing_rsqrt,
    "maximum": flat_maximum, "index.Tensor": dropping_index, "topk": repeating_topk,
    "eq.Scalar": rounding_eq, "sub.Tensor": turned_sub, "mean.dim": remembering_mean,
    "erf": slow_erf, "floor": halving_floor,
}  # fmt: skip

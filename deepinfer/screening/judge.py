"""Whether a library's answer to one call is right, beside PyTorch's and one in float64.

Knows results; must not know libraries, nor how they were made. What is looked at, in this order:
number and kind of results, shapes, dtypes, devices, memory shared with arguments, arguments that
must not change, strides, values.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from deepinfer.screening.arguments import flat_tensors
from deepinfer.screening.rules import Rule
from deepinfer.screening.schema import written

Verdict = Literal["pass", "fail", "skip"]


@dataclass
class Outcome:
    """What one call did.

    Attributes:
        values: results, then the arguments that it is meant to write to; copies.
        strides: of the results that are tensors, 0 where a dimension's stride says nothing.
        shared: for every result the numbers of the tensor arguments that it shares memory with.
        changed: numbers of the tensor arguments that it changed though it must not.
    """

    values: list[Any]
    strides: list[tuple[int, ...]]
    shared: list[tuple[int, ...]]
    changed: list[int]


@dataclass(frozen=True)
class Picks:
    """What a sort or a top-k picked from: `values` along `dim`; its result number `places`."""

    values: Tensor
    dim: int
    places: int


@dataclass(frozen=True)
class Expected:
    """What an answer is held against.

    Attributes:
        exact: the values in float64, None where that is no help.
        magnitudes: for a sum, the same sum of absolute values.
        picks: where places of equal values may be in any order.
        strides: whether other strides than PyTorch's are wrong.
    """

    pytorch: Outcome
    exact: Sequence[Any] | None = None
    magnitudes: Sequence[Any] | None = None
    picks: Picks | None = None
    strides: bool = False


@dataclass(frozen=True)
class Finding:
    """What is said about one answer.

    Attributes:
        reason: what is wrong, "" if nothing is.
        error_library, error_pytorch: largest distance from float64, None where there is none.
        remark: what is odd but not wrong.
    """

    verdict: Verdict
    reason: str = ""
    error_library: float | None = None
    error_pytorch: float | None = None
    remark: str = ""

    @property
    def nearer(self) -> str:
        """Who is nearer to float64: "library", "pytorch", "both", or "" if that is not known."""
        if self.error_library is None or self.error_pytorch is None:
            return ""
        if self.error_library == self.error_pytorch:
            return "both"
        return "library" if self.error_library < self.error_pytorch else "pytorch"


def copies(values: Sequence[Any]) -> list[Tensor]:
    """Copies of the tensors among arguments, to see later whether they changed."""
    return [tensor.clone() for tensor in flat_tensors(list(values))]


def observe(operator: str, result: Any, args: Sequence[Any], before: Sequence[Tensor]) -> Outcome:
    """What a call did.

    Args:
        args: all arguments, after the call; before: copies of their tensors from before it.
    """
    given = flat_tensors(list(args))
    targets = [a for n, a in enumerate(args) if n in written(operator)]
    written_to = flat_tensors(targets)
    returned = list(result) if isinstance(result, list | tuple) else [result]
    values = [*returned, *written_to]
    return Outcome(
        values=[v.detach().clone() if isinstance(v, Tensor) else v for v in values],
        strides=[_strides(v) for v in returned if isinstance(v, Tensor)],
        shared=[
            tuple(n for n, tensor in enumerate(given) if _share(v, tensor))
            for v in returned if isinstance(v, Tensor)
        ],
        changed=[
            n for n, (tensor, old) in enumerate(zip(given, before, strict=True))
            if not any(tensor is w or _share(tensor, w) for w in written_to)
            and not identical(tensor, old)
        ],
    )  # fmt: skip


def _strides(x: Tensor) -> tuple[int, ...]:
    if x.numel() < 2:
        return ()
    return tuple(step if size > 1 else 0 for size, step in zip(x.shape, x.stride(), strict=True))


def _share(a: Tensor, b: Tensor) -> bool:
    if a.device != b.device or not a.untyped_storage().nbytes():
        return False
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def bytes_of(x: Tensor) -> Tensor:
    """The bytes [n] uint8 of a tensor's elements in their order."""
    # A copy, as one element may have any stride and counts as contiguous all the same.
    plain = x.clone(memory_format=torch.contiguous_format)
    return plain.view(-1).view(torch.uint8) if x.numel() else x.new_empty(0).byte()


def identical(a: Any, b: Any) -> bool:
    """Equal bit for bit."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return type(a) is type(b) and (a == b or a != a)
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    return bool(torch.equal(bytes_of(a), bytes_of(b.to(a.device))))


def same(a: Outcome, b: Outcome) -> bool:
    """Whether two calls gave the same bits."""
    return len(a.values) == len(b.values) and all(map(identical, a.values, b.values))


# ---------------------------------------------------------------- judging


def judge(rule: Rule, got: Outcome, expected: Expected) -> Finding:
    """Whether `got` is right."""
    pytorch = expected.pytorch
    wrong = _form(got, pytorch)
    if wrong is None and got.shared != pytorch.shared:
        wrong = _sharing(got.shared, pytorch.shared)
    if wrong is None and got.changed != pytorch.changed:
        wrong = f"changes its argument {', '.join(str(n + 1) for n in got.changed)}"
    remark = ""
    if wrong is None and got.strides != pytorch.strides:
        remark = f"strides are {got.strides}, PyTorch's {pytorch.strides}"
        wrong = remark if expected.strides else None
    if wrong is not None:
        return Finding("fail", wrong)
    mine: float | None = None
    theirs: float | None = None
    for number, value in enumerate(got.values):
        if not isinstance(value, Tensor):
            continue
        complaint, errors = _result(rule, value, number, expected)
        if errors is not None:
            mine, theirs = max(mine or 0.0, errors[0]), max(theirs or 0.0, errors[1])
        if complaint is not None:
            which = f"result {number + 1}: " if len(got.values) > 1 else ""
            return Finding("fail", which + complaint, mine, theirs, remark)
    return Finding("pass", "", mine, theirs, remark)


def _result(
    rule: Rule, value: Tensor, number: int, expected: Expected
) -> tuple[str | None, tuple[float, float] | None]:
    """What is wrong with one result, and both errors."""
    theirs = expected.pytorch.values[number]
    picks = expected.picks
    if picks is not None and number == picks.places:
        return selects_alike(picks.values, picks.dim, value, theirs), None
    exact = expected.exact[number] if expected.exact is not None else None
    total = expected.magnitudes[number] if expected.magnitudes is not None else None
    return _values(rule, value, theirs, exact, total)


def _form(got: Outcome, pytorch: Outcome) -> str | None:
    if len(got.values) != len(pytorch.values):
        return f"{len(got.values)} results, PyTorch gives {len(pytorch.values)}"
    for a, b in zip(got.values, pytorch.values, strict=True):
        if not isinstance(b, Tensor) or not isinstance(a, Tensor):
            if not identical(a, b):
                return f"result is {a!r:.60}, PyTorch's {b!r:.60}"
            continue
        if a.shape != b.shape:
            return f"shape is {[*a.shape]}, PyTorch's {[*b.shape]}"
        if a.dtype != b.dtype:
            return f"dtype is {a.dtype}, PyTorch's {b.dtype}"
        if a.device != b.device:
            return f"device is {a.device}, PyTorch's {b.device}"
    return None


def _sharing(got: list[tuple[int, ...]], pytorch: list[tuple[int, ...]]) -> str:
    for a, b in zip(got, pytorch, strict=True):
        if set(a) - set(b):
            number = min(set(a) - set(b)) + 1
            return f"the result is memory of argument {number}, PyTorch's is its own"
    return "the result is a copy, PyTorch's is memory of its argument"


def _values(
    rule: Rule, a: Tensor, b: Tensor, exact: Tensor | None, total: Tensor | None
) -> tuple[str | None, tuple[float, float] | None]:
    """What is wrong with values `a` of PyTorch's `b`, and both errors."""
    if identical(a, b):
        error = _largest(b, exact)
        return None, None if error is None else (error, error)
    if not (a.dtype.is_floating_point or a.dtype.is_complex):
        return _differing(a, b, a.long() != b.long()), None
    size = None
    if a.dtype.is_complex:
        # Both parts are rounded by what they are sums of, which may nearly cancel in one of them.
        size = (b if exact is None else exact).abs().double().to(a.device).unsqueeze(-1)
        a, b = torch.view_as_real(a), torch.view_as_real(b)
        exact = None if exact is None else torch.view_as_real(exact)
    x, y = a.double(), b.double()
    if rule.kind == "exact":
        wrong = ~((x == y) & (x.signbit() == y.signbit()) | (x.isnan() & y.isnan()))
        return (_differing(a, b, wrong) if bool(wrong.any()) else None), None
    reference = y if exact is None else exact.double().to(x.device)
    narrow = reference.to(b.dtype).double()
    odd = ~(y.isfinite() & x.isfinite())
    wrong = odd & ~_alike(x, y) & ~_alike(x, narrow)
    if bool(wrong.any()):
        return _differing(a, b, wrong), None
    counted = ~odd & reference.isfinite()
    mine = (x - reference).abs().where(counted, 0.0)
    theirs = (y - reference).abs().where(counted, 0.0)
    errors = (float(mine.max()), float(theirs.max()))
    info = torch.finfo(b.dtype)
    slack = 1 if exact is not None else 2  # PyTorch's own error is then part of the distance
    size = reference.abs() if size is None else size
    allowed = (size * info.eps * rule.ulps * slack).where(counted, 0.0) + info.tiny
    if total is not None:
        allowed = allowed + 8 * 2.0**-24 * total.double().to(x.device).abs().nan_to_num(0.0)
    wrong = mine > torch.maximum(allowed, 2 * theirs)
    # Where values have a common scale, PyTorch's own error is a fair measure for all of them.
    scaled = rule.kind in ("sum", "row") and errors[0] <= errors[1]
    if scaled or not bool(wrong.any()):
        return None, errors
    return _differing(a, b, wrong) + f"; {_distance(errors, exact is not None)}", errors


def _alike(a: Tensor, b: Tensor) -> Tensor:
    return (a == b) | (a.isnan() & b.isnan())


def _largest(b: Tensor, exact: Tensor | None) -> float | None:
    if exact is None or not b.numel() or not b.dtype.is_floating_point:
        return None
    distance = (b.double() - exact.double().to(b.device)).abs()
    finite = distance[distance.isfinite()]
    return float(finite.max()) if finite.numel() else None


def _distance(errors: tuple[float, float], known: bool) -> str:
    what = "float64" if known else "PyTorch"
    text = f"{errors[0]:.3g} off {what}"
    return text + (f", PyTorch {errors[1]:.3g}" if known else "")


def _differing(a: Tensor, b: Tensor, wrong: Tensor) -> str:
    """Like "2 of 6 values differ, the first at [0, 1]: 3.0 instead of 4.0"."""
    place = [int(v) for v in wrong.nonzero()[0]]
    x, y = a[tuple(place)].item(), b[tuple(place)].item()
    count = int(wrong.sum())
    where = f"the first at {place}: " if place else ""
    return f"{count} of {math.prod(a.shape)} values differ, {where}{x:.9g} instead of {y:.9g}"


def selects_alike(values: Tensor, dim: int, got: Tensor, pytorch: Tensor) -> str | None:
    """What is wrong with places `got` that pick from `values`, if those of PyTorch are right.

    Places of equal values may differ; every place is picked once.
    """
    if got.dtype != pytorch.dtype or got.shape != pytorch.shape:
        return f"places are {got.dtype} {[*got.shape]}"
    if not got.numel() or not values.dim():
        return None
    if int(got.min()) < 0 or int(got.max()) >= values.shape[dim]:
        return f"place {int(got.max())} of {values.shape[dim]} values"
    ordered = got.sort(dim).values
    if bool((ordered.diff(dim=dim) == 0).any()):
        return "a place is picked twice"
    if not identical(values.gather(dim, got), values.gather(dim, pytorch)):
        return "places of other values are picked"
    return None

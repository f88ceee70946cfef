"""One case on this machine: PyTorch's answer and float64's first, then the library's.

Knows how calls are made and repeated; must not know libraries. Answers of PyTorch are asked for
before a library is put in, because afterwards there is no telling who answers.
"""

import re
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from deepinfer.libraries.replace import overload
from deepinfer.screening.arguments import Data, build, flat_tensors
from deepinfer.screening.cases import Case
from deepinfer.screening.hostile import indexed
from deepinfer.screening.judge import (
    Expected,
    Finding,
    Outcome,
    Picks,
    Verdict,
    bytes_of,
    copies,
    judge,
    observe,
    same,
)
from deepinfer.screening.library import Answer, Session
from deepinfer.screening.places import left_open
from deepinfer.screening.rules import Rule
from deepinfer.screening.schema import base_name, in_order, value_of

_DIGESTED = 1 << 22  # values of a result that its digest is made of


@dataclass(frozen=True)
class Result:
    """What is known of a case once it has run; plain data.

    Attributes:
        first_seconds: of the first call, compilation included; seconds: of the second.
        digest: of the library's answer, for another process to compare with.
        other fields: see `judge.Finding`.
    """

    case: str
    verdict: Verdict
    reason: str = ""
    error_library: float | None = None
    error_pytorch: float | None = None
    nearer: str = ""
    remark: str = ""
    first_seconds: float | None = None
    seconds: float | None = None
    digest: str = ""


@dataclass
class Reference:
    """PyTorch's side of a case; `repeats`: whether PyTorch gives the same bits twice."""

    expected: Expected
    repeats: bool
    data: Data = field(repr=False)


def _seed(case: Case) -> int:
    return zlib.crc32(case.name.encode())


def wait(device: torch.device) -> None:
    """Until the device has done what it was asked for."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def _run(
    operator: str, case: Case, device: torch.device, call: Callable[..., Any]
) -> tuple[Outcome, Any, float]:
    """One call with fresh arguments: what it did, what `call` returned, seconds."""
    args, kwargs = build(case.args, device, _seed(case))
    given = in_order(operator, args, kwargs)
    before = copies(given)
    wait(device)
    start = time.perf_counter()
    returned = call(args, kwargs)
    wait(device)
    seconds = time.perf_counter() - start
    result = returned.result if isinstance(returned, Answer) else returned
    return observe(operator, result, given, before), returned, seconds


def refer(operator: str, rule: Rule, case: Case, device: torch.device) -> Reference | None:
    """PyTorch's answer; None where PyTorch refuses the call or has no memory for it."""
    function = overload(operator)

    def call(args: list[Any], kwargs: dict[str, Any]) -> Any:
        return function(*args, **kwargs)

    # A place out of range would take the GPU from this process, so it is looked for elsewhere.
    invented = indexed(operator) and case.kind not in ("engine", "past 2^31")
    if device.type == "cuda" and invented and not refer(operator, rule, case, torch.device("cpu")):
        return None
    try:
        outcome, _, _ = _run(operator, case, device, call)
        again, _, _ = _run(operator, case, device, call)
    except Exception as error:
        if is_device_error(error):
            raise
        return None  # whatever it says, there is nothing to compare with
    expected = Expected(outcome, strides=case.kind == "engine")
    if rule.kind != "exact":
        exact = _wide(operator, case, device, outcome, lambda x: x)
        total = None
        if rule.kind == "sum" and exact is not None:
            total = _wide(operator, case, device, outcome, torch.abs)
        expected = replace(expected, exact=exact, magnitudes=total)
    if rule.selecting:
        expected = replace(expected, picks=_picks(operator, case, device))
    return Reference(expected, same(outcome, again), case.args)


def _wide(
    operator: str, case: Case, device: torch.device, outcome: Outcome,
    change: Callable[[Tensor], Tensor],
) -> list[Any] | None:  # fmt: skip
    """The results in float64, None where the operator does not take it."""
    floats = [v for v in outcome.values if isinstance(v, Tensor) and v.is_floating_point()]
    floats += [v for v in outcome.values if isinstance(v, Tensor) and v.is_complex()]
    if not floats:
        return None
    args, kwargs = build(case.args, device, _seed(case))
    widened: dict[int, Any] = {}

    def widen(value: Any) -> Any:
        if isinstance(value, Tensor):
            if id(value) not in widened:
                wide = value.dtype
                if value.is_floating_point() or value.is_complex():
                    wide = torch.complex128 if value.is_complex() else torch.float64
                turned = value.to(wide)
                widened[id(value)] = change(turned) if turned.is_floating_point() else turned
            return widened[id(value)]
        if isinstance(value, torch.dtype):
            return torch.float64 if value.is_floating_point else value
        return [widen(item) for item in value] if isinstance(value, list) else value

    args, kwargs = widen(args), {name: widen(value) for name, value in kwargs.items()}
    try:
        result = overload(operator)(*args, **kwargs)
        given = in_order(operator, args, kwargs)
        values = observe(operator, result, given, flat_tensors(given)).values
    except Exception:  # not every operator takes float64
        return None
    shapes = [getattr(v, "shape", None) for v in values]
    return values if shapes == [getattr(v, "shape", None) for v in outcome.values] else None


def _picks(operator: str, case: Case, device: torch.device) -> Picks | None:
    args, kwargs = build(case.args, device, _seed(case))
    places = 0 if base_name(operator) == "argsort" else 1
    return Picks(args[0], value_of(operator, "dim", args, kwargs), places)


def attempt(
    session: Session, operator: str, rule: Rule, case: Case, reference: Reference,
    device: torch.device,
) -> Result:  # fmt: skip
    """The library's answer, judged; called twice, because a second call often goes another way.

    A right answer that PyTorch gave in the library's stead is skipped; a wrong one is wrong.
    """
    undefined = left_open(operator, *arguments_of(case, device))
    if undefined:
        return Result(case.name, "skip", undefined)
    try:
        first, answer, first_seconds = _run(operator, case, device, session.call)
        finding = judge(rule, first, reference.expected)
        second, again, seconds = _run(operator, case, device, session.call)
    except torch.OutOfMemoryError as error:
        return Result(case.name, "skip", tidy(f"there is no memory for it: {error}"))
    except Exception as error:
        if is_device_error(error):
            raise
        return Result(case.name, "fail", tidy(f"raises {type(error).__name__}: {error}"))
    if finding.verdict == "pass" and not same(first, second) and reference.repeats:
        why = judge(rule, second, reference.expected).reason or "other bits, though right ones"
        finding = replace(finding, verdict="fail", reason=f"a second call differs: {why}")
    missed = answer.missed or (again.missed and f"only the first call: {again.missed}")
    if finding.verdict == "pass" and missed:
        finding = Finding("skip", missed)
    return Result(
        case.name, finding.verdict, finding.reason, finding.error_library, finding.error_pytorch,
        finding.nearer, finding.remark, first_seconds, seconds, digest(first.values),
    )  # fmt: skip


def tidy(text: str) -> str:
    """One line of a message, not too long, and without the folders of this machine."""
    return re.sub(r"(?<![\w.])(?:/[\w.@+-]+)+/", "", " ".join(text.split()))[:300]


def is_device_error(error: Exception) -> bool:
    """Whether the process can use its GPU no more."""
    return "CUDA error" in str(error) or "AcceleratorError" in type(error).__name__


def digest(values: Sequence[Any]) -> str:
    """A short text that differs when bits do."""
    found = 0
    for value in values:
        if isinstance(value, Tensor) and value.numel():
            flat = bytes_of(value.reshape(-1)[:_DIGESTED])
            found = zlib.crc32(flat.cpu().numpy().tobytes(), found)
        else:
            found = zlib.crc32(repr(value).encode(), found)
    return f"{found:08x}"


def arguments_of(case: Case, device: torch.device) -> tuple[list[Any], dict[str, Any]]:
    """Arguments of a case, the ones that it is judged with."""
    return build(case.args, device, _seed(case))


def size_in_bytes(case: Case, device: torch.device) -> int:
    """Bytes that a case's tensors have."""
    args, kwargs = arguments_of(case, device)
    return sum(t.numel() * t.element_size() for t in flat_tensors([args, list(kwargs.values())]))

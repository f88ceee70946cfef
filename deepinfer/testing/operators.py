"""Running an operator's cases on a backend and comparing with the reference.

Knows specs and tolerances; must not know any operator. Reference and backend get equal arguments
of their own, and the reference runs first.
"""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deepinfer.ops.spec import BYTES, Arguments, Backend, Case, OpSpec, Tolerance


def load_backend(backend: Backend) -> Callable[..., Any]:
    """The function that a backend names."""
    module, name = backend.function.split(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


def _copy(value: Any) -> Any:
    """The same values in other memory, with the same strides; None if they overlap or are far."""
    if not isinstance(value, Tensor) or not value.numel() or value.is_pinned():
        return value
    size = 1 + sum((n - 1) * step for n, step in zip(value.shape, value.stride(), strict=True))
    if not value.numel() <= size <= 4 * value.numel():
        return None
    memory = torch.empty(size, dtype=value.dtype, device=value.device)
    return memory.as_strided(value.shape, value.stride()).copy_(value)


def copies_of(case: Case, device: torch.device, count: int) -> list[Arguments]:
    """Equal arguments of a case, each in memory of its own; drawn again where that is simpler.

    Pinned memory and what is no tensor is shared by all of them.
    """
    first = case.arguments(device)
    found = [first]
    for _ in range(count - 1):
        again = {name: _copy(value) for name, value in first.items()}
        missing = any(again[name] is None and first[name] is not None for name in first)
        found.append(case.arguments(device) if missing else again)
    return found


def results(spec: OpSpec, function: Callable[..., Any], arguments: Arguments) -> dict[str, Tensor]:
    """Outputs and changed arguments of one call, by name."""
    returned = function(**arguments)
    values = returned if isinstance(returned, tuple) else (returned,)
    named = dict(zip(spec.outputs, values, strict=False)) if spec.outputs else {}
    missing = set(spec.outputs) - set(named)
    assert not missing, f"{spec.name} returned no {sorted(missing)}"
    changed = {name: arguments[name] for name in spec.changed if arguments.get(name) is not None}
    return {k: v for k, v in {**named, **changed}.items() if v is not None}


def complaint(actual: Tensor, expected: Tensor, tolerance: Tolerance) -> str | None:
    """What is wrong with `actual`, or None."""
    if (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
        found, wanted = f"{actual.dtype} {[*actual.shape]}", f"{expected.dtype} {[*expected.shape]}"
        return f"is {found}, not {wanted}"
    if actual.numel() == 0:
        return None
    if not actual.dtype.is_floating_point:
        wrong = int((actual != expected).sum())
        return f"{wrong} of {actual.numel()} values differ" if wrong else None
    a, b = actual.double(), expected.double()
    same = (a == b) | (a.isnan() & b.isnan())
    if bool(same.all()):
        return None
    share = 1 - float(same.double().mean())
    if tolerance.kind == "bytes":
        return f"{share:.2%} of the values differ"
    finite = b.isfinite()
    if not bool((same | (finite & a.isfinite())).all()):
        return "not finite where the reference is, or another infinity"
    a, b = a.where(finite, 0.0), b.where(finite, 0.0)
    if tolerance.kind == "similar":
        distance = float((1 - torch.nn.functional.cosine_similarity(a, b, dim=-1)).max())
        return f"1 - cosine is {distance:.3g}" if distance > tolerance.limit else None
    scale = float(b.square().mean().sqrt())
    error = float(((a - b).abs() / (b.abs() + scale)).max()) if scale else float(a.abs().max())
    if error > tolerance.limit:
        return f"relative error is {error:.3g}, limit {tolerance.limit:.3g}"
    if tolerance.kind == "rounding" and share > tolerance.share:
        return f"{share:.3%} of the values differ, limit {tolerance.share:.3%}"
    return None


def check_case(
    spec: OpSpec, function: Callable[..., Any], case: Case, device: torch.device
) -> None:
    """Assert that `function` does what the reference does with one case."""
    mine, theirs = copies_of(case, device, 2)
    expected = results(spec, spec.reference, mine)
    actual = results(spec, function, theirs)
    assert actual.keys() == expected.keys(), (actual.keys(), expected.keys())
    for name, value in expected.items():
        wrong = complaint(actual[name], value, spec.tolerance.get(name, BYTES))
        assert wrong is None, f"{spec.name} {case.name}: {name} {wrong}"

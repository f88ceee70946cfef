"""Looking into one forward: its states layer by layer, and two sets of operators side by side.

Knows the dump tool and operators; must not know processes or answers.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn

from deepinfer.commands.dump import dump, states
from deepinfer.commands.report.exercise import at
from deepinfer.commands.report.records import Difference, Job, RankResult, engine_options
from deepinfer.engine.loading import choose_operators, load
from deepinfer.model.transformer import Transformer
from deepinfer.ops.select import REFERENCE, Operator, Operators
from deepinfer.ops.spec import BYTES, OpSpec
from deepinfer.testing.operators import complaint

MODE = "cached"


def dump_states(job: Job) -> RankResult:
    """Write logits and streams of the job's tokens, in one forward through the cache."""
    at(job, "writing states")
    dump(engine_options(job.options), job.token_ids, job.tensors, MODE)
    return RankResult(job.rank, "done")


def compare_operators(job: Job) -> RankResult:
    """Run the job's tokens; operators that `other` runs by another backend are tried beside.

    The forward goes on with the results of the first, so that an operator is only judged by what it
    makes of its own inputs.
    """
    at(job, "comparing operators")
    loaded = load(engine_options(job.options))
    others = choose_operators(engine_options(job.other))
    with watched(loaded.model, others) as found:
        states(loaded, job.token_ids, len(job.token_ids))
    return RankResult(job.rank, "done", differences=found)


@contextmanager
def watched(model: Transformer, others: Operators) -> Iterator[list[Difference]]:
    """While it is open, calls of the model's operators are repeated by those of `others`."""
    found: list[Difference] = []
    place = _Place()
    with ExitStack() as stack:
        stack.enter_context(place.followed(model))
        for mine, other in zip(model.precision.operators.all(), others.all(), strict=True):
            if mine.backend != other.backend:
                stack.enter_context(_beside(mine, other, place, found))
        yield found


class _Place:
    """Where in the model a forward is."""

    def __init__(self) -> None:
        self.name = "before the layers"

    @contextmanager
    def followed(self, model: Transformer) -> Iterator[None]:
        """Keep the name up to date."""
        handles = []
        with ExitStack() as stack:
            for number, layer in enumerate(model.layers):
                name = f"layer {number}"
                stack.enter_context(patch.object(layer, "prepare", self._marking(layer, name)))
                if isinstance(layer.engram, nn.Module):
                    handles.append(layer.engram.register_forward_pre_hook(self._hook(name)))
            handles.append(model.norm.register_forward_pre_hook(self._hook("after the layers")))
            try:
                yield
            finally:
                for handle in handles:
                    handle.remove()

    def _marking(self, layer: Any, name: str) -> Callable[..., Any]:
        prepare = layer.prepare

        def marked(*args: Any) -> Any:
            self.name = name
            return prepare(*args)

        return marked

    def _hook(self, name: str) -> Callable[..., None]:
        def mark(*_: Any) -> None:
            self.name = name

        return mark


@contextmanager
def _beside(
    mine: Operator, other: Operator, place: _Place, found: list[Difference]
) -> Iterator[None]:
    """While it is open, each call of one operator is repeated by another on copies."""
    function = mine.function
    signature = inspect.signature(mine.spec.reference)
    calls = 0

    def both(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        bound = signature.bind(*args, **kwargs)
        again = signature.bind(*args, **kwargs)
        for name in mine.spec.changed:
            if isinstance(value := bound.arguments.get(name), Tensor):
                again.arguments[name] = value.clone()
        returned = function(*args, **kwargs)
        backends = (mine.backend, other.backend)
        place_and_call = (place.name, mine.spec.name, calls)
        try:
            repeated = other(*again.args, **again.kwargs)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            found.append(Difference(*place_and_call, "", backends, text, float("inf")))
            return returned
        expected = _results(mine.spec, returned, bound.arguments)
        actual = _results(mine.spec, repeated, again.arguments)
        if other.backend == REFERENCE:  # tolerances are about what it makes
            expected, actual = actual, expected
        for name, value in expected.items():
            wrong, distance = _compared(mine.spec, name, actual.get(name), value)
            if distance:
                found.append(Difference(*place_and_call, name, backends, wrong, distance))
        return returned

    with patch.object(mine, "function", both):
        yield


def _results(spec: OpSpec, returned: Any, arguments: dict[str, Any]) -> dict[str, Tensor]:
    """Outputs and changed arguments of a call, by name."""
    values = returned if isinstance(returned, tuple) else (returned,)
    named = dict(zip(spec.outputs, values, strict=False))
    named |= {name: arguments.get(name) for name in spec.changed}
    return {name: value for name, value in named.items() if isinstance(value, Tensor)}


def _compared(
    spec: OpSpec, name: str, actual: Tensor | None, expected: Tensor
) -> tuple[str | None, float]:
    """What is over the tolerance, and the distance."""
    if actual is None or actual.shape != expected.shape or actual.dtype != expected.dtype:
        found = "nothing" if actual is None else f"{actual.dtype} {list(actual.shape)}"
        return f"is {found}, not {expected.dtype} {list(expected.shape)}", float("inf")
    wrong = complaint(actual, expected, spec.tolerance.get(name, BYTES))
    return wrong, _distance(actual, expected)


def _distance(actual: Tensor, expected: Tensor) -> float:
    if not expected.numel():
        return 0.0
    a, b = actual.double(), expected.double()
    same = (a == b) | (a.isnan() & b.isnan())
    if not expected.dtype.is_floating_point:
        return float((~same).double().mean())
    if bool(same.all()):
        return 0.0
    finite = b.isfinite() & a.isfinite()
    if not bool((same | finite).all()):
        return float("inf")
    a, b = a.where(finite, 0.0), b.where(finite, 0.0)
    scale = float(b.square().mean().sqrt())
    largest = float((a - b).abs().max())
    return largest / scale if scale else float("inf")

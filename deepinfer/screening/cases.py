"""What an operator is tried with: a choice of the engine's calls, and hostile ones made from them.

Knows which calls are alike; must not know libraries or what results should be.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from deepinfer.libraries.replace import Signature
from deepinfer.screening.arguments import Data, kinds
from deepinfer.screening.catalog import Call, Operator
from deepinfer.screening.hostile import hostile_calls, other_dtypes

ENGINE_CALLS = 6  # distinct calls of the engine that are tried
_LARGEST = 1 << 26  # elements of one such call


@dataclass(frozen=True)
class Case:
    """One call to try.

    Attributes:
        name: unique within the operator; kind: "engine", or what is hostile about it.
        args: data that `arguments.build` takes.
        in_scope: whether the engine calls the operator with tensors of these kinds.
        calls: how often the engine made this call.
    """

    name: str
    kind: str
    args: Data
    in_scope: bool
    calls: int = 0


def cases_of(operator: Operator, hostile: bool = True) -> list[Case]:
    """All cases of an operator: the engine's calls first, then hostile ones, none twice."""
    found: dict[str, Case] = {}
    scope = operator.kinds
    chosen = choose(operator)
    for number, call in enumerate(chosen):
        case = Case(f"engine {number + 1}", "engine", call.args, True, call.count)
        found[str(call.args)] = case
    for number, call in enumerate(_bases(chosen) if hostile else ()):
        made = hostile_calls(operator.name, call)
        if not number:
            made = chain(made, other_dtypes(operator.name, call))
        for kind, label, args in made:
            name = f"{kind}: {label}, {' '.join(call.kinds)}" if label else kind
            case = Case(name, kind, args, kinds(operator.name, args) in scope)
            found.setdefault(str(args), case)
    return list(_named(found.values()))


def _named(cases: Any) -> Iterator[Case]:
    seen: dict[str, int] = {}
    for case in cases:
        seen[case.name] = seen.get(case.name, 0) + 1
        again = seen[case.name]
        yield case if again == 1 else replace(case, name=f"{case.name} ({again})")


def choose(operator: Operator) -> list[Call]:
    """A few calls for all: every kind's most frequent one, then the largest, smallest and next."""
    usable = [call for call in operator.calls.values() if call.numel <= _LARGEST]
    by_count = sorted(usable, key=lambda call: -call.count)
    by_size = sorted(usable, key=lambda call: call.numel)
    first: dict[Signature, Call] = {}
    for call in by_count:
        first.setdefault(call.kinds, call)
    order = [*first.values(), *by_size[-1:], *by_size[:1], *by_count]
    chosen = list({id(call): call for call in order}.values())
    return chosen[: max(ENGINE_CALLS, len(first))]


def _bases(calls: list[Call]) -> list[Call]:
    """Calls that hostile ones are made from: one for each of the first kinds."""
    first: dict[Signature, Call] = {}
    for call in calls:
        first.setdefault(call.kinds, call)
    return list(first.values())[:4]

"""Names of operators: three spellings of one thing, and what comes near a name that is none.

Knows a library's own table; must not know libraries. A table maps PyTorch's operators
("add.Tensor", "abs") to the names by which the library takes them ("add", "abs"); people also
write "_softmax", "aten::eq.Scalar", or the file and function of a log line ("div.true_divide").
"""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

Table = Mapping[str, str]


@dataclass(frozen=True)
class Resolved:
    """What names stand for.

    Attributes:
        operators: PyTorch's operators, each once, in the order in which they were asked for.
        unknown: names that stand for nothing, with what comes nearest.
    """

    operators: tuple[str, ...]
    unknown: Mapping[str, tuple[str, ...]]


def bare(name: str) -> str:
    """`name` as tables spell operators: without "aten::", "aten." and ".default"."""
    for prefix in ("aten::", "aten.", "torch.ops.aten."):
        name = name.removeprefix(prefix)
    return name.removesuffix(".default")


def expand(name: str, table: Table) -> tuple[str, ...]:
    """The operators that one name stands for; none if it is unknown.

    An operator's own name stands for itself, a library's name for all it registers, a name without
    overload for all overloads, the last part of a log line for the function it names.
    """
    asked = bare(name)
    if asked in table:
        return (asked,)
    tail = asked.rpartition(".")[2]
    for wanted in (asked, tail):
        found = tuple(operator for operator, function in table.items() if function == wanted)
        if found:
            return found
    return tuple(operator for operator in table if operator.partition(".")[0] == asked)


def resolve(names: Iterable[str], table: Table) -> Resolved:
    """Expand every name."""
    operators: dict[str, None] = {}
    unknown = {}
    for name in names:
        found = expand(name, table)
        operators.update(dict.fromkeys(found))
        if not found:
            unknown[name] = nearest(name, table)
    return Resolved(tuple(operators), unknown)


def nearest(name: str, table: Table) -> tuple[str, ...]:
    """Up to three operators or names of the library that look like `name`, the best first."""
    known = {*table, *table.values()}
    return tuple(difflib.get_close_matches(bare(name), sorted(known), n=3, cutoff=0.5))

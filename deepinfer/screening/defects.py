"""The page of known defects: what a screening found wrong, each with a few lines that show it.

Knows the screening's JSON; must not know how it was made.
"""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from deepinfer.screening.arguments import tensors
from deepinfer.screening.report import markdown_table
from deepinfer.screening.reproducer import reproducer

Data = Mapping[str, Any]
_HEAD = """# Known defects of operator libraries

Written by `python tools/write_docs.py` from `benchmarks/results/*/screening.json`; do not edit.

What `deepinfer screen` found wrong, on the machine and with the versions named below, and with the
smallest call that shows it. [screening.md](screening.md) says how operators are judged. The engine
uses none of the operators that are wrong in what it calls; "elsewhere" marks what is wrong only for
arguments that it never passes.
"""


def screenings(folder: Path) -> Iterator[Data]:
    """Committed screenings, by the names of their folders."""
    for file in sorted(folder.glob("*/screening.json")):
        yield json.loads(file.read_text(encoding="utf-8"))


def defects_page(folder: Path) -> str:
    """The page for all screenings of `folder`."""
    parts = [_HEAD.rstrip()]
    found = list(screenings(folder))
    if not found:
        parts.append("No screening is committed yet.")
    for data in found:
        versions = ", ".join(f"{name} {value}" for name, value in data["made_with"].items())
        wrong = [o for o in data["operators"] if any(c["verdict"] == "fail" for c in o["cases"])]
        parts.append(f"## {data['library']}")
        parts.append(f"{versions}. {len(wrong)} of {len(data['operators'])} operators.")
        for operator in wrong:
            parts += _operator(data, operator)
    return "\n\n".join(parts) + "\n"


def _operator(data: Data, operator: Data) -> Iterator[str]:
    wrong = [case for case in operator["cases"] if case["verdict"] == "fail"]
    scope = any(case["in_scope"] for case in wrong)
    where = "" if scope else " (elsewhere)"
    yield f"### {operator['operator']}, by the name {operator['name']}{where}"
    yield markdown_table(["with", "what is wrong", "cases"], list(_kinds(wrong)))
    smallest = min(wrong, key=lambda case: (not case["in_scope"], _size(case)))
    lines = reproducer(
        data["library"], operator["name"], operator["operator"], smallest["case"],
        smallest["args"], data["device"],
    )  # fmt: skip
    yield f"{smallest['case'][:1].upper()}{smallest['case'][1:]}:"
    yield f"```python\n{lines}\n```"


def _kinds(wrong: list[Data]) -> Iterator[list[str]]:
    """One row for each kind of case: its smallest case's complaint, and how many there are."""
    by_kind: dict[tuple[str, bool], list[Data]] = {}
    for case in wrong:
        by_kind.setdefault((case["kind"], case["in_scope"]), []).append(case)
    for (kind, scope), cases in by_kind.items():
        first = min(cases, key=_size)
        named = "calls of the engine" if kind == "engine" else kind
        yield [named + ("" if scope else " (elsewhere)"), first["reason"], str(len(cases))]


def _size(case: Data) -> float:
    args = case.get("args")
    return math.inf if args is None else sum(spec.numel for spec in tensors(args))

"""`deepinfer ops`: which implementation of every operator runs here, and why.

Knows how the choice is shown; must not know how it is made.
"""

import json
import sys
from dataclasses import asdict, dataclass

from deepinfer.commands.console import console
from deepinfer.config import EngineOptions
from deepinfer.engine.llm import LLM
from deepinfer.engine.loading import choose_operators
from deepinfer.ops.select import Operators
from deepinfer.sampling.params import SamplingParams

_TOKENS = 8


@dataclass(frozen=True)
class Line:
    """One operator: see `ops.select.Operator`; `backends` are all that implement it."""

    operator: str
    backend: str
    reason: str
    calls: int
    fallbacks: int
    backends: list[str]


def lines(operators: Operators) -> list[Line]:
    """All operators in alphabetical order."""
    return [
        Line(
            o.spec.name, o.backend, o.reason, o.calls, o.fallbacks,
            ["ref", *(backend.name for backend in o.spec.backends)],
        )
        for o in operators.all()
    ]  # fmt: skip


def list_operators(options: EngineOptions, try_out: bool) -> list[Line]:
    """The choice for a checkpoint; with `try_out`, after a few generated tokens.

    Raises:
        ConfigError: a wish cannot be met.
    """
    if not try_out:
        return lines(choose_operators(options))
    llm = LLM.from_options(options)
    prompt = [llm.model_config.bos_token_id, *range(3, 3 + _TOKENS)]
    llm.generate([prompt], SamplingParams(max_tokens=_TOKENS, ignore_eos=True, temperature=0.0))
    return lines(llm.model.precision.operators)


def show(found: list[Line], as_json: bool) -> None:
    """Print a table, or JSON."""
    if as_json:
        sys.stdout.write(json.dumps([asdict(line) for line in found]) + "\n")
        return
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE)
    for name in ("operator", "backend", "why", "calls", "fallbacks"):
        table.add_column(name, no_wrap=name == "operator")
    for line in found:
        table.add_row(
            line.operator, line.backend, line.reason, str(line.calls), str(line.fallbacks),
        )  # fmt: skip
    console().print(table)
    if any(line.calls for line in found):
        sys.stdout.write(
            "calls: while one prompt and a few greedy tokens ran. 0: they did not need it here;"
            " on a CPU, for one, PyTorch multiplies matrices that a GPU keeps packed.\n"
        )

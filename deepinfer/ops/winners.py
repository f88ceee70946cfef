"""Which backend of an operator was the fastest on a GPU, by number of rows.

Knows the committed measurements in winners.json, written by benchmarks/winners.py; must not know
what the user wants. Only operators with several kernels are in it.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

from deepinfer.errors import Unsupported


@dataclass(frozen=True)
class Bucket:
    """`backend` is the fastest up to `rows` rows of the first argument, None for any number."""

    rows: int | None
    backend: str


@cache
def winners(gpu: str) -> dict[str, tuple[Bucket, ...]]:
    """Buckets of operators by name, fewest rows first; empty for a GPU that nobody measured."""
    text = Path(__file__).with_name("winners.json").read_text(encoding="utf-8")
    found: dict[str, list[list[Any]]] = json.loads(text).get(gpu, {})
    return {
        name: tuple(Bucket(rows, backend) for rows, backend in buckets)
        for name, buckets in found.items()
    }


def describe(buckets: tuple[Bucket, ...]) -> str:
    """Like "triton_split to 24 rows, triton"."""
    return ", ".join(
        b.backend if b.rows is None else f"{b.backend} to {b.rows} rows" for b in buckets
    )


class ByRows:
    """One function of several, by the rows of the first argument.

    Args:
        buckets: most rows, or None, and functions of which the next does what one refuses.
    """

    def __init__(self, buckets: list[tuple[int | None, list[Callable[..., Any]]]]) -> None:
        assert buckets[-1][0] is None, "the last bucket takes any number of rows"
        self._buckets = buckets

    def __call__(self, first: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Arguments and results are those of the reference."""
        rows = first.shape[0]
        functions = next(found for most, found in self._buckets if most is None or rows <= most)
        for function in functions[:-1]:
            try:
                return function(first, *args, **kwargs)
            except Unsupported:
                continue
        return functions[-1](first, *args, **kwargs)

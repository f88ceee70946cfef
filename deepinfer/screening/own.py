"""Backends of this project's own operators as a library: TileKernels, for instance.

Knows specs and how their cases are checked; must not know any operator. Operators are called
"deepinfer::NAME"; their cases are those of their specs, and nothing has to be traced.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from deepinfer.errors import ConfigError, Unsupported
from deepinfer.libraries.names import Table
from deepinfer.ops.registry import specs
from deepinfer.ops.select import package_of
from deepinfer.screening.arguments import Data
from deepinfer.screening.cases import Case
from deepinfer.screening.library import Answer
from deepinfer.screening.trial import Result, is_device_error, tidy
from deepinfer.testing.operators import check_case, load_backend

PREFIX = "deepinfer::"
_BACKENDS = {"tile_kernels": "tilelang"}


def is_own(operator: str) -> bool:
    """Whether an operator is one of this project's."""
    return operator.startswith(PREFIX)


class Backends:
    """Every operator that has the backend.

    Args:
        name: "tile_kernels" or "backend:NAME".

    Raises:
        ConfigError: no operator has it.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.backend = _BACKENDS.get(name, name.partition(":")[2])
        self.package = package_of(self.backend)
        if not self.table():
            known = sorted({b.name for spec in specs().values() for b in spec.backends})
            raise ConfigError(
                f"library {name}: no operator of deepinfer has a backend {self.backend!r}; there"
                f" are {', '.join(known)}"
            )

    def table(self) -> Table:
        """Operators that have it."""
        return {
            PREFIX + spec.name: self.backend for spec in specs().values()
            if any(backend.name == self.backend for backend in spec.backends)
        }  # fmt: skip

    def function(self, operator: str) -> Callable[..., Any]:
        """The backend's function."""
        spec = specs()[operator.removeprefix(PREFIX)]
        return load_backend(next(b for b in spec.backends if b.name == self.backend))

    def open(self, operator: str) -> "_Own":
        """Nothing is registered: the engine calls operators by name."""
        return _Own(self.function(operator))


class _Own:
    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Answer:
        """Call the backend."""
        return Answer(self.function(*args, **kwargs))

    def close(self) -> None:
        """Nothing to restore."""


def own_cases(operator: str, device: str) -> list[Case]:
    """Cases of the operator's spec that fit the device."""
    kinds = ("tiny", "hostile", "released") if device == "cuda" else ("tiny", "hostile")
    spec = specs()[operator.removeprefix(PREFIX)]
    nothing: Data = {"args": [], "kwargs": {}}
    return [Case(c.name, c.kind, nothing, True) for c in spec.cases() if c.kind in kinds]


def own_attempt(library: Backends, operator: str, case: Case, device: torch.device) -> Result:
    """Whether the backend does what the reference does with one case, by the spec's tolerances."""
    spec = specs()[operator.removeprefix(PREFIX)]
    made = next(c for c in spec.cases() if c.name == case.name)
    try:
        check_case(spec, library.function(operator), made, device)
    except Unsupported as error:
        return Result(case.name, "skip", f"refuses it: {error}")
    except Exception as error:
        if is_device_error(error):
            raise
        told = str(error) if isinstance(error, AssertionError) else f"raises {error!r}"
        return Result(case.name, "fail", tidy(told))
    return Result(case.name, "pass")

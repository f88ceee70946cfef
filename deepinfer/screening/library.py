"""Libraries that can be screened: FlagGems, and functions in a module of the user's.

Knows how each is asked; must not know how answers are judged. A library that is none of these needs
no change here: `--library FILE.py:NAME` takes any object with the methods of `Library`.
"""

import difflib
import importlib
import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, runtime_checkable

import torch

from deepinfer.errors import ConfigError
from deepinfer.libraries import flaggems
from deepinfer.libraries.names import Table, bare
from deepinfer.libraries.replace import Replacement, overload
from deepinfer.screening.arguments import flat_tensors

DEFAULT_OBJECT = "OPERATORS"


@dataclass(frozen=True)
class Answer:
    """What a call gave.

    Attributes:
        missed: why the library itself did not answer, None if it did.
    """

    result: Any
    missed: str | None = None


@runtime_checkable
class Session(Protocol):
    """One operator of a library, ready to be called.

    Outside of `call` PyTorch's own operators have to answer: arguments are made and answers are
    judged with them.
    """

    def call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Answer:
        """Call it once."""

    def close(self) -> None:
        """Give PyTorch its operator back."""


@runtime_checkable
class Library(Protocol):
    """A library of operators.

    Attributes:
        name: as it is asked for; package: whose version is noted, None for none.
    """

    name: str
    package: str | None

    def table(self) -> Table | None:
        """PyTorch's operators that it has, with the names by which it takes them; None for any."""

    def open(self, operator: str) -> Session:
        """Put one operator in, which `table` has."""


class Dispatched:
    """An operator that PyTorch's dispatcher hands to a function, during `call` alone."""

    def __init__(self, operator: str, replacement: Replacement) -> None:
        self.operator = operator
        self.replacement = replacement
        replacement.answering = False

    def call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Answer:
        """Call it through PyTorch; proof is that the function was called, and not PyTorch by it."""
        use = self.replacement.uses[self.operator]
        calls, nested = use.calls, use.nested
        self.replacement.answering = True
        try:
            result = overload(self.operator)(*args, **kwargs)
        finally:
            self.replacement.answering = False
        if use.calls == calls:
            return Answer(result, "PyTorch's dispatcher did not call it")
        if use.nested > nested:
            return Answer(result, "its function hands the call back to PyTorch")
        return Answer(result)

    def close(self) -> None:
        """Restore PyTorch's kernel."""
        self.replacement.close()


class Functions:
    """Functions by the names of the operators that they stand for.

    Args:
        functions: like {"add.Tensor": my_add}; arguments are those of the operator.
    """

    package: str | None = None

    def __init__(self, name: str, functions: Mapping[str, Callable[..., Any]], device: str) -> None:
        self.name = name
        self.functions = functions
        self.device = device

    def table(self) -> Table:
        """Names of the functions."""
        return {key: getattr(f, "__name__", key) for key, f in self.functions.items()}

    def open(self, operator: str) -> Session:
        """Register the function with PyTorch's dispatcher."""
        replacement = Replacement(self.device)
        replacement.add(operator, self.functions[operator])
        return Dispatched(operator, replacement)


class FlagGems:
    """FlagGems, one operator at a time."""

    name: str = flaggems.NAME
    package: str | None = flaggems.PACKAGE

    def __init__(self) -> None:
        self.module = flaggems.load()

    def table(self) -> Table:
        """Its own table."""
        return flaggems.table(self.module)

    def open(self, operator: str) -> Session:
        """Register its function, and watch Triton's launches."""
        replacement = Replacement("cuda")
        flaggems.put_in(self.module, {operator: None}, replacement)
        return _Launching(operator, replacement)


class _Launching(Dispatched):
    """A function whose work is done by Triton's kernels: a call that launches none did nothing.

    FlagGems hands some calls on to PyTorch's kernels below the dispatcher; only this shows it.
    """

    def __init__(self, operator: str, replacement: Replacement) -> None:
        super().__init__(operator, replacement)
        import triton

        self.launches = 0
        self.hooks = triton.knobs.runtime.launch_enter_hook
        self.hooks.add(self._launched)

    def _launched(self, *_: Any) -> None:
        self.launches += 1

    def call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Answer:
        """Call it through PyTorch; proof is a launch, where there is anything to compute."""
        before = self.launches
        answer = super().call(args, kwargs)
        empty = not any(t.numel() for t in flat_tensors([answer.result, *args]))
        if answer.missed is None and self.launches == before and not empty:
            return Answer(answer.result, "it launched no kernel of its own")
        return answer

    def close(self) -> None:
        """Restore PyTorch's kernel and Triton's hooks."""
        self.hooks.remove(self._launched)
        super().close()


NAMED = ("flaggems", "torch.compile", "tile_kernels", "backend:NAME", "MODULE:OBJECT",
         "FILE.py:OBJECT")  # fmt: skip


def check_device(name: str, device: str) -> None:
    """Refuse a library that has nothing to show on a CPU.

    Raises:
        ConfigError: it has kernels for GPUs only.
    """
    if name in ("flaggems", "tile_kernels") and device == "cpu":
        raise ConfigError(
            f"library {name} has kernels for GPUs only, and this run is on a CPU; torch.compile or"
            " functions of yours (FILE.py:OBJECT) can be screened here"
        )


def load_library(name: str, device: str) -> Library:
    """The library of a name, imported.

    Raises:
        ConfigError: there is none of that name, it cannot be imported, or needs a GPU.
    """
    check_device(name, device)
    if name == flaggems.NAME:
        return FlagGems()
    if name == "torch.compile":
        from deepinfer.screening.compiled import Compiled

        return Compiled()
    if name == "tile_kernels" or name.startswith("backend:"):
        from deepinfer.screening.own import Backends

        return Backends(name)
    return _users(name, device)


def _users(name: str, device: str) -> Library:
    where, _, attribute = name.partition(":")
    module = _module(name, where)
    found = getattr(module, attribute or DEFAULT_OBJECT, None)
    if isinstance(found, Library):
        return found
    if isinstance(found, Mapping):
        for key, function in found.items():
            if not isinstance(key, str) or not callable(function):
                raise ConfigError(
                    f"library {name}: {key!r}: {function!r:.60}; expected a function for the name"
                    " of an operator, like add.Tensor"
                )
        plain = {bare(key): function for key, function in found.items()}
        _check_operators(name, plain)
        return Functions(name, plain, device)
    raise ConfigError(
        f"library {name}: {where} has no {attribute or DEFAULT_OBJECT} that is a dict of functions"
        " by operator, or an object with the methods of deepinfer.screening.library.Library"
    )


def _check_operators(name: str, functions: Mapping[str, Any]) -> None:
    """Refuse names that PyTorch has no operator for."""
    for key in functions:
        family = key.partition(".")[0]
        packet = getattr(torch.ops.aten, family, None)
        overloads = [] if packet is None else packet.overloads()
        known = [family if o == "default" else f"{family}.{o}" for o in overloads]
        if key not in known:
            near = known or difflib.get_close_matches(family, dir(torch), n=3)
            raise ConfigError(
                f"library {name}: {key!r} is no operator of PyTorch; nearest:"
                f" {', '.join(near[:6]) or 'none'}"
            )


def _module(name: str, where: str) -> ModuleType:
    try:
        if not where.endswith(".py"):
            return importlib.import_module(where)
        spec = importlib.util.spec_from_file_location(re.sub(r"\W", "_", Path(where).stem), where)
        assert spec is not None and spec.loader is not None, where
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    except Exception as error:
        expected = ", ".join(NAMED)
        raise ConfigError(
            f"library {name!r} cannot be imported ({type(error).__name__}: {error}); expected one"
            f" of {expected}"
        ) from error

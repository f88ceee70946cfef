"""Functions in the place of PyTorch's own operators, for the kinds of arguments they are good for.

Knows PyTorch's dispatcher; must not know any library. A function is called only from outside of
other functions and only with argument kinds that it may have; every other call goes to PyTorch's
own kernel, so that what was proven of an operator alone holds however many are replaced.
"""

import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

Function = Callable[..., Any]
Signature = tuple[str, ...]
_PACKAGE = str(Path(__file__).resolve().parents[1])
_OWN = (str(Path(__file__).resolve().parent), str(Path(_PACKAGE) / "screening"))


def overload(operator: str) -> Any:
    """torch.ops.aten's function of "add.Tensor" or "abs"; AttributeError where there is none."""
    name, _, variant = operator.partition(".")
    return getattr(getattr(torch.ops.aten, name), variant or "default")


@cache
def tensor_places(operator: str) -> tuple[tuple[int, str], ...]:
    """(position, name) of the arguments that are tensors or lists of them; dtype= counts too."""
    arguments = overload(operator)._schema.arguments
    return tuple(
        (number, a.name) for number, a in enumerate(arguments)
        if "Tensor" in str(a.type) or a.name == "dtype"
    )  # fmt: skip


def signature(operator: str, args: Sequence[Any], kwargs: dict[str, Any], device: str) -> Signature:
    """The kinds of a call's tensors: dtypes, "int" for a number in a tensor's place, and so on.

    A tensor on another device than `device` ("cuda" or "cpu") has that device's name behind its
    dtype, so that a host scalar is a kind of its own.
    """
    kinds: list[str] = []
    for number, name in tensor_places(operator):
        value = args[number] if number < len(args) else kwargs.get(name)
        for item in value if isinstance(value, list | tuple) else (value,):
            if isinstance(item, Tensor):
                where = item.device.type
                kinds.append(_dtype(item.dtype) + ("" if where == device else f"@{where}"))
            elif isinstance(item, torch.dtype):
                kinds.append(_dtype(item))
            else:
                kinds.append("-" if item is None else type(item).__name__)
    return tuple(kinds)


@cache
def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def call_site() -> str | None:
    """ "file.py:line" of the innermost frame of this package outside of screening, or None."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_PACKAGE) and not name.startswith(_OWN):
            return f"{name[len(_PACKAGE) + 1 :]}:{frame.f_lineno}"
        frame = frame.f_back
    return None


@dataclass
class Use:
    """What became of one replaced operator's calls.

    Attributes:
        calls: that the function answered; kept: that PyTorch's kernel did, because their kinds are
            not proven or another function made them; nested: calls that the function made of the
            very operator it stands for.
        sites: lines of this package that the answered calls came from.
    """

    calls: int = 0
    kept: int = 0
    nested: int = 0
    sites: set[str] = field(default_factory=set)


class Replacement:
    """Registered functions and their use; `close` gives PyTorch its operators back.

    Args:
        device: "cuda" or "cpu": calls on it are answered.

    Attributes:
        answering: while this is false, all calls go to PyTorch's kernels.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.answering = True
        self.library = torch.library.Library("aten", "IMPL")
        self.uses: dict[str, Use] = {}
        self._inside = threading.local()

    def add(
        self, operator: str, function: Function, proven: Collection[Signature] | None = None
    ) -> None:
        """Answer calls of `operator` with `function`.

        Args:
            proven: kinds of arguments that it may have; None for any.

        Raises:
            AttributeError: PyTorch has no such operator. RuntimeError: it has no kernel for the
                device that calls could go back to.
        """
        key = self.device.upper()
        overload(operator)
        native = torch.library.get_kernel(f"aten::{operator}", key)
        answer = _Answer(operator, function, native, self, proven)
        self.uses[operator] = answer.use
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns of what is meant: an override
            self.library.impl(operator, answer.__call__, key, with_keyset=True)

    @property
    def stack(self) -> list[str]:
        """Operators whose functions are running in this thread, innermost last."""
        if not hasattr(self._inside, "stack"):
            self._inside.stack = []
        stack: list[str] = self._inside.stack
        return stack

    def totals(self) -> Counter[str]:
        """Operators that were dispatched, the calls, their sites and what PyTorch kept."""
        used = [use for use in self.uses.values() if use.calls]
        return Counter(
            operators=len(used),
            calls=sum(use.calls for use in used),
            sites=len(set[str]().union(*(use.sites for use in used))),
            kept=sum(use.kept for use in self.uses.values()),
        )

    def close(self) -> None:
        """Restore PyTorch's own kernels."""
        self.library._destroy()


class _Answer:
    """One operator's calls: to the function where it may, else to PyTorch."""

    def __init__(
        self,
        operator: str,
        function: Function,
        native: Any,
        replacement: Replacement,
        proven: Collection[Signature] | None,
    ) -> None:
        self.operator = operator
        self.function = function
        self.native = native
        self.replacement = replacement
        self.proven = proven
        self.use = Use()

    def __call__(self, keys: Any, *args: Any, **kwargs: Any) -> Any:
        """Answer one call that the dispatcher hands over with its key set."""
        stack, use = self.replacement.stack, self.use
        if not self.replacement.answering:
            return self._native(keys, args, kwargs)
        if stack:
            use.nested += stack[-1] == self.operator
            return self._native(keys, args, kwargs)
        if self.proven is not None:
            kinds = signature(self.operator, args, kwargs, self.replacement.device)
            if kinds not in self.proven:
                return self._native(keys, args, kwargs)
        use.calls += 1
        site = call_site()
        if site is not None:
            use.sites.add(site)
        stack.append(self.operator)
        try:
            return self.function(*args, **kwargs)
        finally:
            stack.pop()

    def _native(self, keys: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.use.kept += 1
        stack = self.replacement.stack
        stack.append("")  # numbers become tensors by operators that may be replaced, too
        try:
            return self.native.call_boxed(keys, *_numbers_as_tensors(self.operator, args), **kwargs)
        finally:
            stack.pop()


def _numbers_as_tensors(operator: str, args: tuple[Any, ...]) -> list[Any]:
    """Positional arguments with tensors for the numbers that stand in a tensor's place.

    The dispatcher unwraps such numbers for Python and does not wrap them again. A scalar tensor of
    the right dtype gives the same result: a wide one beside a tensor with dimensions, which decides
    the result's dtype; the result's dtype itself otherwise, which rounds a number beside a scalar
    tensor of 16 bits earlier than PyTorch would.
    """
    found = list(args)
    tensors = [a for a in args if isinstance(a, Tensor)]
    for number, name in tensor_places(operator):
        if number >= len(args) or name == "dtype" or not isinstance(args[number], int | float):
            continue
        wide = torch.float64 if isinstance(args[number], float) else None
        value = torch.tensor(args[number], dtype=wide)
        if tensors:
            wanted = torch.result_type(tensors[0], args[number])
            if torch.result_type(tensors[0], value) != wanted:
                value = value.to(wanted)
        found[number] = value
    return found

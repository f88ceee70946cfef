"""torch.compile as a library: every operator, compiled alone.

Knows Inductor's counters; must not know how answers are judged.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from deepinfer.libraries.replace import overload
from deepinfer.screening.arguments import flat_tensors
from deepinfer.screening.library import Answer


class Compiled:
    """Inductor's code for one operator at a time."""

    name = "torch.compile"
    package: str | None = None

    def table(self) -> None:
        """Any operator can be compiled."""

    def open(self, operator: str) -> "_Compiling":
        """Nothing is registered: a compiled operator is a function of its own."""
        return _Compiling(operator)


class _Compiling:
    def __init__(self, operator: str) -> None:
        self.function = overload(operator)
        self.compiled: dict[str, Any] = {}
        self.generated: dict[str, bool] = {}

    def call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Answer:
        """Call the code for these shapes; proof is that a kernel was generated when it was made."""
        from torch._inductor import metrics

        key = _shape_key([*args, *kwargs.values()])
        if key not in self.compiled:
            torch._dynamo.reset()
            self.compiled[key] = torch.compile(self._call, fullgraph=True, dynamic=False)
        before = metrics.generated_kernel_count
        result = self.compiled[key](list(args), dict(kwargs))
        made = metrics.generated_kernel_count > before
        self.generated[key] = made or self.generated.get(key, False)
        empty = not any(t.numel() for t in flat_tensors([result, *args]))
        if self.generated[key] or empty:
            return Answer(result)
        return Answer(result, "Inductor generated no kernel and calls PyTorch's")

    def _call(self, args: list[Any], kwargs: dict[str, Any]) -> Any:
        return self.function(*args, **kwargs)

    def close(self) -> None:
        """Forget what was compiled."""
        torch._dynamo.reset()


def _shape_key(values: Sequence[Any]) -> str:
    """What code is specialised on, and a little more."""
    parts = []
    for value in values:
        if isinstance(value, torch.Tensor):
            parts.append(f"{value.dtype}{[*value.shape]}{value.stride()}{value.device.type}")
        elif isinstance(value, list | tuple):
            parts.append(f"[{_shape_key(value)}]")
        else:
            parts.append(repr(value))
    return " ".join(parts)

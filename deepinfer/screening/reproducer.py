"""A few lines of Python that show one wrong call.

Knows how arguments are written down; must not know why a call is wrong.
"""

import math
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from deepinfer.libraries import flaggems
from deepinfer.screening.arguments import Data, TensorData, build, contiguous, tensor_data, tensors
from deepinfer.screening.own import PREFIX, is_own
from deepinfer.screening.schema import written

LINES = 10
_LITERAL = 40  # elements that are written out


def reproducer(library: str, name: str, operator: str, case: str, args: Data, device: str) -> str:
    """At most ten lines that print PyTorch's result and the library's.

    Values are the very ones of the case where there are few, and drawn alike where there are many.

    Args:
        name: by which the library takes the operator.
    """
    if is_own(operator):
        return _own(name, operator, case, device)
    maker = _Writer(case, args, device)
    call = maker.call(operator)
    target = f"torch.ops.aten.{operator if '.' in operator else operator + '.default'}"
    if library == flaggems.NAME:
        imports = "import torch, flag_gems"
        ask = [f'flag_gems.only_enable(include=["{name}"])', f"print({target}({call}))"]
    else:
        imports = "import torch\nfrom deepinfer.screening.library import load_library"
        ask = [
            f'session = load_library("{library}", "{device}").open("{operator}")',
            f"print(session.call({maker.packed(operator)}).result)",
        ]
    lines = [*imports.splitlines(), *maker.lines, f"print({target}({call}))", *ask]
    return "\n".join(_joined(lines))


def _own(name: str, operator: str, case: str, device: str) -> str:
    spec = operator.removeprefix(PREFIX)
    return "\n".join((
        "import torch",
        "from deepinfer.ops.registry import specs",
        "from deepinfer.testing.operators import check_case, load_backend",
        f'spec = specs()["{spec}"]',
        f'backend = next(b for b in spec.backends if b.name == "{name}")',
        f'case = next(c for c in spec.cases() if c.name == "{case}")',
        f'check_case(spec, load_backend(backend), case, torch.device("{device}"))',
    ))  # fmt: skip


def _joined(lines: list[str]) -> list[str]:
    """The same program with short assignments side by side, if it has too many lines."""
    while len(lines) > LINES:
        at = next(n for n, line in enumerate(lines) if " = " in line and n + 1 < len(lines))
        lines = [*lines[:at], f"{lines[at]}; {lines[at + 1]}", *lines[at + 2 :]]
    return lines


class _Writer:
    def __init__(self, case: str, args: Data, device: str) -> None:
        self.args = args
        self.device = device
        built, named = build(args, torch.device("cpu"), zlib.crc32(case.encode()))
        self.values = list(_tensors([*built, *named.values()]))
        self.lines: list[str] = []
        self.names: list[str] = []
        for number, spec in enumerate(tensors(args)):
            self.names.append(self._define(number, spec))

    def _define(self, number: int, spec: TensorData) -> str:
        if spec.same_as is not None:
            return self.names[spec.same_as]
        name = "abcdefgh"[number] if number < 8 else f"t{number}"
        self.lines.append(f"{name} = {self._expression(spec, self.values[number])}")
        return name

    def _expression(self, spec: TensorData, value: Tensor) -> str:
        device = "cpu" if spec.where == "cpu" else self.device
        plain = spec.stride == contiguous(spec.shape)
        shape = [1 if step == 0 else n for n, step in zip(spec.shape, spec.stride, strict=True)]
        values = value.as_strided(shape, spec.stride)
        text = _literal(values) if values.numel() <= _LITERAL else _drawn(values)
        made = f"torch.{text}"
        made += f'.to(torch.{spec.dtype}).to("{device}")' if device != "cpu" else (
            f".to(torch.{spec.dtype})"
        )  # fmt: skip
        if plain:
            return made
        if 0 in spec.stride:
            return f"{made}.expand({list(spec.shape)})"
        kind = f'dtype=torch.{spec.dtype}, device="{device}"'
        empty = f"torch.empty_strided({list(spec.shape)}, {list(spec.stride)}, {kind})"
        return f"{empty}.copy_({made})"

    def _parts(self, operator: str) -> tuple[list[str], list[str]]:
        names = iter(self.names)
        changed = written(operator)
        args = [_argument(item, names, self.device) for item in self.args["args"]]
        args = [f"{a}.clone()" if n in changed else a for n, a in enumerate(args)]
        named = [
            f"{key}={_argument(item, names, self.device)}"
            for key, item in self.args["kwargs"].items()
        ]
        return args, [n + ".clone()" if n.startswith("out=") else n for n in named]

    def call(self, operator: str) -> str:
        """Arguments as they stand between brackets; what is written to is a copy."""
        args, named = self._parts(operator)
        return ", ".join([*args, *named])

    def packed(self, operator: str) -> str:
        """The same as a list and a dict."""
        args, named = self._parts(operator)
        return f"[{', '.join(args)}], dict({', '.join(named)})"


def _tensors(values: list[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list):
            yield from _tensors(value)


def _argument(item: Data, names: Iterator[str], device: str) -> str:
    if isinstance(item, list):
        return f"[{', '.join(_argument(inner, names, device) for inner in item)}]"
    if not isinstance(item, dict):
        return repr(item)
    ((kind, content),) = item.items()
    if kind == "tensor":
        tensor_data(item)
        return next(names)
    if kind == "float":
        return f'float("{content}")'
    if kind == "device":
        return f'torch.device("{device if content != "cpu" else "cpu"}")'
    return f"torch.{content}"


def _literal(values: Tensor) -> str:
    if values.dtype.is_complex:
        return f"tensor({values.tolist()})"
    wide = values.double() if values.is_floating_point() else values
    return f"tensor({_text(wide.tolist())})"


def _text(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, float) and not math.isfinite(value):
        return f"{'-' if value < 0 else ''}torch.{'nan' if math.isnan(value) else 'inf'}"
    return f"{value:.9g}" if isinstance(value, float) else repr(value)


def _drawn(values: Tensor) -> str:
    """Values like these, but not these: there are too many to write them out."""
    shape = list(values.shape)
    if values.is_floating_point() or values.dtype.is_complex:
        wide = values.double() if values.is_floating_point() else values.abs()
        finite = wide[wide.isfinite()]
        scale = float(finite.square().mean().sqrt()) if finite.numel() else 1.0
        return f"randn({shape}).mul({scale:.3g})"
    if values.dtype == torch.bool:
        return f"rand({shape}).gt(0.5)"
    low, high = int(values.long().min()), int(values.long().max())
    return f"randint({low}, {min(high, 2**62) + 1}, {shape})"

"""Arguments of one call as data: described from real ones, and built again anywhere.

Knows tensors and how their values are drawn; must not know operators. Data is what JSON holds:
numbers, texts, null, lists, and objects with one key that says what they stand for ("tensor",
"dtype", "device", "layout", "memory_format", "float").
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from deepinfer.libraries.replace import Signature, tensor_places

Data = Any
TARGET = "target"  # the device under test
_SAMPLE = 1 << 20  # values of a large tensor that are looked at
# What floating kernels are known to trip over; -0.0 and denormals included.
_SPECIALS = (
    1.5, -math.inf, 0.0, -0.0, math.nan, -2.25, math.inf, 3e-39, 1e-3, -7.0, 65504.0, -1e30, 1e30,
)  # fmt: skip
_BIG = (0, 1, -1, 2**24, 2**24 + 1, 2**31 - 1, 2**31, 2**53, 2**53 + 1, -(2**53) - 1, 2**62, 7)


@dataclass(frozen=True)
class Fill:
    """How values are drawn.

    Attributes:
        kind: normal: N(0, scale), clipped to [low, high]. whole: whole numbers in [low, high].
            rising: the same, sorted, the last one high. specials: infinities, NaN, zeros, tiny and
            huge among others. low_rows: -inf, whole rows of it too. big: whole numbers around
            2^24, 2^31, 2^53 and 2^62. given: `values`, row by row.
    """

    kind: str = "normal"
    low: float = -math.inf
    high: float = math.inf
    scale: float = 1.0
    values: tuple[float, ...] = ()


@dataclass(frozen=True)
class TensorData:
    """One tensor.

    Attributes:
        where: "target" or "cpu".
        same_as: number of an earlier tensor of the call that this one is, instead of its own.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    fill: Fill = field(default_factory=Fill)
    where: str = TARGET
    same_as: int | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def storage(self) -> int:
        """Elements from the first to the last, gaps included."""
        if not self.numel:
            return 0
        return 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))

    def to_data(self) -> Data:
        """As JSON."""
        data = {k: v for k, v in asdict(self).items() if v not in (None, TARGET)}
        unsaid = asdict(Fill())
        fill = {k: _number(v) for k, v in data["fill"].items() if v != unsaid[k]}
        return {"tensor": {**data, "shape": [*self.shape], "stride": [*self.stride], "fill": fill}}


def tensor_data(data: Data) -> TensorData:
    """From JSON."""
    inner = dict(data["tensor"])
    fill = {k: _from_number(v) for k, v in inner["fill"].items()}
    inner["fill"] = Fill(**{**fill, "values": tuple(fill.get("values", ()))})
    return TensorData(**{**inner, "shape": tuple(inner["shape"]), "stride": tuple(inner["stride"])})


def _number(value: Any) -> Data:
    if isinstance(value, tuple | list):
        return [_number(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    return value


def _from_number(value: Data) -> Any:
    if isinstance(value, list):
        return tuple(_from_number(v) for v in value)
    return float(value["float"]) if isinstance(value, dict) else value


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a row-major tensor."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))


# ---------------------------------------------------------------- describing


def describe(value: Any, device: str) -> Data:
    """`value`, which is what an operator may be called with on `device`, as data.

    Raises:
        TypeError: it is nothing of the kind, a generator for instance.
    """
    if isinstance(value, Tensor):
        return _describe_tensor(value, device).to_data()
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, list | tuple):
        return [describe(item, device) for item in value]
    if isinstance(value, torch.device):
        return {"device": TARGET if value.type == device else "cpu"}
    for kind in ("dtype", "layout", "memory_format"):
        if isinstance(value, getattr(torch, kind)):
            return {kind: str(value).removeprefix("torch.")}
    raise TypeError(type(value).__name__)


def _describe_tensor(x: Tensor, device: str) -> TensorData:
    where = TARGET if x.device.type == device else "cpu"
    dtype = str(x.dtype).removeprefix("torch.")
    return TensorData(tuple(x.shape), tuple(x.stride()), dtype, _describe_values(x), where)


def _describe_values(x: Tensor) -> Fill:
    flat = x.detach().reshape(-1)[:_SAMPLE]
    if not flat.numel():
        return Fill()
    if x.dtype in (torch.bool, torch.uint64):  # PyTorch can hardly look at the latter
        return Fill("whole", 0, 1)
    if x.dtype.is_complex:
        return Fill()
    if not x.dtype.is_floating_point:
        flat = flat.long()
        least, most = (int(v) for v in flat.aminmax())
        rises = flat.numel() > 2 and most > least and bool((flat[1:] >= flat[:-1]).all())
        return Fill("rising" if rises else "whole", least, most)
    flat = flat.float() if x.dtype.itemsize < 4 else flat
    finite = flat[flat.isfinite()]
    if flat.isneginf().any():
        return Fill("low_rows", scale=_scale(finite))
    if finite.numel() < flat.numel() or not finite.numel():
        return Fill("specials")
    low, high = (float(v) for v in finite.aminmax())
    return Fill("normal", low, high, _scale(finite))


def _scale(finite: Tensor) -> float:
    return float(finite.double().square().mean().sqrt()) or 1.0 if finite.numel() else 1.0


# ---------------------------------------------------------------- building


def build(args: Data, device: torch.device, seed: int) -> tuple[list[Any], dict[str, Any]]:
    """Arguments from {"args": [...], "kwargs": {...}}, the same ones for the same seed."""
    maker = _Maker(device, seed)
    positional = [maker.value(item) for item in args["args"]]
    return positional, {name: maker.value(item) for name, item in args["kwargs"].items()}


class _Maker:
    def __init__(self, device: torch.device, seed: int) -> None:
        self.device = device
        self.generator = torch.Generator().manual_seed(seed)
        self.made: list[Tensor] = []

    def value(self, data: Data) -> Any:
        if isinstance(data, list):
            return [self.value(item) for item in data]
        if not isinstance(data, dict):
            return data
        ((kind, content),) = data.items()
        if kind == "tensor":
            self.made.append(self.tensor(tensor_data(data)))
            return self.made[-1]
        if kind == "float":
            return float(content)
        if kind == "device":
            return torch.device("cpu") if content == "cpu" else self.device
        return getattr(torch, content)

    def tensor(self, spec: TensorData) -> Tensor:
        if spec.same_as is not None:
            return self.made[spec.same_as]
        device = torch.device("cpu") if spec.where == "cpu" else self.device
        dtype: torch.dtype = getattr(torch, spec.dtype)
        # Where a stride is 0 there is one value.
        shape = [1 if step == 0 else n for n, step in zip(spec.shape, spec.stride, strict=True)]
        values = _draw(spec.fill, shape, dtype, self.generator).to(device)
        memory = torch.empty(max(1, spec.storage), dtype=dtype, device=device)
        _copy(memory.as_strided(shape, spec.stride), values)
        return memory.as_strided(spec.shape, spec.stride)


def _copy(target: Tensor, values: Tensor) -> None:
    """Like copy_, for dtypes that copy nothing but bytes, too."""
    if target.dtype.itemsize == 1:
        target.view(torch.uint8).copy_(values.view(torch.uint8))
    else:
        target.copy_(values)


def _draw(fill: Fill, shape: list[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    count = math.prod(shape)
    if fill.kind == "given":
        flat = torch.tensor(fill.values, dtype=_wide(dtype))
    elif dtype.is_complex:
        flat = torch.randn(count, dtype=dtype, generator=generator)
    elif dtype.is_floating_point:
        flat = _draw_floats(fill, count, generator)
    else:
        flat = _draw_whole(fill, count, dtype, generator)
    values = flat[:count].reshape(shape)
    if fill.kind == "low_rows" and dtype.is_floating_point and len(shape) and shape[0] > 1:
        values[-1] = -math.inf
    if dtype == torch.float8_e8m0fnu:
        values = values.abs().clamp(2.0**-20, 2.0**20)
    return values.to(dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype.is_floating_point else torch.int64


def _draw_floats(fill: Fill, count: int, generator: torch.Generator) -> Tensor:
    if fill.kind == "specials":
        return _repeated(torch.tensor(_SPECIALS, dtype=torch.float64), count)
    values = torch.randn(count, dtype=torch.float64, generator=generator) * fill.scale
    if fill.kind == "low_rows":
        values[torch.rand(count, generator=generator) < 0.4] = -math.inf
        return values
    return values.clamp(fill.low, fill.high)


def _draw_whole(fill: Fill, count: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    if fill.kind == "big":
        values = _repeated(torch.tensor(_BIG, dtype=torch.int64), count)
        return values % 2 if dtype == torch.bool else values
    low = int(fill.low) if math.isfinite(fill.low) else 0
    high = int(fill.high) if math.isfinite(fill.high) else 3
    # randint's upper bound is exclusive and an int64.
    top = min(max(low, high), 2**63 - 2) + 1
    values = torch.randint(low, top, (count,), generator=generator)
    if fill.kind == "rising" and count:
        values = values.sort().values
        values[-1] = high
    return values


def _repeated(values: Tensor, count: int) -> Tensor:
    return values.repeat(-(-count // len(values)) or 1)[:count]


# ---------------------------------------------------------------- looking and changing


def kinds(operator: str, data: Data) -> Signature:
    """What `libraries.replace.signature` says of the arguments once they are built."""
    found: list[str] = []
    for number, name in tensor_places(operator):
        args = data["args"]
        value = args[number] if number < len(args) else data["kwargs"].get(name)
        for item in value if isinstance(value, list) else (value,):
            found.append(_kind(item))
    return tuple(found)


def _kind(item: Data) -> str:
    if not isinstance(item, dict):
        return "-" if item is None else type(item).__name__
    if "tensor" in item:
        inner = item["tensor"]
        return str(inner["dtype"]) + ("@cpu" if inner.get("where") == "cpu" else "")
    return str(item["dtype"]) if "dtype" in item else "float"


def flat_tensors(value: Any) -> list[Tensor]:
    """Tensors in nested lists and tuples of arguments or results."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in flat_tensors(item)]
    return []


def tensors(data: Data) -> Iterator[TensorData]:
    """All tensors of arguments, in the order in which they are built."""
    if isinstance(data, list):
        for item in data:
            yield from tensors(item)
    elif isinstance(data, dict):
        if "tensor" in data:
            yield tensor_data(data)
        elif "args" in data:
            yield from tensors(data["args"])
            yield from tensors(list(data["kwargs"].values()))


def change(data: Data, new: Callable[[int, TensorData], TensorData]) -> Data:
    """Arguments with other tensors: `new` gets each one's number and data."""
    count = 0

    def visit(item: Data) -> Data:
        nonlocal count
        if isinstance(item, list):
            return [visit(inner) for inner in item]
        if isinstance(item, dict) and "tensor" in item:
            count += 1
            return new(count - 1, tensor_data(item)).to_data()
        return item

    return {
        "args": visit(data["args"]),
        "kwargs": {name: visit(item) for name, item in data["kwargs"].items()},
    }


def reshaped(spec: TensorData, shape: Sequence[int]) -> TensorData:
    """The same kind of tensor with another shape, row-major; expanded dimensions stay expanded."""
    strides = list(contiguous(shape))
    if len(shape) == len(spec.shape):
        for place, (size, step) in enumerate(zip(spec.shape, spec.stride, strict=True)):
            if step == 0 and size > 1:
                strides[place] = 0
    fill = spec.fill if spec.fill.kind != "given" else Fill()
    return replace(spec, shape=tuple(shape), stride=tuple(strides), fill=fill)


# ---------------------------------------------------------------- showing


def show(data: Data) -> str:
    """Arguments for people, like "float32[3, 4] by (1, 3) specials, 2.0, dim=-1"."""
    named = [f"{name}={_shown(item)}" for name, item in data["kwargs"].items()]
    return ", ".join([*map(_shown, data["args"]), *named])


def _shown(item: Data) -> str:
    if isinstance(item, list):
        return f"[{', '.join(map(_shown, item))}]"
    if not isinstance(item, dict):
        return str(item)
    if "tensor" not in item:
        return str(next(iter(item.values())))
    spec = tensor_data(item)
    if spec.same_as is not None:
        return f"tensor {spec.same_as + 1} again"
    strides = "" if spec.stride == contiguous(spec.shape) else f" by {spec.stride}"
    fill = "" if spec.fill.kind in ("normal", "whole") else f" {spec.fill.kind.replace('_', ' ')}"
    where = "" if spec.where == TARGET else f" on the {spec.where}"
    return f"{spec.dtype}{[*spec.shape]}{strides}{fill}{where}"

"""Which of PyTorch's operators a run calls, with which arguments and from where: found by a trace.

Knows the dispatcher and the profiler; must not know the engine, which the caller runs. Operators
that a composite one is made of are seen too, and those that PyTorch's kernels call inside of
themselves, which a library may answer as well as any other.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deepinfer.libraries.replace import Signature, call_site, overload, signature
from deepinfer.screening.arguments import (
    Data,
    Fill,
    TensorData,
    contiguous,
    describe,
    kinds,
    tensors,
)

_SCALAR_TYPES = {"Scalar", "int", "double", "bool"}


@dataclass
class Call:
    """Calls of one operator with the same shapes, dtypes, strides and numbers.

    Attributes:
        args: data that `arguments.build` takes.
        kinds: see `libraries.replace.signature`.
        count: how many there were.
        nested: whether a kernel of PyTorch called it, so that values are not known.
    """

    args: Data
    kinds: Signature
    count: int = 0
    nested: bool = False

    @property
    def numel(self) -> int:
        """Elements of all tensors together."""
        return sum(t.numel for t in tensors(self.args))


@dataclass
class Operator:
    """One operator of the catalog.

    Attributes:
        name: like "add.Tensor" or "abs".
        calls: distinct ones, by their data as text.
        sites: lines of the engine that calls came from.
    """

    name: str
    calls: dict[str, Call] = field(default_factory=dict)
    sites: set[str] = field(default_factory=set)

    @property
    def count(self) -> int:
        """Number of calls."""
        return sum(call.count for call in self.calls.values())

    @property
    def kinds(self) -> set[Signature]:
        """Signatures of all calls."""
        return {call.kinds for call in self.calls.values()}


Catalog = dict[str, Operator]


def trace(
    run: Callable[[], object], device: str, inner: Callable[[], object] | None = None
) -> Catalog:
    """Operators that `run` calls in this thread.

    Args:
        device: "cuda" or "cpu": calls that have all their tensors elsewhere are left out.
        inner: a shorter run for the profiler, which shows what kernels call; default: the same.
    """
    mode = _Trace(device)
    with mode:
        run()
    called = {name: operator for name, operator in mode.catalog.items() if operator.calls}
    return merge([called, {operator.name: operator for operator in _nested(inner or run)}])


class _Trace(TorchDispatchMode):
    def __init__(self, device: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.catalog: Catalog = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.name()
        if name.startswith("aten::"):
            self._note(name.removeprefix("aten::"), args, kwargs)
        if torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"):
            with self:
                return func.decompose(*args, **kwargs)
        return func(*args, **kwargs)

    def _note(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not _on(self.device, args, kwargs):
            return
        try:
            found = signature(name, args, kwargs, self.device)
            key = f"{found} {_shapes(args)} {_shapes(tuple(kwargs.items()))}"
            operator = self.catalog.setdefault(name, Operator(name))
            if key not in operator.calls:
                data = {
                    "args": [describe(a, self.device) for a in args],
                    "kwargs": {k: describe(v, self.device) for k, v in kwargs.items()},
                }
                operator.calls[key] = Call(data, found)
        except TypeError:
            return  # a generator or a stream: nothing that could be called again
        operator.calls[key].count += 1
        site = call_site()
        if site is not None:
            operator.sites.add(site)


def _on(device: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call runs on a device, by its tensors or else by what it was asked for."""
    asked = [torch.device(kwargs["device"])] if kwargs.get("device") is not None else []
    found = {t.device.type for t in _flat((*args, *kwargs.values()))} | {d.type for d in asked}
    return device in (found or {"cpu"})


def _flat(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _flat(value)


def _shapes(value: Any) -> Any:
    """What tells calls apart: values of tensors do not, numbers do."""
    if isinstance(value, torch.Tensor):
        return (*value.shape, "s", *value.stride())
    if isinstance(value, list | tuple):
        return tuple(_shapes(item) for item in value)
    plain = value is None or isinstance(value, bool | int | float | str)
    return value if plain or type(value).__module__ == "torch" else type(value).__name__


# ---------------------------------------------------------------- calls inside of kernels


def _nested(run: Callable[[], object]) -> Iterator[Operator]:
    """Operators that other operators call below the dispatcher's Python side."""
    from torch._C._profiler import _ExperimentalConfig
    from torch.profiler import ProfilerActivity, profile

    config = _ExperimentalConfig(capture_overload_names=True)
    with profile(
        activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=True,
        experimental_config=config,
    ) as profiled:  # fmt: skip
        run()
    found: Catalog = {}
    for event in profiled.events() or ():
        parent = event.cpu_parent
        if not event.name.startswith("aten::") or parent is None:
            continue
        if not parent.name.startswith("aten::"):
            continue
        variant = getattr(event, "overload_name", "")
        name = event.name.removeprefix("aten::") + (f".{variant}" if variant else "")
        operator = found.setdefault(name, Operator(name))
        key = f"{event.input_dtypes} {event.structured_input_shapes} {event.concrete_inputs}"
        if key not in operator.calls:
            call = _profiled_call(name, event)
            if call is None:
                continue
            operator.calls[key] = call
        operator.calls[key].count += 1
    yield from (operator for operator in found.values() if operator.calls)


def _profiled_call(name: str, event: Any) -> Call | None:
    """A call as the profiler saw it, without its values; None where something was not recorded."""
    try:
        schema = overload(name)._schema
    except AttributeError:
        return None
    strides = getattr(event, "structured_input_strides", None) or event.structured_input_shapes
    seen = list(zip(event.input_dtypes, event.structured_input_shapes, strides,
                    event.concrete_inputs, strict=False))  # fmt: skip
    args: list[Data] = []
    kwargs: dict[str, Data] = {}
    for argument, (dtype, shape, stride, concrete) in zip(schema.arguments, seen, strict=False):
        value = _profiled_value(str(argument.type), dtype, shape, stride, concrete)
        if value is NotImplemented:
            return None
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    left = schema.arguments[len(args) + len(kwargs) :]
    if not args or any(not argument.has_default_value() for argument in left):
        return None
    data = {"args": args, "kwargs": kwargs}
    return Call(data, kinds(name, data), nested=True)


def _profiled_value(kind: str, dtype: str, shape: Any, stride: Any, concrete: Any) -> Data:
    """One argument, NotImplemented if it was not recorded."""
    if kind not in ("Tensor", "Optional[Tensor]"):
        return concrete if dtype in _SCALAR_TYPES or concrete is not None else NotImplemented
    if not dtype:
        return None
    known = _DTYPES.get(dtype)
    if known is None:
        return NotImplemented
    steps = stride if len(stride) == len(shape) else contiguous(shape)
    fill = Fill("whole", 0, 1) if known in _WHOLE else Fill()
    return TensorData(tuple(shape), tuple(steps), known, fill).to_data()


# The profiler's names of C++ types.
_DTYPES = {
    "float": "float32", "double": "float64", "c10::BFloat16": "bfloat16", "c10::Half": "float16",
    "int": "int32", "long int": "int64", "long": "int64", "short int": "int16",
    "unsigned char": "uint8", "signed char": "int8", "bool": "bool",
    "c10::Float8_e4m3fn": "float8_e4m3fn", "c10::complex<float>": "complex64",
}  # fmt: skip
_WHOLE = {"int32", "int64", "int16", "uint8", "int8", "bool"}


def merge(catalogs: Iterable[Catalog]) -> Catalog:
    """One catalog of several; calls inside of kernels only where their kinds are new."""
    found: Catalog = {}
    for catalog in catalogs:
        for name, operator in catalog.items():
            known = found.setdefault(name, Operator(name))
            known.sites |= operator.sites
            seen = known.kinds
            for key, call in operator.calls.items():
                if call.nested and call.kinds in seen:
                    continue
                mine = known.calls.setdefault(key, Call(call.args, call.kinds, 0, call.nested))
                mine.count += call.count
    return dict(sorted(found.items()))


def summary(catalog: Catalog) -> Counter[str]:
    """Numbers of operators, calls, distinct calls and call sites."""
    sites = set[str]().union(*(operator.sites for operator in catalog.values()))
    return Counter(
        operators=len(catalog),
        calls=sum(operator.count for operator in catalog.values()),
        distinct=sum(len(operator.calls) for operator in catalog.values()),
        sites=len(sites),
    )


def to_data(catalog: Catalog) -> Data:
    """As JSON, for another process or a later run."""
    return {
        name: {
            "sites": sorted(operator.sites),
            "calls": [[c.args, c.kinds, c.count, c.nested] for c in operator.calls.values()],
        }
        for name, operator in catalog.items()
    }


def from_data(data: Data) -> Catalog:
    """From `to_data`."""
    return {
        name: Operator(
            name,
            {
                json.dumps(args): Call(args, tuple(found), count, nested)
                for args, found, count, nested in entry["calls"]
            },
            set(entry["sites"]),
        )
        for name, entry in data.items()
    }

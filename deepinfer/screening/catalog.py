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

from deepinfer.env import silence_profiler
from deepinfer.libraries.replace import Signature, call_site, overload, signature
from deepinfer.screening.arguments import (
    TARGET,
    Data,
    Fill,
    TensorData,
    describe,
    kinds,
    tensors,
)


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
    return merge([called, {operator.name: operator for operator in _nested(inner or run, device)}])


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


def _nested(run: Callable[[], object], device: str) -> Iterator[Operator]:
    """Operators that other operators call below the dispatcher's Python side."""
    from torch._C._profiler import _ExperimentalConfig
    from torch.profiler import ProfilerActivity, profile

    silence_profiler()
    with profile(
        activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=True,
        experimental_config=_ExperimentalConfig(capture_overload_names=True),
    ) as profiled:  # fmt: skip
        run()
    results = profiled.profiler.kineto_results if profiled.profiler is not None else None
    assert results is not None, "the profiler keeps what it saw"
    found: Catalog = {}
    events = [(event, False) for event in results.experimental_event_tree()]
    while events:
        event, inside = events.pop()
        name = event.name if event.name.startswith("aten::") else ""
        events += [(child, bool(name)) for child in event.children]
        if name and inside:
            _note_profiled(found, name.removeprefix("aten::"), event, device)
    yield from (operator for operator in found.values() if operator.calls)


def _note_profiled(found: Catalog, base: str, event: Any, device: str) -> None:
    inputs = [_profiled(item, device) for item in event.extra_fields.inputs]
    variant = getattr(event, "overload_name", None)
    name = f"{base}.{variant}" if variant else _overload_of(base, inputs)
    if name is None:
        return
    operator = found.setdefault(name, Operator(name))
    key = str(inputs)
    if key not in operator.calls:
        data = _profiled_call(name, inputs)
        if data is None:
            return
        operator.calls[key] = Call(data, kinds(name, data), nested=True)
    operator.calls[key].count += 1


def _profiled(item: Any, device: str) -> Data:
    """An argument as the profiler saw it: no values of tensors, no lists of numbers."""
    if isinstance(item, list):
        return [_profiled(inner, device) for inner in item]
    if not hasattr(item, "sizes"):
        return item if item is None or isinstance(item, bool | int | float) else "?"
    dtype = str(item.dtype).removeprefix("torch.")
    fill = Fill() if item.dtype.is_floating_point or item.dtype.is_complex else Fill("whole", 0, 1)
    where = TARGET if item.device.type == device else "cpu"
    return TensorData(tuple(item.sizes), tuple(item.strides), dtype, fill, where).to_data()


def _profiled_call(name: str, inputs: list[Data]) -> Data | None:
    """The call as data; None where the profiler did not see enough, or it runs elsewhere."""
    args: list[Data] = []
    kwargs: dict[str, Data] = {}
    try:
        schema = overload(name)._schema
    except AttributeError:
        return None
    for argument, item in zip(schema.arguments, inputs, strict=False):
        # None may stand for a list, which the profiler does not record; dtypes are mere numbers.
        lost = item is None and "List" in str(argument.type)
        unsaid = item is None and argument.has_default_value()
        if lost or item == "?" or (argument.name == "dtype" and not unsaid):
            return None
        if argument.kwarg_only and not unsaid:
            kwargs[argument.name] = item
        elif not argument.kwarg_only:
            args.append(item)
    data = {"args": args, "kwargs": kwargs}
    specs = list(tensors(data))
    return data if any(spec.where == TARGET for spec in specs) else None


def _overload_of(base: str, inputs: list[Data]) -> str | None:
    """The first overload that takes such inputs, for a profiler that does not name it."""
    packet = getattr(torch.ops.aten, base, None)
    for variant in packet.overloads() if packet is not None else ():
        name = base if variant == "default" else f"{base}.{variant}"
        arguments = overload(name)._schema.arguments
        fits = len(arguments) >= len(inputs) and all(
            isinstance(item, dict) == (str(argument.type) == "Tensor")
            for argument, item in zip(arguments, inputs, strict=False)
            if item is not None
        )
        if fits:
            return name
    return None


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

"""Which implementation of every operator runs: decided once, when a model is built.

Knows backends by name and the user's wishes; must not know what an operator computes. The user's
word for an operator comes first, then the word for all operators, then the fastest measured on this
GPU, then the order ORDER. What an implementation refuses falls back to the reference: said once
with the reason, counted, and an error in strict mode.
"""

import difflib
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from deepinfer.errors import ConfigError, Unsupported
from deepinfer.log import warn_once
from deepinfer.ops.registry import specs
from deepinfer.ops.spec import Backend, OpSpec
from deepinfer.ops.winners import ByRows, describe, winners

REFERENCE = "ref"
ORDER = {"cuda": ("triton", REFERENCE), "cpu": (REFERENCE,)}
TILE = "tile_kernels."  # how calls of that library begin in `stands_for`
_NAMED = 4  # operators that a note has the names of
# What a backend's name needs besides this package.
PACKAGES = {"tilelang": "tile_kernels"}


def package_of(backend: str) -> str | None:
    """The package that a backend needs, by its name: Triton has Gluon too."""
    return "triton" if backend.startswith(("triton", "gluon")) else PACKAGES.get(backend)


def installed(backend: str) -> bool:
    """Whether the package that a backend needs is there."""
    package = package_of(backend)
    return package is None or importlib.util.find_spec(package) is not None


@dataclass(frozen=True)
class Wishes:
    """What the user wants of operators.

    Attributes:
        device: "cuda" or "cpu".
        gpu: its name, for what was measured there.
        backend: preferred backend of every operator, "auto" for what was measured, else ORDER.
        operators: backend by operator name; these are demands, not preferences.
        tile_kernels: preferred backend of the operators that stand for calls of TileKernels.
        strict: a fallback is an error.
        batch_invariant: only implementations whose rows do not depend on each other.
        without_tilelang: act as on a machine that has no TileLang.
    """

    device: str = "cpu"
    gpu: str = ""
    backend: str = "auto"
    operators: Mapping[str, str] = field(default_factory=dict)
    tile_kernels: str = "auto"
    strict: bool = False
    batch_invariant: bool = False
    without_tilelang: bool = False


class Operator:
    """One operator as the model calls it.

    Attributes:
        backend, reason: what was chosen, and why.
        function: the chosen implementation.
        calls, fallbacks: how often it was called, and how often the reference stepped in.
    """

    def __init__(
        self, spec: OpSpec, backend: str, function: Callable[..., Any], reason: str, strict: bool
    ) -> None:
        self.spec = spec
        self.backend = backend
        self.reason = reason
        self.calls = 0
        self.fallbacks = 0
        self.function = function
        self._strict = strict

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it; arguments and results are those of the reference."""
        self.calls += 1
        try:
            return self.function(*args, **kwargs)
        except Unsupported as error:
            reason = str(error)
        message = f"operator {self.spec.name}: {self.backend} {reason}"
        if self._strict:
            raise Unsupported(f"{message}; strict mode allows no fallback")
        self.fallbacks += 1
        warn_once(f"{message}; the reference runs instead")
        return self.spec.reference(*args, **kwargs)


class Operators:
    """All operators by name, as attributes: `operators.rms_norm(x, weight, eps)`."""

    def __init__(self, chosen: Mapping[str, Operator]) -> None:
        self._chosen = dict(chosen)

    def __getattr__(self, name: str) -> Operator:
        try:
            return self.__dict__["_chosen"][name]
        except KeyError:
            raise AttributeError(f"no operator is called {name}") from None

    def all(self) -> list[Operator]:
        """Every operator in alphabetical order."""
        return list(self._chosen.values())


def select(wishes: Wishes) -> Operators:
    """Choose an implementation of every operator.

    Raises:
        ConfigError: a wish names no operator or backend, or a demanded backend cannot run here, or
            in strict mode a preferred one cannot.
    """
    known = specs()
    _check_names(wishes, known)
    missed: dict[str, list[str]] = {}
    chosen = {name: _choose(spec, wishes, missed) for name, spec in known.items()}
    for why, names in missed.items():
        if len(names) <= _NAMED:
            warn_once(f"operator {', '.join(names)}: {why}")
        else:
            warn_once(f"{len(names)} operators: {why}; `deepinfer ops` says what runs instead")
    return Operators(chosen)


@cache
def references() -> Operators:
    """Every operator by its reference."""
    return select(Wishes(backend=REFERENCE))


def backend_names(known: Mapping[str, OpSpec]) -> list[str]:
    """Backends that may be asked for."""
    named = {backend.name for spec in known.values() for backend in spec.backends}
    return sorted(named | set(PACKAGES) | {REFERENCE, "triton"})


def _check_names(wishes: Wishes, known: Mapping[str, OpSpec]) -> None:
    backends = backend_names(known)
    for name in wishes.operators:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise ConfigError(f"operator {name!r} is unknown; did you mean {near!r}?")
    asked = {wishes.backend, wishes.tile_kernels, *wishes.operators.values()}
    for backend in sorted(asked - {"auto"}):
        if backend not in backends:
            expected = ", ".join(["auto", *backends])
            raise ConfigError(f"operator backend {backend!r}; expected one of {expected}")


def _choose(spec: OpSpec, wishes: Wishes, missed: dict[str, list[str]]) -> Operator:
    """The implementation of one operator; a preference that it cannot follow goes into `missed`,
    under the reason."""
    wanted = wishes.operators.get(spec.name, "auto")
    if wanted != "auto":
        function = _implementation(spec, wanted, wishes)
        if isinstance(function, str):
            raise ConfigError(f"operator {spec.name}: backend {wanted} {function}")
        return Operator(spec, wanted, function, "demanded", wishes.strict)
    why: list[str] = []
    preference = wishes.backend
    if wishes.tile_kernels != "auto" and any(c.startswith(TILE) for c in spec.stands_for):
        preference = wishes.tile_kernels
    measured = _fastest(spec, preference, wishes)
    if measured is not None:
        return measured
    preferred = () if preference == "auto" else (preference,)
    implemented = {backend.name for backend in spec.backends}
    for backend in dict.fromkeys((*preferred, *ORDER[wishes.device], REFERENCE)):
        function = _implementation(spec, backend, wishes)
        if not isinstance(function, str):
            reason = (
                "preferred"
                if backend in preferred
                else "; ".join(why) or f"first in order on {wishes.device}"
            )
            return Operator(spec, backend, function, reason, wishes.strict)
        why.append(f"{backend} {function}")
        if backend in preferred or (wishes.strict and backend in implemented):
            message = f"backend {backend} {function}"
            if wishes.strict:
                raise ConfigError(f"operator {spec.name}: {message}; strict mode allows no other")
            missed.setdefault(message, []).append(spec.name)
    raise AssertionError("the reference can always run")


def _fastest(spec: OpSpec, preference: str, wishes: Wishes) -> Operator | None:
    """What was measured, if nothing speaks against it.

    A preference for Triton is one for any of its kernels, Gluon's included; what a narrow one
    refuses goes to the one that takes everything. Kernels of one operator agree within
    rounding only: which one runs may not depend on the rows where results may not.
    """
    buckets = winners(wishes.gpu).get(spec.name, ())
    if not buckets or preference not in ("auto", "triton") or wishes.batch_invariant:
        return None
    found: list[tuple[int | None, list[Callable[..., Any]]]] = []
    narrow = {backend.name for backend in spec.backends if backend.narrow}
    for bucket in buckets:
        names = [bucket.backend, "triton"] if bucket.backend in narrow else [bucket.backend]
        functions = [_implementation(spec, name, wishes) for name in names]
        usable = [function for function in functions if not isinstance(function, str)]
        if len(usable) < len(names):
            return None
        found.append((bucket.rows, usable))
    return Operator(
        spec, describe(buckets), ByRows(found), f"fastest on {wishes.gpu}", wishes.strict
    )


def _implementation(spec: OpSpec, backend: str, wishes: Wishes) -> Callable[..., Any] | str:
    """The function of a backend, or why it cannot run here."""
    if backend == REFERENCE:
        return spec.reference
    if backend == "tilelang" and wishes.without_tilelang:
        return "is simulated to be absent"
    package = package_of(backend)
    if not installed(backend):
        return f"needs the package {package}"
    found: Backend | None = next((b for b in spec.backends if b.name == backend), None)
    if found is None:
        return "does not implement it"
    if wishes.batch_invariant and not found.batch_invariant:
        return "is not batch-invariant"
    emulated = package == "triton" and _interpreted()
    if package is not None and wishes.device == "cpu" and not emulated:
        return "needs a CUDA GPU"
    module, name = found.function.split(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


def _interpreted() -> bool:
    """Whether Triton kernels run in the interpreter, which is for tests."""
    import triton

    return bool(triton.knobs.runtime.interpret)

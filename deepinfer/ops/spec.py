"""What an operator is, as data: tests, benchmarks, documentation and selection read it.

Knows names, tensors, cases and tolerances; must not know any operator.
"""

import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Argument:
    """One tensor of the contract.

    Attributes:
        shape: in the project's alphabet, like "T N D"; dtype: in words, like "bf16 | fp32".
        role: inout tensors are changed in place.
        meaning: one line.
    """

    name: str
    shape: str
    dtype: str
    role: Literal["in", "out", "inout"]
    meaning: str


@dataclass(frozen=True)
class Tolerance:
    """How far a backend's output may be from the reference's.

    Attributes:
        kind: bytes: equal bit for bit (NaN equals NaN). close: |a - b| <= limit * (|b| + scale),
            scale the root mean square of b. rounding: as close, but in all but `share` of the
            values equal bit for bit. similar: 1 - cosine of rows <= limit.
        limit: see kind. share: part of the values that may differ.
    """

    kind: Literal["bytes", "close", "rounding", "similar"]
    limit: float = 0.0
    share: float = 0.0


BYTES = Tolerance("bytes")


@dataclass(frozen=True)
class Case:
    """Arguments to try an operator with.

    Attributes:
        name: unique within the operator.
        kind: tiny fits an interpreter, hostile is tiny and nasty, released has V4.1 sizes, large
            has such as need tens of gigabytes, for benchmarks alone.
        make: keyword arguments on a device, from a seeded CPU generator.
    """

    name: str
    kind: Literal["tiny", "hostile", "released", "large"]
    make: Callable[[torch.Generator, torch.device], Arguments]

    def arguments(self, device: torch.device) -> Arguments:
        """Fresh arguments, the same ones at every call."""
        seed = zlib.crc32(self.name.encode())
        return self.make(torch.Generator().manual_seed(seed), device)


@dataclass(frozen=True)
class Work:
    """What one call has to do at least: bytes read and written, floating-point operations."""

    bytes: int
    flops: int = 0


@dataclass(frozen=True)
class Backend:
    """One implementation beside the reference, with the same signature.

    Attributes:
        function: "package.module:name", imported when it is chosen.
        batch_invariant: a row's result does not depend on the other rows.
        narrow: made for the released forms on a GPU: it refuses other cases, and no interpreter
            can run it.
    """

    name: str
    function: str
    batch_invariant: bool = True
    narrow: bool = False


@dataclass(frozen=True)
class OpSpec:
    """One operator.

    Attributes:
        reference: plain PyTorch; the definition of what is right.
        outputs: names of the results, in the order in which they are returned.
        tolerance: for each output and each inout argument; one that is missing must be equal.
        work: from the arguments of a call.
        stands_for: kernel files and library calls of the released engine whose work it does.
    """

    name: str
    summary: str
    arguments: tuple[Argument, ...]
    reference: Callable[..., Any]
    backends: tuple[Backend, ...]
    cases: Callable[[], Iterable[Case]]
    work: Callable[[Arguments], Work]
    tolerance: Mapping[str, Tolerance] = field(default_factory=dict)
    stands_for: tuple[str, ...] = ()

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the returned tensors."""
        return tuple(a.name for a in self.arguments if a.role == "out")

    @property
    def changed(self) -> tuple[str, ...]:
        """Names of the arguments that a call changes in place."""
        return tuple(a.name for a in self.arguments if a.role == "inout")


def size_of(*tensors: Tensor | None) -> int:
    """Bytes of tensors."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)

"""Kernels compiled for SM90 without a GPU.

Knows Triton's compiler; must not know kernels.
"""

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Signature:
    """One production form of a kernel.

    Attributes:
        types: Triton type of every argument that is no constant, like "*bf16", "i32", "fp32".
        constants: value of every tl.constexpr argument.
        divisible: arguments that are multiples of 16 (pointers always are).
        spills: most bytes of stack per thread that are accepted.
        maxnreg: registers that the launcher allows a thread, None for what the compiler wants.
    """

    name: str
    kernel: Any
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    divisible: tuple[str, ...] = ()
    spills: int = 0
    maxnreg: int | None = None


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel needs: registers and stack bytes per thread, shared memory bytes."""

    registers: int
    stack: int
    shared: int


def compile_sm90(signature: Signature) -> Resources:
    """Compile to an SM90 cubin, on any machine.

    Needs kernels that were defined without TRITON_INTERPRET.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    names = signature.kernel.arg_names
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature.types.get(name, "").startswith("*") or name in signature.divisible
    }
    types = {n: signature.types.get(n, "constexpr") for n in names}
    kind = GluonASTSource if signature.kernel.is_gluon() else ASTSource
    source = kind(signature.kernel, types, dict(signature.constants), attributes)
    options: dict[str, int] = {"num_warps": signature.num_warps}
    if kind is ASTSource:
        options["num_stages"] = signature.num_stages
    if signature.maxnreg is not None:
        options["maxnreg"] = signature.maxnreg
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    registers, stack = _usage(compiled.asm["cubin"])
    return Resources(registers, stack, compiled.metadata.shared)


def _usage(cubin: bytes) -> tuple[int, int]:
    import triton.backends.nvidia

    tool = Path(triton.backends.nvidia.__path__[0]) / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, text
    return int(found[1]), int(found[2])

"""Compiling every kernel's production forms for SM90, on any machine.

`python -m deepinfer.testing.compilation` compiles all of them with one process per core and prints
what each needs; exit status 1 when one does not compile or spills more than it may. Needs an
environment without TRITON_INTERPRET.
"""

import importlib
import multiprocessing
import os
import sys
from pathlib import Path

import deepinfer.ops
from deepinfer.kernels.launch import INTERPRETED
from deepinfer.kernels.signature import Resources, Signature, compile_sm90


def kernel_modules() -> list[str]:
    """Modules of deepinfer.ops that define SIGNATURES."""
    root = Path(deepinfer.ops.__path__[0])
    found = []
    for file in sorted(root.glob("*/*.py")):
        if "\nSIGNATURES" in file.read_text(encoding="utf-8"):
            found.append(f"deepinfer.ops.{file.parent.name}.{file.stem}")
    return found


def signatures() -> list[tuple[str, int]]:
    """(module, number in its SIGNATURES) of every production form."""
    return [
        (module, number)
        for module in kernel_modules()
        for number in range(len(importlib.import_module(module).SIGNATURES))
    ]


def _compile(place: tuple[str, int]) -> tuple[str, int, Resources | str]:
    module, number = place
    signature: Signature = importlib.import_module(module).SIGNATURES[number]
    name = f"{module.removeprefix('deepinfer.ops.')} {signature.name}"
    try:
        return name, signature.spills, compile_sm90(signature)
    except Exception as error:
        # Whatever a compiler raises is a finding about this kernel, and the others go on.
        return name, signature.spills, f"{type(error).__name__}: {error}"


def main() -> int:
    """Compile all and print a line each."""
    assert not INTERPRETED, "TRITON_INTERPRET is set"
    bad = 0
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        for name, spills, result in pool.imap(_compile, signatures()):
            if isinstance(result, str):
                bad += 1
                sys.stdout.write(f"{name}: FAILED {result}\n")
                continue
            wrong = result.stack > spills
            bad += wrong
            sys.stdout.write(
                f"{name}: {result.registers} registers, {result.shared} bytes shared,"
                f" {result.stack} bytes stack{f', at most {spills}: FAILED' if wrong else ''}\n"
            )
    sys.stdout.write(f"{bad} failed\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

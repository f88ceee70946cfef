"""What importing must not do: load torch for the package or its control code.

The import contracts in pyproject.toml read the source; this runs it in a fresh interpreter, so that
what a package's __init__ imports counts too.
"""

import subprocess
import sys
import tomllib
from pathlib import Path

# Modules that are control code as soon as they exist.
CONTROL = {
    "deepinfer.config",
    "deepinfer.engine.output",
    "deepinfer.engine.request",
    "deepinfer.engine.scheduler",
    "deepinfer.engine.sequence",
    "deepinfer.env",
    "deepinfer.errors",
    "deepinfer.kv.audit",
    "deepinfer.kv.blocks",
    "deepinfer.kv.geometry",
    "deepinfer.kv.manager",
    "deepinfer.kv.prefix",
    "deepinfer.log",
    "deepinfer.sampling.params",
    "deepinfer.sampling.patterns",
    "deepinfer.sampling.schema",
    "deepinfer.sampling.structured",
}

PROBE = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    heavy = {"torch", "triton"} & sys.modules.keys()
    if heavy:
        sys.exit(f"importing {name} imports {', '.join(sorted(heavy))}")
"""


def _contract_modules(root: Path) -> set[str]:
    settings = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    return set(next(c for c in contracts if c["id"] == "control")["source_modules"])


def _probe(root: Path, modules: list[str]) -> None:
    command = [sys.executable, "-c", PROBE, *modules]
    done = subprocess.run(
        command, cwd=root, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def test_importing_the_package_imports_no_torch(root: Path) -> None:
    _probe(root, ["deepinfer"])


def test_importing_control_code_imports_no_torch(root: Path) -> None:
    _probe(root, sorted(_contract_modules(root)))


def test_control_contract_is_complete(root: Path, modules: list[Path]) -> None:
    paths = (m.relative_to(root).with_suffix("") for m in modules)
    existing = CONTROL & {".".join(path.parts) for path in paths}
    listed = _contract_modules(root)
    missing = sorted(existing - listed)
    unknown = sorted(listed - CONTROL)
    assert not missing, f"add to the contract 'control' in pyproject.toml: {missing}"
    assert not unknown, f"add to CONTROL in this file: {unknown}"

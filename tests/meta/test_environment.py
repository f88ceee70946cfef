"""Environment variables are read in deepinfer/env.py and nowhere else in the package."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

READERS = {"environ", "environb", "getenv", "getenvb"}


def environment_reads(source: str) -> list[int]:
    """Lines of `source` that reach for the environment, whatever name `os` was imported under."""
    tree = ast.parse(source)
    aliases = {
        alias.asname or "os"
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name.split(".")[0] == "os"
    }

    def lines() -> Iterator[int]:
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == "os":
                if READERS & {alias.name for alias in node.names}:
                    yield node.lineno
            elif (
                isinstance(node, ast.Attribute)
                and node.attr in READERS
                and isinstance(node.value, ast.Name)
                and node.value.id in aliases
            ):
                yield node.lineno

    return sorted(lines())


def test_only_env_reads_the_environment(root: Path, modules: list[Path]) -> None:
    wrong = [
        f"{module.relative_to(root)}:{line}"
        for module in modules
        if module != root / "deepinfer" / "env.py"
        for line in environment_reads(module.read_text("utf-8"))
    ]
    assert not wrong, f"read the environment in deepinfer/env.py instead: {wrong}"


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("import os\nos.environ['A']", [2]),
        ("import os as system\nsystem.getenv('A')", [2]),
        ("import os.path\nprint(os.environ)", [2]),
        ("from os import environ as e", [1]),
        ("import os\nos.cpu_count()", []),
        ("config.environ", []),
    ],
)
def test_the_search_finds_reads(source: str, lines: list[int]) -> None:
    assert environment_reads(source) == lines

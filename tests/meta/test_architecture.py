"""docs/architecture.md has one line for every package and module, and none for anything else.

A line is "- `path`: what it is", the path relative to deepinfer/, packages with a slash at the end.
A path may hold `*`, which stands for one folder or file name and has to match something; modules
with a line of their own may match it too.
"""

import ast
import re
from pathlib import Path, PurePosixPath

PAGE = "docs/architecture.md"
LINE = re.compile(r"^- `([^`]+)`: \S")


def _matches(path: str, pattern: str) -> bool:
    same_kind = path.endswith("/") == pattern.endswith("/")
    same_depth = path.count("/") == pattern.count("/")
    return same_kind and same_depth and PurePosixPath(path).match(pattern)


def _summary(path: Path) -> str:
    doc = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "..."
    return doc.split("\n\n")[0].replace("\n", " ").rstrip(".")


def _tree(package: Path, modules: list[Path]) -> dict[str, str]:
    """Path on the page -> first sentence of the docstring, for everything under `package`."""
    found = {}
    for module in modules:
        inner = module.relative_to(package)
        if module.name != "__init__.py":
            found[inner.as_posix()] = _summary(module)
        elif module.parent != package:
            found[f"{inner.parent.as_posix()}/"] = _summary(module)
    return found


def _page_lines(text: str) -> list[tuple[int, str]]:
    """(line number, path) of the lines below the heading "Modules"."""
    lines = list(enumerate(text.splitlines(), 1))
    start = next(number for number, line in lines if line == "## Modules")
    return [(number, m[1]) for number, line in lines[start:] if (m := LINE.match(line))]


def test_page_and_tree_agree(root: Path, modules: list[Path]) -> None:
    tree = _tree(root / "deepinfer", modules)
    lines = _page_lines((root / PAGE).read_text("utf-8"))
    patterns = [pattern for _, pattern in lines]
    wrong = [
        f"{PAGE}: add\n    - `{path}`: {summary}"
        for path, summary in tree.items()
        if not any(_matches(path, pattern) for pattern in patterns)
    ]
    for number, pattern in lines:
        if not any(_matches(path, pattern) for path in tree):
            wrong.append(f"{PAGE}:{number}: `{pattern}` does not exist; remove the line")
        if patterns.count(pattern) > 1:
            wrong.append(f"{PAGE}:{number}: `{pattern}` has more than one line")
    assert not wrong, "\n" + "\n".join(wrong)


def test_every_folder_with_modules_is_a_package(modules: list[Path]) -> None:
    lacking = sorted({m.parent for m in modules if not (m.parent / "__init__.py").exists()})
    assert not lacking, f"these folders have no __init__.py and would not be installed: {lacking}"

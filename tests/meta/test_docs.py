"""Documents name Makefile targets and files that exist."""

import re
import shlex
from pathlib import Path

import pytest

TARGET = re.compile(r"^([a-z][a-z-]*):(?!=)", re.MULTILINE)
DOCUMENTED = re.compile(r"^([a-z][a-z-]*):.*## \S", re.MULTILINE)
INLINE = re.compile(r"`(make(?: [^`]*)?)`")
BLOCK = re.compile(r"^```[a-z]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
PAGES = ("README.md", "docs/engine.md", "CONTRIBUTING.md", "docs/architecture.md")


def mentioned_targets(page: str) -> set[str]:
    """Targets of the `make` commands in inline code and code blocks of `page`."""
    commands = INLINE.findall(page)
    for block in BLOCK.findall(page):
        commands += [line for line in block.splitlines() if line.startswith("make ")]
    words = [word for command in commands for word in shlex.split(command, comments=True)[1:]]
    return {word for word in words if "=" not in word and not word.startswith("-")}


@pytest.mark.parametrize("page", PAGES)
def test_make_commands_are_targets(root: Path, page: str) -> None:
    targets = set(TARGET.findall((root / "Makefile").read_text("utf-8")))
    unknown = mentioned_targets((root / page).read_text("utf-8")) - targets
    assert not unknown, f"{page} names targets that the Makefile lacks: {sorted(unknown)}"


def test_readme_names_the_two_commands(root: Path) -> None:
    assert {"demo", "test"} <= mentioned_targets((root / "README.md").read_text("utf-8"))


def test_make_help_lists_every_target(root: Path) -> None:
    makefile = (root / "Makefile").read_text("utf-8")
    assert TARGET.findall(makefile) == DOCUMENTED.findall(makefile)


def test_links_lead_to_files(root: Path, texts: dict[str, str]) -> None:
    wrong = [
        f"{name}: {link}"
        for name, text in texts.items()
        if name.endswith(".md")
        for link in LINK.findall(text)
        if "://" not in link and not (root / name).parent.joinpath(link).exists()
    ]
    assert not wrong, wrong


def test_commands_are_found_in_text() -> None:
    page = (
        "`make`, `make demo` and\n```bash\nmake PYTHON=python3.12 test  # slow\nls\n```\nmake it\n"
    )
    assert mentioned_targets(page) == {"demo", "test"}

"""Where the project's files are, for the tests that read them instead of running them."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT_SUFFIXES = {"", ".cfg", ".json", ".md", ".py", ".sh", ".toml", ".txt", ".yaml", ".yml"}
IGNORED = {".git", ".venv", "__pycache__", "build", "dist", "shared"}


def _project_files() -> list[Path]:
    """Files that are in the repository or would be added to it; all of them outside of one."""
    if (ROOT / ".git").exists():
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        paths = [ROOT / name for name in sorted(set(listed.stdout.split("\0"))) if name]
    else:
        everything = sorted(ROOT.rglob("*"))
        paths = [p for p in everything if IGNORED.isdisjoint(p.relative_to(ROOT).parts)]
    return [path for path in paths if path.is_file() and not path.is_symlink()]


@pytest.fixture(scope="session")
def root() -> Path:
    """The top folder of the project."""
    return ROOT


@pytest.fixture(scope="session")
def modules() -> list[Path]:
    """Every Python file of the package."""
    return sorted((ROOT / "deepinfer").rglob("*.py"))


@pytest.fixture(scope="session")
def texts() -> dict[str, str]:
    """Text of every source file and document of the project, by its path; data is left out."""
    found = {}
    for path in _project_files():
        name = path.relative_to(ROOT).as_posix()
        if path.suffix in TEXT_SUFFIXES and path.name != "tokenizer.json":
            found[name] = path.read_text("utf-8")
    return found

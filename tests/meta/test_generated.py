"""Generated pages are what the code generates."""

from pathlib import Path

import pytest
from write_docs import PAGES


@pytest.mark.parametrize("name", PAGES)
def test_page_is_up_to_date(name: str, root: Path) -> None:
    text = (root / name).read_text(encoding="utf-8")
    assert text == PAGES[name](), f"{name} is old: run python tools/write_docs.py"

"""The files of a screening: JSON, reports, allow-list.

Knows their names; must not know what is in them.
"""

import json
from pathlib import Path

from deepinfer.libraries.allowlist import AllowList
from deepinfer.screening.report import markdown, page
from deepinfer.screening.run import Screening
from deepinfer.screening.verdict import entries

DATA, MARKDOWN, PAGE, ALLOWED = "screening.json", "report.md", "report.html", "allowlist.json"


def allow_list(screening: Screening) -> AllowList:
    """The operators that passed, for the versions and the GPU they passed with."""
    head = screening.head
    made_by = f"{head['made_by']}, revision {head['revision']}, {head['date']}"
    return AllowList(head["library"], head["made_with"], made_by, entries(screening.reports))


def write_files(screening: Screening, out: Path) -> list[Path]:
    """Write all of them to `out`; their paths."""
    data = screening.to_data()
    texts = {
        DATA: json.dumps(data, indent=None, separators=(",", ":")) + "\n",
        MARKDOWN: markdown(data),
        PAGE: page(data),
    }
    for name, text in texts.items():
        (out / name).write_text(text, encoding="utf-8")
    allow_list(screening).write(out / ALLOWED)
    return [out / name for name in (*texts, ALLOWED)]

"""Write the generated pages of docs: ops.md, env.md, and known_defects.md from screenings.

`python tools/write_docs.py` writes all; tests/meta/test_generated.py fails while they are old.
Names of the released engine's kernel files are in released_kernels.json beside this program.
"""

import json
from pathlib import Path

from deepinfer.env import OPERATOR_PREFIX, VARIABLES
from deepinfer.ops.registry import specs
from deepinfer.ops.spec import BYTES, Argument, OpSpec, Tolerance
from deepinfer.screening.defects import defects_page

ROOT = Path(__file__).resolve().parent.parent
LIBRARIES = {
    "tile_kernels": "TileKernels", "flash_mla": "FlashMLA", "deep_gemm": "DeepGEMM",
    "deep_select": "DeepSelect", "deep_ep": "DeepEP",
}  # fmt: skip
_OPS_HEAD = """# Operators

Written by `python tools/write_docs.py` from `deepinfer/ops/*/spec.py`; do not edit.

Every operator has a reference in plain PyTorch, which defines what is right and is the CPU path.
Other backends are judged by the same cases. On a GPU the Triton kernels come first, and of several
the one that was fastest there for the number of rows (`deepinfer/ops/winners.json`).
`--ops-backend`, `--op OPERATOR=BACKEND` and the variables of [env.md](env.md) choose otherwise;
`deepinfer ops MODEL` says what runs on a machine, and why. Measurements are in
[benchmarks/results](../benchmarks/results).
"""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _tolerance(tolerance: Tolerance) -> str:
    return {
        "bytes": "equal bit for bit",
        "close": f"relative error at most {tolerance.limit:.2g}",
        "rounding": f"relative error at most {tolerance.limit:.2g} in at most"
        f" {tolerance.share:.2g} of the values, the others equal",
        "similar": f"1 - cosine at most {tolerance.limit:.2g}",
    }[tolerance.kind]


def _argument(spec: OpSpec, argument: Argument) -> list[str]:
    role = {"in": "in", "out": "out", "inout": "changed"}[argument.role]
    judged = ""
    if argument.role != "in":
        judged = _tolerance(spec.tolerance.get(argument.name, BYTES))
    name = f"`{argument.name}`"
    return [name, role, f"`{argument.shape}`", argument.dtype, argument.meaning, judged]


def operator(spec: OpSpec) -> str:
    """One operator's section."""
    backends = ", ".join(f"`{name}`" for name in ("ref", *(b.name for b in spec.backends)))
    summary = spec.summary[:1].upper() + spec.summary[1:].rstrip(".")
    kinds = [case.kind for case in spec.cases()]
    cases = ", ".join(f"{kinds.count(kind)} {kind}" for kind in ("tiny", "hostile", "released"))
    header = ["tensor", "role", "shape", "dtype", "meaning", "may differ from the reference"]
    rows = [_argument(spec, argument) for argument in spec.arguments]
    return f"### {spec.name}\n\n{summary}. Backends: {backends}. Cases: {cases}.\n\n" + table(
        header, rows
    )


def kernel_files() -> str:
    """The released engine's kernel files and who does their work here."""
    entries = json.loads((ROOT / "tools" / "released_kernels.json").read_text(encoding="utf-8"))
    rows, done, open_ = [], 0, 0
    for entry in entries:
        name = entry.get("as", entry["file"])
        doers = [spec.name for spec in specs().values() if name in spec.stands_for]
        if "open" in entry:
            open_ += 1
            rows.append([entry["file"], "open", entry["open"]])
        elif "none" in entry:
            rows.append([entry["file"], "not needed", entry["none"]])
        else:
            assert doers, f"no operator stands for {name}"
            done += 1
            rows.append([entry["file"], ", ".join(f"`{doer}`" for doer in doers), entry["note"]])
    unneeded = len(rows) - done - open_
    head = f"{done} of {len(rows)} are done, {unneeded} are not needed, {open_} are open."
    return f"{head}\n\n" + table(["kernel file", "operator here", "remark"], rows)


def library_calls() -> str:
    """Library calls of the released engine and the operators that stand for them."""
    calls: dict[str, list[str]] = {}
    for spec in specs().values():
        for call in spec.stands_for:
            if "." in call:
                calls.setdefault(call, []).append(spec.name)
    rows = []
    for call in sorted(calls):
        library, _, function = call.partition(".")
        doers = ", ".join(f"`{doer}`" for doer in calls[call])
        rows.append([LIBRARIES[library], f"`{function}`", doers])
    return table(["library", "call", "operator here"], rows)


def ops_page() -> str:
    """docs/ops.md."""
    sections = "\n\n".join(operator(spec) for spec in specs().values())
    return (
        f"{_OPS_HEAD}\n## The released engine's kernel files\n\n{kernel_files()}\n\n"
        f"## Calls of its libraries\n\n{library_calls()}\n\n## All operators\n\n{sections}\n"
    )


def env_page() -> str:
    """docs/env.md."""
    rows = [
        [f"`{v.name}`", v.expected, f"`--{v.setting.replace('_', '-')}`", v.meaning]
        for v in VARIABLES
    ]
    rows.append([
        f"`{OPERATOR_PREFIX}<OPERATOR>`", "a backend like triton or ref", "`--op`",
        "backend of one operator, like DEEPINFER_OPS_RMS_NORM=ref",
    ])  # fmt: skip
    head = (
        "# Environment variables\n\nWritten by `python tools/write_docs.py` from"
        " `deepinfer/env.py`; do not edit.\n\nAn option on the command line or in Python comes"
        " first, then the variable, then a default. An unknown\n`DEEPINFER_*` name or a value that"
        " is none of the expected is an error; an empty value counts as not set.\n\n"
    )
    return head + table(["variable", "values", "option", "meaning"], rows) + "\n"


def defects() -> str:
    """docs/known_defects.md."""
    return defects_page(ROOT / "benchmarks" / "results")


PAGES = {"docs/ops.md": ops_page, "docs/env.md": env_page, "docs/known_defects.md": defects}


def main() -> None:
    """Write the pages."""
    for name, page in PAGES.items():
        (ROOT / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()

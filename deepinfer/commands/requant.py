"""`deepinfer requant`: a copy of a checkpoint in FP8 with 128 x 128 blocks, for other engines.

Knows folders and what is said about the result; must not know when a block fits.
"""

import json
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deepinfer import __version__
from deepinfer.checkpoint.hf_config import load_model_config
from deepinfer.checkpoint.reader import CheckpointReader
from deepinfer.checkpoint.requant import (
    REASONS,
    TensorReport,
    examine,
    requantised_config,
    write_requantised,
)
from deepinfer.commands.console import console
from deepinfer.errors import CheckpointError, ConfigError

REPORT = "requant.json"
_SHOWN = 10  # matrices that stay as they are and are named in the table's foot
_FORMATS = {
    "fp8_128x128": "e4m3 codes [out, in], .scale e8m0 [ceil(out/128), ceil(in/128)]",
    "fp8_32x32": "as released: e4m3 codes [out, in], .scale e8m0 [ceil(out/32), ceil(in/32)]",
    "fp4_1x32": "as released: two e2m1 codes per byte [out, in/2], .scale e8m0 [out, in/32]",
}


def requant(model: Path, out: Path | None, dry_run: bool, progress: bool = False) -> dict[str, Any]:
    """Write checkpoint `model` to `out`, what fits in 128 x 128 blocks; returns requant.json.

    The result is written beside `out` and renamed when it is complete; nothing stays of a run that
    is interrupted or fails.

    Args:
        dry_run: only look; `out` may be None then, and is refused as ever if it is not.
        progress: show a bar on standard error.

    Raises:
        ConfigError: `model` has no valid config.json; `out` is missing, exists, or lies in `model`,
            or cannot be written.
        CheckpointError: the tensors are not those of the config, or no matrix fits at all.
    """
    config = load_model_config(model)
    with CheckpointReader(model) as reader:
        if dry_run:
            if out is not None:
                _target(model, out)
            with _bar(reader, progress) as advance:
                return _report(model, examine(reader, config, advance))
        target = _target(model, out)
        with _appearing(target) as partial:
            with _bar(reader, progress) as advance:
                reports = write_requantised(reader, config, partial, advance)
            report = _report(model, reports)
            if not report["converted"]:
                raise CheckpointError(
                    f"{model}: none of its {len(reports)} matrices fits 128 x 128 blocks without a"
                    " loss; nothing was written, --dry-run says why"
                )
            _write_rest(model, partial, reports, report)
    return report


def _target(model: Path, out: Path | None) -> Path:
    if out is None:
        raise ConfigError("--out is missing; name a folder to write, or only look with --dry-run")
    target = Path(os.path.abspath(out))  # not resolve(): a link of that name exists, too
    _refuse_existing(target)
    if target.parent.resolve().is_relative_to(model.resolve()):
        raise ConfigError(f"--out {out} lies in the checkpoint {model}; name a folder outside it")
    return target


@contextmanager
def _appearing(target: Path) -> Iterator[Path]:
    """A folder to fill that becomes `target` at the end, or disappears if anything goes wrong."""
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        partial.mkdir()
        try:
            yield partial
            _refuse_existing(target)
            partial.rename(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:  # of the files that are copied, too: the text names the file
        raise ConfigError(f"--out {target} cannot be written ({error})") from None


def _refuse_existing(target: Path) -> None:
    if os.path.lexists(target):
        raise ConfigError(f"--out {target} exists; name a new folder, or remove that one first")


def _report(model: Path, reports: list[TensorReport]) -> dict[str, Any]:
    """The content of requant.json."""
    converted = sum(report.converted for report in reports)
    return {
        "made_by": f"deepinfer {__version__}",
        "made_from": model.resolve().name,
        "formats": _FORMATS,
        "converted": converted,
        "left": len(reports) - converted,
        "tensors": {report.name: report.to_dict() for report in reports},
    }


def _write_rest(
    model: Path, folder: Path, reports: list[TensorReport], report: dict[str, Any]
) -> None:
    """Everything but the weights: config.json and requant.json, and copies of the other files."""
    ours = {"config.json", REPORT, ".git", ".cache"}

    def skipped(directory: str, names: list[str]) -> set[str]:
        if Path(directory) != model:
            return set()
        weights = (n for n in names if n.endswith((".safetensors", ".safetensors.index.json")))
        return ours | set(weights)

    shutil.copytree(model, folder, ignore=skipped, dirs_exist_ok=True)
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    _write_json(folder / "config.json", requantised_config(config, reports, REPORT))
    _write_json(folder / REPORT, report)


def _write_json(file: Path, data: dict[str, Any]) -> None:
    file.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@contextmanager
def _bar(reader: CheckpointReader, shown: bool) -> Iterator[Callable[[int], None]]:
    """A bar on standard error that counts bytes of the checkpoint."""
    from rich.console import Console
    from rich.progress import DownloadColumn, Progress, TimeRemainingColumn

    columns = (*Progress.get_default_columns()[:2], DownloadColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    hidden = not (shown and console.is_terminal)  # a file would get an empty line
    bar = Progress(*columns, console=console, transient=True, disable=hidden)
    with bar:
        task = bar.add_task("requantising", total=sum(reader.tensor(n).nbytes for n in reader))
        yield lambda done: bar.advance(task, done)


def show(report: dict[str, Any]) -> None:
    """Print what was, or would be, converted: a line per kind of matrix, and what stays and why."""
    from rich import box
    from rich.table import Table

    kinds: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for name, entry in report["tensors"].items():
        kinds[re.sub(r"\d+", "*", name.removesuffix(".weight")), entry["was"]].append(entry)
    table = Table("matrices", "stored as", "fit", "of", "groups", "not exact", box=box.SIMPLE)
    for (kind, was), entries in kinds.items():
        fit = sum(not entry["not_exact"] for entry in entries)
        groups = sum(entry["groups"] for entry in entries)
        misfits = sum(entry["not_exact"] for entry in entries)
        table.add_row(kind, was, *(f"{n:,}" for n in (fit, len(entries), groups, misfits)))
    screen = console()
    screen.print(table)
    left = {name: entry for name, entry in report["tensors"].items() if entry["not_exact"]}
    for name, entry in list(left.items())[:_SHOWN]:
        why = ", ".join(f"{entry['why'][r]:,} {r}" for r in REASONS if entry["why"][r])
        counts = f"{entry['not_exact']:,} of {entry['groups']:,} groups do not fit ({why})"
        screen.print(f"{name} stays: {counts}", markup=False, highlight=False, soft_wrap=True)
    if len(left) > _SHOWN:
        screen.print(f"... and {len(left) - _SHOWN:,} more; --json lists all")
    fit, kept = report["converted"], report["left"]
    screen.print(f"{fit:,} matrices fit 128 x 128 blocks, {kept:,} stay as they are")

"""`deepinfer screen`: trace a checkpoint's run, screen a library's operators, write what was found.

Knows what is run for the trace and what is printed; must not know how operators are judged.
"""

import gc
import json
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import cast

import torch

from deepinfer.commands.pulse import Pulse
from deepinfer.config import DEFAULT_TOKENS, DeviceName, EngineOptions
from deepinfer.engine.llm import LLM
from deepinfer.errors import ConfigError
from deepinfer.libraries.switch import disable
from deepinfer.ops.select import REFERENCE
from deepinfer.sampling.params import SamplingParams
from deepinfer.screening.catalog import Catalog, from_data, merge, to_data, trace
from deepinfer.screening.files import write_files
from deepinfer.screening.library import check_device
from deepinfer.screening.options import ScreenOptions
from deepinfer.screening.probe import Limits
from deepinfer.screening.report import sentence
from deepinfer.screening.run import Progress, Screening, Settings, screen

_PROMPT = "Once upon a time"
_LONG = {"cuda": 512, "cpu": 96}  # tokens of a prompt that runs in chunks, or in large tiles
CATALOG = "catalog.json"


def screen_library(
    options: EngineOptions, wanted: ScreenOptions, progress: bool = True
) -> tuple[Screening, list[Path]]:
    """Trace, screen and write; the screening and its files.

    Raises:
        ConfigError: the library cannot be used here, or a setting is wrong.
    """
    device = _device(options)
    check_device(wanted.library, device)
    own = wanted.library == "tile_kernels" or wanted.library.startswith("backend:")
    settings = _settings(wanted, device)
    with _bar(progress) as advance:

        def catalog() -> Catalog:
            advance("tracing the engine", 0, 1)
            return {} if own else _catalog(options, device, settings.out)

        advance(f"loading {wanted.library}", 0, 1)
        screening = screen(catalog, settings, advance)
    return screening, write_files(screening, Path(wanted.out))


def _device(options: EngineOptions) -> str:
    if options.device in (None, "auto"):
        return "cuda" if torch.cuda.is_available() else "cpu"
    assert options.device is not None
    return options.device


def _settings(wanted: ScreenOptions, device: str) -> Settings:
    for name in ("case_seconds", "operator_seconds", "memory_gib", "seconds"):
        value = getattr(wanted, name)
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{name} = {value}; expected more than 0")
    if wanted.jobs is not None and wanted.jobs < 1:
        raise ConfigError(f"jobs = {wanted.jobs}; expected at least 1")
    names = [name.strip() for name in (wanted.operators or "").split(",") if name.strip()]
    limits = Limits(
        case_seconds=wanted.case_seconds, operator_seconds=wanted.operator_seconds,
        memory=int(wanted.memory_gib * 2**30),
    )  # fmt: skip
    return Settings(
        library=wanted.library, device=device, out=Path(wanted.out), operators=names or None,
        workers=wanted.jobs or min(16, os.cpu_count() or 1), limits=limits,
        hostile=wanted.hostile, speed=wanted.speed, seconds=wanted.seconds or math.inf,
    )  # fmt: skip


def _catalog(options: EngineOptions, device: str, out: Path) -> Catalog:
    """The trace that an earlier run in `out` has left, or a new one."""
    file = out / CATALOG
    told = {k: v for k, v in asdict(options).items() if v is not None}
    asked = json.loads(json.dumps({**told, "device": device}))
    if file.exists():
        data = json.loads(file.read_text(encoding="utf-8"))
        if data["options"] != asked:
            raise ConfigError(
                f"--out {out} holds a screening of another run ({data['options']}); name another"
                " folder, or remove that one"
            )
        return from_data(data["operators"])
    catalog = engine_catalog(options, device)
    data = {"options": asked, "operators": to_data(catalog)}
    file.write_text(json.dumps(data) + "\n", encoding="utf-8")
    return catalog


def engine_catalog(options: EngineOptions, device: str) -> Catalog:
    """Operators of loading, prefill, decode and drafting, with chosen backends and references."""
    disable()
    # The trace looks at values, which captured graphs and the guard against waiting do not allow.
    plain = replace(
        options, device=cast("DeviceName", device), flaggems="off", enforce_eager=True,
        sync_guard=False, cache_tokens=options.cache_tokens or DEFAULT_TOKENS,
    )  # fmt: skip
    runs = [plain]
    if device == "cuda" and options.ops_backend is None:
        runs.append(replace(plain, ops_backend=REFERENCE))
    found = []
    for settings in runs:
        brief = partial(_run, settings, device, brief=True)
        found.append(trace(partial(_run, settings, device), device, brief))
    gc.collect()  # the models' memory is for the children now
    if device == "cuda":
        torch.cuda.empty_cache()
    return merge(found)


def _run(options: EngineOptions, device: str, brief: bool = False) -> None:
    """Load the checkpoint; greedy and sampled tokens of a short and a long prompt, some drafts."""
    if device == "cpu":
        options = replace(options, max_num_batched_tokens=64)
    llm = LLM.from_options(options)
    short = llm.encode(_PROMPT)
    if brief:
        llm.generate(short, SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True))
        return
    length = min(_LONG[device], llm.config.max_model_len - 8)
    long = (short * (1 + length // len(short)))[:length]
    params = [
        SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True),
        SamplingParams(
            max_tokens=3, temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, seed=1, ignore_eos=True
        ),
    ]
    llm.generate([short, long], params)
    if llm.model_config.has_drafter:
        list(llm.speculate(short, 3))


@contextmanager
def _bar(shown: bool) -> Iterator[Progress]:
    """A bar on standard error; a line now and then where that is no terminal."""
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    columns = (*Bar.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn())
    pulse = Pulse(shown and not console.is_terminal)
    bar = Bar(
        *columns, console=console, transient=True, disable=not (shown and console.is_terminal)
    )
    with bar:
        task = bar.add_task("starting", total=None)

        def advance(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)
            pulse.tell(f"{what}, {done} of {total}")

        yield advance


def show(screening: Screening, files: list[Path]) -> None:
    """Print the summary, and where everything is."""
    data = screening.to_data()
    for name, near in screening.unknown.items():
        sys.stdout.write(f"{name} stands for no operator; nearest: {', '.join(near) or 'none'}\n")
    for report in screening.reports:
        if report.verdict == "fail":
            sys.stdout.write(f"wrong: {report.operator}: {report.reason}\n")
    sys.stdout.write(f"{sentence(data)}\n")
    for file in files:
        sys.stdout.write(f"  {file}\n")

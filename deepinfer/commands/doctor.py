"""`deepinfer doctor`: what this machine can run, and why not more.

Knows the machine and how much a checkpoint needs; must not load one.
"""

import importlib.metadata
import importlib.util
import os
import platform
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.table import Table

from deepinfer import __version__
from deepinfer.checkpoint.hf_config import load_model_config, parse_model_config
from deepinfer.checkpoint.released import RELEASED_CONFIG
from deepinfer.commands.console import console
from deepinfer.config import EngineConfig, EngineOptions, Host, ModelConfig, resolve
from deepinfer.env import read_environment
from deepinfer.errors import ConfigError
from deepinfer.kv.plan import MemoryPlan, plan_memory, weight_bytes

GIB = 2**30

# GPUs that people have: how many, which, and bytes of each as the driver counts them.
COMMON_GPUS = (
    (1, "H200", 143_771 * 2**20),
    (8, "H20", 97_871 * 2**20),
    (8, "H100", 81_559 * 2**20),
)


# By the names they are imported by: for what they are needed.
OPTIONAL_PACKAGES = (
    ("triton", "kernels on a GPU"),
    ("xgrammar", "structured output (extra structured)"),
    ("deepseek_recipe", "chat (extra chat)"),
    ("flag_gems", "--flaggems (docs/screening.md)"),
    ("tile_kernels", "the backend tilelang (docs/screening.md)"),
)


@dataclass(frozen=True)
class Finding:
    """One line of the report: subject, fact, and ok, missing (cannot) or note."""

    subject: str
    fact: str
    state: str


def memory_bytes() -> int:
    """Main memory that is free for programs, in bytes (all of it where the system does not say)."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(line for line in lines if line.startswith("MemAvailable:"))
        return int(free.split()[1]) * 1024
    except (OSError, StopIteration, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _fits(name: str, config: ModelConfig, where: str, free: int) -> Finding:
    """Whether the weights fit: a CPU keeps float32 matrices and leaves n-gram tables on disk."""
    weights = weight_bytes(config, 4 if where == "CPU" else None)
    need = weights.experts + weights.other + (0 if where == "CPU" else weights.tables)
    size = f"{need / GIB:,.1f} GiB" if need >= GIB else f"{need / 2**20:,.0f} MiB"
    fact = f"needs {size} of weights on the {where}, {free / GIB:,.1f} GiB are free"
    return Finding(name, fact, "ok" if need < free else "missing")


def _gpu_findings() -> list[Finding]:
    if torch.version.cuda is None:
        return [Finding("GPU", "this torch has no CUDA; install a CUDA build for GPUs", "note")]
    if not torch.cuda.is_available():
        return [Finding("GPU", "torch has CUDA but sees no GPU or no driver", "note")]
    findings = []
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        capability = f"sm_{properties.major}{properties.minor}"
        fact = f"{properties.name}, {capability}, {properties.total_memory / GIB:,.0f} GiB"
        hopper = properties.major == 9
        findings.append(Finding(f"GPU {number}", fact, "ok" if hopper else "note"))
        if not hopper:
            findings.append(Finding("", "not Hopper: runs, but is not what this is tuned for", ""))
    return findings


def _package_findings() -> list[Finding]:
    """Packages that something more needs, if they are there."""
    findings = []
    for module, what in OPTIONAL_PACKAGES:
        if importlib.util.find_spec(module) is None:
            findings.append(Finding(module, f"not installed; {what} needs it", "note"))
        else:
            findings.append(Finding(module, f"{_version(module)}: {what}", "ok"))
    return findings


def _version(module: str) -> str:
    """Version of an installed package, by the name that it is imported by."""
    named = importlib.metadata.packages_distributions().get(module, [module])[0]
    try:
        return importlib.metadata.version(named)
    except importlib.metadata.PackageNotFoundError:
        return "installed"


def examine(model: Path | None) -> list[Finding]:
    """Facts of this machine, then whether `model` (or else the released checkpoint) fits it.

    Raises:
        ConfigError: `model` has no valid config.json.
    """
    free = memory_bytes()
    findings = [
        Finding("deepinfer", __version__, "ok"),
        Finding("Python", platform.python_version(), "ok"),
        Finding("torch", f"{torch.__version__}, {torch.get_num_threads()} CPU threads", "ok"),
        Finding("CPU", f"{os.cpu_count()} cores, {free / GIB:,.1f} GiB free memory", "ok"),
        *_gpu_findings(),
        *_package_findings(),
    ]
    checked: list[tuple[str, ModelConfig]] = []
    if model is not None:
        checked.append((str(model), load_model_config(model)))
    checked.append(("DeepSeek-V4.1-Flash", parse_model_config(RELEASED_CONFIG)))
    for name, config in checked:
        findings.append(_fits(name, config, "CPU", free))
        for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
            available, _ = torch.cuda.mem_get_info(number)
            findings.append(_fits(name, config, f"GPU {number}", available))
    return findings


@dataclass(frozen=True)
class Planned:
    """The memory plan of one model on some GPUs."""

    model: str
    gpus: int
    gpu: str
    plan: MemoryPlan

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; sizes in bytes."""
        extra = {"fits": self.plan.fits, "cache_tokens": self.plan.cache_tokens}
        return {
            "model": self.model,
            "gpus": self.gpus,
            "gpu": self.gpu,
            **asdict(self.plan),
            **extra,
        }


def plan_for(options: EngineOptions, gpus: str | None) -> list[Planned]:
    """Memory plans of a checkpoint, or without a model of the released one.

    Args:
        gpus: like 8xH20, or 8x96 for eight GPUs of 96 GiB each; None for those of this machine, or
            where it has none for GPUs that are common.

    Raises:
        ConfigError: a setting or `gpus` cannot be.
    """
    name = options.model or "DeepSeek-V4.1-Flash"
    model = load_model_config(Path(name)) if options.model else parse_model_config(RELEASED_CONFIG)
    host = Host(cuda=True, cores=os.cpu_count() or 1)
    options = replace(options, device="cuda", model=name)
    config, _ = resolve(options, read_environment(), model, host)
    return [
        Planned(name, count, gpu, _planned(model, config, size, count, options.cache_tokens))
        for count, gpu, size in _gpus(gpus)
    ]


def _planned(
    model: ModelConfig, config: EngineConfig, memory: int, gpus: int, asked: int | None
) -> MemoryPlan:
    """The plan; where so many cache tokens are asked for, with these and no more."""
    packed = config.dtype == "bfloat16" and config.act_quant and config.ops_backend != "ref"
    plan = plan_memory(model, config, memory, weight_bytes(model, None if packed else 4), gpus)
    if asked is None or not plan.fits:
        return plan
    wanted = -(-asked // plan.page_tokens)
    if wanted <= plan.pages:
        return replace(plan, pages=wanted, wanted_pages=wanted)
    return replace(plan, wanted_pages=wanted, advice=(f"cache_tokens = {plan.cache_tokens}",))


def _gpus(text: str | None) -> tuple[tuple[int, str, int], ...]:
    if text is not None:
        count, _, kind = (part.strip() for part in text.partition("x"))
        sizes = {name.lower(): (name, size) for _, name, size in COMMON_GPUS}
        try:
            name, size = sizes.get(kind.lower()) or (f"{float(kind):g} GiB", int(float(kind) * GIB))
            number = int(count)
        except (ValueError, OverflowError):
            name, size, number = "", 0, 0
        if number < 1 or size < 1:
            names = ", ".join(name for name, _ in sizes.values())
            raise ConfigError(
                f"gpus = {text!r}; expected NUMBERxGIB, like 8x96, or NUMBERxNAME with one of"
                f" {names}"
            )
        return ((number, name, size),)
    if not torch.cuda.is_available():
        return COMMON_GPUS
    properties = torch.cuda.get_device_properties(0)
    return ((torch.cuda.device_count(), properties.name, properties.total_memory),)


def show(findings: list[Finding]) -> None:
    """Print the findings as a table."""
    table = Table(box=box.SIMPLE, show_header=False)
    marks = {"ok": "[green]yes[/]", "missing": "[red]no[/]", "note": "[yellow]note[/]", "": ""}
    for finding in findings:
        table.add_row(marks[finding.state], finding.subject, finding.fact)
    console().print(table)


def show_plans(plans: list[Planned]) -> None:
    """Print a column for each kind of GPU, and what to change where something does not fit."""
    columns = [f"{p.gpus} x {p.gpu}" for p in plans]
    table = Table("GiB on each GPU", *columns, box=box.SIMPLE)
    for part in ("usable", "weights", "workspace", "graphs", "states"):
        table.add_row(part, *(f"{getattr(p.plan, part) / GIB:,.2f}" for p in plans))
    table.add_row("pages", *(f"{p.plan.pages * p.plan.page / GIB:,.2f}" for p in plans))
    table.add_row("cache_tokens", *(f"{p.plan.cache_tokens:,}" for p in plans))
    table.add_row("fits", *("yes" if p.plan.fits else "no" for p in plans))
    screen = console()
    screen.print(f"memory plan of {plans[0].model}")
    screen.print(table)
    for column, planned in zip(columns, plans, strict=True):
        if planned.plan.advice:
            screen.print(f"{column}: {'; or '.join(planned.plan.advice)}")
    if any(p.gpus > 1 for p in plans):
        screen.print("This version runs on one GPU; plans for several show what each would hold.")

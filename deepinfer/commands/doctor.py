"""`deepinfer doctor`: what this machine can run, and why not more.

Knows the machine and how much a checkpoint needs; must not load one.
"""

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch

from deepinfer import __version__
from deepinfer.checkpoint.hf_config import load_model_config, parse_model_config
from deepinfer.checkpoint.names import tensor_specs
from deepinfer.checkpoint.released import RELEASED_CONFIG
from deepinfer.config import ModelConfig

GIB = 2**30


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


def weight_bytes(config: ModelConfig, matrix_bytes: int) -> tuple[int, int]:
    """Bytes of a loaded model: what must be in memory, and n-gram tables that stay mapped.

    Args:
        matrix_bytes: of one value of a quantised or bfloat16 matrix: 4 on a CPU, 2 on a GPU.
    """
    resident = tables = 0
    for spec in tensor_specs(config):
        count = 1
        for size in spec.shape:
            count *= size
        if spec.format == "fp8_row":
            tables += count + count // 32
        else:
            resident += count * (4 if spec.format == "f32" else matrix_bytes)
    return resident, tables


def _fits(name: str, config: ModelConfig, where: str, free: int, matrix: int) -> Finding:
    resident, tables = weight_bytes(config, matrix)
    need = resident + (0 if where == "CPU" else tables)
    fact = f"needs {need / GIB:,.1f} GiB of weights on the {where}, {free / GIB:,.1f} GiB are free"
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
    ]
    checked: list[tuple[str, ModelConfig]] = []
    if model is not None:
        checked.append((str(model), load_model_config(model)))
    checked.append(("DeepSeek-V4.1-Flash", parse_model_config(RELEASED_CONFIG)))
    for name, config in checked:
        findings.append(_fits(name, config, "CPU", free, 4))
        for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
            available, _ = torch.cuda.mem_get_info(number)
            findings.append(_fits(name, config, f"GPU {number}", available, 2))
    return findings

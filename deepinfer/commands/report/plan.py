"""What a report asks for, and the jobs that follow from it on this machine.

Knows options, GPUs and cores; must not know processes or results.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Self

from deepinfer.commands.report.configurations import Configuration, options_for
from deepinfer.commands.report.questions import Question
from deepinfer.commands.report.records import Job, set_fields
from deepinfer.config import EngineOptions, Host, resolve
from deepinfer.env import read_environment
from deepinfer.errors import ConfigError

CPU_RANKS = 2
_GPU_MEMORY = 0.9  # of one GPU, for all ranks that share it


@dataclass(frozen=True)
class ReportOptions:
    """What a report is about.

    Attributes:
        configs: configurations with commas between: ref, triton, tilelang, flaggems, no-tilelang,
            strict, speculation, no-speculation; NAME+SETTING=VALUE changes a setting of one, like
            ref+act_quant=false. Default: ref, triton and speculation, or those to be compared.
        compare: two configurations whose difference is explained, layer by layer and operator by
            operator.
        ranks: processes that do the same side by side. Default: one for each GPU, two on a CPU.
        questions: JSON file of questions with answers. Default: questions.json of the model.
        limit: at most so many questions.
        out: folder for report.json, report.md and logs. Default: nothing is kept.
        timeout: seconds that a configuration may take, loading included.
        transport: how ranks talk to each other: gloo or nccl. Default auto: nccl between GPUs.
        prompt_tokens: tokens of the prompt whose prefill is timed.
        output_tokens: tokens whose decode is timed.
        tolerance: with compare, the distance (1 - cosine) from which on states count as different.
    """

    configs: str | None = None
    compare: tuple[str, str] | None = None
    ranks: int | None = None
    questions: Path | None = None
    limit: int | None = None
    out: Path | None = None
    timeout: float = 1200.0
    transport: Literal["auto", "gloo", "nccl"] = "auto"
    prompt_tokens: int = 256
    output_tokens: int = 32
    tolerance: float = 1e-3

    def __post_init__(self) -> None:
        least = {"ranks": 1, "prompt_tokens": 1, "output_tokens": 2}
        for name, low in least.items():
            value = getattr(self, name)
            if value is not None and value < low:
                raise ConfigError(f"{name} = {value}; expected a whole number of at least {low}")
        for name in ("timeout", "tolerance"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} = {getattr(self, name)}; expected a number above 0")


@dataclass(frozen=True)
class Machine:
    """GPUs and CPU cores that ranks can use."""

    gpus: int
    cores: int

    @classmethod
    def this(cls) -> Self:
        """The one that this runs on."""
        import torch

        return cls(torch.cuda.device_count(), os.cpu_count() or 1)


@dataclass(frozen=True)
class Plan:
    """How all jobs are run.

    Attributes:
        options: what the user says about the engine, and each rank's share of the machine.
        gpus: 0 where the model runs on the CPU.
        transport: None for one rank alone.
    """

    options: EngineOptions
    ranks: int
    gpus: int
    transport: str | None
    seconds: float
    speed_tokens: tuple[int, int]

    @classmethod
    def make(cls, options: EngineOptions, wanted: ReportOptions, machine: Machine) -> Self:
        """Divide the machine among the ranks.

        Raises:
            ConfigError: nccl without a GPU for each rank.
        """
        gpus = 0 if options.device == "cpu" else machine.gpus
        ranks = wanted.ranks or gpus or CPU_RANKS
        own_gpus = gpus >= ranks
        if wanted.transport == "nccl" and not own_gpus:
            raise ConfigError(f"transport = 'nccl' with {ranks} ranks on {gpus} GPUs; expected a"
                              " GPU for each, or gloo")  # fmt: skip
        chosen = wanted.transport
        if chosen == "auto":
            chosen = "nccl" if own_gpus else "gloo"
        if gpus and not own_gpus and options.gpu_memory is None:
            options = replace(options, gpu_memory=round(_GPU_MEMORY / -(-ranks // gpus), 3))
        if not gpus and options.threads is None:
            options = replace(options, threads=max(1, machine.cores // ranks))
        speed = (wanted.prompt_tokens, wanted.output_tokens)
        return cls(options, ranks, gpus, chosen if ranks > 1 else None, wanted.timeout, speed)

    def answers(
        self, configuration: Configuration, questions: Sequence[Question], folder: Path
    ) -> list[Job]:
        """A job for each rank."""
        fields = set_fields(options_for(self.options, configuration))
        prompts = [(question.prompt, question.max_tokens) for question in questions]
        return [
            Job(
                "answers", fields, str(folder), rank, self.ranks, self._gpu(rank), self.transport,
                str(folder / "ranks.store"), self.seconds, configuration.drafts,
                configuration.may_lack, prompts, self.speed_tokens,
            )
            for rank in range(self.ranks)
        ]  # fmt: skip

    def states(self, configuration: Configuration, token_ids: list[int], folder: Path) -> Job:
        """The job that writes states of some tokens."""
        fields = set_fields(options_for(self.options, configuration))
        return Job("dump", fields, str(folder), gpu=self._gpu(0), token_ids=token_ids)

    def operators(
        self, one: Configuration, other: Configuration, token_ids: list[int], folder: Path
    ) -> Job:
        """The job that compares the operators of two configurations."""
        fields, others = (set_fields(options_for(self.options, c)) for c in (one, other))
        return Job("operators", fields, str(folder), gpu=self._gpu(0), token_ids=token_ids,
                   other=others)  # fmt: skip

    def _gpu(self, rank: int) -> int | None:
        return rank % self.gpus if self.gpus else None


def why_impossible(plan: Plan, configuration: Configuration) -> str | None:
    """What a configuration lacks here, as far as that can be seen before a model is loaded.

    Raises:
        ConfigError, CheckpointError: a setting contradicts others or the checkpoint, or its
            config.json cannot be read.
    """
    from deepinfer.checkpoint.hf_config import load_model_config

    model = load_model_config(Path(plan.options.model))
    options = options_for(plan.options, configuration)
    try:
        resolve(options, read_environment(), model, Host(plan.gpus > 0, os.cpu_count() or 1))
    except ConfigError as error:
        if configuration.may_lack:
            return str(error)
        raise
    if configuration.drafts and not model.has_drafter:
        return "the checkpoint has no drafter"
    if configuration.backend is None:
        return None
    return _lacking_backend(configuration.backend, "cuda" if plan.gpus else "cpu")


def _lacking_backend(backend: str, device: str) -> str | None:
    """Why no operator can run by a backend here; None if one can."""
    from deepinfer.ops.registry import specs
    from deepinfer.ops.select import Wishes, select

    reason = f"no operator is implemented by {backend}"
    for name, spec in specs().items():
        if backend not in [found.name for found in spec.backends]:
            continue
        try:
            select(Wishes(device=device, operators={name: backend}))
            return None
        except ConfigError as error:
            reason = str(error).partition("backend ")[2] or str(error)
    return reason

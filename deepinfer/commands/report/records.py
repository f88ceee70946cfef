"""What goes between the report and its ranks, as data: a job, and what came of it.

Knows names and JSON; must not know torch, processes or what is right.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from deepinfer.config import EngineOptions

Kind = Literal["answers", "dump", "operators"]


@dataclass(frozen=True)
class Job:
    """What one process has to do.

    Attributes:
        kind: answers = answer the questions; dump = write states of `token_ids` to `tensors`;
            operators = compare operators with those of `other` on `token_ids`.
        options, other: fields of EngineOptions that are set.
        gpu: number of the GPU to use, None without one.
        transport: how ranks talk to each other, gloo or nccl, None for one rank alone.
        store: file by which ranks find each other. seconds: limit of everything they wait for.
        prompts: texts to be continued, each by at most so many tokens.
        speed_tokens: tokens of the prompt and of the reply that are timed.
        folder: where result, progress and tensors are written.
    """

    kind: Kind
    options: Mapping[str, Any]
    folder: str
    rank: int = 0
    ranks: int = 1
    gpu: int | None = None
    transport: str | None = None
    store: str = ""
    seconds: float = 600.0
    drafts: bool = False
    may_lack: bool = False
    prompts: list[tuple[str, int]] = field(default_factory=list)
    speed_tokens: tuple[int, int] = (256, 32)
    other: Mapping[str, Any] = field(default_factory=dict)
    token_ids: list[int] = field(default_factory=list)

    @property
    def file(self) -> Path:
        """The job's own file."""
        return Path(self.folder) / f"rank{self.rank}.job.json"

    @property
    def log(self) -> Path:
        """Everything that the process says."""
        return Path(self.folder) / f"rank{self.rank}.log"

    @property
    def progress(self) -> Path:
        """One line with what the process is doing."""
        return Path(self.folder) / f"rank{self.rank}.progress"

    @property
    def result(self) -> Path:
        """The result, complete as soon as it exists."""
        return Path(self.folder) / f"rank{self.rank}.json"

    @property
    def tensors(self) -> Path:
        """States, of a dump."""
        return Path(self.folder) / f"rank{self.rank}.safetensors"

    def write(self) -> None:
        """Write the job's file."""
        write_json(self.file, asdict(self))

    @classmethod
    def read(cls, file: Path) -> Self:
        """The job of a file."""
        data = json.loads(file.read_text(encoding="utf-8"))
        data["prompts"] = [(text, most) for text, most in data["prompts"]]
        data["speed_tokens"] = tuple(data["speed_tokens"])
        return cls(**data)


def set_fields(options: EngineOptions) -> dict[str, Any]:
    """What the user or a configuration decided."""
    return {name: value for name, value in asdict(options).items() if value is not None}


def engine_options(fields: Mapping[str, Any]) -> EngineOptions:
    """The options of a job; JSON has lists where they have tuples."""
    plain: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
    return EngineOptions(**plain)


@dataclass(frozen=True)
class Answer:
    """One reply.

    Attributes:
        logprobs: of the chosen tokens; margins: how far the second most likely token was below the
            most likely one, in nats. Both are empty where they were not reported.
    """

    token_ids: list[int]
    text: str
    finish_reason: str
    error: str | None = None
    logprobs: list[float] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Run:
    """All questions once: replies, and a digest of the bits of each step's logits."""

    answers: list[Answer]
    steps: list[str]


@dataclass(frozen=True)
class OperatorUse:
    """One operator of the model: what ran, why, how often, and how often the reference stepped in.

    An operator of PyTorch that a library has replaced begins with "aten::".
    Calls from Python are counted: what a CUDA graph replays is counted when it is captured.
    """

    operator: str
    backend: str
    reason: str
    calls: int
    fallbacks: int


@dataclass(frozen=True)
class Difference:
    """An output of an operator of which two backends made different things of one input.

    Attributes:
        place: layer, or what comes before or after all layers; call: number of the operator's call.
        complaint: what is over the operator's tolerance, None if nothing is.
        distance: largest difference by the root mean square of the expected values; of whole
            numbers the part that differs.
    """

    place: str
    operator: str
    call: int
    output: str
    backends: tuple[str, str]
    complaint: str | None
    distance: float


@dataclass(frozen=True)
class RankResult:
    """What a rank found out.

    Attributes:
        status: done; impossible = a setting cannot be met here; error = it broke off.
        reason: of what is not done.
        host: versions and devices by name.
        runs: of answers, the same questions in each.
        notes: warnings of the package.
        seconds: of loading, of the first token and the like; rates: tokens per second;
            memory: bytes.
        agreed: whether all ranks had the same digest, as they told each other; None for one alone.
        differences: of two sets of operators.
    """

    rank: int
    status: Literal["done", "impossible", "error"]
    reason: str = ""
    host: dict[str, str] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)
    operators: list[OperatorUse] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    agreed: bool | None = None
    differences: list[Difference] = field(default_factory=list)

    def write(self, job: Job) -> None:
        """Write the result of a job."""
        write_json(job.result, asdict(self))

    @classmethod
    def read(cls, job: Job) -> "RankResult | None":
        """The result of a job, None if there is none yet."""
        if not job.result.exists():
            return None
        data = json.loads(job.result.read_text(encoding="utf-8"))
        data["runs"] = [
            Run([Answer(**answer) for answer in run["answers"]], run["steps"])
            for run in data["runs"]
        ]
        data["operators"] = [OperatorUse(**use) for use in data["operators"]]
        data["differences"] = [
            Difference(**{**entry, "backends": tuple(entry["backends"])})
            for entry in data["differences"]
        ]
        return cls(**data)


def write_json(file: Path, data: Any) -> None:
    """Write JSON so that a reader sees all of it or none."""
    part = file.with_name(f"{file.name}.part")
    part.write_text(json.dumps(data, indent=1), encoding="utf-8")
    os.replace(part, file)

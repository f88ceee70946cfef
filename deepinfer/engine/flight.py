"""A step between its launch and the arrival of its tokens on the host.

Knows logits, draws and their way to the host; must not know requests' fate or the scheduler.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from deepinfer.engine.request import Completion
from deepinfer.engine.scheduler import PlannedRows
from deepinfer.model.step import to_device
from deepinfer.ops.select import Operators
from deepinfer.sampling.batch import Drawn, Sampled
from deepinfer.sampling.logprobs import LogprobRows


@dataclass(frozen=True)
class Launched:
    """Logits of a forward: [n, V], and which of them belong to which rows."""

    rows: list[PlannedRows]
    logits: Tensor
    places: list[slice]

    def kept(self) -> "Launched":
        """The same with logits that the next forward does not overwrite."""
        return Launched(self.rows, self.logits.clone(), self.places)

    def select(self, places: list[int]) -> Tensor:
        """Logits at these places [n, V], which may be overwritten."""
        if places == list(range(len(self.logits))):
            return self.logits
        (index,) = to_device([np.array(places, dtype=np.int64)], self.logits.device)
        return self.logits.index_select(0, index)


@dataclass(frozen=True)
class SampledRow:
    """One draw.

    Attributes:
        place: of its logits.
        position: of the token to be drawn.
    """

    completion: Completion
    place: int
    position: int


@dataclass
class _PromptRows:
    """Log-probabilities of prompt tokens, the first of which stands at `first`."""

    completion: Completion
    first: int
    rows: LogprobRows


@dataclass
class Flight:
    """What one forward brings.

    Attributes:
        rows: the draws; sampled: what was drawn, on the device, None without any.
        failed: replies that could not be drawn for, and why.
    """

    rows: list[SampledRow]
    failed: list[tuple[Completion, Exception]] = field(default_factory=list)
    sampled: Sampled | None = None
    _prompts: list[_PromptRows] = field(default_factory=list)
    _host: list[Tensor] = field(default_factory=list)
    _arrived: torch.cuda.Event | None = None

    @property
    def completions(self) -> list[Completion]:
        """Everybody for whom it brings something."""
        return [row.completion for row in self.rows] + [p.completion for p in self._prompts]

    def report_prompt(
        self, completion: Completion, start: int, logits: Tensor, operators: Operators
    ) -> None:
        """Log-probabilities of the prompt tokens that the rows from `start` on predict."""
        ids = completion.request.prompt_ids[start + 1 : start + 1 + len(logits)]
        wanted = completion.request.params.prompt_logprobs
        assert wanted is not None
        (tokens,) = to_device([np.array(ids, dtype=np.int64)], logits.device)
        rows = LogprobRows.of(logits[: len(ids)], tokens, [wanted] * len(ids), operators)
        self._prompts.append(_PromptRows(completion, start + 1, rows))

    def send(self) -> None:
        """Start the copy to the host."""
        parts = [prompt.rows.pack() for prompt in self._prompts]
        if self.sampled is not None:
            parts.append(self.sampled.pack())
        for part in parts:
            on_gpu = part.device.type == "cuda"
            host = torch.empty(part.shape, dtype=part.dtype, pin_memory=on_gpu)
            self._host.append(host.copy_(part, non_blocking=True))
        if parts and parts[0].device.type == "cuda":
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def receive(self) -> Drawn:
        """Wait for everything; prompts get their log-probabilities, the draws are returned."""
        if self._arrived is not None:
            self._arrived.synchronize()
        for prompt, host in zip(self._prompts, self._host, strict=False):
            found = prompt.completion.request.prompt_logprobs
            # A sequence that was preempted computes its prompt again.
            found += prompt.rows.read(host)[len(found) - prompt.first :]
        return Drawn([], [], {}) if self.sampled is None else self.sampled.read(self._host[-1])

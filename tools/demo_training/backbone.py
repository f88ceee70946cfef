"""Training of everything but the drafter.

Knows the losses and the step; must not know how batches are made.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from deepinfer.model.moe import MixtureOfExperts
from deepinfer.model.transformer import Transformer
from demo_training.optimiser import Optimiser, schedule
from demo_training.recipe import Training
from demo_training.state import TrainingState, detach_indexers

# (tokens int64 [B, T + 1], weights float32 [B, T + 1])
Batch = tuple[Tensor, Tensor]


@dataclass
class Curve:
    """What a run recorded: one value per logged step."""

    steps: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    index_loss: list[float] = field(default_factory=list)


class RouterBalance:
    """Moves each router's bias towards equal load (noaux_tc): no loss term, only selection."""

    def __init__(self, model: nn.Module, step: float) -> None:
        self.step = step
        self._loads: list[tuple[nn.Parameter, Tensor]] = []
        for module in model.modules():
            if isinstance(module, MixtureOfExperts):
                self._watch(module)

    def _watch(self, module: MixtureOfExperts) -> None:
        plain = module.route

        def route(x: Tensor) -> tuple[Tensor, Tensor]:
            ids, weights = plain(x)
            experts = torch.arange(module.gate.bias.shape[0], device=ids.device)
            load = (ids.detach().flatten().unsqueeze(-1) == experts).sum(0)
            if torch.is_grad_enabled():
                self._loads.append((module.gate.bias, load))
            return ids, weights

        module.route = route  # type: ignore[method-assign]

    @torch.no_grad()
    def update(self) -> None:
        """Raise the bias of experts below the mean load of the last forward, lower the others."""
        for bias, load in self._loads:
            bias.add_(self.step * torch.sign(load.float().mean() - load.float()))
        self._loads.clear()


class Trainer:
    """One model, its optimiser, and a step as a CUDA graph per (stage kind, batch shape)."""

    def __init__(self, model: Transformer, token_map: Tensor, settings: Training) -> None:
        self.model, self.token_map, self.settings = model, token_map, settings
        detach_indexers(model)
        self.balance = RouterBalance(model, settings.bias_step)
        backbone = [
            (n, p) for n, p in model.named_parameters() if p.requires_grad and "mtp." not in n
        ]
        for name, p in model.named_parameters():
            if "mtp." in name:
                p.requires_grad_(False)
        matrices = [p for n, p in backbone if _is_matrix(n, p)]
        others = [p for n, p in backbone if not _is_matrix(n, p)]
        self.optimiser = Optimiser(
            matrices, others, rate=settings.rate, adam_rate=settings.adam_rate,
            weight_decay=settings.weight_decay, clip=settings.gradient_clip,
        )  # fmt: skip
        self._graphs: dict[tuple[bool, int], tuple[object, list[Tensor], Tensor]] = {}
        self._pool: object | None = None

    def losses(self, tokens: Tensor, weights: Tensor, sampled: Tensor, sparse: bool) -> Tensor:
        """[3] weighted next-token loss, index loss, and unweighted loss over answer tokens."""
        inputs, targets, w = tokens[:, :-1], tokens[:, 1:], weights[:, 1:]
        state = TrainingState(self.model, inputs, self.token_map, sparse, sampled,
                              self.settings.candidate_targets)  # fmt: skip
        with parametrize.cached():
            hidden = self.model(inputs, state)
            logits = self.model.logits(hidden.x)
        each = nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), reduction="none"
        )
        each = each.view_as(w)
        answers = (w >= 0.999).float()
        return torch.stack([
            (each * w).sum() / w.sum(),
            state.index_loss(),
            (each * answers).sum().detach() / answers.sum().clamp_min(1.0),
        ])  # fmt: skip

    def _step(self, tokens: Tensor, weights: Tensor, sampled: Tensor, sparse: bool) -> Tensor:
        for p in self.optimiser.matrices + self.optimiser.others:
            p.grad = None
        losses = self.losses(tokens, weights, sampled, sparse)
        (losses[0] + losses[1]).backward()
        for p in self.optimiser.matrices + self.optimiser.others:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        norm = self.optimiser.step()
        self.balance.update()
        return torch.cat([losses.detach(), norm.unsqueeze(0)])

    def step(self, batch: Batch, sampled: Tensor, sparse: bool, factor: float) -> Tensor:
        """One update; returns losses and gradient norm [4] on the device."""
        self.optimiser.factor.fill_(factor)
        tokens, weights = batch
        if tokens.device.type != "cuda":
            return self._step(tokens, weights, sampled, sparse)
        key = (sparse, tokens.shape[-1])
        if key not in self._graphs:
            self._graphs[key] = self._capture([tokens, weights, sampled], sparse)
        graph, inputs, result = self._graphs[key]
        for buffer, value in zip(inputs, (tokens, weights, sampled), strict=True):
            buffer.copy_(value, non_blocking=True)
        graph.replay()  # type: ignore[attr-defined]
        return result.clone()

    def _capture(self, example: list[Tensor], sparse: bool) -> tuple[object, list[Tensor], Tensor]:
        """Record the step; the warm-up steps before it run with a zero rate."""
        inputs = [value.clone() for value in example]
        factor = self.optimiser.factor.clone()
        self.optimiser.factor.zero_()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._step(*inputs, sparse)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = self._step(*inputs, sparse)
        self._pool = graph.pool()
        self.optimiser.factor.copy_(factor)
        return graph, inputs, result


def _is_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Whether Muon updates it: matrices between activations, not tables, heads or coefficients."""
    plain = name.replace("parametrizations.", "").replace(".original", "")
    table = plain.endswith(("embed.weight", "head.weight", "confidence_head.proj.weight"))
    mixing = "hc_" in plain or plain.endswith(("q_weight", "k_weight", "gate.weight"))
    return parameter.dim() >= 2 and not table and not mixing


def _kinds(settings: Training) -> Iterator[str]:
    """Batch kind of every step; long batches are spread evenly over a stage."""
    for stage in settings.stages:
        debt = 0.0
        for _ in range(round(stage.share * settings.steps)):
            debt += stage.long
            due = debt > 1.0 - 1e-9  # ten times 0.1 is a little less than 1
            yield "long" if due else "short"
            debt -= float(due)


def train_backbone(
    trainer: Trainer,
    batches: Callable[[str], Batch],
    seed: int,
    log: Callable[[str], None],
) -> Curve:
    """Run the whole schedule; it is cut to the time budget by measuring the pace as it goes."""
    settings = trainer.settings
    generator = torch.Generator().manual_seed(seed)
    curve = Curve()
    seen = 0
    start = time.monotonic()
    plan = list(_kinds(settings))
    done = 0.0
    recorded: list[Tensor] = []
    for number, kind in enumerate(plan):
        spent = (time.monotonic() - start) / settings.seconds
        # The rate follows whichever of steps and seconds is further on, so that it ends at zero.
        done = max(number / len(plan), spent, done)
        if spent >= 1.0:
            log(f"time is up after {number} of {len(plan)} steps")
            break
        batch = batches(kind)
        length = batch[0].shape[-1] - 1
        sampled = torch.randperm(length, generator=generator)[: settings.index_rows]
        factor = schedule(done, settings.warmup, settings.decay)
        result = trainer.step(batch, sampled.to(batch[0].device), _sparse(settings, done), factor)
        recorded.append(result)
        seen += batch[0].numel()
        if number % 50 == 49 or number == len(plan) - 1:
            mean = torch.stack(recorded).mean(0).tolist()
            recorded.clear()
            elapsed = time.monotonic() - start
            curve.steps.append(number + 1)
            curve.tokens.append(seen)
            curve.seconds.append(elapsed)
            curve.loss.append(mean[2])
            curve.index_loss.append(mean[1])
            log(f"step {number + 1} {seen / 1e6:.1f}M tokens {elapsed:.0f}s "
                f"loss {mean[0]:.4f} answers {mean[2]:.4f} index {mean[1]:.4f} "
                f"norm {mean[3]:.2f} factor {factor:.3f}")  # fmt: skip
            if not math.isfinite(mean[0]):
                raise RuntimeError(f"loss is {mean[0]} at step {number + 1}")
    return curve


def _sparse(settings: Training, done: float) -> bool:
    """Whether progress `done` has reached the stage of sparse attention."""
    end = 0.0
    for stage in settings.stages:
        end += stage.share
        if done < end:
            return stage.sparse
    return settings.stages[-1].sparse

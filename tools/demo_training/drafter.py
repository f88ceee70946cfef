"""Training of the drafter and its Markov and confidence heads on the frozen backbone.

Knows draft blocks, anchors and targets; must not know how batches are made.
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from deepinfer.model.norm import RMSNorm
from deepinfer.model.transformer import Transformer
from deepinfer.ops.kv_records import round_window
from deepinfer.ops.rope import rope
from deepinfer.ops.sparse_attention import attention_with_sink
from demo_training.backbone import Batch, Curve
from demo_training.optimiser import Optimiser, schedule
from demo_training.recipe import DrafterTraining
from demo_training.state import TrainingState


class AnchoredDraftState:
    """Draft blocks after many anchors of packed sequences; rows are [B, A, n].

    Args:
        context: window keys [B, T, D] of each stage, normalised and rotated, before rounding.
        anchors: [B, A] last processed position of each block; documents: [B, T].
    """

    def __init__(
        self, model: Transformer, context: list[Tensor], anchors: Tensor, documents: Tensor
    ) -> None:
        window, slots = model.config.sliding_window, model.mtp.block_size
        device = anchors.device
        self.scale = model.config.head_dim**-0.5
        after = torch.arange(1, slots + 1, device=device)
        self.positions = anchors.unsqueeze(-1) + after
        places = anchors.unsqueeze(-1) + torch.arange(1 - window, 1, device=device)
        own = documents.gather(1, anchors)
        earlier = documents.gather(1, places.clamp_min(0).flatten(1)).view_as(places)
        self.valid = (places >= 0) & (earlier == own.unsqueeze(-1))
        self.places = places.clamp_min(0)
        self.context = [round_window(keys) for keys in context]
        self._rotations = model.rotary.rotations(self.positions, 0, model.precision.dtype)

    def rotations(self, ratio: int) -> Tensor:
        """Rotations [B, A, n, d/2] of the slots, base table."""
        return self._rotations

    def attend(
        self, layer: int, queries: Tensor, kv: Tensor, norm: RMSNorm, sink: Tensor
    ) -> Tensor:
        """Attention over each anchor's context window and all slots of its block."""
        batch, count, window = self.places.shape
        table = self.context[layer]
        index = self.places.flatten(1).unsqueeze(-1).expand(-1, -1, table.shape[-1])
        keys = table.gather(1, index).view(batch, count, window, -1)
        own = round_window(rope(norm(kv), self._rotations))
        keys = torch.cat([keys, own], dim=2).unsqueeze(2)
        slots = torch.ones(*kv.shape[:3], dtype=torch.bool, device=kv.device)
        valid = torch.cat([self.valid, slots], dim=-1).unsqueeze(2)
        return attention_with_sink(queries, keys, valid, sink, self.scale)


def _following(values: Tensor, places: Tensor) -> Tensor:
    """values[b, places[b, ...]] of [B, T] values."""
    return values.gather(1, places.flatten(1)).view_as(places)


def draft_losses(
    model: Transformer, batch: Batch, anchors: Tensor, token_map: Tensor
) -> tuple[Tensor, Tensor]:
    """Loss [] and measures [3]: cross-entropy, confidence loss, accepted drafts per block.

    Slot i after anchor p predicts token p + 2 + i from the teacher's distribution at p + 1 + i.
    Confidence is fitted where all drafts before were accepted, which is when it is used.
    """
    tokens = batch[0]
    inputs = tokens[:, :-1]
    slots = model.mtp.block_size
    with torch.no_grad():
        state = TrainingState(model, inputs, token_map, True, torch.zeros_like(inputs[0, :1]))
        hidden = model(inputs, state)
        assert hidden.taps is not None
        after = torch.arange(1, slots + 1, device=inputs.device)
        places = anchors.unsqueeze(-1) + after
        x = hidden.x.gather(1, places.flatten(1).unsqueeze(-1).expand(-1, -1, hidden.x.shape[-1]))
        teacher = model.logits(x).view(*places.shape, -1)
        documents = state.documents
        wanted = _following(documents, places) == documents.gather(1, anchors).unsqueeze(-1)
        actual = _following(tokens, places + 1)
        choice = teacher.argmax(-1)
    turns = state.rotations(0)
    context = [rope(norm(keys), turns) for keys, norm in model.mtp.context_keys(hidden.taps)]
    draft_state = AnchoredDraftState(model, context, anchors, documents)
    first = _following(tokens, places[..., :1])
    ids = model.mtp.draft_inputs(first.flatten()).view(*anchors.shape, slots)
    streams, pre = model.initial_streams(ids)
    x = model.mtp.hidden(streams, pre, draft_state)
    last = model.mtp.stage(-1)
    previous = torch.cat([first, actual[..., :-1]], dim=-1)
    embedded, bias = last.markov_head(previous)
    logits = model.head(last.norm(x)) + bias
    target = torch.softmax(teacher, dim=-1)
    each = -(target * torch.log_softmax(logits, dim=-1)).sum(-1)
    weight = wanted.float()
    loss = (each * weight).sum() / weight.sum().clamp_min(1.0)
    with torch.no_grad():
        right = logits.argmax(-1) == choice
        on_path = right & (choice == actual) & wanted
        reached = torch.cat([torch.ones_like(on_path[..., :1]), on_path[..., :-1]], dim=-1)
        reached = reached.cumprod(-1) * wanted
        accepted = (right & reached.bool()).float().sum() / wanted[..., 0].sum().clamp_min(1)
    joined = torch.cat([x, embedded], dim=-1).detach().float()
    confidence = joined @ last.confidence_head.proj.weight[0].float()
    doubt = nn.functional.binary_cross_entropy_with_logits(
        confidence, right.float(), reduction="none"
    )
    doubt = (doubt * reached).sum() / reached.sum().clamp_min(1)
    return loss + doubt, torch.stack([loss.detach(), doubt.detach(), accepted])


def choose_anchors(weights: Tensor, count: int, slots: int, generator: torch.Generator) -> Tensor:
    """[B, count] anchors, four in five right before or inside answers (weights [B, T + 1])."""
    usable = weights.shape[1] - 2 - slots
    answers = (weights[:, 2 : 2 + usable] >= 0.999).float()
    chance = answers / answers.sum(1, keepdim=True).clamp_min(1) * 0.8 + 0.2 / usable
    return torch.multinomial(chance, count, replacement=True, generator=generator)


class DrafterTrainer:
    """The drafter's optimiser and its step, as a CUDA graph where there is a GPU."""

    def __init__(self, model: Transformer, token_map: Tensor, settings: DrafterTraining) -> None:
        self.model, self.token_map, self.settings = model, token_map, settings
        named = []
        for name, p in model.named_parameters():
            mine = "mtp." in name and not name.endswith("bias")
            p.requires_grad_(mine)
            p.grad = None
            if mine:
                named.append((name, p))
        plain = ("embed.weight", "head.weight", "proj.weight", "gate.weight")
        is_matrix = [
            p.dim() >= 2 and "hc_" not in n and not n.replace(".original", "").endswith(plain)
            and "markov" not in n
            for n, p in named
        ]  # fmt: skip
        self.optimiser = Optimiser(
            [p for (_, p), m in zip(named, is_matrix, strict=True) if m],
            [p for (_, p), m in zip(named, is_matrix, strict=True) if not m],
            rate=settings.rate, adam_rate=settings.rate, weight_decay=0.05, clip=1.0,
        )  # fmt: skip
        self._graph: tuple[object, list[Tensor], Tensor] | None = None

    def _step(self, tokens: Tensor, weights: Tensor, anchors: Tensor) -> Tensor:
        trained = self.optimiser.matrices + self.optimiser.others
        for p in trained:
            p.grad = None
        with parametrize.cached():
            loss, measures = draft_losses(self.model, (tokens, weights), anchors, self.token_map)
            loss.backward()
        for p in trained:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        self.optimiser.step()
        return measures

    def step(self, batch: Batch, anchors: Tensor, factor: float) -> Tensor:
        """One update; returns the measures [3] of `draft_losses`."""
        self.optimiser.factor.fill_(factor)
        values = [*batch, anchors]
        if batch[0].device.type != "cuda":
            return self._step(*values)
        if self._graph is None:
            self.optimiser.factor.zero_()
            inputs = [value.clone() for value in values]
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(2):
                    self._step(*inputs)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                result = self._step(*inputs)
            self._graph = (graph, inputs, result)
            self.optimiser.factor.fill_(factor)
        graph, inputs, result = self._graph
        for buffer, value in zip(inputs, values, strict=True):
            buffer.copy_(value, non_blocking=True)
        graph.replay()  # type: ignore[attr-defined]
        return result.clone()


def train_drafter(
    trainer: DrafterTrainer,
    batches: Callable[[str], Batch],
    seed: int,
    log: Callable[[str], None],
) -> Curve:
    """Run the schedule within its time budget; the curve's `index_loss` is accepted drafts."""
    settings = trainer.settings
    generator = torch.Generator().manual_seed(seed)
    curve = Curve()
    start = time.monotonic()
    recorded: list[Tensor] = []
    seen, done = 0, 0.0
    slots = trainer.model.mtp.block_size
    for number in range(settings.steps):
        spent = (time.monotonic() - start) / settings.seconds
        if spent >= 1.0:
            log(f"time is up after {number} of {settings.steps} drafter steps")
            break
        done = max(number / settings.steps, spent, done)
        tokens, weights = batches("short")
        anchors = choose_anchors(weights.cpu(), settings.anchors, slots, generator)
        factor = schedule(done, settings.warmup, settings.decay)
        recorded.append(trainer.step((tokens, weights), anchors.to(tokens.device), factor))
        seen += tokens.numel()
        if number % 50 == 49 or number == settings.steps - 1:
            mean = torch.stack(recorded).mean(0).tolist()
            recorded.clear()
            elapsed = time.monotonic() - start
            for values, value in (
                (curve.steps, number + 1), (curve.tokens, seen), (curve.seconds, elapsed),
                (curve.loss, mean[0]), (curve.index_loss, mean[2]),
            ):  # fmt: skip
                values.append(value)  # type: ignore[arg-type]
            log(f"drafter step {number + 1} {elapsed:.0f}s loss {mean[0]:.4f} "
                f"confidence {mean[1]:.4f} accepted {mean[2]:.2f}")  # fmt: skip
    return curve

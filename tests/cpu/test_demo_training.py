"""Training of the demo model: what learns is what is stored, and documents do not see each other.

The product's recompute path says what a model computes; training has to compute the same on packed
documents, with weights as the checkpoint will hold them.
"""

import dataclasses
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import train_demo
from demo_training import backbone, drafter, optimiser, truncated_sinkhorn
from demo_training.backbone import RouterBalance, Trainer, train_backbone
from demo_training.drafter import DrafterTrainer, choose_anchors, draft_losses
from demo_training.fake_quant import FakeQuant, TrainableTable, make_trainable, master_values
from demo_training.initialise import initialise
from demo_training.optimiser import Optimiser, orthogonalise, schedule
from demo_training.recipe import DrafterTraining, Stage, Training
from demo_training.state import TrainingState
from demo_training.truncated_sinkhorn import sinkhorn
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn.utils import parametrize

import deepinfer.ops.hyper_connection.reference as hyper_connection
from deepinfer import LLM, SamplingParams
from deepinfer.checkpoint.hf_config import load_model_config
from deepinfer.checkpoint.loader import parameter_slot
from deepinfer.checkpoint.names import TensorSpec, tensor_specs
from deepinfer.checkpoint.quant import (
    dequantise_fp4,
    dequantise_fp8,
    dequantise_fp8_row,
    quantise_fp4,
    quantise_fp8,
    quantise_fp8_row,
)
from deepinfer.checkpoint.writer import write_checkpoint
from deepinfer.config import EngineOptions
from deepinfer.engine.loading import Loaded
from deepinfer.engine.loading import load as load_engine
from deepinfer.model.moe import MixtureOfExperts
from deepinfer.model.norm import RMSNorm
from deepinfer.model.recompute import RecomputeState, recompute, recompute_draft
from deepinfer.model.transformer import Transformer
from deepinfer.testing.tiny import random_values
from tests.cpu.checkpoint_helpers import FLOAT32, load, stored_values
from tests.cpu.model_helpers import EXACT, loaded, random_ids

pytestmark = pytest.mark.usefixtures("one_thread")

BOS = 0


@pytest.fixture(scope="module")
def tiny(tiny_folder: Path) -> Loaded:
    return loaded(tiny_folder)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.float().view(torch.int32), b.float().view(torch.int32))


# Weights


def _hostile() -> dict[str, Tensor]:
    """Matrices [64, 96]: blocks of every kind that a scale has to be found for."""
    drawn = torch.randn(64, 96, generator=torch.Generator().manual_seed(5))
    outliers = drawn.clone()
    outliers[::7, ::11] *= 1000.0
    mixed = drawn.clone()
    mixed[:32, :32] = 0.0
    mixed[32:, 32:64] = -0.0
    mixed[40] = 0.0
    edges = torch.zeros(64, 96)
    for place, edge in enumerate((6.0, 448.0, 7.0, 465.0, 2.0**-120)):
        edges[place * 8, :32] = edge * drawn[place, :32].clamp(-1.0, 1.0)
        edges[place * 8, 0] = edge
        edges[place * 8, 32] = torch.nextafter(torch.tensor(edge), torch.tensor(1e30))
        edges[place * 8, 64] = -torch.nextafter(torch.tensor(edge), torch.tensor(0.0))
    return {
        "random": drawn,
        "outliers": outliers,
        "zeros": mixed,
        "denormal": drawn * 1e-40,
        "small": drawn * 1e-36,
        "large": drawn * 1e36,
        "ties": torch.arange(64 * 96).view(64, 96).remainder(225).float() / 16.0 - 7.0,
        "edges": edges,
    }


HOSTILE = _hostile()


@pytest.mark.parametrize("kind", HOSTILE)
def test_weights_are_rounded_as_stored(kind: str) -> None:
    """What the writer's quantisers keep, dequantised, bit for bit."""
    weight = HOSTILE[kind]
    fp8 = FakeQuant("fp8", torch.float32)(weight)
    assert same_bits(fp8, dequantise_fp8(*quantise_fp8(weight)))
    fp4 = FakeQuant("fp4", torch.float32)(weight)
    assert same_bits(fp4, dequantise_fp4(*quantise_fp4(weight)))
    stacked = FakeQuant("fp4", torch.float32)(torch.stack([weight, -weight]).unflatten(1, (2, -1)))
    assert same_bits(stacked[0].flatten(0, 1), fp4)
    assert same_bits(stacked[1].flatten(0, 1), -fp4)
    table = TrainableTable(*weight.shape, torch.float32, torch.device("cpu"))
    table.weight.data.copy_(weight)
    rows = torch.tensor([[3, 40], [63, 3]])
    kept = dequantise_fp8_row(*quantise_fp8_row(weight))
    assert same_bits(table(rows), kept[rows].flatten(-2))


def test_rounding_passes_gradients_straight_through() -> None:
    for stored in ("fp8", "fp4"):
        weight = HOSTILE["outliers"].clone().requires_grad_()
        slope = torch.randn(64, 96)
        FakeQuant(stored, torch.float32)(weight).backward(slope)
        assert torch.equal(weight.grad, slope)
    table = TrainableTable(64, 96, torch.float32, torch.device("cpu"))
    table.weight.data.copy_(HOSTILE["outliers"])
    rows = torch.tensor([5, 9, 5])
    slope = torch.randn(3, 96)
    table(rows.unsqueeze(-1)).backward(slope)
    wanted = torch.zeros(64, 96).index_add(0, rows, slope)
    assert torch.equal(table.weight.grad, wanted)


def trainable(folder: Path, seed: int = 0) -> Transformer:
    """A model of the shapes of `folder` that can be trained, freshly initialised."""
    model = Transformer(load_model_config(folder), FLOAT32)
    make_trainable(model, torch.float32)
    initialise(model, seed)
    return model


def in_use(model: nn.Module, name: str) -> Tensor:
    """A parameter as products see it."""
    owner, _, attribute = name.rpartition(".")
    module = model.get_submodule(owner)
    if isinstance(module, TrainableTable):
        return module(torch.arange(len(module.weight)).unsqueeze(-1))
    return getattr(module, attribute)


def is_rounded(model: nn.Module, name: str) -> bool:
    owner, _, attribute = name.rpartition(".")
    return parametrize.is_parametrized(model.get_submodule(owner), attribute)


@torch.no_grad()
def test_a_trained_model_is_the_model_that_is_loaded(small_folder: Path, tmp_path: Path) -> None:
    """Every weight in use is the one read back, and the loaded model says the same, bit for bit."""
    model = trainable(small_folder)
    specs = list(tensor_specs(model.config))
    drawn = random_values(3, outliers=True)
    master = master_values(model)
    for spec in specs:
        name, place = parameter_slot(spec.name)
        values = drawn(spec)
        if spec.format == "bf16" and not is_rounded(model, name):
            values = values.to(torch.bfloat16).float()  # norms and wide products stay in float32
        master[name][place].copy_(values)

    def values_of(spec: TensorSpec) -> Tensor:
        name, place = parameter_slot(spec.name)
        return master[name][place]

    config = json.loads((small_folder / "config.json").read_text())
    tokenizer = Tokenizer.from_file(str(small_folder / "tokenizer.json"))
    write_checkpoint(tmp_path, config, tokenizer, values_of)
    stored = stored_values(tmp_path)
    for spec in specs:
        name, place = parameter_slot(spec.name)
        assert same_bits(in_use(model, name)[place], stored[spec.name]), spec.name
    product = load(tmp_path)
    ids = random_ids(loaded(small_folder), 40)
    token_map = loaded(small_folder).token_map
    found, wanted = recompute(model, ids, token_map), recompute(product, ids, token_map)
    assert torch.equal(model.logits(found.x), product.logits(wanted.x))


def test_initial_values(small_folder: Path) -> None:
    """The same from the same seed, and a residual net whose mixing hardly mixes."""
    model, again, other = (trainable(small_folder, seed) for seed in (1, 1, 2))
    values, same, different = (dict(m.named_parameters()) for m in (model, again, other))
    assert all(torch.equal(values[name], same[name]) for name in values)
    assert not torch.equal(values["layers.0.hc_attn.fn"], different["layers.0.hc_attn.fn"])
    assert all(torch.isfinite(value).all() for value in values.values())
    count = model.config.hc_mult
    with torch.no_grad():
        layer = model.layers[0]
        streams = torch.randn(9, count, model.config.hidden_size)
        entering = layer.hc_attn.start(streams, torch.ones(9, count), layer.attn_norm)
        pre, post, comb = entering.pre, entering.post, entering.comb
    # Scale 0.1 of N(0, 1) mixes: gates move by a tenth or two.
    torch.testing.assert_close(pre, torch.full_like(pre, 1 / count), atol=0.1, rtol=0)
    torch.testing.assert_close(post, torch.ones_like(post), atol=0.25, rtol=0)
    torch.testing.assert_close(comb, torch.eye(count).expand_as(comb), atol=0.02, rtol=0)


# The forward pass on packed documents


def document(model: Loaded, length: int, seed: int) -> Tensor:
    ids = random_ids(model, length, seed)
    ids[0] = BOS
    return ids


def trained_logits(model: Loaded, ids: Tensor, sparse: bool) -> Tensor:
    """Logits [B, T, V] as training computes them."""
    sampled = torch.arange(0, ids.shape[-1], 5)
    with torch.inference_mode():
        state = TrainingState(model.model, ids, model.token_map, sparse, sampled)
        return model.model.logits(model.model(ids, state).x)


def product_logits(model: Loaded, ids: Tensor, sparse: bool) -> Tensor:
    """Logits [B, T, V] of the specification; not sparse = nothing is left out of a selection."""
    with torch.inference_mode():
        state = RecomputeState(model.model, ids, model.token_map)
        if not sparse:
            state.config = dataclasses.replace(
                state.config, index_topk=10_000, candidate_topk_blocks=10_000
            )
        return model.model.logits(model.model(ids, state).x)


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_training_computes_what_the_product_does(tiny: Loaded, sparse: bool) -> None:
    """Two rows of one document each. The fused attention sums in another order, which in float64
    is far too little to move a rounded value; leaving out the selection is not.
    """
    ids = torch.stack([document(tiny, 71, 1), document(tiny, 71, 2)])
    found = trained_logits(tiny, ids, sparse)
    assert (found - product_logits(tiny, ids, sparse)).abs().max() < EXACT
    assert (found - product_logits(tiny, ids, not sparse)).abs().max() > 1e-3


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("first", [31, 32, 1], ids=lambda n: f"after {n}")
def test_documents_do_not_see_each_other(tiny: Loaded, first: int, sparse: bool) -> None:
    """Other tokens in one document change nothing in the other, also where a group of tokens that
    make one entry would begin in the one and end in the other.
    """
    a, b = document(tiny, first, 3), document(tiny, 80 - first, 4)
    other_a, other_b = document(tiny, first, 5), document(tiny, 80 - first, 6)
    rows = torch.stack([torch.cat(pair) for pair in ((a, b), (other_a, b), (a, other_b))])
    whole, without_a, without_b = trained_logits(tiny, rows, sparse)
    assert (whole[first:] - without_a[first:]).abs().max() < EXACT
    assert (whole[:first] - without_b[:first]).abs().max() < EXACT
    assert (whole[first + 1 :] - without_b[first + 1 :]).abs().max() > 1e-3


@pytest.fixture
def unrounded(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Loaded:
    """The tiny model without rounding of activations and records, and with rotation angles that
    are exact in float32: it depends on distances only, not on where a document begins.
    """
    for place in (
        "deepinfer.model.recompute.round_window", "deepinfer.model.recompute.round_compressed",
        "deepinfer.model.recompute.round_index", "deepinfer.ops.kv_records.reference.round_index",
    ):  # fmt: skip
        monkeypatch.setattr(place, lambda values: values)
    options = EngineOptions(
        model=str(tiny_folder), dtype="float64", act_quant=False, threads=1
    )  # fmt: skip
    model = load_engine(options)
    for table in (model.model.rotary.base, model.model.rotary.compressed):
        table.copy_(table.to(torch.bfloat16))
    return model


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_packed_documents_are_as_alone(unrounded: Loaded, sparse: bool) -> None:
    """Documents that begin where groups and blocks of entries do (tokens 0, 16 and 64)."""
    parts = [document(unrounded, length, length) for length in (16, 48, 57)]
    packed = trained_logits(unrounded, torch.cat(parts).unsqueeze(0), sparse)[0]
    for found, ids in zip(packed.split([16, 48, 57]), parts, strict=True):
        assert (found - product_logits(unrounded, ids.unsqueeze(0), sparse)[0]).abs().max() < EXACT


# Mixing


def test_truncated_sinkhorn_has_the_products_values() -> None:
    for logits in (torch.randn(500, 16), 6 * torch.eye(4).flatten() + torch.randn(5, 7, 16)):
        logits.requires_grad_()
        wanted = hyper_connection._sinkhorn(logits, 4, 20, 1e-6)
        assert torch.equal(sinkhorn(logits, 4, 20, 1e-6), wanted)


def test_truncated_sinkhorn_has_nearly_the_full_gradient() -> None:
    logits = torch.randn(500, 16)
    slope = torch.randn(500, 4, 4)
    gradients = []
    for function in (hyper_connection._sinkhorn, sinkhorn):
        leaf = logits.clone().requires_grad_()
        function(leaf, 4, 20, 1e-6).backward(slope)
        gradients.append(leaf.grad.flatten())
    # Two of twenty passes carry a gradient.
    assert torch.nn.functional.cosine_similarity(*gradients, dim=0) > 0.98


def test_truncated_sinkhorn_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = hyper_connection._sinkhorn
    monkeypatch.setattr(hyper_connection, "_sinkhorn", plain)
    truncated_sinkhorn.install()
    assert hyper_connection._sinkhorn is sinkhorn


# Optimiser


def parameters(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(shape)) for shape in shapes]


def polar(matrices: Tensor) -> Tensor:
    """The nearest matrices with orthonormal rows or columns."""
    u, _, v = torch.linalg.svd(matrices, full_matrices=False)
    return u @ v


SHAPES = ((32, 96), (96, 32), (3, 2, 32, 64))


def test_orthogonalised_matrices_are_nearly_orthogonal() -> None:
    for shape in SHAPES:
        matrices = torch.randn(shape).reshape(-1, *shape[-2:])
        found = orthogonalise(matrices)
        # The quintic iteration aims at 0.7 to 1.2; bfloat16 adds a little.
        singular = torch.linalg.svdvals(found)
        assert singular.min() > 0.6
        assert singular.max() < 1.3
        cosines = torch.nn.functional.cosine_similarity(
            found.flatten(1), polar(matrices).flatten(1)
        )
        assert cosines.min() > 0.97


def test_muon_steps_along_the_momentum() -> None:
    """Two steps: the second follows Nesterov's sum of both gradients; its RMS is Adam's, 0.2."""
    matrices, others = parameters(*SHAPES), parameters((4,))
    steps = Optimiser(matrices, others, rate=0.01, adam_rate=0.0, weight_decay=0.0, clip=1e9)
    steps.factor.fill_(0.5)
    gradients = [[torch.randn_like(p) for p in matrices] for _ in range(2)]
    for number in range(2):
        before = [p.detach().clone() for p in matrices]
        others[0].grad = torch.zeros(4)
        for p, gradient in zip(matrices, gradients[number], strict=True):
            p.grad = gradient.clone()
        steps.step()
    for place, p in enumerate(matrices):
        first, second = gradients[0][place], gradients[1][place]
        wanted = polar(second + 0.95 * (0.95 * first + second))
        update = (before[place] - p.detach()) / (0.5 * 0.01)
        cosine = torch.nn.functional.cosine_similarity(update.flatten(), wanted.flatten(), dim=0)
        assert cosine > 0.97
        assert 0.2 * 0.7 < update.square().mean().sqrt() < 0.2 * 1.2


def test_weights_decay_with_the_rate() -> None:
    matrices, others = parameters((32, 64)), parameters((4,))
    before = matrices[0].detach().clone()
    steps = Optimiser(matrices, others, rate=0.1, adam_rate=0.1, weight_decay=0.5, clip=1.0)
    steps.factor.fill_(0.5)
    for p in (*matrices, *others):
        p.grad = torch.zeros_like(p)
    steps.step()
    torch.testing.assert_close(matrices[0].detach(), before * (1 - 0.1 * 0.5 * 0.5))


def test_adam_and_clipping_are_those_of_torch() -> None:
    """Gradients whose norm is above and below the limit; float32 in another order of operations."""
    matrices, others = parameters((32, 32)), parameters((7, 5), (3,))
    twins = [nn.Parameter(p.detach().clone()) for p in others]
    steps = Optimiser(matrices, others, rate=0.0, adam_rate=0.01, weight_decay=0.0, clip=1.0)
    torch_adam = torch.optim.Adam(twins, lr=0.01, betas=(0.9, 0.98), eps=1e-10)
    stand_in = nn.Parameter(torch.zeros(32, 32))
    for number in range(8):
        size = 0.01 if number % 2 else 1.0
        gradients = [size * torch.randn_like(p) for p in (*matrices, *others)]
        for p, gradient in zip((*matrices, *others), gradients, strict=True):
            p.grad = gradient.clone()
        for p, gradient in zip((stand_in, *twins), gradients, strict=True):
            p.grad = gradient.clone()
        factor = 1.0 / (number + 1)
        steps.factor.fill_(factor)
        torch_adam.param_groups[0]["lr"] = 0.01 * factor
        norm = nn.utils.clip_grad_norm_([stand_in, *twins], 1.0)
        torch_adam.step()
        torch.testing.assert_close(steps.step(), norm)
    for p, twin in zip(others, twins, strict=True):
        torch.testing.assert_close(p.detach(), twin.detach(), rtol=1e-5, atol=1e-6)


def test_a_factor_of_zero_changes_nothing() -> None:
    matrices, others = parameters(*SHAPES), parameters((7, 5), (3,))
    before = [p.detach().clone() for p in (*matrices, *others)]
    steps = Optimiser(matrices, others, rate=0.1, adam_rate=0.1, weight_decay=0.5, clip=1.0)
    for p in (*matrices, *others):
        p.grad = torch.randn_like(p)
    steps.step()
    for p, old in zip((*matrices, *others), before, strict=True):
        assert torch.equal(p.detach(), old)


# Schedule


def test_schedule_rises_stays_and_falls_to_zero() -> None:
    rise = [schedule(p / 100, 0.1, 0.4) for p in range(11)]
    assert rise == pytest.approx([p / 10 for p in range(11)])
    assert {schedule(p / 100, 0.1, 0.4) for p in range(10, 61)} == {1.0}
    fall = [schedule(p / 100, 0.1, 0.4) for p in range(60, 101)]
    assert fall == pytest.approx([(100 - p) / 40 for p in range(60, 101)])
    assert schedule(1.0, 0.1, 0.4) == 0.0


@pytest.mark.parametrize("share", [0.0, 0.1, 0.2, 0.3, 0.35, 0.5, 0.7, 1.0])
@pytest.mark.parametrize("steps", [10, 100, 1000])
def test_long_batches_keep_to_their_share(share: float, steps: int) -> None:
    """Exactly over the stage, and within one batch at every step of it."""
    settings = Training(steps=steps, stages=(Stage(1.0, sparse=False, long=share),))
    kinds = list(backbone._kinds(settings))
    assert len(kinds) == steps
    counts = itertools.accumulate(kind == "long" for kind in kinds)
    hundredths = round(share * 100)  # exact arithmetic
    for number, count in enumerate(counts, 1):
        assert count == number * hundredths // 100


def test_every_stage_has_its_share_of_steps() -> None:
    settings = Training(steps=1000)
    kinds = list(backbone._kinds(settings))
    dense, sparse = settings.stages
    assert len(kinds) == 1000
    assert kinds[:350].count("long") == pytest.approx(350 * dense.long)
    assert kinds[350:].count("long") == pytest.approx(650 * sparse.long)
    assert [backbone._sparse(settings, p) for p in (0.0, 0.349, 0.35, 1.0)] == [
        False, False, True, True,
    ]  # fmt: skip


class Recorder:
    """Stands for a trainer: remembers the calls, and each takes a second."""

    def __init__(self, settings: Training, clock: list[float], loss: float = 2.0) -> None:
        self.settings, self.clock, self.loss = settings, clock, loss
        self.calls: list[tuple[bool, float]] = []

    def step(self, batch: object, sampled: Tensor, sparse: bool, factor: float) -> Tensor:
        assert len(sampled) == len(set(sampled.tolist())) == 4
        assert sampled.max() < 8
        self.calls.append((sparse, factor))
        self.clock[0] += 1.0
        return torch.tensor([self.loss, 0.5, 3.0, 1.0])


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(backbone, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def batch_of(kind: str) -> tuple[Tensor, Tensor]:
    return torch.zeros(2, 9, dtype=torch.int64), torch.ones(2, 9)


def test_backbone_runs_its_plan(clock: list[float]) -> None:
    recorder = Recorder(Training(steps=100, index_rows=4, seconds=1e6), clock)
    curve = train_backbone(recorder, batch_of, 0, lambda message: None)  # type: ignore[arg-type]
    assert [sparse for sparse, _ in recorder.calls] == [False] * 35 + [True] * 65
    factors = [factor for _, factor in recorder.calls]
    assert factors == pytest.approx([schedule(n / 100, 0.02, 0.4) for n in range(100)])
    assert (curve.steps, curve.tokens) == ([50, 100], [900, 1800])
    assert (curve.loss, curve.index_loss) == ([3.0, 3.0], [0.5, 0.5])


def test_backbone_keeps_to_its_time_at_a_falling_rate(clock: list[float]) -> None:
    recorder = Recorder(Training(steps=1000, index_rows=4, seconds=20.0), clock)
    messages: list[str] = []
    train_backbone(recorder, batch_of, 0, messages.append)  # type: ignore[arg-type]
    assert messages == ["time is up after 20 of 1000 steps"]
    factors = [factor for _, factor in recorder.calls]
    assert factors == pytest.approx([schedule(n / 20, 0.02, 0.4) for n in range(20)])
    assert [sparse for sparse, _ in recorder.calls] == [False] * 7 + [True] * 13


def test_backbone_stops_when_the_loss_is_not_finite(clock: list[float]) -> None:
    recorder = Recorder(Training(steps=3, index_rows=4), clock, loss=float("nan"))
    with pytest.raises(RuntimeError, match="loss is nan at step 3"):
        train_backbone(recorder, batch_of, 0, lambda message: None)  # type: ignore[arg-type]


# Router balance


def router(tiny: Loaded) -> MixtureOfExperts:
    module = MixtureOfExperts(tiny.model_config, 8, 2, FLOAT32)
    for p in module.parameters():
        p.data.normal_(std=0.1)
    module.gate.bias.data.zero_()
    return module


def loads(module: MixtureOfExperts, x: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.bincount(module.route(x)[0].flatten(), minlength=8)


def test_router_bias_moves_towards_balance(tiny: Loaded) -> None:
    """By one step against each expert's excess over the mean (64 x 2 / 8); then loads even out."""
    module = router(tiny)
    module.gate.bias.data[:2] = torch.tensor([0.5, -0.5])
    x = torch.randn(64, tiny.model_config.hidden_size)
    used = loads(module, x)
    assert used[0] > 16 > used[1]
    balance = RouterBalance(nn.Sequential(module), 0.01)
    before = module.gate.bias.detach().clone()
    module(x)
    balance.update()
    moves = torch.where(used > 16, -0.01, torch.where(used < 16, 0.01, 0.0))
    torch.testing.assert_close(module.gate.bias.detach() - before, moves)
    balance.update()  # each forward counts once
    torch.testing.assert_close(module.gate.bias.detach() - before, moves)
    for _ in range(100):
        module(x)
        balance.update()
    assert (loads(module, x) - 16).abs().max() <= 4


def test_router_bias_stays_where_nothing_is_learned(tiny: Loaded) -> None:
    module = router(tiny)
    balance = RouterBalance(nn.Sequential(module), 0.01)
    with torch.no_grad():
        module(torch.randn(64, tiny.model_config.hidden_size))
    balance.update()
    assert not module.gate.bias.any()


# Steps of the backbone


def packed_batch(model: Loaded, length: int = 65) -> tuple[Tensor, Tensor]:
    """Two rows of two documents each, [2, T + 1] tokens and weights."""
    rows = [
        torch.cat([document(model, n, n), document(model, length - n, n + 1)]) for n in (21, 38)
    ]
    tokens = torch.stack(rows)
    return tokens, torch.where(tokens == BOS, 0.0, 1.0)


def changed(model: nn.Module, before: dict[str, Tensor]) -> set[str]:
    return {n for n, p in model.named_parameters() if not torch.equal(p.detach(), before[n])}


def values_now(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


SETTINGS = Training(rate=0.01, adam_rate=0.01)
SAMPLED = torch.arange(0, 64, 4)


def test_steps_train_the_backbone_alone(small_folder: Path) -> None:
    small = loaded(small_folder)
    model = trainable(small_folder)
    trainer = Trainer(model, small.token_map, SETTINGS)
    batch = packed_batch(small)
    before = values_now(model)
    trainer.step(batch, SAMPLED, False, 0.0)
    assert not changed(model, before)
    losses = [trainer.step(batch, SAMPLED, number >= 2, 1.0)[0].item() for number in range(5)]
    assert losses[0] == pytest.approx(torch.tensor(512.0).log().item(), rel=1e-3)  # zero head
    assert losses[-1] < losses[0] - 0.5
    # Here every token visits both experts, so that their bias has no reason to move.
    moved = changed(model, before)
    assert moved == {n for n in before if "mtp." not in n and not n.endswith("gate.bias")}


def test_loss_is_the_products_weighted_by_token(small_folder: Path) -> None:
    """One document, all entries selected by both; float32 sums in another order, and the few codes
    that fall to the other side because of it.
    """
    small = loaded(small_folder)
    model = trainable(small_folder)
    with torch.no_grad():
        model.head.weight.normal_(std=0.1)
    trainer = Trainer(model, small.token_map, SETTINGS)
    tokens = document(small, 33, 7).unsqueeze(0)
    weights = torch.rand(1, 33)
    weights[0, 20:] = 1.0
    with torch.no_grad():
        loss, _, answers = trainer.losses(tokens, weights, SAMPLED[:4], False)
        state = RecomputeState(model, tokens[:, :-1], small.token_map)
        state.config = dataclasses.replace(state.config, index_topk=99, candidate_topk_blocks=99)
        logits = model.logits(model(tokens[:, :-1], state).x)
    each = -logits.log_softmax(-1)[0, torch.arange(32), tokens[0, 1:]]
    assert loss.item() == pytest.approx((each @ weights[0, 1:] / weights[0, 1:].sum()).item(), 1e-3)
    assert answers.item() == pytest.approx(each[19:].mean().item(), 1e-3)


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_index_loss_trains_indexers_and_nothing_else(small_folder: Path, sparse: bool) -> None:
    small = loaded(small_folder)
    model = trainable(small_folder)
    with torch.no_grad():
        model.head.weight.normal_(std=0.1)
    trainer = Trainer(model, small.token_map, SETTINGS)
    indexers = {name for name, _ in model.named_parameters() if "indexer" in name}
    for place, wanted in ((1, indexers), (0, set())):
        model.zero_grad()
        losses = trainer.losses(*packed_batch(small), SAMPLED, sparse)
        losses[place].backward()
        reached = {n for n, p in model.named_parameters() if p.grad is not None and p.grad.any()}
        assert losses[place] > 0
        if place:
            assert reached == wanted
        else:
            assert reached
            assert not reached & indexers


class Watched(TrainingState):
    """Works out by softmax, one layer at a time, how much attention entries get at every row."""

    expected: dict[int, Tensor]

    def attend(
        self, layer: int, queries: Tensor, kv: Tensor, norm: RMSNorm, sink: Tensor
    ) -> Tensor:
        ratio = self.config.compress_ratio(layer)
        if ratio:
            entries = self.entries[self.config.kv_source(layer)]
            visible = torch.cat([self.window, self.visible_entries(ratio)], -1)
            keys = torch.cat([self.window_keys(layer, kv, norm), entries], 1)
            scores = torch.einsum("bthd,bsd->bths", queries, keys) * self.config.head_dim**-0.5
            scores = scores.masked_fill(~visible.unsqueeze(2), float("-inf"))
            sinks = sink.view(1, 1, -1, 1).expand(*scores.shape[:3], 1)
            shares = torch.cat([scores, sinks], -1).softmax(-1)[..., self.window.shape[-1] : -1]
            source = self.config.index_source(layer)
            sources = [source]
            if self.candidate_targets and self.config.restricts_to_candidates(source):
                sources.append(self.config.candidate_source_layer_id)
            for number in sources:
                self.expected[number] = self.expected.get(number, 0.0) + shares.sum(2)
        return super().attend(layer, queries, kv, norm, sink)


@pytest.mark.parametrize("candidates", [False, True], ids=["own", "candidates"])
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_index_targets_are_the_attention_to_entries(
    tiny: Loaded, sparse: bool, candidates: bool
) -> None:
    """Of all heads and of all layers that use a selection, or choose among its candidates if these
    count; to entries left out of it, too. Scores are float32 there.
    """
    ids = packed_batch(tiny)[0][:, :-1]
    state = Watched(tiny.model, ids, tiny.token_map, sparse, SAMPLED, candidates)
    state.expected = {}
    with torch.inference_mode():
        tiny.model(ids, state)
    assert state._targets.keys() == state.expected.keys()
    for source, found in state._targets.items():
        wanted = state.expected[source][:, SAMPLED]
        assert (found - wanted).abs().max() < 1e-4 < wanted.max()


def test_index_loss_is_the_distance_from_attention(tiny: Loaded) -> None:
    """KL divergence, weighted by the attention that entries get, worked out row by row."""
    ids = packed_batch(tiny)[0][:, :-1]
    state = TrainingState(tiny.model, ids, tiny.token_map, False, SAMPLED)
    with torch.inference_mode():
        tiny.model(ids, state)
        found = state.index_loss().item()
    means = []
    for source, scores in state._index_rows.items():
        total, mass = 0.0, 0.0
        for row, targets in zip(scores.flatten(0, 1), state._targets[source].flatten(0, 1),
                                strict=True):  # fmt: skip
            some = targets > 0
            share = targets[some] / targets.sum()
            log_q = row.double().log_softmax(-1)[some]
            total += (targets[some] * (share.log() - log_q)).sum().item()
            mass += targets.sum().item()
        means.append(total / mass)
    assert found == pytest.approx(sum(means) / len(means), rel=1e-5)
    assert len(means) == len(tiny.model_config.index_source_layer_ids)


# Drafter


@dataclasses.dataclass
class Drafts:
    """What `draft_losses` computes on the way: logits [B, A, n, V], before and after the bias."""

    base: Tensor
    logits: Tensor
    teacher: Tensor
    accepted: float


def drafts(model: Loaded, tokens: Tensor, anchors: Tensor) -> Drafts:
    heads: list[Tensor] = []
    biases: list[Tensor] = []
    hooks = [
        model.model.head.register_forward_hook(lambda _, x, y: heads.append(y)),
        model.model.mtp.stage(-1).markov_head.register_forward_hook(
            lambda _, x, y: biases.append(y[1])
        ),
    ]
    with torch.inference_mode():
        batch = (tokens, torch.ones(tokens.shape))
        _, measures = draft_losses(model.model, batch, anchors, model.token_map)
    for hook in hooks:
        hook.remove()
    teacher, base = heads
    return Drafts(base, base + biases[0], teacher.view(base.shape), measures[2].item())


def test_training_drafts_what_the_product_does(tiny: Loaded) -> None:
    """Anchors before and after a whole window has passed, the text after them being the product's
    greedy drafts; so the bias of every slot is by the same token.
    """
    tokens = document(tiny, 60, 8)
    anchors = torch.tensor([3, 16, 40])
    wanted = []
    for anchor in anchors.tolist():
        with torch.inference_mode():
            taps = recompute(tiny.model, tokens[: anchor + 1], tiny.token_map).taps
            assert taps is not None
            draft = recompute_draft(tiny.model, taps, tokens[anchor + 1])
        tokens[anchor + 2 : anchor + 2 + 5] = draft.token_ids[0]
        wanted.append(draft)
    found = drafts(tiny, tokens.unsqueeze(0), anchors.unsqueeze(0))
    for place, draft in enumerate(wanted):
        assert (found.base[0, place] - draft.base_logits[0]).abs().max() < EXACT
        assert (found.logits[0, place] - draft.logits[0]).abs().max() < EXACT


def test_drafts_see_nothing_after_the_anchor_but_their_first_token(tiny: Loaded) -> None:
    """Tokens from the second after the anchor on only move the bias, each that of the next slot."""
    tokens = document(tiny, 40, 9)
    other = torch.cat([tokens[:22], document(tiny, 18, 10)])
    other[22] = 30 if tokens[22] != 30 else 31
    other[24:] = tokens[24:]
    rows = torch.stack([tokens, other])
    found = drafts(tiny, rows, torch.tensor([[20, 21, 22]] * 2))
    base = (found.base[0] - found.base[1]).abs().amax(-1)  # [A, n]
    bias = (found.logits[0] - found.logits[1]).abs().amax(-1)
    assert base[0].max() < EXACT  # anchor 20: token 21 is the slot's own, 22 and 23 are ahead
    assert (bias[0] > 1e-3).tolist() == [False, True, True, False, False]
    assert base[1].min() > 1e-3  # anchor 21: token 22 is in the block
    assert base[2].min() > 1e-3  # anchor 22: it is in the window


def test_drafts_do_not_see_other_documents(tiny: Loaded) -> None:
    first, second = document(tiny, 13, 11), document(tiny, 37, 12)
    rows = torch.stack([torch.cat([first, second]), torch.cat([document(tiny, 13, 13), second])])
    found = drafts(tiny, rows, torch.tensor([[13, 16, 27], [13, 16, 27]]))
    assert (found.logits[0] - found.logits[1]).abs().max() < EXACT


def test_accepted_drafts_are_counted_until_the_text_goes_elsewhere(small_folder: Path) -> None:
    """Target, drafts and text choose between two tokens and often agree; some blocks reach into
    another document.
    """
    small = load_engine(EngineOptions(model=str(small_folder), dtype="float64", threads=1))
    with torch.no_grad():
        small.model.mtp.stage(-1).markov_head.head.weight.zero_()
        row = small.model.head.weight[30].clone()
        small.model.head.weight.zero_()[30:32] = torch.stack([row, -row])
    tokens = torch.randint(30, 32, (80,))
    tokens[0] = tokens[60] = BOS
    anchors = torch.arange(2, 70)
    found = drafts(small, tokens.unsqueeze(0), anchors.unsqueeze(0))
    lengths = []
    for place, anchor in enumerate(anchors.tolist()):
        if anchor == 59:
            continue  # its block begins in the other document
        lengths.append(0)
        for slot in range(5):
            position = anchor + 1 + slot
            choice = found.teacher[0, place, slot].argmax()
            ends = position >= 60 > anchor
            if ends or found.logits[0, place, slot].argmax() != choice:
                break
            lengths[-1] += 1
            if choice != tokens[position + 1]:
                break
    assert set(lengths) >= {0, 1, 2, 3}
    assert found.accepted == pytest.approx(sum(lengths) / len(lengths), rel=1e-6)


def test_anchors_lie_mostly_in_answers_and_leave_room_for_the_block() -> None:
    weights = torch.zeros(2, 101)
    weights[0, 50:60] = 1.0
    weights[1, -1] = 1.0
    anchors = choose_anchors(weights, 2000, 5, torch.Generator().manual_seed(1))
    assert anchors.shape == (2, 2000)
    assert anchors.min() >= 0
    assert anchors.max() + 5 + 1 <= 100  # the last slot's target
    # 0.8 + 0.2 * 10 / 94, three standard deviations of 0.0085 around it.
    inside = ((anchors[0] >= 48) & (anchors[0] < 58)).float().mean().item()
    assert inside == pytest.approx(0.821, abs=0.026)


def test_drafter_steps_leave_the_backbone_alone(small_folder: Path) -> None:
    small = loaded(small_folder)
    model = trainable(small_folder)
    with torch.no_grad():
        model.head.weight.normal_(std=0.2)  # a teacher with opinions
    trainer = DrafterTrainer(model, small.token_map, DrafterTraining(rate=0.01))
    batch = packed_batch(small)
    anchors = torch.arange(0, 56, 3).expand(2, -1)
    before = values_now(model)
    trainer.step(batch, anchors, 0.0)
    assert not changed(model, before)
    losses = [trainer.step(batch, anchors, 1.0)[0].item() for _ in range(5)]
    assert losses[-1] < losses[0] - 0.1
    trained = {name for name in before if "mtp." in name and not name.endswith("gate.bias")}
    assert changed(model, before) == trained


def test_drafter_runs_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    now = itertools.count()
    monkeypatch.setattr(drafter, "time", SimpleNamespace(monotonic=lambda: next(now)))
    factors: list[float] = []

    def step(batch: object, anchors: Tensor, factor: float) -> Tensor:
        assert anchors.shape == (2, 6)
        factors.append(factor)
        return torch.tensor([4.0, 0.5, 1.5])

    settings = DrafterTraining(steps=50, seconds=1e6, anchors=6)
    model = SimpleNamespace()
    model.mtp = SimpleNamespace(block_size=3)
    trainer = SimpleNamespace(settings=settings, step=step, model=model)
    curve = drafter.train_drafter(trainer, batch_of, 0, lambda message: None)  # type: ignore[arg-type]
    assert factors == pytest.approx([schedule(n / 50, 0.03, 0.5) for n in range(50)], abs=1e-4)
    assert (curve.steps, curve.tokens, curve.loss) == ([50], [900], [4.0])
    assert curve.index_loss == [1.5]


# The program


@pytest.fixture
def settings_kept() -> Iterator[None]:
    """The program changes these for its process."""
    mixing, tf32 = hyper_connection._sinkhorn, torch.backends.cuda.matmul.allow_tf32
    yield
    hyper_connection._sinkhorn, torch.backends.cuda.matmul.allow_tf32 = mixing, tf32


@pytest.mark.usefixtures("settings_kept")
def test_program_trains_a_checkpoint_that_generates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step of each stage and one of the drafter, with tiny batches."""
    # What takes seconds here and has its own tests: products in bfloat16, items to evaluate.
    monkeypatch.setattr(optimiser, "orthogonalise", lambda m: nn.functional.normalize(m, dim=-1))
    monkeypatch.setattr(train_demo, "evaluation_items", lambda: [{"prompt": "1 + 1"}])
    arguments = (
        f"--out {tmp_path} --device cpu --workers 0 --steps 2 --drafter-steps 1 --small --seed 4"
    )
    monkeypatch.setattr("sys.argv", ["train_demo.py", *arguments.split()])
    train_demo.main()
    assert "drafter step 1" in capsys.readouterr().out
    record = json.loads((tmp_path / "training.json").read_text())
    assert record["seed"] == 4
    assert record["curves"]["backbone"]["steps"] == [2]
    # Both were computed before anything was learned: a uniform guess among 4,096 tokens.
    for part in ("backbone", "drafter"):
        assert record["curves"][part]["loss"][0] == pytest.approx(8.318, abs=0.01)
    assert json.loads((tmp_path / "eval.jsonl").read_text()) == {"prompt": "1 + 1"}
    assert json.loads((tmp_path / "questions.json").read_text())
    llm = LLM(tmp_path, threads=1)
    (output,) = llm.generate(["Hello"], SamplingParams(max_tokens=3, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 3

"""Choosing implementations: whose word counts, what fallbacks do, the whole model on kernels."""

import dataclasses
from pathlib import Path

import pytest
import torch

from deepinfer import LLM, SamplingParams
from deepinfer.config import EngineOptions
from deepinfer.engine.loading import choose_operators
from deepinfer.errors import ConfigError, Unsupported
from deepinfer.ops import select as selection
from deepinfer.ops.select import Operator, Wishes, select
from deepinfer.testing.tiny import tiny_config, write_random_checkpoint
from tests.cpu.conftest import SMALL


def choice(name: str = "rms_norm", **wishes: object) -> Operator:
    return getattr(select(Wishes(**wishes)), name)  # type: ignore[arg-type]


def test_order_and_wishes() -> None:
    assert choice(device="cpu").backend == "ref"
    assert choice(device="cuda").backend == "triton"
    assert choice(device="cuda", backend="ref").backend == "ref"
    assert choice(device="cuda", backend="triton").backend == "triton"
    mixed = choice(device="cuda", backend="triton", operators={"rms_norm": "ref"})
    assert mixed.backend == "ref"
    demanded = choice(device="cuda", backend="ref", operators={"rms_norm": "triton"})
    assert (demanded.backend, demanded.reason) == ("triton", "demanded")
    other = choice("rope", device="cuda", backend="ref", operators={"rms_norm": "triton"})
    assert other.backend == "ref"


def test_wishes_for_tile_kernels_reach_its_operators_only() -> None:
    for others, tiles in (("triton", "ref"), ("ref", "triton")):
        wishes = {"device": "cuda", "backend": others, "tile_kernels": tiles}
        assert choice("rope", **wishes).backend == tiles
        assert choice("topk_select", **wishes).backend == others


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ({"operators": {"rmsnorm": "ref"}}, "'rmsnorm' is unknown; did you mean 'rms_norm'?"),
        ({"backend": "cuda"}, "operator backend 'cuda'; expected one of auto, "),
        ({"operators": {"rope": "cute"}}, "operator backend 'cute'; expected one of auto, "),
        (
            {"operators": {"rope": "tilelang"}},
            "rope: backend tilelang needs the package tile_kernels",
        ),
        ({"backend": "tilelang", "strict": True}, "strict mode allows no other"),
    ],
)
def test_wishes_that_cannot_be_met(wishes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        select(Wishes(**wishes))  # type: ignore[arg-type]
    assert message in str(caught.value)


def test_a_gpu_is_needed_without_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "_interpreted", lambda: False)
    with pytest.raises(ConfigError, match="needs a CUDA GPU"):
        choice(device="cpu", operators={"rms_norm": "triton"})


def test_only_invariant_backends_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = selection.specs()["rms_norm"]
    loose = tuple(dataclasses.replace(b, batch_invariant=False) for b in spec.backends)
    known = {"rms_norm": dataclasses.replace(spec, backends=loose)}
    monkeypatch.setattr(selection, "specs", lambda: known)
    assert choice(device="cuda", backend="triton").backend == "triton"
    assert choice(device="cuda", backend="triton", batch_invariant=True).backend == "ref"


def refuse(*arguments: object, **more: object) -> object:
    raise Unsupported("takes no numbers")


def test_a_fallback_is_counted_and_an_error_in_strict_mode() -> None:
    spec = selection.specs()["rms_norm"]
    x, weight = torch.randn(3, 8), torch.ones(8)
    tolerant = Operator(spec, "triton", refuse, "demanded", strict=False)
    assert torch.equal(tolerant(x, weight, 1e-6), spec.reference(x, weight, 1e-6))
    assert (tolerant.calls, tolerant.fallbacks) == (1, 1)
    strict = Operator(spec, "triton", refuse, "demanded", strict=True)
    with pytest.raises(Unsupported, match="rms_norm: triton takes no numbers; strict mode"):
        strict(x, weight, 1e-6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers, the last of which selects among candidates."""
    folder = tmp_path_factory.mktemp("selection") / "checkpoint"
    config = {
        **SMALL, "num_hidden_layers": 4, "compress_ratios": [0, 2, 1, 1, 0],
        "index_source_layer_ids": [1, 2, 3], "index_topk": 8, "candidate_topk_blocks": 2,
    }  # fmt: skip
    write_random_checkpoint(folder, tiny_config(**config), seed=3, outliers=True)
    return folder


def test_the_environment_and_options_reach_the_choice(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "_interpreted", lambda: True)
    monkeypatch.setenv("DEEPINFER_OPS_ROPE", "triton")
    monkeypatch.setenv("DEEPINFER_OPS_RMS_NORM", "triton")
    monkeypatch.setenv("DEEPINFER_SPARSE_MLA_BACKEND", "triton_split")
    options = EngineOptions(str(folder), device="cpu", op=("rms_norm=ref",))
    chosen = {o.spec.name: o.backend for o in choose_operators(options).all()}
    on_kernels = {name: backend for name, backend in chosen.items() if backend != "ref"}
    assert on_kernels == {"rope": "triton", "sparse_attention": "triton_split"}
    monkeypatch.setenv("DEEPINFER_OPS_ROPES", "triton")
    with pytest.raises(ConfigError, match="operator 'ropes' is unknown"):
        choose_operators(options)


def test_the_whole_model_on_kernels(folder: Path) -> None:
    """Every operator that the model calls through Triton, strictly, against the references."""
    prompts = [list(range(3, 25)), [7, 8, 9]]
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True, logprobs=0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    replies, models = {}, {}
    for backend in ("ref", "triton"):
        models[backend] = LLM(
            folder, device=device, dtype="float32", ops_backend=backend,
            ops_strict=True, enforce_eager=True, threads=1,
        )  # fmt: skip
        replies[backend] = [r.outputs[0] for r in models[backend].generate(prompts, params)]
    for reply, expected in zip(replies["triton"], replies["ref"], strict=True):
        assert reply.token_ids == expected.token_ids
        assert reply.logprobs is not None
        assert expected.logprobs is not None
        found = torch.tensor([entry.logprob for entry in reply.logprobs])
        torch.testing.assert_close(
            found, torch.tensor([entry.logprob for entry in expected.logprobs]), atol=2e-3, rtol=0
        )
    operators = models["triton"].model.precision.operators.all()
    # Where a GPU was measured, several kernels may share an operator.
    assert all(o.backend.startswith(("triton", "gluon")) for o in operators)
    assert not any(o.fallbacks for o in operators)
    called = {o.spec.name for o in operators if o.calls}
    assert {"sparse_attention", "paged_index_scores", "topk_select", "candidate_scores"} <= called


@pytest.mark.parametrize("backend", ["triton", "triton_split"])
def test_every_triton_backend_needs_a_gpu(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "_interpreted", lambda: False)
    with pytest.raises(ConfigError, match="needs a CUDA GPU"):
        choice("sparse_attention", device="cpu", operators={"sparse_attention": backend})


def test_strict_mode_wants_kernels_where_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    fallback = choice(device="cuda", backend="triton")
    assert (fallback.backend, fallback.reason) == ("ref", "triton needs the package triton")
    with pytest.raises(ConfigError, match="needs the package triton; strict mode"):
        choice(device="cuda", backend="triton", strict=True)


def test_simulated_absence_is_the_reason() -> None:
    with pytest.raises(ConfigError, match="backend tilelang is simulated to be absent"):
        choice(operators={"rope": "tilelang"}, without_tilelang=True)


def test_the_command_line_comes_before_the_environment(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEPINFER_OPS_SPARSE_ATTENTION", "triton")
    options = EngineOptions(str(folder), device="cpu", sparse_mla_backend="ref")
    assert choose_operators(options).sparse_attention.backend == "ref"

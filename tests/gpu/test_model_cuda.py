"""The model on a GPU, by references and by kernels: against the CPU, the oracle, and itself."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from deepinfer import LLM, SamplingParams
from deepinfer.commands.dump import dump
from deepinfer.config import EngineOptions
from deepinfer.testing.compare import distances
from deepinfer.testing.tiny import tiny_config, write_random_checkpoint

BACKENDS = pytest.mark.parametrize("backend", ["ref", "triton"])
ORACLE = Path(__file__).parents[1] / "oracle"


@BACKENDS
@pytest.mark.parametrize("mode", ["recompute", "cached", "chunked:7"])
def test_float32_agrees_with_the_oracle(backend: str, mode: str, tmp_path: Path) -> None:
    expected = load_file(ORACLE / "oracle-float32.safetensors")
    for case in range(7):
        ids = expected[f"case{case}.input_ids"].tolist()
        options = EngineOptions(str(ORACLE), device="cuda", dtype="float32", act_quant=False,
                                ops_backend=backend, ops_strict=True)  # fmt: skip
        actual = dump(options, ids, tmp_path / "dump.safetensors", mode)["logits"]
        close = distances(actual, expected[f"case{case}.logits"]) <= 1e-4
        assert close.double().mean() >= 0.95, case


@BACKENDS
def test_bfloat16_is_as_near_as_the_cpu(backend: str, tmp_path: Path) -> None:
    """Two bfloat16 runs differ by rounding; the GPU may not be further off than the CPU is."""
    expected = load_file(ORACLE / "oracle-float32-actq.safetensors")
    medians = {}
    for device, operators in (("cpu", "ref"), ("cuda", backend)):
        off = []
        for case in range(2, 7):
            ids = expected[f"case{case}.input_ids"].tolist()
            options = EngineOptions(str(ORACLE), device=device, ops_backend=operators)  # type: ignore[arg-type]
            actual = dump(options, ids, tmp_path / "dump.safetensors", "cached")["logits"]
            off.append(distances(actual, expected[f"case{case}.logits"]))
        medians[device] = torch.cat(off).median().item()
    assert medians["cuda"] <= 1.2 * medians["cpu"], medians


@BACKENDS
def test_greedy_tokens_equal_the_oracle(backend: str) -> None:
    expected = load_file(ORACLE / "oracle-float32.safetensors")
    llm = LLM(ORACLE, device="cuda", dtype="float32", act_quant=False, ops_backend=backend,
              enforce_eager=True)  # fmt: skip
    params = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
    (reply,) = llm.generate(expected["greedy.prompt_ids"].tolist(), params)
    for step, (token, wanted) in enumerate(
        zip(reply.outputs[0].token_ids, expected["greedy.output_ids"].tolist(), strict=True)
    ):
        if expected["greedy.margins"][step] <= 0.01:
            return
        assert token == wanted, step


def test_outliers_and_two_runs(tmp_path: Path) -> None:
    """Weights and activations with outliers: as the CPU, and the same bits when run again."""
    folder = tmp_path / "outliers"
    write_random_checkpoint(folder, tiny_config(index_topk=8), seed=5, outliers=True)
    ids = torch.randint(3, 90, (150,), generator=torch.Generator().manual_seed(1)).tolist()
    logits = {}
    for name, device, backend in (
        ("cpu", "cpu", "ref"), ("first", "cuda", "triton"), ("second", "cuda", "triton"),
    ):  # fmt: skip
        options = EngineOptions(str(folder), device=device, dtype="float32", act_quant=False,  # type: ignore[arg-type]
                                ops_backend=backend, ops_strict=True)  # fmt: skip
        logits[name] = dump(options, ids, tmp_path / "dump.safetensors", "chunked:64")["logits"]
    assert torch.equal(logits["first"], logits["second"])
    close = distances(logits["first"], logits["cpu"]) <= 1e-3
    assert close.double().mean() >= 0.95

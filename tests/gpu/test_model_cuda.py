"""The reference model on a GPU against the same on the CPU, and against the oracle."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from deepinfer import LLM, SamplingParams
from deepinfer.commands.dump import dump
from deepinfer.config import EngineOptions
from deepinfer.testing.compare import distances

ORACLE = Path(__file__).parents[1] / "oracle"


@pytest.mark.parametrize("mode", ["recompute", "cached", "chunked:7"])
def test_float32_agrees_with_the_oracle(mode: str, tmp_path: Path) -> None:
    expected = load_file(ORACLE / "oracle-float32.safetensors")
    for case in range(7):
        ids = expected[f"case{case}.input_ids"].tolist()
        options = EngineOptions(str(ORACLE), device="cuda", dtype="float32", act_quant=False)
        actual = dump(options, ids, tmp_path / "dump.safetensors", mode)["logits"]
        close = distances(actual, expected[f"case{case}.logits"]) <= 1e-4
        assert close.double().mean() >= 0.95, case


def test_bfloat16_is_as_near_as_the_cpu(tmp_path: Path) -> None:
    """Two bfloat16 runs differ by rounding; the GPU may not be further off than the CPU is."""
    expected = load_file(ORACLE / "oracle-float32-actq.safetensors")
    medians = {}
    for device in ("cpu", "cuda"):
        off = []
        for case in range(2, 7):
            ids = expected[f"case{case}.input_ids"].tolist()
            options = EngineOptions(str(ORACLE), device=device)  # type: ignore[arg-type]
            actual = dump(options, ids, tmp_path / "dump.safetensors", "cached")["logits"]
            off.append(distances(actual, expected[f"case{case}.logits"]))
        medians[device] = torch.cat(off).median().item()
    assert medians["cuda"] <= 1.2 * medians["cpu"], medians


def test_greedy_tokens_equal_the_oracle() -> None:
    expected = load_file(ORACLE / "oracle-float32.safetensors")
    llm = LLM(ORACLE, device="cuda", dtype="float32", act_quant=False)
    params = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
    (reply,) = llm.generate(expected["greedy.prompt_ids"].tolist(), params)
    for step, (token, wanted) in enumerate(
        zip(reply.outputs[0].token_ids, expected["greedy.output_ids"].tolist(), strict=True)
    ):
        if expected["greedy.margins"][step] <= 0.01:
            return
        assert token == wanted, step

"""A packed model (matrices as stored, multiplied by operators) is the same model."""

import logging
from pathlib import Path

import pytest
import torch

from deepinfer.checkpoint.hf_config import load_model_config
from deepinfer.checkpoint.loader import load_model
from deepinfer.model.linear import Precision
from deepinfer.model.recompute import recompute
from deepinfer.model.transformer import Transformer
from deepinfer.ops import select as selection
from deepinfer.ops.select import Wishes
from deepinfer.testing.compare import distances
from tests.cpu.model_helpers import ORACLE_FOLDER, loaded, random_ids

CPU = torch.device("cpu")


def model_of(folder: Path, packed: bool) -> Transformer:
    dtype = torch.bfloat16
    precision = Precision(dtype, dtype if packed else torch.float32, True, packed)
    return load_model(folder, load_model_config(folder), precision, CPU)


@pytest.mark.parametrize("name", ["tiny", "oracle"])
def test_logits_are_those_of_the_dequantised_model(name: str, tiny_folder: Path) -> None:
    folder = tiny_folder if name == "tiny" else ORACLE_FOLDER
    ids, token_map = random_ids(loaded(folder), 60), loaded(folder).token_map
    logits = {}
    with torch.inference_mode():
        for packed in (False, True):
            model = model_of(folder, packed)
            logits[packed] = model.logits(recompute(model, ids, token_map).x)
    apart = distances(logits[True], logits[False])
    # bfloat16 rounds some sums the other way, which routing can magnify in single tokens.
    assert apart.median() < 1e-3, apart
    assert apart.max() < 0.1, apart


def test_the_loader_says_what_it_did(tiny_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="deepinfer"):
        model_of(tiny_folder, packed=True)
    assert "x FP4 experts" in caplog.text
    assert "x FP8 matrix" in caplog.text


def test_exact_products_keep_matrices_as_stored(tiny_folder: Path) -> None:
    """The twin that applies every scale needs no other layout."""
    wishes = Wishes(operators={"fp8_linear": "triton_exact"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "_interpreted", lambda: True)
        operators = selection.select(wishes)
    precision = Precision(torch.bfloat16, torch.bfloat16, packed=True, operators=operators)
    assert not precision.wide_scales
    model = load_model(tiny_folder, load_model_config(tiny_folder), precision, CPU)
    projection = model.layers[0].attn.wq_a
    assert projection.scale.shape == (projection.weight.shape[0] // 32, 128 // 32)

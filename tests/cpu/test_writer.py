"""Writing checkpoints: what comes back is what went in, and nothing half-written is left."""

import copy
import dataclasses
import hashlib
import itertools
import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from deepinfer.checkpoint.hf_config import load_model_config, parse_model_config
from deepinfer.checkpoint.names import TensorSpec, tensor_specs
from deepinfer.checkpoint.quant import quantise_fp4, quantise_fp8, quantise_fp8_row
from deepinfer.checkpoint.token_map import build_token_map
from deepinfer.checkpoint.tokenizer_training import train_tokenizer
from deepinfer.checkpoint.writer import (
    Values,
    complete_config,
    model_values,
    write_checkpoint,
)
from deepinfer.errors import CheckpointError, ConfigError
from deepinfer.model.linear import Precision
from deepinfer.testing.tiny import random_values, tiny_config, write_random_checkpoint
from tests.cpu.checkpoint_helpers import (
    FLOAT32,
    copy_of,
    header_and_data,
    load,
    same_parameters,
    stored_values,
)

pytestmark = pytest.mark.usefixtures("one_thread")

INDEX = "model.safetensors.index.json"


def parts(folder: Path) -> tuple[dict[str, Any], Tokenizer]:
    """config.json and tokenizer of a checkpoint."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config, Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def settled(small_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small checkpoint written again, which gives the same bytes from then on.

    Scales shrink at the first time where rounding made a block's largest value smaller.
    """
    folder = tmp_path_factory.mktemp("settled")
    config, tokenizer = parts(small_folder)
    write_checkpoint(folder, config, tokenizer, model_values(load(small_folder)))
    return folder


def same_values(a: Path, b: Path) -> bool:
    left, right = stored_values(a), stored_values(b)
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


def listing(folder: Path) -> dict[str, str]:
    """Every file of a folder, with its content's digest."""
    return {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()
    }  # fmt: skip


@pytest.mark.parametrize("precision", [
    FLOAT32, Precision(torch.bfloat16, torch.bfloat16), Precision(torch.float64, torch.float64),
], ids=["float32", "bfloat16", "float64"])  # fmt: skip
def test_written_loaded_and_written_again(
    tiny_folder: Path, tmp_path: Path, precision: Precision
) -> None:
    config, tokenizer = parts(tiny_folder)
    second, third = tmp_path / "second", tmp_path / "third"
    write_checkpoint(second, config, tokenizer, model_values(load(tiny_folder, precision)))
    assert same_values(tiny_folder, second)
    # Only scales may differ, of blocks whose largest value has become smaller by rounding.
    write_checkpoint(third, config, tokenizer, model_values(load(second, precision)))
    assert listing(second) == listing(third)
    assert load_model_config(second) == load_model_config(tiny_folder)
    assert json.loads((second / "config.json").read_text(encoding="utf-8")) == config


def test_the_oracle_checkpoint_is_reproduced(oracle_folder: Path, tmp_path: Path) -> None:
    config, tokenizer = parts(oracle_folder)
    write_checkpoint(tmp_path, config, tokenizer, model_values(load(oracle_folder)))
    assert same_values(oracle_folder, tmp_path)


def test_stored_bytes_are_those_of_the_quantisers(small_folder: Path, tmp_path: Path) -> None:
    config, tokenizer = parts(small_folder)
    values = random_values(3, outliers=True)
    write_checkpoint(tmp_path, config, tokenizer, values)
    raw = load_file(tmp_path / "model.safetensors")
    quantise = {"fp8": quantise_fp8, "fp8_row": quantise_fp8_row, "fp4": quantise_fp4}
    dtypes = {"fp4": torch.int8, "bf16": torch.bfloat16, "f32": torch.float32}
    for spec in tensor_specs(parse_model_config(config)):
        stored = raw.pop(spec.name)
        assert stored.dtype == dtypes.get(spec.format, torch.float8_e4m3fn)
        if spec.scale_name is None:
            assert torch.equal(stored, values(spec).to(stored.dtype))
            continue
        scale = raw.pop(spec.scale_name)
        assert scale.dtype == torch.float8_e8m0fnu
        codes, exponents = quantise[spec.format](values(spec))
        assert torch.equal(stored.view(torch.uint8), codes)
        assert torch.equal(scale.view(torch.uint8), exponents)
    assert not raw


@pytest.mark.parametrize("limit", [1, 20_000, 200_000])
def test_shards(settled: Path, tmp_path: Path, limit: int) -> None:
    config, tokenizer = parts(settled)
    write_checkpoint(tmp_path, config, tokenizer, model_values(load(settled)), limit)
    files = sorted(tmp_path.glob("*.safetensors"))
    count = len(files)
    assert [f.name for f in files] == [
        f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)
    ]
    assert count > 1
    index = json.loads((tmp_path / INDEX).read_text())
    held: dict[str, str] = {}
    total = 0
    for file in files:
        header, data = header_and_data(file)
        header.pop("__metadata__")
        held |= dict.fromkeys(header, file.name)
        total += len(data)
        single = {name.rpartition(".")[0] for name in header}
        assert len(data) <= limit or len(single) == 1
    sizes = [len(header_and_data(file)[1]) for file in files]
    assert all(a + b > limit for a, b in itertools.pairwise(sizes))  # none is cut off early
    assert index["weight_map"] == held
    assert index["metadata"] == {"total_size": total}
    assert same_parameters(load(tmp_path), load(settled))


def test_an_exact_fit_is_one_file(settled: Path, tmp_path: Path) -> None:
    config, tokenizer = parts(settled)
    values = model_values(load(settled))
    size = len(header_and_data(settled / "model.safetensors")[1])
    write_checkpoint(tmp_path / "one", config, tokenizer, values, size)
    write_checkpoint(tmp_path / "two", config, tokenizer, values, size - 1)
    assert set(listing(tmp_path / "one")) == {"config.json", "tokenizer.json", "model.safetensors"}
    assert len(list((tmp_path / "two").glob("*.safetensors"))) == 2
    assert same_parameters(load(tmp_path / "two"), load(tmp_path / "one"))


def test_what_the_folder_held_before_is_replaced(settled: Path, tmp_path: Path) -> None:
    config, tokenizer = parts(settled)
    values = model_values(load(settled))
    write_checkpoint(tmp_path, config, tokenizer, values, 20_000)
    write_checkpoint(tmp_path, config, tokenizer, values)
    assert set(listing(tmp_path)) == {"config.json", "tokenizer.json", "model.safetensors"}
    write_checkpoint(tmp_path, config, tokenizer, values, 200_000)
    assert not (tmp_path / "model.safetensors").exists()
    assert same_parameters(load(tmp_path), load(settled))


def test_a_model_can_be_written_where_it_was_read(small_folder: Path, tmp_path: Path) -> None:
    """Its n-gram tables are views of the very file that is replaced."""
    folder = copy_of(small_folder, tmp_path / "checkpoint")
    model = load(folder)
    config, tokenizer = parts(folder)
    write_checkpoint(folder, config, tokenizer, model_values(model))
    assert same_values(folder, small_folder)
    assert same_parameters(model, load(small_folder))


def failing(good: Values, name: str, bad: Tensor) -> Values:
    return lambda spec: bad if spec.name == name else good(spec)


@pytest.mark.parametrize(("name", "bad", "expected"), [
    ("norm.weight", torch.full((128,), math.nan), "not finite"),
    ("norm.weight", torch.full((128,), math.inf), "not finite"),
    ("norm.weight", torch.full((128,), 3.4e38), "not finite"),  # finite, but not in bfloat16
    ("layers.0.attn.attn_sink", torch.full((4,), 1e300, dtype=torch.float64), "not finite"),
    ("mtp.0.ffn.shared_experts.w1.weight", torch.full((32, 128), -math.inf), "not finite"),
    ("layers.2.ffn.experts.1.w2.weight", torch.full((128, 32), 1e39, dtype=torch.float64),
     "not finite"),
    ("norm.weight", torch.zeros(127), r"values of shape \(127,\); expected \(128,\)"),
    ("norm.weight", torch.zeros(1, 128), r"values of shape \(1, 128\); expected \(128,\)"),
    ("layers.2.ffn.experts.1.w2.weight", torch.zeros(32, 128), r"expected \(128, 32\)"),
])  # fmt: skip
def test_bad_values_are_refused_and_leave_no_trace(
    small_folder: Path, tmp_path: Path, name: str, bad: Tensor, expected: str
) -> None:
    config, tokenizer = parts(small_folder)
    folder = copy_of(small_folder, tmp_path / "checkpoint")
    before = listing(folder)
    values = failing(model_values(load(small_folder)), name, bad)
    for limit in (20_000, 2**30):
        with pytest.raises(CheckpointError, match=expected) as caught:
            write_checkpoint(folder, config, tokenizer, values, limit)
        assert str(caught.value).startswith(f"{name}: ")
        assert listing(folder) == before


def test_an_invalid_config_is_refused_before_anything_is_written(
    small_folder: Path, tmp_path: Path
) -> None:
    config, tokenizer = parts(small_folder)
    config["text_config"]["hidden_size"] = 100
    with pytest.raises(ConfigError, match="hidden_size = 100"):
        write_checkpoint(tmp_path / "new", config, tokenizer, random_values(0))
    assert not (tmp_path / "new").exists()


def test_files_can_be_read_by_others(small_folder: Path, tmp_path: Path) -> None:
    config, tokenizer = parts(small_folder)
    write_checkpoint(tmp_path, config, tokenizer, random_values(0), 50_000)
    assert all(file.stat().st_mode & 0o777 == 0o644 for file in tmp_path.glob("*.safetensors"))


@pytest.mark.usefixtures("warnings_anew")
@pytest.mark.parametrize("limit", [50_000, 2**30])
def test_the_note_is_shown_once_to_everybody_who_loads(
    small_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, limit: int
) -> None:
    config, tokenizer = parts(small_folder)
    write_checkpoint(tmp_path, config, tokenizer, random_values(0), limit, note="random weights")
    with caplog.at_level(logging.WARNING, logger="deepinfer"):
        load(tmp_path)
        load(tmp_path)
    assert [record.getMessage() for record in caplog.records] == [f"{tmp_path}: random weights"]


@pytest.mark.usefixtures("warnings_anew")
def test_without_a_note_nothing_is_said(
    small_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load(small_folder)
    assert not caplog.records


def test_config_is_completed_from_the_tokenizer() -> None:
    tokenizer = train_tokenizer(["Some words, some Words, SOME words."], 512)
    given = tiny_config()
    kept = copy.deepcopy(given)
    text = complete_config(given, tokenizer)["text_config"]
    assert given == kept
    assert text["engram_compressed_vocab_size"] == len(set(build_token_map(tokenizer))) < 512
    assert text["engram_num_embeddings"] == [462, 630]
    assert {k: v for k, v in text.items() if k in kept["text_config"]} == kept["text_config"]


def test_a_config_without_ngram_layers_is_complete() -> None:
    given = tiny_config(engram_layer_ids=[])
    assert complete_config(given, train_tokenizer([], 512)) == given


def test_a_random_checkpoint_belongs_together(tiny_folder: Path) -> None:
    config, tokenizer = parts(tiny_folder)
    assert tokenizer.get_vocab_size() == config["text_config"]["vocab_size"] == 512
    noise = config["text_config"]["dspark_noise_token_id"]
    assert "draft" in tokenizer.id_to_token(noise)
    assert "image" in tokenizer.id_to_token(config["image_token_id"])
    assert config["text_config"]["engram_compressed_vocab_size"] == len(
        set(build_token_map(tokenizer))
    )


def test_random_checkpoints_are_reproducible(tiny_folder: Path, tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path, seed=1, outliers=True)
    assert listing(tmp_path) == listing(tiny_folder)
    write_random_checkpoint(tmp_path, seed=2, outliers=True)
    assert not same_values(tmp_path, tiny_folder)


def specs() -> list[TensorSpec]:
    sizes = {"engram_num_embeddings": [462, 630], "engram_compressed_vocab_size": 300}
    return list(tensor_specs(parse_model_config(tiny_config(**sizes))))


@pytest.mark.parametrize("outliers", [False, True])
def test_random_values_do_not_depend_on_the_order_of_drawing(outliers: bool) -> None:
    values = random_values(4, outliers)
    forward = {spec.name: values(spec) for spec in specs()}
    torch.manual_seed(99)
    again = random_values(4, outliers)
    for spec in reversed(specs()):
        assert torch.equal(again(spec), forward[spec.name])
    assert torch.equal(values(specs()[0]), forward[specs()[0].name])


def test_random_values_depend_on_seed_and_name() -> None:
    spec = next(spec for spec in specs() if spec.name == "layers.0.attn.wq_a.weight")
    other = dataclasses.replace(spec, name="layers.1.attn.wq_a.weight")
    drawn = random_values(0)(spec)
    assert not torch.equal(drawn, random_values(1)(spec))
    assert not torch.equal(drawn, random_values(0)(other))


def excess(values: Tensor) -> float:
    """Largest magnitude in units of the median one; about 6 for 10,000 normal numbers."""
    return (values.abs().max() / values.abs().median()).item()


def test_outliers_are_there_when_asked_for() -> None:
    plain, heavy = random_values(1), random_values(1, outliers=True)
    matrices = [s for s in specs() if len(s.shape) == 2 and math.prod(s.shape) >= 4096
                and not s.name.startswith("embed") and "engram.embed" not in s.name]  # fmt: skip
    assert len(matrices) > 200
    grown = [heavy(spec) != plain(spec) for spec in matrices]
    assert 0.0018 < torch.cat([where.flatten() for where in grown]).float().mean() < 0.0022
    for spec, where in zip(matrices, grown, strict=True):
        assert excess(plain(spec)) < 9
        assert excess(heavy(spec)) > 15
        assert torch.equal(heavy(spec)[where], plain(spec)[where] * 20)
    embedding = next(spec for spec in specs() if spec.name == "embed.weight")
    channels = (heavy(embedding) != plain(embedding)).any(0)
    assert channels.sum() == 3
    assert torch.equal(heavy(embedding)[:, channels], plain(embedding)[:, channels] * 8)


def test_outliers_of_vectors() -> None:
    plain, heavy = random_values(1), random_values(1, outliers=True)
    norms = [spec for spec in specs() if len(spec.shape) == 1 and "norm" in spec.name]
    weights = torch.cat([heavy(spec) for spec in norms])
    assert 0.005 < (weights > 4).float().mean() < 0.05
    assert all(plain(spec).min() > 0.5 and plain(spec).max() < 1.5 for spec in norms)
    for ending in ("attn.attn_sink", "ffn.gate.bias"):
        found = [spec for spec in specs() if spec.name.endswith(ending)]
        assert len(found) == 11
        for spec in found:
            assert torch.allclose(heavy(spec), plain(spec) * 10)
            assert plain(spec).abs().max() < 0.5


def test_scales_of_random_values() -> None:
    """What keeps a random net tame: norms around 1, matrices by their width, tables of size 1."""
    values = random_values(1)
    for spec in specs():
        drawn = values(spec)
        assert drawn.shape == spec.shape
        if "engram.embed" in spec.name or spec.name == "embed.weight":
            assert 0.9 < drawn.std() < 1.1
        elif spec.name.endswith(("q_weight", "k_weight")):
            assert 0.9 < drawn.mean() < 1.1
        elif len(spec.shape) == 2 and drawn.numel() >= 4096:
            damped = any(part in spec.name for part in ("wo_b", ".w2.", "engram.wkv"))
            expected = (0.5 if damped else 1.0) / math.sqrt(spec.shape[1])
            assert drawn.std().item() == pytest.approx(expected, rel=0.1)

"""Loading: every parameter has the stored value, exactly once, or one error says what is wrong."""

import dataclasses
import logging
import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from deepinfer.checkpoint import names
from deepinfer.checkpoint.hf_config import load_model_config
from deepinfer.checkpoint.loader import load_model, parameter_slot
from deepinfer.checkpoint.names import TensorSpec, tensor_specs
from deepinfer.config import ModelConfig
from deepinfer.errors import CheckpointError
from deepinfer.model.linear import Precision
from deepinfer.model.transformer import Transformer
from tests.cpu.checkpoint_helpers import (
    CPU,
    FLOAT32,
    change_tensors,
    copy_of,
    header_and_data,
    is_mapped,
    join,
    load,
    same_parameters,
    split_in_shards,
    stored_values,
)

pytestmark = pytest.mark.usefixtures("one_thread")

PRECISIONS = {
    "bfloat16": Precision(torch.bfloat16, torch.bfloat16),
    "bfloat16 on a CPU": Precision(torch.bfloat16, torch.float32),
    "float32": FLOAT32,
    "float64": Precision(torch.float64, torch.float64),
}


def expected_parameter(name: str, values: dict[str, Tensor]) -> Tensor:
    """The values of parameter `name`, from the tensors of the file."""
    experts = re.fullmatch(r"(.*\.experts)\.w(13|2)", name)
    if experts:
        numbers = range(sum(key.startswith(f"{experts[1]}.") for key in values) // 3)
        parts = [
            [values[f"{experts[1]}.{number}.w{digit}.weight"] for digit in experts[2]]
            for number in numbers
        ]
        stacked = torch.stack([torch.stack(matrices) for matrices in parts])
        return stacked if experts[2] == "13" else stacked[:, 0]
    mixing = re.fullmatch(r"(.*\.hc_\w+)\.(fn|base|scale)", name)
    return values[f"{mixing[1]}_{mixing[2]}" if mixing else name]


@pytest.mark.parametrize("precision", PRECISIONS.values(), ids=PRECISIONS)
@pytest.mark.parametrize("which", ["tiny_folder", "oracle_folder"])
def test_every_parameter_has_its_stored_value(
    which: str, precision: Precision, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(which)
    values = stored_values(folder)
    model = load(folder, precision)
    assert not model.training
    for name, parameter in model.named_parameters():
        assert not parameter.requires_grad
        assert not parameter.is_inference()
        if ".engram.embed." not in name:
            expected = expected_parameter(name, values)
            assert parameter.dtype in (precision.dtype, precision.matrix, precision.accumulate)
            assert torch.equal(parameter.double(), expected), name


def test_ngram_tables_keep_their_bytes_in_the_file(tiny_folder: Path) -> None:
    file = tiny_folder / "model.safetensors"
    header, data = header_and_data(file)
    model = load(tiny_folder)
    for layer in (1, 4):
        for part in ("weight", "scale"):
            name = f"layers.{layer}.engram.embed.{part}"
            parameter = model.get_parameter(name)
            start, end = header[name]["data_offsets"]
            assert parameter.dtype == torch.uint8
            assert list(parameter.shape) == header[name]["shape"]
            assert parameter.numpy().tobytes() == data[start:end]
            assert is_mapped(parameter, file)
    assert not is_mapped(model.get_parameter("layers.0.attn.wq_a.weight"), file)


@pytest.mark.parametrize("inference", [True, False])
def test_loading_under_inference_mode_gives_ordinary_tensors(
    small_folder: Path, inference: bool
) -> None:
    with torch.inference_mode(inference):
        model = load(small_folder)
    for tensor in (*model.parameters(), *model.buffers()):
        assert not tensor.is_inference()
        assert not tensor.is_meta


@pytest.mark.parametrize(("shards", "prefix"), [(0, "model."), (1, ""), (5, ""), (3, "model.")])
def test_any_division_into_files_gives_the_same_model(
    small_folder: Path, tmp_path: Path, shards: int, prefix: str
) -> None:
    folder = copy_of(small_folder, tmp_path / "checkpoint")
    if shards:
        split_in_shards(folder, shards, prefix)
    else:
        change_tensors(folder, _with_prefix)
    assert same_parameters(load(folder), load(small_folder))


def _with_prefix(tensors: dict[str, Tensor]) -> None:
    for name in list(tensors):
        tensors[f"model.{name}"] = tensors.pop(name)


def test_bytes_may_be_stored_as_such(small_folder: Path, tmp_path: Path) -> None:
    folder = copy_of(small_folder, tmp_path / "checkpoint")
    file = folder / "model.safetensors"
    header, data = header_and_data(file)
    for entry in header.values():
        if entry.get("dtype") in ("I8", "F8_E8M0"):
            entry["dtype"] = "U8"
    file.unlink()
    file.write_bytes(join(header, data))
    assert same_parameters(load(folder), load(small_folder))


def changed_error(source: Path, target: Path, change: Callable[[dict[str, Tensor]], None]) -> str:
    folder = copy_of(source, target / "changed")
    change_tensors(folder, change)
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    message = str(caught.value)
    assert message.isprintable()
    assert message.startswith(f"{folder} does not match its config.json; ")
    return message.partition("; ")[2]


def test_missing_tensors_are_listed(small_folder: Path, tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        del tensors["norm.weight"], tensors["layers.1.attn.wkv.scale"]

    message = changed_error(small_folder, tmp_path, change)
    assert message == "2 missing tensors: norm.weight, layers.1.attn.wkv.scale"


def test_long_lists_are_cut(small_folder: Path, tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("layers.0.")]:
            del tensors[name]

    message = changed_error(small_folder, tmp_path, change)
    head, _, tail = message.partition(": ")
    # 18 tensors of attention, mixing and router, 2 experts and the shared one of 3; 5 + 9 scales.
    assert head == f"{18 + 9 + 5 + 9} missing tensors"
    assert tail.count(", ") == 8
    assert tail.endswith(", ...")


def test_unknown_tensors_are_listed(small_folder: Path, tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors["layers.3.attn_norm.weight"] = torch.zeros(128, dtype=torch.bfloat16)
        tensors["norm.scale"] = torch.zeros(128)
        tensors["bias_vl"] = torch.zeros(2)

    message = changed_error(small_folder, tmp_path, change)
    listed = message.removeprefix("3 unknown tensors: ").split(", ")
    assert sorted(listed) == ["bias_vl", "layers.3.attn_norm.weight", "norm.scale"]


def test_wrong_tensors_are_listed_with_what_was_expected(
    small_folder: Path, tmp_path: Path
) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors["norm.weight"] = tensors["norm.weight"].float()
        tensors["head.weight"] = tensors["head.weight"][:-1].clone()
        tensors["embed.weight"] = tensors["embed.weight"].view(-1)
        tensors["layers.0.attn.wkv.weight"] = tensors["layers.0.attn.wkv.weight"].view(torch.uint8)
        tensors["layers.0.attn.wkv.scale"] = torch.ones(2, 4)
        experts = "layers.0.ffn.experts.0.w1"
        tensors[f"{experts}.scale"] = tensors[f"{experts}.scale"][:1].clone()

    parts = changed_error(small_folder, tmp_path, change)
    assert parts == (
        "6 wrong tensors: embed.weight is BF16 [65536], not BF16 [512, 128],"
        " head.weight is BF16 [511, 128], not BF16 [512, 128],"
        " norm.weight is F32 [128], not BF16 [128],"
        " layers.0.attn.wkv.weight is U8 [64, 128], not F8_E4M3 [64, 128],"
        " layers.0.attn.wkv.scale is F32 [2, 4], not F8_E8M0 [2, 4],"
        " layers.0.ffn.experts.0.w1.scale is F8_E8M0 [1, 4], not F8_E8M0 [32, 4]"
    )


def test_all_kinds_of_problems_come_in_one_error(small_folder: Path, tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors["norm.weights"] = tensors.pop("norm.weight")
        tensors["embed.weight"] = tensors["embed.weight"].float()

    message = changed_error(small_folder, tmp_path, change)
    assert message == (
        "1 missing tensors: norm.weight; 1 unknown tensors: norm.weights;"
        " 1 wrong tensors: embed.weight is F32 [512, 128], not BF16 [512, 128]"
    )


@pytest.mark.parametrize(("field", "value"), [
    ("hidden_size", 2**40), ("vocab_size", 2**61), ("engram_num_embeddings", (2**61,)),
])  # fmt: skip
def test_sizes_that_nothing_could_hold_are_a_mismatch(
    small_folder: Path, field: str, value: object
) -> None:
    config = dataclasses.replace(load_model_config(small_folder), **{field: value})
    with pytest.raises(CheckpointError, match="wrong tensors"):
        load_model(small_folder, config, FLOAT32, CPU)


@pytest.mark.usefixtures("warnings_anew")
def test_image_tensors_are_skipped_with_one_note(
    small_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in ("vision.norm.weight", "aligner.w1.bias", "image_start", "image_end",
                     "image_newline", "layers.2.ffn.gate.bias_vl",
                     "mtp.0.ffn.gate.bias_vl"):  # fmt: skip
            tensors[name] = torch.zeros(3)

    folder = copy_of(small_folder, tmp_path / "images")
    change_tensors(folder, change)
    with caplog.at_level(logging.WARNING, logger="deepinfer"):
        for _ in range(2):
            assert same_parameters(load(folder), load(small_folder))
    (record,) = caplog.records
    assert record.getMessage() == ("7 tensors for image input are skipped: only text is supported")


def test_names_and_parameters_of_the_released_model_correspond(released: ModelConfig) -> None:
    with torch.device("meta"):
        model = Transformer(released, PRECISIONS["bfloat16"])
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    places: dict[str, set[tuple[int, ...]]] = {}
    for spec in tensor_specs(released):
        name, place = parameter_slot(spec.name)
        assert place not in places.setdefault(name, set())
        places[name].add(place)
        assert shapes[name][len(place) :] == spec.shape
        if spec.format == "fp8_row":
            places[spec.scale_name] = {()}
            assert shapes[spec.scale_name] == spec.scale_shape
    assert places.keys() == shapes.keys()
    for name, filled in places.items():
        depth = len(next(iter(filled)))
        assert len(filled) == math.prod(shapes[name][:depth])


@pytest.mark.parametrize("number", range(len(names.RULES)))
def test_a_parameter_that_no_rule_fills_is_noticed(
    number: int, small_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file lacks the rule's tensors, too: nothing but the count of parameters can tell."""
    dropped = {spec.name for spec in tensor_specs(load_model_config(small_folder))}
    monkeypatch.setattr(names, "RULES", names.RULES[:number] + names.RULES[number + 1 :])
    kept = list(tensor_specs(load_model_config(small_folder)))
    dropped -= {spec.name for spec in kept}
    dropped |= {name.removesuffix("weight") + "scale" for name in dropped if "weight" in name}

    def change(tensors: dict[str, Tensor]) -> None:
        for name in dropped & tensors.keys():
            del tensors[name]

    folder = copy_of(small_folder, tmp_path / "less")
    change_tensors(folder, change)
    with pytest.raises(AssertionError, match="is not filled completely"):
        load(folder)


@pytest.mark.parametrize("name", ["norm.weight", "ffn.experts.{e}.w3.weight", "hc_ffn_base"])
def test_a_parameter_that_two_rules_fill_is_noticed(
    name: str, small_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = next(rule for rule in names.RULES if rule.name == name)
    monkeypatch.setattr(names, "RULES", (*names.RULES, rule))
    with pytest.raises(AssertionError, match="filled twice"):
        load(small_folder)


def test_a_tensor_without_parameter_is_noticed(
    tmp_path: Path, small_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extra = names.TensorRule("model", "norm.bias", "bf16", "H")
    monkeypatch.setattr(names, "RULES", (*names.RULES, extra))
    folder = copy_of(small_folder, tmp_path / "more")
    bias = torch.zeros(128, dtype=torch.bfloat16)
    change_tensors(folder, lambda tensors: tensors.update({"norm.bias": bias}))
    with pytest.raises(AssertionError, match=r"no parameter norm\.bias"):
        load(folder)


def test_progress_sees_every_tensor(small_folder: Path) -> None:
    config = load_model_config(small_folder)
    seen: list[str] = []

    def progress(specs: Iterable[TensorSpec], count: int) -> Iterable[TensorSpec]:
        for spec in specs:
            seen.append(spec.name)
            yield spec
        assert count == len(seen)

    model = load_model(small_folder, config, FLOAT32, CPU, progress)
    assert seen == [spec.name for spec in tensor_specs(config)]
    assert same_parameters(model, load(small_folder))


def test_a_config_of_another_model_does_not_fit(small_folder: Path, tiny_folder: Path) -> None:
    with pytest.raises(CheckpointError, match="does not match its config"):
        load_model(small_folder, load_model_config(tiny_folder), FLOAT32, CPU)


@given(st.data())
def test_a_corrupt_header_is_an_error_or_harmless(
    small_folder: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = bytearray((small_folder / "model.safetensors").read_bytes())
    header = 8 + int.from_bytes(content[:8], "little")
    likely = st.sampled_from(b'"\\{}[]:,0123456789nrtuBF_ ')
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(8, header - 1))] = data.draw(likely)
    folder = copy_of(small_folder, tmp_path_factory.mktemp("corrupt") / "checkpoint")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").write_bytes(content)
    message = ""
    try:
        model = load(folder)
    except CheckpointError as error:
        message = str(error)
    else:
        assert same_parameters(model, load(small_folder))
    assert message.isprintable()

"""The table of tensors against published totals of the released checkpoint and a real file."""

import json
import math
import struct
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from deepinfer.checkpoint.hf_config import load_model_config, parse_model_config
from deepinfer.checkpoint.names import (
    SCALE_DTYPE,
    STORED_DTYPE,
    TensorSpec,
    is_image_tensor,
    tensor_specs,
)
from deepinfer.checkpoint.released import RELEASED_CONFIG
from deepinfer.config import ModelConfig
from deepinfer.testing.tiny import tiny_config

DTYPE_BYTES = {"F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "BF16": 2, "F32": 4}

# Image input, which is not read: bias_vl of 40 backbone and 3 draft routers, the encoder (2 tensors
# of the patch embedding, 8 of each of 32 blocks, a norm), the aligner (4) and three delimiters.
BIAS_VL = 40 * 384 + 3 * 128
VISION = 485_268_480
IMAGE_TENSORS = 43 + (2 + 32 * 8 + 1) + 4 + 3


def stored(specs: Iterable[TensorSpec]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Every tensor on disk, scales included: dtype and shape."""
    result: dict[str, tuple[str, tuple[int, ...]]] = {}
    for spec in specs:
        assert spec.name not in result
        result[spec.name] = (STORED_DTYPE[spec.format], spec.stored_shape)
        if spec.scale_name is not None:
            assert spec.scale_name not in result
            result[spec.scale_name] = (SCALE_DTYPE, spec.scale_shape)
    return result


def bytes_by_dtype(tensors: dict[str, tuple[str, tuple[int, ...]]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for dtype, shape in tensors.values():
        total[dtype] += math.prod(shape) * DTYPE_BYTES[dtype]
    return total


def parameters(specs: Iterable[TensorSpec]) -> int:
    return sum(math.prod(spec.shape) for spec in specs)


def test_vision_sizes_add_up_to_the_published_ones() -> None:
    block = 2 * 1024 + 3072 * 1024 + 3072 + 1024 * 1024 + 1024 + 5632 * 1024 + 1024 * 2816
    encoder = 1024 * 588 + 1024 + 32 * block + 1024
    aligner = 5120 * 9216 + 5120 + 5120 * 5120 + 5120
    assert encoder + aligner + 3 * 5120 == VISION


def test_released_totals(released: ModelConfig) -> None:
    specs = list(tensor_specs(released))
    tensors = stored(specs)
    assert len(tensors) == 96_085 - IMAGE_TENSORS
    assert parameters(specs) == 763_205_315_794 - VISION - BIAS_VL
    assert bytes_by_dtype(tensors) == {
        "I8": 278_585_671_680,
        "F8_E4M3": 204_015_223_296,
        "F8_E8M0": 23_563_015_184,
        "BF16": 3_952_883_712 - 2 * VISION,
        "F32": 169_229_128 - 4 * BIAS_VL,
    }
    assert bytes_by_dtype(tensors).total() == 510_286_023_000 - 2 * VISION - 4 * BIAS_VL


def part(name: str) -> str:
    """The row of the table in model description 1.3 to which a tensor belongs."""
    if name.startswith("mtp."):
        return "draft experts" if ".experts." in name else "draft rest"
    for mark, row in (
        ("ffn.experts.", "experts"), ("shared_experts", "shared"), ("ffn.gate", "routers"),
        ("engram.embed", "tables"), ("engram.", "engram"), ("indexer", "indexers"),
        ("compressor", "compressors"), ("hc_", "mixing"), ("attn.", "attention"),
    ):  # fmt: skip
        if mark in name:
            return row
    return "rest"


# Parameters and bytes of model description 1.3.
PARTS = {
    "experts": (543_581_798_400, 288_777_830_400),
    "tables": (196_613_849_600, 202_758_032_400),
    "draft experts": (13_589_544_960, 7_219_445_760),
    "attention": (5_064_696_320, 5_069_721_600),
    "shared": (1_415_577_600, 1_416_960_000),
    "rest": (1_324_241_920, 2_648_483_840),
    "draft rest": (635_817_570 - 3 * 128, 713_428_872 - 4 * 3 * 128),
    "engram": (314_654_720, 315_043_840),
    "routers": (78_673_920 - 40 * 384, 157_409_280 - 4 * 40 * 384),
    "indexers": (43_516_416, 45_130_752),
    "mixing": (39_323_760, 157_295_040),
    "compressors": (18_352_128, 36_704_256),
}


def test_released_parts(released: ModelConfig) -> None:
    found: dict[str, list[TensorSpec]] = {}
    for spec in tensor_specs(released):
        found.setdefault(part(spec.name), []).append(spec)
    sizes = {
        row: (parameters(specs), bytes_by_dtype(stored(specs)).total())
        for row, specs in found.items()
    }
    assert sizes == PARTS


def test_bench_totals() -> None:
    """The configuration of model description 8.2."""
    changes = {
        "vocab_size": 16384, "num_hidden_layers": 5, "num_nextn_predict_layers": 1,
        "n_routed_experts": 8, "dspark_n_routed_experts": 4, "compress_ratios": [0, 2, 1, 1, 1, 0],
        "kv_source_layer_ids": [1, 2], "index_source_layer_ids": [1, 2, 4],
        "candidate_source_layer_id": 2, "engram_layer_ids": [1], "engram_vocab_size": 16000,
        "engram_num_embeddings": [386748], "dspark_target_layer_ids": [4],
        "dspark_noise_token_id": 16380,
    }  # fmt: skip
    text = {**RELEASED_CONFIG["text_config"], **changes}
    config = {**RELEASED_CONFIG, "text_config": text, "vision_config": None}
    specs = list(tensor_specs(parse_model_config(config)))
    assert len(stored(specs)) == 472
    assert parameters(specs) == 3_018_309_360
    assert bytes_by_dtype(stored(specs)).total() == 2_495_345_056


def test_tiny_totals() -> None:
    """The configuration of model description 8.1, less its encoder of two layers."""
    block = 2 * 64 + 192 * 64 + 192 + 64 * 64 + 64 + 128 * 64 + 64 * 64
    vision = 64 * 588 + 64 + 2 * block + 64 + 128 * 576 + 128 + 128 * 128 + 128 + 3 * 128
    bias_vl = 9 * 8 + 2 * 4
    sizes = {"engram_num_embeddings": [462, 630], "engram_compressed_vocab_size": 300}
    specs = list(tensor_specs(parse_model_config(tiny_config(**sizes))))
    assert len(stored(specs)) == 884 - (2 + 2 * 8 + 1 + 4 + 3) - 11
    assert parameters(specs) == 2_748_606 - vision - bias_vl
    assert bytes_by_dtype(stored(specs)).total() == 3_526_512 - 2 * vision - 4 * bias_vl


def test_the_oracle_file_is_named_completely(oracle_folder: Path) -> None:
    content = (oracle_folder / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    header.pop("__metadata__", None)
    inside = {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in header.items()}
    assert stored(tensor_specs(load_model_config(oracle_folder))) == inside


def test_a_model_without_extras_has_none_of_their_tensors() -> None:
    plain = tiny_config(
        num_nextn_predict_layers=0, engram_layer_ids=[], compress_ratios=[0] * 9,
        kv_source_layer_ids=[], index_source_layer_ids=[], candidate_source_layer_id=None,
    )  # fmt: skip
    names = [spec.name for spec in tensor_specs(parse_model_config(plain))]
    assert len(names) == 3 + 9 * (18 + 3 * 8 + 3)
    assert not [n for n in names if "mtp" in n or "engram" in n or "index" in n or "compress" in n]


def test_sizes_that_are_no_multiple_of_32_have_a_scale_for_the_rest() -> None:
    assert TensorSpec("a.weight", "fp8", (33, 65)).scale_shape == (2, 3)
    assert TensorSpec("a.weight", "fp8_row", (33, 65)).scale_shape == (33, 3)
    assert TensorSpec("a.weight", "fp4", (33, 64)).scale_shape == (33, 2)
    assert TensorSpec("a.weight", "fp4", (33, 64)).stored_shape == (33, 32)


@pytest.mark.parametrize("name", [
    "vision.norm.weight", "vision.blocks.0.attn.wqkv.bias", "aligner.w1.weight", "image_start",
    "image_end", "image_newline", "layers.3.ffn.gate.bias_vl", "mtp.0.ffn.gate.bias_vl",
])  # fmt: skip
def test_image_tensors_are_known(name: str) -> None:
    assert is_image_tensor(name)


@pytest.mark.parametrize("name", [
    "norm.weight", "layers.0.vision.weight", "image_middle", "layers.0.ffn.gate.bias", "bias_vl",
    "visions.norm.weight", "layers.0.image_start",
])  # fmt: skip
def test_other_tensors_are_no_image_tensors(name: str) -> None:
    assert not is_image_tensor(name)


def test_no_tensor_of_the_text_model_counts_as_image_tensor(released: ModelConfig) -> None:
    assert not [name for name in stored(tensor_specs(released)) if is_image_tensor(name)]

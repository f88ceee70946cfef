"""config.json: what is accepted, and one clear error for everything that is not."""

import copy
import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.checkpoint.hf_config import load_model_config, parse_model_config
from deepinfer.checkpoint.released import RELEASED_CONFIG
from deepinfer.config import ModelConfig, RopeScaling, VisionConfig
from deepinfer.errors import ConfigError

ABSENT = object()


def changed(*changes: tuple[str, Any]) -> dict[str, Any]:
    """The released config.json with keys replaced; a bare name is a key of text_config."""
    data = copy.deepcopy(RELEASED_CONFIG)
    for path, value in changes:
        *sections, key = path.split("/") if "/" in path else ["text_config", path]
        place = data
        for section in sections:
            place = place[section] if section else place
        if value is ABSENT:
            del place[key]
        else:
            place[key] = value
    return data


def refused(data: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_model_config(data)
    message = str(caught.value)
    assert message.startswith("config.json: ")
    assert "\n" not in message
    return message


def test_the_released_config() -> None:
    config = parse_model_config(RELEASED_CONFIG)
    text = RELEASED_CONFIG["text_config"]
    for key in ("hidden_size", "routed_scaling_factor", "norm_topk_prob", "rms_norm_eps"):
        assert getattr(config, key) == text[key]
    assert config.compress_ratios == (0,) * 2 + (2,) * 18 + (1,) * 20 + (0,) * 3
    assert config.rope_scaling == RopeScaling(16.0, 32.0, 1.0, 65536)
    assert config.gate_temp == 1.0
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (0, 1, 2)
    assert config.image_token_id == 129264
    assert config.vision.num_hidden_layers == 32
    assert config.has_drafter
    assert config.boundary_layer == 20
    assert config.engram_columns == 24


def test_every_value_of_text_config_arrives() -> None:
    text = {**RELEASED_CONFIG["text_config"]}
    config = parse_model_config(RELEASED_CONFIG)
    for key in set(text) & set(vars(config)) - {"rope_scaling"}:
        value = tuple(text[key]) if isinstance(text[key], list) else text[key]
        assert getattr(config, key) == value, key
    for key, value in text["rope_scaling"].items():
        assert key == "rope_type" or getattr(config.rope_scaling, key) == value
    for key, value in RELEASED_CONFIG["vision_config"].items():
        assert key == "model_type" or getattr(config.vision, key) == value


def test_sources_of_layers(released: ModelConfig) -> None:
    """The table of model description 1.2."""
    for layers, kv, index in (
        (range(2, 8), 2, 2), (range(8, 14), 8, 8), (range(14, 20), 14, 14), (range(20, 24), 20, 20),
        (range(24, 28), 20, 24), (range(28, 32), 20, 28), (range(32, 36), 20, 32),
        (range(36, 40), 20, 36),
    ):  # fmt: skip
        for layer in layers:
            assert released.kv_source(layer) == kv
            assert released.index_source(layer) == index
            assert released.restricts_to_candidates(layer) == (layer > 20)


def test_the_oracle_config(oracle_folder: Path) -> None:
    config = load_model_config(oracle_folder)
    assert config == load_model_config(oracle_folder / "config.json")
    assert config.engram_compressed_vocab_size == 453
    assert config.vision == VisionConfig()
    assert config.boundary_layer == 5


FIXED = {
    "num_key_value_heads": [2, True, "1"],
    "n_shared_experts": [0, 2, True],
    "hidden_act": ["gelu", None],
    "scoring_func": ["softmax", "sigmoid"],
    "topk_method": ["greedy"],
    "attention_bias": [True, 0, None],
    "attention_dropout": [0.1, False],
    "tie_word_embeddings": [True, 0],
    "/tie_word_embeddings": [True],
    "dspark_target_attn_input": [False, 1],
    "hc_shifted": [False],
    "use_fp4_sparse_kv": [False],
    "model_type": ["deepseek_v4_text"],
    "/quantization_config/quant_method": ["gptq", ABSENT],
    "/quantization_config/activation_scheme": ["static", ABSENT],
    "/quantization_config/weight_block_size": [[128, 128], [32], 32, ABSENT],
    "/quantization_config/scale_fmt": ["float", ABSENT],
    "/quantization_config/expert_dtype": ["fp8", ABSENT],
    "/quantization_config/fmt": ["e5m2"],
}


@pytest.mark.parametrize(
    ("path", "value"), [(path, value) for path, values in FIXED.items() for value in values]
)
def test_another_architecture_is_refused(path: str, value: object) -> None:
    message = refused(changed((path, value)))
    key = path.split("/")[-1]
    assert f"{key} = {None if value is ABSENT else value!r}; expected" in message


@pytest.mark.parametrize("path", ["attention_bias", "hc_shifted", "model_type",
                                  "/quantization_config/fmt", "/tie_word_embeddings"])  # fmt: skip
def test_fixed_keys_may_be_absent(path: str) -> None:
    data = changed((path, True))
    *sections, key = path.split("/") if "/" in path else ["text_config", path]
    section = data[sections[-1]] if sections[-1] else data
    del section[key]
    assert parse_model_config(data) == parse_model_config(RELEASED_CONFIG)


@pytest.mark.parametrize("model_type", ["deepseek_v4", "llama", None, ABSENT, 5])
def test_other_models_are_refused(model_type: object) -> None:
    assert "model_type = " in refused(changed(("/model_type", model_type)))


# (changes, key that the message names, what it expects); model description 2 has the rules.
VIOLATIONS: list[tuple[list[tuple[str, Any]], str, str]] = [
    ([("num_attention_heads", 60)], "o_groups = 8", "a divisor of 60 heads"),
    ([("qk_rope_head_dim", 63)], "qk_rope_head_dim = 63", "even number up to 128"),
    ([("qk_rope_head_dim", 130)], "qk_rope_head_dim = 130", "even number up to 128"),
    ([("head_dim", 32)], "qk_rope_head_dim = 64", "even number up to 32"),
    ([("hidden_size", 5100)], "hidden_size = 5100", "a multiple of 32"),
    ([("head_dim", 500)], "head_dim = 500", "a multiple of 32"),
    ([("q_lora_rank", 1000)], "q_lora_rank = 1000", "a multiple of 32"),
    ([("moe_intermediate_size", 2300)], "moe_intermediate_size = 2300", "a multiple of 32"),
    ([("index_head_dim", 100)], "index_head_dim = 100", "a multiple of 32"),
    ([("o_lora_rank", 1000)], "o_lora_rank = 1000", "a multiple of 32"),
    ([("num_experts_per_tok", 385)], "num_experts_per_tok = 385", "at most n_routed_experts = 384"),
    ([("swiglu_limit", -1.0)], "swiglu_limit = -1.0", "0 (no clamp) or more"),
    ([("/bos_token_id", 129280)], "bos_token_id = 129280", "vocab_size = 129280"),
    ([("/eos_token_id", -1)], "eos_token_id = -1", "0 <= id"),
    ([("pad_token_id", 200000)], "pad_token_id = 200000", "vocab_size = 129280"),
    ([("/image_token_id", 129280)], "image_token_id = 129280", "vocab_size = 129280"),
    ([("/image_token_id", None)], "image_token_id = None", "vocab_size = 129280"),
    # topology
    ([("compress_ratios", [0] * 42)], "compress_ratios", "43 entries"),
    ([("compress_ratios", [0] * 44)], "compress_ratios", "43 entries"),
    ([("compress_ratios", [0, 0, 3] + [2] * 17 + [1] * 20 + [0] * 3)], "compress_ratios",
     "0, 1 or 2"),
    ([("compress_ratios", [0, 0] + [2] * 18 + [1] * 20 + [0, 0, 1])], "compress_ratios",
     "0 for draft blocks"),
    ([("num_nextn_predict_layers", -1), ("compress_ratios", [0, 0] + [2] * 18 + [1] * 19)],
     "num_nextn_predict_layers = -1", "0 or more"),
    ([("kv_source_layer_ids", [2, 8, 14, 40])], "kv_source_layer_ids", "below 40"),
    ([("kv_source_layer_ids", [-1, 2, 8, 14, 20])], "kv_source_layer_ids", "strictly increasing"),
    ([("kv_source_layer_ids", [2, 14, 8, 20])], "kv_source_layer_ids", "strictly increasing"),
    ([("index_source_layer_ids", [2, 8, 8, 14, 20])], "index_source_layer_ids",
     "strictly increasing"),
    ([("kv_source_layer_ids", [1, 2, 8, 14, 20])], "kv_source_layer_ids = 1", "ratio is not 0"),
    ([("index_source_layer_ids", [0, 2, 8, 14, 20])], "index_source_layer_ids = 0",
     "ratio is not 0"),
    ([("index_source_layer_ids", [2, 8, 20, 24])], "index_source_layer_ids", "14 is missing"),
    ([("kv_source_layer_ids", [8, 14, 20])], "kv_source_layer_ids", "ratio 2 at or before layer 2"),
    ([("kv_source_layer_ids", [2, 8, 14])], "kv_source_layer_ids", "ratio 1 at or before layer 20"),
    ([("kv_source_layer_ids", [2, 8, 14, 21]), ("candidate_source_layer_id", None),
      ("index_source_layer_ids", [2, 8, 14, 21])], "kv_source_layer_ids",
     "ratio 1 at or before layer 20"),
    ([("candidate_source_layer_id", 14)], "candidate_source_layer_id = 14", "the last KV source"),
    ([("candidate_source_layer_id", 24)], "candidate_source_layer_id = 24", "a KV source layer"),
    ([("candidate_source_layer_id", -2)], "candidate_source_layer_id = -2", "-1 or null for off"),
    ([("candidate_topk_blocks", 64)], "candidate_topk_blocks = 64", "index_topk = 512"),
    ([("candidate_topk_blocks", 0)], "candidate_topk_blocks = 0", "above 0"),
    ([("candidate_block_size", 0)], "candidate_block_size = 0", "above 0"),
    ([("index_k_source_layer_ids", [2, 8])], "index_k_source_layer_ids", "as kv_source_layer_ids"),
    # n-gram memory
    ([("engram_layer_ids", [1, 1])], "engram_layer_ids = [1, 1]", "distinct layers below 40"),
    ([("engram_layer_ids", [1, 40])], "engram_layer_ids = [1, 40]", "distinct layers below 40"),
    ([("engram_layer_ids", [-1, 14])], "engram_layer_ids = [-1, 14]", "distinct layers below 40"),
    ([("engram_num_embeddings", [384006168])], "engram_num_embeddings", "one entry per Engram"),
    ([("engram_head_dim", 250)], "engram_head_dim = 250", "a multiple of 32"),
    ([("engram_head_dim", 0)], "engram_head_dim = 0", "above 0"),
    ([("engram_vocab_size", 0)], "engram_vocab_size = 0", "above 0"),
    ([("engram_n_heads", 0)], "engram_n_heads = 0", "above 0"),
    ([("engram_compressed_vocab_size", ABSENT)], "engram_compressed_vocab_size = 0", "above 0"),
    ([("engram_max_ngram_size", 1)], "engram_max_ngram_size = 1", "2 or more"),
    ([("engram_pad_token_id", 129280)], "engram_pad_token_id = 129280", "a token id"),
    # drafter
    ([("dspark_block_size", 0)], "dspark_block_size = 0", "above 0"),
    ([("dspark_markov_rank", 0)], "dspark_markov_rank = 0", "above 0"),
    ([("dspark_n_routed_experts", -1)], "dspark_n_routed_experts = -1", "above 0"),
    ([("dspark_num_experts_per_tok", -1)], "dspark_num_experts_per_tok = -1", "above 0"),
    ([("dspark_num_experts_per_tok", 129)], "dspark_num_experts_per_tok = 129",
     "at most dspark_n_routed_experts = 128"),
    ([("dspark_target_layer_ids", [])], "dspark_target_layer_ids = []", "at least one"),
    ([("dspark_target_layer_ids", [37, 40])], "dspark_target_layer_ids", "below 40"),
    ([("dspark_target_layer_ids", [38, 37])], "dspark_target_layer_ids", "strictly increasing"),
    ([("dspark_noise_token_id", 129280)], "dspark_noise_token_id = 129280", "vocab_size = 129280"),
    # rotary tables and images
    ([("rope_scaling", {"rope_type": "linear", "factor": 2})], "rope_scaling.rope_type = 'linear'",
     "'yarn'"),
    ([("rope_scaling", "yarn")], "rope_scaling = 'yarn'", "an object or null"),
    ([("/text_config/rope_scaling/factor", ABSENT)], "rope_scaling.factor", "the key is missing"),
    ([("/text_config/rope_scaling/factor", 0)], "rope_scaling.factor = 0.0", "above 0"),
    ([("/text_config/rope_scaling/beta_fast", "32")], "rope_scaling.beta_fast = '32'", "a number"),
    ([("/text_config/rope_scaling/original_max_position_embeddings", 1.5)],
     "rope_scaling.original_max_position_embeddings = 1.5", "an integer"),
    ([("/vision_config", [])], "vision_config = []", "an object or null"),
    ([("/vision_config", 5)], "vision_config = 5", "an object or null"),
    ([("/vision_config", True)], "vision_config = True", "an object or null"),
    ([("/vision_config/num_hidden_layers", -1)], "vision_config.num_hidden_layers", "0 or more"),
    ([("/vision_config/num_attention_heads", 0)], "vision_config.hidden_size", "a multiple of 4"),
    ([("/vision_config/num_attention_heads", 15)], "vision_config.hidden_size", "a multiple of 4"),
    ([("/vision_config/hidden_size", 16 * 6)], "vision_config.hidden_size = 96", "a multiple of 4"),
    ([("/vision_config/hidden_size", 0)], "vision_config.hidden_size = 0", "a multiple of 4"),
    ([("/vision_config/patch_size", "14")], "vision_config.patch_size = '14'", "an integer"),
    ([("/text_config", None)], "text_config = None", "an object"),
    ([("/text_config", ABSENT)], "text_config = None", "an object"),
    ([("/quantization_config", [])], "quantization_config = []", "an object"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "key", "expected"), VIOLATIONS)
def test_violated_constraints(changes: list[tuple[str, Any]], key: str, expected: str) -> None:
    message = refused(changed(*changes))
    named, _, wanted = message.partition("; expected ")
    assert key in named
    assert expected in wanted


POSITIVE = [
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim",
    "qk_rope_head_dim", "q_lora_rank", "o_groups", "o_lora_rank", "moe_intermediate_size",
    "n_routed_experts", "num_experts_per_tok", "gate_temp", "rms_norm_eps", "rope_theta",
    "compress_rope_theta", "max_position_embeddings", "sliding_window", "index_n_heads",
    "index_head_dim", "index_topk", "hc_mult", "hc_sinkhorn_iters", "hc_eps",
]  # fmt: skip


@pytest.mark.parametrize("key", POSITIVE)
@pytest.mark.parametrize("value", [0, -1])
def test_sizes_are_positive(key: str, value: int) -> None:
    assert f"{key} = {value}" in refused(changed((key, value)))


# Keys that a checkpoint may lack, with what their absence means.
OPTIONAL = {
    "gate_temp": 1.0, "norm_topk_prob": True, "rope_scaling": None,
    "candidate_source_layer_id": None, "dspark_n_routed_experts": 384,
    "dspark_num_experts_per_tok": 6,
}  # fmt: skip
NEEDED = [
    key for key in RELEASED_CONFIG["text_config"]
    if key in ModelConfig.__dataclass_fields__ and key not in OPTIONAL
    and not key.startswith(("engram", "candidate", "num_nextn_predict_layers"))
]  # fmt: skip


@pytest.mark.parametrize("key", NEEDED)
@pytest.mark.parametrize("value", [ABSENT, None])
def test_missing_keys_are_named(key: str, value: object) -> None:
    message = refused(changed((key, value)))
    assert message == f"config.json: {key} is missing; it belongs in text_config"


@pytest.mark.parametrize("key", OPTIONAL)
def test_optional_keys(key: str) -> None:
    text = {k: v for k, v in RELEASED_CONFIG["text_config"].items() if k != key}
    config = parse_model_config({**RELEASED_CONFIG, "text_config": text})
    assert getattr(config, key) == OPTIONAL[key]


@pytest.mark.parametrize("key", ["bos_token_id", "eos_token_id", "pad_token_id"])
def test_token_ids_may_stand_in_either_place(key: str) -> None:
    assert f"{key} is missing" in refused(changed((f"/{key}", ABSENT)))
    assert getattr(parse_model_config(changed((f"/{key}", ABSENT), (key, 7))), key) == 7
    assert getattr(parse_model_config(changed((f"/{key}", 3), (key, 7))), key) == 7
    assert getattr(parse_model_config(changed((f"/{key}", 3), (key, None))), key) == 3


INTEGERS = ["vocab_size", "hc_mult", "num_nextn_predict_layers", "candidate_source_layer_id"]
WRONG = {
    "integer": (INTEGERS, [True, False, 3.5, "128", [1], {}, math.nan, math.inf, 10**30,
                           -(10**400)]),
    "number": (["rms_norm_eps", "routed_scaling_factor", "swiglu_limit"],
               [True, "1e-6", [1.0], math.nan, -math.inf, 1e300, 10**400]),
    "true or false": (["norm_topk_prob"], [1, 0, "true", None, [True]]),
    "list of integers": (["kv_source_layer_ids", "engram_num_embeddings", "compress_ratios"],
                         [5, "2,8", [2.0], [True, 8], ["2"], {"2": 8}, [10**30]]),
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [(kind, key, value) for kind, (keys, values) in WRONG.items() for key in keys
     for value in values],
)  # fmt: skip
def test_wrong_types(kind: str, key: str, value: object) -> None:
    message = refused(changed((key, value)))
    assert message.startswith(f"config.json: {key} = ")
    assert kind in message.partition("; expected ")[2] or "a number below 2^62" in message


def test_whole_floats_are_integers_and_integers_are_floats() -> None:
    config = parse_model_config(changed(("hidden_size", 5120.0), ("swiglu_limit", 10)))
    assert (config.hidden_size, type(config.hidden_size)) == (5120, int)
    assert (config.swiglu_limit, type(config.swiglu_limit)) == (10.0, float)
    assert parse_model_config(changed(("swiglu_limit", 0))).swiglu_limit == 0.0


@pytest.mark.parametrize("off", [-1, None, -1.0, ABSENT])
def test_candidates_can_be_off(off: object) -> None:
    data = changed(("candidate_source_layer_id", off))
    for key in ("candidate_topk_blocks", "candidate_block_size"):
        del data["text_config"][key]
    config = parse_model_config(data)
    assert config.candidate_source_layer_id is None
    assert not config.restricts_to_candidates(24)


def test_ratios_of_draft_blocks_may_be_left_out() -> None:
    ratios = RELEASED_CONFIG["text_config"]["compress_ratios"][:40]
    assert parse_model_config(changed(("compress_ratios", ratios))) == parse_model_config(
        RELEASED_CONFIG
    )


@pytest.mark.parametrize("vision", [None, ABSENT, {"num_hidden_layers": 0}, {}])
def test_checkpoints_without_images(vision: object) -> None:
    for token in (None, ABSENT, 10**6):
        config = parse_model_config(changed(("/vision_config", vision), ("/image_token_id", token)))
        assert config.vision.num_hidden_layers == 0
        assert config.image_token_id == (10**6 if token == 10**6 else None)


@pytest.mark.parametrize("value", [0, None, ABSENT])
def test_expert_numbers_of_the_drafter_fall_back(value: object) -> None:
    config = parse_model_config(
        changed(("dspark_n_routed_experts", value), ("dspark_num_experts_per_tok", value))
    )
    assert (config.dspark_n_routed_experts, config.dspark_num_experts_per_tok) == (384, 6)


def test_a_checkpoint_without_drafter_needs_no_drafter_keys() -> None:
    text = {k: v for k, v in RELEASED_CONFIG["text_config"].items() if not k.startswith("dspark")}
    text |= {"num_nextn_predict_layers": 0, "compress_ratios": text["compress_ratios"][:40]}
    assert not parse_model_config({**RELEASED_CONFIG, "text_config": text}).has_drafter


def test_a_checkpoint_without_ngram_memory_needs_no_engram_keys() -> None:
    text = {k: v for k, v in RELEASED_CONFIG["text_config"].items() if not k.startswith("engram")}
    assert parse_model_config({**RELEASED_CONFIG, "text_config": text}).engram_layer_ids == ()


def test_ngram_layers_may_be_listed_in_any_order() -> None:
    config = parse_model_config(changed(("engram_layer_ids", [14, 1])))
    assert config.engram_layer_ids == (14, 1)


def test_a_model_without_one_token_entries_has_no_boundary() -> None:
    config = parse_model_config(changed(
        ("compress_ratios", [0, 0] + [2] * 38 + [0] * 3), ("candidate_source_layer_id", None),
    ))  # fmt: skip
    assert config.boundary_layer is None


@pytest.mark.usefixtures("warnings_anew")
def test_unknown_keys_warn_once(caplog: pytest.LogCaptureFixture) -> None:
    data = changed(("/pruned", 1), ("sliding", 2), ("/vision_config/tower", 3), ("vision", {}),
                   ("/quantization_config/ignored_layers", []), ("image_token_id", 3),
                   ("/text_config/rope_scaling/mscale", 1.0))  # fmt: skip
    with caplog.at_level(logging.WARNING, logger="deepinfer"):
        for _ in range(3):
            assert parse_model_config(data) == parse_model_config(RELEASED_CONFIG)
    (record,) = caplog.records
    assert record.name == "deepinfer"
    assert record.getMessage().endswith(
        ": pruned, quantization_config.ignored_layers, text_config.image_token_id,"
        " text_config.rope_scaling.mscale, text_config.sliding, text_config.vision,"
        " vision_config.tower"
    )


@pytest.mark.usefixtures("warnings_anew")
def test_known_keys_do_not_warn(caplog: pytest.LogCaptureFixture, oracle_folder: Path) -> None:
    load_model_config(oracle_folder)
    parse_model_config(changed(("index_k_source_layer_ids", [2, 8, 14, 20]), ("gate_temp", 2.0),
                               ("/torch_dtype", "bfloat16"), ("use_cache", True)))  # fmt: skip
    assert not caplog.records


@pytest.mark.parametrize("content", [
    b"", b"{", b"nonsense", b"\xff\xfe{}", b"\xef\xbb\xbf{}", b"[" * 100_000, b"1" * 5000,
    b'{"a": 1,}',
])  # fmt: skip
def test_malformed_files(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match="not valid JSON") as caught:
        load_model_config(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("content", "kind"), [("[]", "list"), ("5", "int"), ("null", "NoneType")])
def test_files_without_an_object(tmp_path: Path, content: str, kind: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=f"expected a JSON object, found {kind}"):
        load_model_config(tmp_path)


def test_missing_files_are_named(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "config.json", tmp_path / "absent"):
        with pytest.raises(ConfigError, match="no such file; the model is a folder"):
            load_model_config(path)


def test_the_file_is_read_as_it_is_written(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(RELEASED_CONFIG))
    assert load_model_config(tmp_path) == parse_model_config(RELEASED_CONFIG)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**65), 2**65) | st.integers(-2, 50)
    | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner,
                                                                max_size=2),
    max_leaves=5,
)  # fmt: skip
PLACES = [
    *(f"/{key}" for key in RELEASED_CONFIG),
    *(f"/{section}/{key}" for section in ("text_config", "vision_config", "quantization_config")
      for key in RELEASED_CONFIG[section]),
    *(f"/text_config/rope_scaling/{key}" for key in
      RELEASED_CONFIG["text_config"]["rope_scaling"]),
]  # fmt: skip


@given(st.dictionaries(st.sampled_from(PLACES), VALUES, min_size=1, max_size=2))
def test_any_value_anywhere_is_accepted_or_refused_in_words(changes: dict[str, Any]) -> None:
    ordered = sorted(changes.items(), key=lambda item: -item[0].count("/"))
    try:
        config = parse_model_config(changed(*ordered))
    except ConfigError as error:
        message = str(error)
    else:
        message = f"accepted {hash(config)}"
    assert message.isprintable()

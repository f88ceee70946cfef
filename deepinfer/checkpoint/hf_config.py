"""config.json of `deepseek_v41` to a validated ModelConfig.

Knows every key of the released file and every constraint between them; must not know tensors.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_type_hints

from deepinfer.config import ModelConfig, RopeScaling, VisionConfig
from deepinfer.errors import ConfigError
from deepinfer.log import warn_once

# Keys whose value is part of the architecture: anything else is a different model.
_FIXED: dict[str, Any] = {
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "hidden_act": "silu",
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "dspark_target_attn_input": True,
    "hc_shifted": True,
    "use_fp4_sparse_kv": True,
    "model_type": "deepseek_v41_text",
}
_FIXED_QUANTIZATION: dict[str, Any] = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 32],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
    "fmt": "e4m3",
}
# Keys without influence on inference, accepted with any value.
_IGNORED = {"initializer_range", "use_cache", "dtype", "torch_dtype"}
_IGNORED_TOP = {"architectures", "transformers_version", "dtype", "torch_dtype"}
# From here on a number is a mistake, and int64 may not hold it.
_LIMIT = 2**62
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_DEFAULTS: dict[str, Any] = {
    "gate_temp": 1.0,
    "norm_topk_prob": True,
    "rope_scaling": None,
    "candidate_source_layer_id": None,
    "candidate_topk_blocks": 0,
    "candidate_block_size": 0,
    "num_nextn_predict_layers": 0,
    "engram_layer_ids": [],
    "engram_num_embeddings": [],
    "engram_max_ngram_size": 2,
    "engram_vocab_size": 0,
    "engram_n_heads": 0,
    "engram_head_dim": 0,
    "engram_pad_token_id": 0,
    "engram_compressed_vocab_size": 0,
    "image_token_id": None,
}


def load_model_config(path: Path) -> ModelConfig:
    """Read and validate `path` (config.json, or a folder that holds one).

    Raises:
        ConfigError: missing or malformed file, a missing key, a wrong type, a violated constraint.
    """
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(
            f"{file}: no such file; the model is a folder with a config.json (nothing is"
            " downloaded from the Hub)"
        )
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({error})") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: not valid JSON ({error})") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{file}: expected a JSON object, found {type(data).__name__}")
    return parse_model_config(data)


def parse_model_config(data: Mapping[str, Any]) -> ModelConfig:
    """Validated ModelConfig of a parsed config.json; see `load_model_config` for errors."""
    if data.get("model_type") != "deepseek_v41":
        raise _wrong(
            "model_type", data.get("model_type"), "'deepseek_v41', the one model this runs"
        )
    text = _section(data, "text_config")
    _check_quantization(_section(data, "quantization_config"))
    values = {**_DEFAULTS, **text}
    for key in _TOKEN_IDS:
        if values.get(key) is None:
            values[key] = data.get(key)
    values["image_token_id"] = data.get("image_token_id")
    _check_fixed(data, text)
    _check_index_keys(text)
    values["vision"] = _vision(data.get("vision_config"))
    values["rope_scaling"] = _rope_scaling(values["rope_scaling"])
    _warn_unknown(data)
    _fill_drafter_defaults(values)
    config = ModelConfig(**{name: _field(name, values) for name in get_type_hints(ModelConfig)})
    config = _canonical(config)
    _check_sizes(config)
    _check_topology(config)
    _check_engram(config)
    _check_drafter(config)
    return config


def _canonical(config: ModelConfig) -> ModelConfig:
    """-1 means no candidates, as null does; ratios of draft blocks may be left out (they are 0)."""
    source = config.candidate_source_layer_id
    ratios = config.compress_ratios
    if len(ratios) == config.num_hidden_layers:
        ratios += (0,) * config.num_nextn_predict_layers
    return dataclasses.replace(
        config,
        candidate_source_layer_id=None if source == -1 else source,
        compress_ratios=ratios,
    )


def _wrong(key: str, value: Any, expected: str) -> ConfigError:
    return ConfigError(f"config.json: {key} = {value!r}; expected {expected}")


def _section(data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    section = data.get(key)
    if not isinstance(section, dict):
        raise _wrong(key, section, "an object")
    return section


def _warn_unknown(data: Mapping[str, Any]) -> None:
    known_text = set(get_type_hints(ModelConfig)) - {"vision", "image_token_id"}
    known_text |= {"index_k_source_layer_ids", *_FIXED, *_IGNORED}
    known_top = {"model_type", "text_config", "vision_config", "quantization_config"}
    known_top |= {"image_token_id", "tie_word_embeddings", *_TOKEN_IDS, *_IGNORED_TOP}
    known_vision = set(get_type_hints(VisionConfig)) | {"model_type", *_IGNORED}
    known_scaling = {*get_type_hints(RopeScaling), "rope_type", "type"}
    text = data["text_config"]
    unknown = [key for key in data if key not in known_top]
    for path, section, known in (
        ("text_config", text, known_text),
        ("text_config.rope_scaling", text.get("rope_scaling"), known_scaling),
        ("vision_config", data.get("vision_config"), known_vision),
        ("quantization_config", data["quantization_config"], set(_FIXED_QUANTIZATION)),
    ):
        unknown += [f"{path}.{key}" for key in section or {} if key not in known]
    if unknown:
        warn_once(f"config.json: unknown keys without effect here: {', '.join(sorted(unknown))}")


def _check_fixed(data: Mapping[str, Any], text: Mapping[str, Any]) -> None:
    """Fixed keys have their value wherever they occur; true and false are no numbers here."""
    for key, expected in _FIXED.items():
        for section in (text, data):
            if key not in section or (section is data and key == "model_type"):
                continue
            found = section[key]
            if found != expected or isinstance(found, bool) != isinstance(expected, bool):
                raise _wrong(key, found, f"{expected!r}, the only value supported")


def _check_quantization(section: Mapping[str, Any]) -> None:
    if "requant" in section:
        raise ConfigError(
            "config.json: quantization_config.requant says that `deepinfer requant` wrote this"
            " checkpoint for other engines (requant.json beside it lists what it changed); load the"
            " checkpoint that it was made from"
        )
    for key, expected in _FIXED_QUANTIZATION.items():
        found = section.get(key, expected if key == "fmt" else None)
        if found != expected:
            raise _wrong(f"quantization_config.{key}", found, f"{expected!r}")


def _check_index_keys(text: Mapping[str, Any]) -> None:
    sources = text.get("index_k_source_layer_ids")
    if sources is not None and sources != text.get("kv_source_layer_ids"):
        raise _wrong("index_k_source_layer_ids", sources, "the same list as kv_source_layer_ids")


def _vision(section: Any) -> VisionConfig:
    if section is None:
        return VisionConfig()
    if not isinstance(section, dict):
        raise _wrong("vision_config", section, "an object or null")
    known = get_type_hints(VisionConfig)
    values = {}
    for key in known:
        if key in section:
            values[key] = _typed(f"vision_config.{key}", section[key], known[key])
    config = VisionConfig(**values)
    if config.num_hidden_layers < 0:
        raise _wrong("vision_config.num_hidden_layers", config.num_hidden_layers, "0 or more")
    if config.num_hidden_layers > 0:
        heads, width = config.num_attention_heads, config.hidden_size
        if heads <= 0 or width <= 0 or width % heads or (width // heads) % 4:
            raise _wrong("vision_config.hidden_size", width, f"{heads} heads times a multiple of 4")
    return config


def _rope_scaling(section: Any) -> RopeScaling | None:
    if section is None:
        return None
    if not isinstance(section, dict):
        raise _wrong("rope_scaling", section, "an object or null")
    kind = section.get("rope_type", section.get("type"))
    if kind != "yarn":
        raise _wrong("rope_scaling.rope_type", kind, "'yarn'")
    hints = get_type_hints(RopeScaling)
    missing = [key for key in hints if key not in section]
    if missing:
        raise _wrong(f"rope_scaling.{missing[0]}", None, "a number; the key is missing")
    values = {key: _typed(f"rope_scaling.{key}", section[key], hint) for key, hint in hints.items()}
    for key, value in values.items():
        if value <= 0:
            raise _wrong(f"rope_scaling.{key}", value, "a number above 0")
    return RopeScaling(**values)


def _fill_drafter_defaults(values: dict[str, Any]) -> None:
    """0 or absent expert numbers of the drafter mean those of the backbone (section 2)."""
    for drafter, backbone in (
        ("dspark_n_routed_experts", "n_routed_experts"),
        ("dspark_num_experts_per_tok", "num_experts_per_tok"),
    ):
        if not values.get(drafter):
            values[drafter] = values.get(backbone)
    if not values["num_nextn_predict_layers"]:
        for key in ("dspark_block_size", "dspark_noise_token_id", "dspark_markov_rank"):
            values.setdefault(key, 0)
        values.setdefault("dspark_target_layer_ids", [])


def _field(name: str, values: Mapping[str, Any]) -> Any:
    if name not in values or (values[name] is None and name not in _DEFAULTS):
        raise ConfigError(f"config.json: {name} is missing; it belongs in text_config")
    return _typed(name, values[name], get_type_hints(ModelConfig)[name])


def _typed(name: str, value: Any, hint: Any) -> Any:
    """`value` as the annotated type; whole floats pass for integers, integers for floats."""
    number = type(value) in (int, float)
    if number and not abs(value) < _LIMIT:  # which holds for NaN, too
        raise _wrong(name, value, "a number below 2^62")
    if hint is bool and isinstance(value, bool):
        return value
    if hint is int or hint == int | None:
        if hint is not int and value is None:
            return None
        if number and float(value).is_integer():
            return int(value)
        raise _wrong(name, value, "an integer" if hint is int else "an integer or null")
    if hint is float or hint == float | None:
        if hint is not float and value is None:
            return None
        if number:
            return float(value)
        raise _wrong(name, value, "a number")
    if hint == tuple[int, ...]:
        if isinstance(value, list) and all(type(i) is int and abs(i) < _LIMIT for i in value):
            return tuple(value)
        raise _wrong(name, value, "a list of integers")
    if hint is bool:
        raise _wrong(name, value, "true or false")
    return value


def _positive(config: ModelConfig, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value <= 0:
            raise _wrong(name, value, "a number above 0")


def _multiple(config: ModelConfig, size: int, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value % size:
            raise _wrong(name, value, f"a multiple of {size}")


def _check_sizes(c: ModelConfig) -> None:
    _positive(
        c, "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim",
        "qk_rope_head_dim", "q_lora_rank", "o_groups", "o_lora_rank", "moe_intermediate_size",
        "n_routed_experts", "num_experts_per_tok", "gate_temp", "rms_norm_eps", "rope_theta",
        "compress_rope_theta", "max_position_embeddings", "sliding_window", "index_n_heads",
        "index_head_dim", "index_topk", "hc_mult", "hc_sinkhorn_iters", "hc_eps",
    )  # fmt: skip
    _multiple(c, 32, "hidden_size", "head_dim", "q_lora_rank", "moe_intermediate_size")
    _multiple(c, 32, "index_head_dim", "o_lora_rank")
    if c.num_attention_heads % c.o_groups:
        raise _wrong("o_groups", c.o_groups, f"a divisor of {c.num_attention_heads} heads")
    limit = min(c.head_dim, c.index_head_dim)
    if c.qk_rope_head_dim % 2 or c.qk_rope_head_dim > limit:
        raise _wrong("qk_rope_head_dim", c.qk_rope_head_dim, f"an even number up to {limit}")
    if c.num_experts_per_tok > c.n_routed_experts:
        expected = f"at most n_routed_experts = {c.n_routed_experts}"
        raise _wrong("num_experts_per_tok", c.num_experts_per_tok, expected)
    if c.swiglu_limit < 0:
        raise _wrong("swiglu_limit", c.swiglu_limit, "0 (no clamp) or more")
    tokens = (*_TOKEN_IDS, "image_token_id") if c.vision.num_hidden_layers else _TOKEN_IDS
    for name in tokens:
        token = getattr(c, name)
        if token is None or not 0 <= token < c.vocab_size:
            raise _wrong(name, token, f"0 <= id < vocab_size = {c.vocab_size}")


def _increasing(config: ModelConfig, name: str) -> None:
    ids = getattr(config, name)
    if list(ids) != sorted(set(ids)) or any(not 0 <= i < config.num_hidden_layers for i in ids):
        expected = f"strictly increasing layers below {config.num_hidden_layers}"
        raise _wrong(name, list(ids), expected)


def _check_topology(c: ModelConfig) -> None:
    if c.num_nextn_predict_layers < 0:
        raise _wrong("num_nextn_predict_layers", c.num_nextn_predict_layers, "0 or more")
    blocks = c.num_hidden_layers + c.num_nextn_predict_layers
    if len(c.compress_ratios) != blocks:
        expected = f"{blocks} entries, one per backbone and draft block"
        raise _wrong("compress_ratios", list(c.compress_ratios), expected)
    if any(ratio not in (0, 1, 2) for ratio in c.compress_ratios):
        raise _wrong("compress_ratios", list(c.compress_ratios), "0, 1 or 2 for each block")
    if any(c.compress_ratios[c.num_hidden_layers :]):
        raise _wrong("compress_ratios", list(c.compress_ratios), "0 for draft blocks")
    _increasing(c, "kv_source_layer_ids")
    _increasing(c, "index_source_layer_ids")
    for name in ("kv_source_layer_ids", "index_source_layer_ids"):
        for layer in getattr(c, name):
            if c.compress_ratios[layer] == 0:
                raise _wrong(name, layer, "layers whose compress ratio is not 0")
    for layer in c.kv_source_layer_ids:
        if layer not in c.index_source_layer_ids:
            expected = f"a list with every KV source; {layer} is missing"
            raise _wrong("index_source_layer_ids", list(c.index_source_layer_ids), expected)
    for layer in range(c.num_hidden_layers):
        # This makes the first layer of ratio 1 a KV source, too: no earlier one has its ratio.
        ratio = c.compress_ratios[layer]
        sources = [source for source in c.kv_source_layer_ids if source <= layer]
        if ratio and (not sources or c.compress_ratios[sources[-1]] != ratio):
            expected = f"a KV source of ratio {ratio} at or before layer {layer}"
            raise _wrong("kv_source_layer_ids", list(c.kv_source_layer_ids), expected)
    _check_candidates(c)


def _check_candidates(c: ModelConfig) -> None:
    source = c.candidate_source_layer_id
    if source is None:
        return
    if source not in c.kv_source_layer_ids:
        raise _wrong(
            "candidate_source_layer_id", source, "a KV source layer, or -1 or null for off"
        )
    later = [layer for layer in c.index_source_layer_ids if layer > source]
    others = [layer for layer in later if c.kv_source(layer) != source]
    if others:
        expected = f"the last KV source: layer {others[0]} selects among other entries than its own"
        raise _wrong("candidate_source_layer_id", source, expected)
    _positive(c, "candidate_topk_blocks", "candidate_block_size")
    reach = (c.candidate_topk_blocks - 1) * c.candidate_block_size + 1
    if reach < c.index_topk:
        expected = f"enough blocks of {c.candidate_block_size} for index_topk = {c.index_topk}"
        raise _wrong("candidate_topk_blocks", c.candidate_topk_blocks, expected)


def _check_engram(c: ModelConfig) -> None:
    layers = c.engram_layer_ids  # any order: primes are given out in it
    if len(set(layers)) != len(layers) or any(not 0 <= i < c.num_hidden_layers for i in layers):
        expected = f"distinct layers below {c.num_hidden_layers}"
        raise _wrong("engram_layer_ids", list(layers), expected)
    if len(c.engram_num_embeddings) != len(c.engram_layer_ids):
        expected = f"one entry per Engram layer {list(c.engram_layer_ids)}"
        raise _wrong("engram_num_embeddings", list(c.engram_num_embeddings), expected)
    if not c.engram_layer_ids:
        return
    _positive(c, "engram_vocab_size", "engram_n_heads", "engram_head_dim")
    _positive(c, "engram_compressed_vocab_size")
    _multiple(c, 32, "engram_head_dim")
    if c.engram_max_ngram_size < 2:
        raise _wrong("engram_max_ngram_size", c.engram_max_ngram_size, "2 or more")
    if not 0 <= c.engram_pad_token_id < c.vocab_size:
        raise _wrong("engram_pad_token_id", c.engram_pad_token_id, "a token id")


def _check_drafter(c: ModelConfig) -> None:
    if not c.has_drafter:
        return
    _positive(c, "dspark_block_size", "dspark_markov_rank")
    _positive(c, "dspark_n_routed_experts", "dspark_num_experts_per_tok")
    _increasing(c, "dspark_target_layer_ids")
    if not c.dspark_target_layer_ids:
        raise _wrong("dspark_target_layer_ids", [], "at least one tapped layer")
    if not 0 <= c.dspark_noise_token_id < c.vocab_size:
        expected = f"0 <= id < vocab_size = {c.vocab_size}"
        raise _wrong("dspark_noise_token_id", c.dspark_noise_token_id, expected)
    if c.dspark_num_experts_per_tok > c.dspark_n_routed_experts:
        expected = f"at most dspark_n_routed_experts = {c.dspark_n_routed_experts}"
        raise _wrong("dspark_num_experts_per_tok", c.dspark_num_experts_per_tok, expected)

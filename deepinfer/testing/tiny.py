"""Tiny checkpoints with every feature of the architecture on, random but reproducible.

Knows a small config and how to draw values; must not know tests.
"""

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepinfer.checkpoint.names import TensorSpec
from deepinfer.checkpoint.tokenizer_training import IMAGE, NOISE, train_tokenizer
from deepinfer.checkpoint.writer import Values, complete_config, write_checkpoint

# Text that gives the tiny tokenizer some merges.
_TEXT = (
    "The engine runs one model on many machines. A window of recent tokens is kept in full; older "
    "tokens are compressed, indexed and selected. Experts are chosen by a router, and an n-gram "
    "memory adds what follows from the last few words. "
)

_TEXT_CONFIG: dict[str, Any] = {
    "model_type": "deepseek_v41_text", "vocab_size": 512, "hidden_size": 128,
    "moe_intermediate_size": 32, "num_hidden_layers": 9, "num_nextn_predict_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 64, "qk_rope_head_dim": 32,
    "q_lora_rank": 64, "o_groups": 2, "o_lora_rank": 32, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "n_shared_experts": 1, "swiglu_limit": 10.0, "hidden_act": "silu",
    "routed_scaling_factor": 1.5, "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc",
    "norm_topk_prob": True, "rms_norm_eps": 1e-20, "sliding_window": 16,
    "max_position_embeddings": 1024, "rope_theta": 10000.0, "compress_rope_theta": 160000.0,
    "rope_scaling": {"rope_type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1,
                     "original_max_position_embeddings": 64},
    "compress_ratios": [0, 0, 2, 2, 2, 1, 1, 1, 1, 0, 0], "kv_source_layer_ids": [2, 4, 5],
    "index_source_layer_ids": [2, 4, 5, 7], "candidate_source_layer_id": 5, "index_n_heads": 4,
    "index_head_dim": 64, "index_topk": 16, "candidate_topk_blocks": 8, "candidate_block_size": 8,
    "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "engram_layer_ids": [1, 4],
    "engram_vocab_size": 64, "engram_max_ngram_size": 4, "engram_n_heads": 2,
    "engram_head_dim": 32, "engram_pad_token_id": 2, "dspark_block_size": 5,
    "dspark_noise_token_id": 510, "dspark_target_layer_ids": [6, 7, 8], "dspark_markov_rank": 32,
    "dspark_n_routed_experts": 4, "dspark_num_experts_per_tok": 2, "attention_bias": False,
    "attention_dropout": 0.0, "tie_word_embeddings": False,
}  # fmt: skip


def tiny_config(**overrides: Any) -> dict[str, Any]:
    """A config.json of 9 layers in which every feature acts within 100 tokens.

    Args:
        overrides: keys of text_config to replace.
    """
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "image_token_id": 10,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "tie_word_embeddings": False,
        "quantization_config": {
            "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0", "expert_dtype": "fp4", "fmt": "e4m3",
        },
        "text_config": {**_TEXT_CONFIG, **overrides},
    }  # fmt: skip


def random_values(seed: int, outliers: bool = False) -> Values:
    """Values of every tensor, drawn per name, so that the order of drawing does not matter.

    Matrices are N(0, 1/in), halved where they write into the residual streams; norms 1 +- 0.1;
    sinks and biases N(0, 0.1); n-gram rows N(0, 1). With `outliers`, one value in 500 of every
    matrix grows twentyfold, three embedding channels and 2 % of the norm weights eightfold, and
    sinks, router and mixing biases tenfold: what a trained net has and a random one lacks.
    """

    def values(spec: TensorSpec) -> Tensor:
        digest = hashlib.sha256(f"{seed}:{spec.name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        drawn = torch.randn(spec.shape, generator=generator)
        return _shape_values(spec, drawn, outliers, generator)

    return values


def _shape_values(
    spec: TensorSpec, drawn: Tensor, outliers: bool, generator: torch.Generator
) -> Tensor:
    leaf = spec.name.rsplit(".", 2)
    name = spec.name
    if len(spec.shape) == 1:
        if "norm" in name:
            drawn = 1.0 + 0.1 * drawn
            if outliers:
                drawn[torch.rand(drawn.shape, generator=generator) < 0.02] *= 8.0
            return drawn
        if name.endswith("_scale"):
            return 1.0 + 0.1 * drawn
        return drawn * (1.0 if outliers else 0.1)
    if "engram.embed" in name:
        return drawn
    if name.endswith(("q_weight", "k_weight")):
        return 1.0 + 0.1 * drawn
    if name == "embed.weight":
        if outliers:
            drawn[:, torch.randperm(spec.shape[1], generator=generator)[:3]] *= 8.0
        return drawn
    damped = leaf[-2] in ("wo_b", "w2") or name.endswith("engram.wkv.weight")
    matrix = drawn * (0.5 if damped else 1.0) / math.sqrt(spec.shape[1])
    if outliers:
        matrix[torch.rand(matrix.shape, generator=generator) < 0.002] *= 20.0
    return matrix


def write_random_checkpoint(
    folder: Path,
    config: Mapping[str, Any] | None = None,
    seed: int = 0,
    outliers: bool = False,
    note: str | None = None,
) -> None:
    """Write a complete random checkpoint; `config` defaults to `tiny_config()`."""
    config = tiny_config() if config is None else config
    tokenizer = train_tokenizer([_TEXT], config["text_config"]["vocab_size"])
    config = complete_config(config, tokenizer)
    config["image_token_id"] = tokenizer.token_to_id(IMAGE)
    config["text_config"]["dspark_noise_token_id"] = tokenizer.token_to_id(NOISE)
    write_checkpoint(folder, config, tokenizer, random_values(seed, outliers), note=note)

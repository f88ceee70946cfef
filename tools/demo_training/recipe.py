"""The demo model's architecture and every hyperparameter of its training.

Knows numbers; must not know how they are used.
"""

from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from deepinfer.checkpoint.tokenizer_training import IMAGE, NOISE
from deepinfer.checkpoint.writer import complete_config
from deepinfer.testing.tiny import tiny_config

# Seven layers with every role of the released forty: 0 window only; 1 window and n-gram memory;
# 2 KV and index source, two tokens per entry; 3 reuses 2, with n-gram memory; 4 KV, index and
# candidate source, one token per entry; 5 reuses 4; 6 selects anew among the candidates of 4.
ARCHITECTURE: dict[str, Any] = {
    "vocab_size": 4096, "hidden_size": 192, "num_hidden_layers": 7, "num_attention_heads": 6,
    "head_dim": 64, "qk_rope_head_dim": 16, "q_lora_rank": 96, "o_groups": 2, "o_lora_rank": 96,
    "moe_intermediate_size": 64, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "compress_ratios": [0, 0, 2, 2, 1, 1, 1, 0, 0], "kv_source_layer_ids": [2, 4],
    "index_source_layer_ids": [2, 4, 6], "candidate_source_layer_id": 4, "index_n_heads": 4,
    "index_head_dim": 32, "index_topk": 128, "candidate_topk_blocks": 64, "candidate_block_size": 8,
    "sliding_window": 64, "max_position_embeddings": 8192,
    "rope_scaling": {"rope_type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1,
                     "original_max_position_embeddings": 512},
    "engram_layer_ids": [1, 3], "engram_vocab_size": 6144, "engram_max_ngram_size": 4,
    "engram_n_heads": 2, "engram_head_dim": 32, "num_nextn_predict_layers": 2,
    "dspark_block_size": 5, "dspark_target_layer_ids": [4, 5, 6], "dspark_markov_rank": 32,
    "dspark_n_routed_experts": 4, "dspark_num_experts_per_tok": 2,
}  # fmt: skip


def demo_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """The config.json of the demo model."""
    config = tiny_config(**ARCHITECTURE)
    config["image_token_id"] = tokenizer.token_to_id(IMAGE)
    config["text_config"]["dspark_noise_token_id"] = tokenizer.token_to_id(NOISE)
    return complete_config(config, tokenizer)


@dataclass(frozen=True)
class Stage:
    """A stretch of backbone training.

    Attributes:
        share: part of all steps.
        sparse: attend to selected entries as at inference, instead of to all.
        long: part of the steps that take long sequences.
    """

    share: float
    sparse: bool
    long: float


@dataclass(frozen=True)
class Training:
    """Hyperparameters; times in seconds are budgets that end a part early, at the final rate.

    Attributes:
        short, long: (sequences, tokens) of a batch.
        rate: peak learning rate, of matrices under Muon and of everything else under Adam.
        warmup, decay: parts of the steps in which the rate rises from 0 and falls to 0.
        index_rows: query rows per sequence at which the indexer is compared with attention.
        bias_step: step of the router bias towards balance.
        long_kind: kind of the long batches.
        candidate_targets: the indexer whose scores choose candidates also learns what the layers
            attend to that select among them.
    """

    steps: int = 6000
    seconds: float = 430.0
    short: tuple[int, int] = (32, 1024)
    long: tuple[int, int] = (12, 2816)
    stages: tuple[Stage, ...] = (
        Stage(0.35, sparse=False, long=0.2),
        Stage(0.65, sparse=True, long=0.3),
    )
    rate: float = 4e-3
    adam_rate: float = 3e-3
    weight_decay: float = 0.05
    warmup: float = 0.02
    decay: float = 0.4
    index_rows: int = 64
    bias_step: float = 1e-3
    gradient_clip: float = 1.0
    long_kind: str = "long"
    candidate_targets: bool = False


# Further training of a finished checkpoint, mostly on words to copy from far away.
LOOKUP_TRAINING = Training(
    seconds=180.0, stages=(Stage(1.0, sparse=True, long=0.6),), rate=2e-3, adam_rate=1.5e-3,
    warmup=0.05, decay=0.7, long_kind="lookup", candidate_targets=True,
)  # fmt: skip


@dataclass(frozen=True)
class DrafterTraining:
    """Hyperparameters of the drafter, trained on the frozen backbone.

    Attributes:
        anchors: positions per sequence after which a block is drafted.
    """

    steps: int = 1500
    seconds: float = 70.0
    short: tuple[int, int] = (32, 1024)
    anchors: int = 128
    rate: float = 3e-3
    warmup: float = 0.03
    decay: float = 0.5

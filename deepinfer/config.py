"""Frozen configuration: what the checkpoint is (ModelConfig) and how it is run (EngineConfig).

Knows names, defaults and derived values; must not know torch, files or the environment.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, get_args

from deepinfer.errors import ConfigError


@dataclass(frozen=True)
class RopeScaling:
    """YaRN parameters of the rotary tables of layers with compressed entries (model description 3.3)."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class VisionConfig:
    """Shape of the image encoder; 0 layers means that the checkpoint has none."""

    num_hidden_layers: int = 0
    hidden_size: int = 0
    num_attention_heads: int = 0
    intermediate_size: int = 0
    patch_size: int = 14
    rope_theta: float = 10000.0
    downsample_ratio: int = 3
    max_image_tokens: int = 1024
    min_pixels: int = 295936
    max_wh_ratio: float | None = None


@dataclass(frozen=True)
class ModelConfig:
    """The architecture of one checkpoint; fields carry the names of config.json.

    Built and validated by `deepinfer.checkpoint.hf_config`. Lists of config.json are tuples here,
    `candidate_source_layer_id` is None when candidates are off.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    swiglu_limit: float
    gate_temp: float
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: RopeScaling | None
    sliding_window: int
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int | None
    candidate_topk_blocks: int
    candidate_block_size: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_max_ngram_size: int
    engram_vocab_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_pad_token_id: int
    engram_compressed_vocab_size: int
    num_nextn_predict_layers: int
    dspark_block_size: int
    dspark_noise_token_id: int
    dspark_target_layer_ids: tuple[int, ...]
    dspark_markov_rank: int
    dspark_n_routed_experts: int
    dspark_num_experts_per_tok: int
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    image_token_id: int | None
    vision: VisionConfig

    def compress_ratio(self, layer: int) -> int:
        """Tokens per compressed entry of backbone layer `layer`; 0 = sliding window only."""
        return self.compress_ratios[layer]

    def kv_source(self, layer: int) -> int:
        """The layer whose compressed entries and index keys `layer` reads (the nearest at or before it)."""
        return max(source for source in self.kv_source_layer_ids if source <= layer)

    def index_source(self, layer: int) -> int:
        """The layer whose top-k selection `layer` uses (the nearest at or before it)."""
        return max(source for source in self.index_source_layer_ids if source <= layer)

    def restricts_to_candidates(self, layer: int) -> bool:
        """Whether index source `layer` may only select inside the published candidate blocks."""
        source = self.candidate_source_layer_id
        return source is not None and layer > source

    @property
    def boundary_layer(self) -> int | None:
        """First layer with one entry per token; truncated prefill may drop rows from here on (6.2)."""
        ones = [i for i in range(self.num_hidden_layers) if self.compress_ratios[i] == 1]
        return ones[0] if ones else None

    @property
    def engram_columns(self) -> int:
        """Table rows looked up per token and Engram layer: heads times n-gram orders."""
        return self.engram_n_heads * (self.engram_max_ngram_size - 1)

    @property
    def has_drafter(self) -> bool:
        """Whether the checkpoint carries DSpark draft blocks."""
        return self.num_nextn_predict_layers > 0


DeviceName = Literal["auto", "cpu", "cuda"]
DtypeName = Literal["auto", "bfloat16", "float32", "float64"]
TruncationMode = Literal["off", "mask", "compact"]


@dataclass(frozen=True)
class EngineConfig:
    """How a checkpoint is run. "auto" and None are filled in by `resolve`.

    Attributes:
        model: folder with config.json, tokenizer.json and safetensors.
        tokenizer: another tokenizer.json, or a folder holding one; default: the model's.
        device: where to run; auto takes a CUDA GPU when there is one.
        dtype: activation dtype; bfloat16 is the released one, the others are for tests.
        act_quant: FP8 activations into FP8 and FP4 matrices, as released; off = plain bfloat16.
        max_model_len: most tokens of a sequence, prompt and output together.
        max_num_seqs: most sequences in one step.
        max_num_batched_tokens: most tokens in one step; longer prompts run in chunks.
        cache_tokens: tokens that the paged cache holds, all running sequences together.
        page_tokens: tokens per cache page.
        threads: CPU threads for arithmetic.
        yoco_prefill: truncated prefill of layers past the boundary (model description 6.3).
        yoco_keep_tokens: prompt rows that truncated prefill keeps.
    """

    model: str
    tokenizer: str | None = None
    device: DeviceName = "auto"
    dtype: DtypeName = "auto"
    act_quant: bool = True
    max_model_len: int | None = None
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    cache_tokens: int | None = None
    page_tokens: int = 64
    threads: int | None = None
    yoco_prefill: TruncationMode = "off"
    yoco_keep_tokens: int | None = None


@dataclass(frozen=True)
class Decision:
    """One line of the start-up table: a setting, its value, and who decided it."""

    name: str
    value: Any
    decided_by: Literal["user", "default", "auto"]


# Rows of prefill that fit the default cache; one full context is always possible.
DEFAULT_CACHE_TOKENS = 32768

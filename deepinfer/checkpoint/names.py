"""The tensors of a released checkpoint: names, dtypes and shapes in symbols, as data.

Knows section 5 of the model description; must not know files or modules. Stored formats:

    fp8       e4m3 codes [out, in], `.scale` of one power of two per 32 x 32 block
    fp8_row   e4m3 codes [rows, columns], `.scale` of one power of two per row and 32 columns
    fp4       two e2m1 codes per byte [out, in/2], `.scale` as fp8_row, per 32 logical columns
    bf16, f32 values
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from deepinfer.config import ModelConfig

Format = Literal["fp8", "fp8_row", "fp4", "bf16", "f32"]

# safetensors dtype names of values and scales.
STORED_DTYPE: dict[Format, str] = {
    "fp8": "F8_E4M3",
    "fp8_row": "F8_E4M3",
    "fp4": "I8",
    "bf16": "BF16",
    "f32": "F32",
}
SCALE_DTYPE = "F8_E8M0"

# Names that belong to image input, which this version does not run.
IMAGE_PREFIXES = ("vision.", "aligner.")
IMAGE_NAMES = ("image_start", "image_end", "image_newline")
IMAGE_SUFFIX = ".ffn.gate.bias_vl"


@dataclass(frozen=True)
class TensorRule:
    """One row of the table: where a tensor occurs, its name, format and shape in symbols."""

    where: str
    name: str
    format: Format
    shape: str


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of one checkpoint: full name, format and logical shape (before packing)."""

    name: str
    format: Format
    shape: tuple[int, ...]

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape on disk; packed FP4 has two columns per byte."""
        if self.format == "fp4":
            return (self.shape[0], self.shape[1] // 2)
        return self.shape

    @property
    def scale_name(self) -> str | None:
        """Name of the scale tensor, None for unquantised formats."""
        if self.format in ("bf16", "f32"):
            return None
        return self.name.removesuffix("weight") + "scale"

    @property
    def scale_shape(self) -> tuple[int, int]:
        """Shape of the scale tensor of a quantised format."""
        rows, columns = self.shape
        return (_ceil32(rows) if self.format == "fp8" else rows, _ceil32(columns))


def _ceil32(n: int) -> int:
    return (n + 31) // 32


# Symbols: V vocabulary, H hidden, N heads, D head dim, R q_lora_rank, G output groups, O its rank,
# I expert width, E experts of the block, S streams, M = S * (2 + S) mixing coefficients, Hi and Di
# index heads and dim, C Engram columns, F Engram row width, A tapped layers, K Markov rank.
RULES: tuple[TensorRule, ...] = (
    TensorRule("model", "embed.weight", "bf16", "V H"),
    TensorRule("model", "head.weight", "bf16", "V H"),
    TensorRule("model", "norm.weight", "bf16", "H"),
    TensorRule("block", "attn_norm.weight", "bf16", "H"),
    TensorRule("block", "ffn_norm.weight", "bf16", "H"),
    TensorRule("block", "attn.wq_a.weight", "fp8", "R H"),
    TensorRule("block", "attn.q_norm.weight", "bf16", "R"),
    TensorRule("block", "attn.wq_b.weight", "fp8", "N*D R"),
    TensorRule("block", "attn.wkv.weight", "fp8", "D H"),
    TensorRule("block", "attn.kv_norm.weight", "bf16", "D"),
    TensorRule("block", "attn.attn_sink", "f32", "N"),
    TensorRule("block", "attn.wo_a.weight", "fp8", "G*O N*D/G"),
    TensorRule("block", "attn.wo_b.weight", "fp8", "H G*O"),
    TensorRule("block", "hc_attn_fn", "f32", "M S*H"),
    TensorRule("block", "hc_attn_base", "f32", "M"),
    TensorRule("block", "hc_attn_scale", "f32", "3"),
    TensorRule("block", "hc_ffn_fn", "f32", "M S*H"),
    TensorRule("block", "hc_ffn_base", "f32", "M"),
    TensorRule("block", "hc_ffn_scale", "f32", "3"),
    TensorRule("block", "ffn.gate.weight", "bf16", "E H"),
    TensorRule("block", "ffn.gate.bias", "f32", "E"),
    TensorRule("expert", "ffn.experts.{e}.w1.weight", "fp4", "I H"),
    TensorRule("expert", "ffn.experts.{e}.w3.weight", "fp4", "I H"),
    TensorRule("expert", "ffn.experts.{e}.w2.weight", "fp4", "H I"),
    TensorRule("block", "ffn.shared_experts.w1.weight", "fp8", "I H"),
    TensorRule("block", "ffn.shared_experts.w3.weight", "fp8", "I H"),
    TensorRule("block", "ffn.shared_experts.w2.weight", "fp8", "H I"),
    TensorRule("index source", "attn.indexer.wq_b.weight", "fp8", "Hi*Di R"),
    TensorRule("index source", "attn.indexer.weights_proj.weight", "bf16", "Hi H"),
    TensorRule("kv source", "attn.indexer.wk.weight", "bf16", "Di D"),
    TensorRule("kv source", "attn.indexer.k_norm.weight", "bf16", "Di"),
    TensorRule("kv source", "attn.compressor.wkv.weight", "bf16", "D H"),
    TensorRule("pooling kv source", "attn.compressor.wgate.weight", "bf16", "D H"),
    TensorRule("kv source", "attn.compressor.norm.weight", "bf16", "D"),
    TensorRule("engram", "engram.embed.weight", "fp8_row", "rows F"),
    TensorRule("engram", "engram.wkv.weight", "fp8", "(S+1)*H C*F"),
    TensorRule("engram", "engram.q_weight", "bf16", "S H"),
    TensorRule("engram", "engram.k_weight", "bf16", "S H"),
    TensorRule("first draft", "main_proj.weight", "fp8", "H A*H"),
    TensorRule("first draft", "main_norm.weight", "bf16", "H"),
    TensorRule("last draft", "norm.weight", "bf16", "H"),
    TensorRule("last draft", "markov_head.embed.weight", "bf16", "V K"),
    TensorRule("last draft", "markov_head.head.weight", "bf16", "V K"),
    TensorRule("last draft", "confidence_head.proj.weight", "bf16", "1 H+K"),
)


def _dimensions(config: ModelConfig) -> dict[str, int]:
    """Value of each shape expression that RULES uses and that does not depend on the block."""
    c = config
    mixing = c.hc_mult * (2 + c.hc_mult)
    heads_dim = c.num_attention_heads * c.head_dim
    targets = len(c.dspark_target_layer_ids)
    return {
        "V": c.vocab_size, "H": c.hidden_size, "N": c.num_attention_heads, "D": c.head_dim,
        "R": c.q_lora_rank, "I": c.moe_intermediate_size, "S": c.hc_mult, "M": mixing,
        "K": c.dspark_markov_rank, "F": c.engram_head_dim, "Hi": c.index_n_heads,
        "Di": c.index_head_dim, "1": 1, "3": 3, "N*D": heads_dim, "N*D/G": heads_dim // c.o_groups,
        "G*O": c.o_groups * c.o_lora_rank, "S*H": c.hc_mult * c.hidden_size,
        "Hi*Di": c.index_n_heads * c.index_head_dim, "(S+1)*H": (c.hc_mult + 1) * c.hidden_size,
        "C*F": c.engram_columns * c.engram_head_dim, "A*H": targets * c.hidden_size,
        "H+K": c.hidden_size + c.dspark_markov_rank,
    }  # fmt: skip


def _occurrences(config: ModelConfig, where: str) -> Iterator[tuple[str, dict[str, int]]]:
    """Prefixes under which rows of kind `where` occur, with the block's own dimensions."""
    layers = range(config.num_hidden_layers)
    drafts = config.num_nextn_predict_layers
    if where == "model":
        yield "", {}
    elif where in ("block", "expert"):
        for layer in layers:
            yield f"layers.{layer}.", {"E": config.n_routed_experts}
        for draft in range(drafts):
            yield f"mtp.{draft}.", {"E": config.dspark_n_routed_experts}
    elif where == "engram":
        for layer, rows in zip(config.engram_layer_ids, config.engram_num_embeddings, strict=True):
            yield f"layers.{layer}.", {"rows": rows}
    elif where == "index source":
        for layer in config.index_source_layer_ids:
            yield f"layers.{layer}.", {}
    elif where in ("kv source", "pooling kv source"):
        for layer in config.kv_source_layer_ids:
            if where == "kv source" or config.compress_ratios[layer] > 1:
                yield f"layers.{layer}.", {}
    elif drafts:
        yield f"mtp.{0 if where == 'first draft' else drafts - 1}.", {}


def tensor_specs(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor that a checkpoint of `config` must hold, without scales and image tensors."""
    common = _dimensions(config)
    for rule in RULES:
        for prefix, own in _occurrences(config, rule.where):
            sizes = {**common, **own}
            shape = tuple(sizes[symbol] for symbol in rule.shape.split())
            if rule.where == "expert":
                for expert in range(sizes["E"]):
                    yield TensorSpec(prefix + rule.name.format(e=expert), rule.format, shape)
            else:
                yield TensorSpec(prefix + rule.name, rule.format, shape)


def is_image_tensor(name: str) -> bool:
    """Whether `name` is only needed for image input."""
    return name.startswith(IMAGE_PREFIXES) or name in IMAGE_NAMES or name.endswith(IMAGE_SUFFIX)

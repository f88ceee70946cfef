"""Where the memory of a GPU goes: weights, workspace, graphs, states of sequences, pages.

Knows sizes that follow from the configuration; must not know torch or the machine. Everything but
the pages has a size of its own; pages get what is left.
"""

import math
from dataclasses import dataclass

from deepinfer.checkpoint.names import tensor_specs
from deepinfer.config import EngineConfig, ModelConfig
from deepinfer.kv.geometry import engine_geometry

_SCALED = {"fp8": 1 + 1 / 1024, "fp4": 1 / 2 + 1 / 32, "fp8_row": 1 + 1 / 32}
# A CUDA context, its libraries, loaded kernels and what the allocator cannot use.
_CONTEXT = 1_500_000_000


@dataclass(frozen=True)
class WeightBytes:
    """Bytes of a loaded model by what can be divided among GPUs: experts and n-gram tables."""

    experts: int
    tables: int
    other: int

    def on_each(self, gpus: int) -> int:
        """Bytes on each of so many GPUs that divide experts and tables and repeat the rest."""
        return math.ceil((self.experts + self.tables) / gpus) + self.other


def weight_bytes(config: ModelConfig, matrix_bytes: int | None) -> WeightBytes:
    """Bytes of a loaded model.

    Args:
        matrix_bytes: of one value of an FP8, FP4 or bfloat16 matrix; None for a packed model, whose
            matrices keep the bytes of the checkpoint. N-gram tables always do.
    """
    found = {"experts": 0.0, "tables": 0.0, "other": 0.0}
    for spec in tensor_specs(config):
        kind = "tables" if spec.format == "fp8_row" else "other"
        kind = "experts" if ".experts." in spec.name else kind
        if spec.format == "f32":
            size: float = 4
        elif spec.format == "fp8_row" or (matrix_bytes is None and spec.format in _SCALED):
            size = _SCALED[spec.format]
        else:
            size = matrix_bytes or 2
        found[kind] += math.prod(spec.shape) * size
    return WeightBytes(*(math.ceil(found[kind]) for kind in ("experts", "tables", "other")))


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of everything on one GPU.

    Attributes:
        usable: bytes that may be planned for.
        weights, workspace, graphs, states: bytes of each; page: of one page.
        pages: how many fit; wanted_pages: what the settings need at least.
        advice: what to change if not everything fits.
    """

    usable: int
    weights: int
    workspace: int
    graphs: int
    states: int
    page: int
    pages: int
    page_tokens: int
    wanted_pages: int
    advice: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether the longest sequence finds room."""
        return self.pages >= self.wanted_pages

    @property
    def cache_tokens(self) -> int:
        """Tokens that all pages hold together."""
        return self.pages * self.page_tokens


def workspace_bytes(model: ModelConfig, rows: int, logits: int, longest: int) -> int:
    """Bytes that a forward of `rows` rows needs at once, at most, and sampling after it.

    Residual streams twice, the queries and outputs of all heads, what routed experts hold between
    their two matrices, and the scores of an index layer with the keys that sort them.

    Args:
        logits: rows that get logits; longest: tokens of the longest sequence.
    """
    streams = 2 * model.hc_mult * model.hidden_size * 2
    heads = 3 * model.num_attention_heads * model.head_dim * 2
    experts = model.num_experts_per_tok * (2 * model.moe_intermediate_size + model.hidden_size) * 2
    row = streams + heads + experts + 8 * model.hidden_size * 2
    ratios = [model.compress_ratio(layer) for layer in model.kv_source_layer_ids]
    scores = max((longest // ratio for ratio in ratios if ratio), default=0) * 4 * 2
    return rows * (row + scores) + logits * model.vocab_size * 4 * 4


def plan_memory(
    model: ModelConfig, config: EngineConfig, memory: int, weights: WeightBytes, gpus: int = 1
) -> MemoryPlan:
    """Divide the memory of each of `gpus` equal GPUs.

    Args:
        memory: bytes of one GPU; gpu_memory of them are planned for.
        weights: of the whole model; experts and n-gram tables are divided among the GPUs.

    Raises:
        ConfigError: page_tokens does not suit the model.
    """
    geometry = engine_geometry(model, config)
    usable = int(memory * config.gpu_memory) - _CONTEXT
    own = weights.on_each(gpus)
    rows, sequences = config.max_num_batched_tokens, config.max_num_seqs
    workspace = workspace_bytes(model, rows, sequences, config.max_model_len)
    graphs = 0
    if not config.enforce_eager:
        graphs = workspace_bytes(model, sequences, sequences, config.max_model_len)
    # A sequence with penalties also counts its tokens, over the vocabulary twice.
    state = geometry.bytes_per_slot + 9 * model.vocab_size
    states = config.state_slots * state
    left = usable - own - workspace - graphs - states
    # Without a KV source a page has no bytes: as many as are wanted fit.
    wanted = geometry.pages_for(config.max_model_len)
    page = geometry.bytes_per_page
    pages = max(0, left // page) if page else (wanted if left >= 0 else 0)
    advice = () if pages >= wanted else tuple(
        _advice(config, memory, weights, gpus, left - wanted * page, state, pages)
    )  # fmt: skip
    return MemoryPlan(usable, own, workspace, graphs, states, page, pages, config.page_tokens,
                      wanted, advice)  # fmt: skip


def _advice(
    config: EngineConfig, memory: int, weights: WeightBytes, gpus: int, missing: int,
    state: int, pages: int,
) -> list[str]:  # fmt: skip
    """What would make room for `-missing` more bytes."""
    usable = int(memory * config.gpu_memory) - _CONTEXT
    found = []
    if weights.on_each(gpus) > usable:
        shared = usable - weights.other
        if shared <= 0:
            return ["no number of such GPUs: what each has to hold is larger than its memory"]
        least = math.ceil((weights.experts + weights.tables) / shared)
        return [
            f"the weights need at least {least} such GPUs that divide experts and n-gram tables"
        ]
    if pages:
        found.append(f"max_model_len = {pages * config.page_tokens}")
    if config.gpu_memory < 1 and missing + memory * (0.97 - config.gpu_memory) >= 0:
        found.append("gpu_memory = 0.97")
    if missing + config.prefix_checkpoints * state >= 0:
        found.append("prefix_checkpoints = 0")
    found.append("a smaller max_num_batched_tokens or max_num_seqs, or more GPUs")
    return found

"""Sizes of everything that is remembered of a token or a sequence, in bytes.

Knows record formats and paging rules (model description 4); must not know torch.
"""

from dataclasses import dataclass

from deepinfer.config import EngineConfig, ModelConfig, max_rollback
from deepinfer.errors import ConfigError


@dataclass(frozen=True)
class CacheGeometry:
    """Shapes of the cache of one model.

    Attributes:
        page_tokens: tokens of one page; all KV source layers share page numbers.
        rollback_tokens: most tokens by which a sequence can be taken back.
        ring_tokens: window keys kept per layer and sequence: the window and rollback slack.
        group_tokens: compressor inputs kept per pooling layer and sequence.
        history_tokens: n-gram classes kept per sequence.
        window_bytes, compressed_bytes: one record; index_code_bytes + index_scale_bytes: another.
        entries: entries per page of each KV source layer.
        layers, draft_blocks: how many window rings a sequence has in each.
        head_dim: channels of a latent (compressor inputs are kept unpacked).
    """

    page_tokens: int
    rollback_tokens: int
    ring_tokens: int
    group_tokens: int
    history_tokens: int
    window_bytes: int
    compressed_bytes: int
    index_code_bytes: int
    index_scale_bytes: int
    entries: dict[int, int]
    pooling_layers: tuple[int, ...]
    layers: int
    draft_blocks: int
    head_dim: int

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page over all KV source layers."""
        entry = self.compressed_bytes + self.index_code_bytes + self.index_scale_bytes
        return sum(self.entries.values()) * entry

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one sequence's state outside the pages (float32 compressor inputs)."""
        rings = (self.layers + self.draft_blocks) * self.ring_tokens * self.window_bytes
        groups = len(self.pooling_layers) * self.group_tokens * 2 * self.head_dim * 4
        return rings + groups + 8 * self.history_tokens

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens."""
        return -(-tokens // self.page_tokens)


def cache_geometry(config: ModelConfig, page_tokens: int, max_rollback: int) -> CacheGeometry:
    """Geometry of `config` whose sequences can be rolled back by up to `max_rollback` tokens.

    Raises:
        ConfigError: `page_tokens` is no multiple of every ratio, or a candidate block would
            straddle two pages (model description 2, constraint 6).
    """
    sources = config.kv_source_layer_ids
    for layer in sources:
        ratio = config.compress_ratio(layer)
        block = config.candidate_block_size if config.candidate_source_layer_id is not None else 1
        if page_tokens < 1 or page_tokens % ratio or (page_tokens // ratio) % block:
            raise ConfigError(
                f"page_tokens = {page_tokens}; expected a multiple of {ratio * block}: pages hold"
                f" whole groups of {ratio} tokens and whole candidate blocks of {block} entries"
            )
    pooling = tuple(layer for layer in sources if config.compress_ratio(layer) > 1)
    largest = max((config.compress_ratio(layer) for layer in pooling), default=1)
    dim, index_dim = config.head_dim, config.index_head_dim
    return CacheGeometry(
        page_tokens=page_tokens,
        rollback_tokens=max_rollback,
        ring_tokens=config.sliding_window + max_rollback,
        group_tokens=largest + max_rollback,
        history_tokens=config.engram_max_ngram_size - 1 + max_rollback,
        window_bytes=dim + dim // 32,
        compressed_bytes=dim // 2 + dim // 16,
        index_code_bytes=index_dim // 2,
        index_scale_bytes=index_dim // 32,
        entries={layer: page_tokens // config.compress_ratio(layer) for layer in sources},
        pooling_layers=pooling,
        layers=config.num_hidden_layers,
        draft_blocks=config.num_nextn_predict_layers,
        head_dim=dim,
    )


def engine_geometry(model: ModelConfig, config: EngineConfig) -> CacheGeometry:
    """Geometry for an engine; with a prefix cache, slots can be taken back to the last page border.

    Raises:
        ConfigError: as `cache_geometry`.
    """
    rollback = max_rollback(model)
    if config.prefix_caching:
        rollback = max(rollback, config.page_tokens)
    return cache_geometry(model, config.page_tokens, rollback)

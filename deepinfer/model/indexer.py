"""Index queries and keys: which compressed entries a token attends to.

Knows the projections of an index source layer; must not know scores or caches.
"""

from torch import Tensor, nn

from deepinfer.config import ModelConfig
from deepinfer.model.linear import Activation, Linear, Precision, QuantisedLinear
from deepinfer.model.norm import RMSNorm
from deepinfer.model.state import SequenceState


class Indexer(nn.Module):
    """Index queries and head weights of an index source (model description 3.7).

    A layer that is also a KV source computes its index keys here too.
    """

    def __init__(self, config: ModelConfig, layer: int, precision: Precision) -> None:
        super().__init__()
        self.layer = layer
        self.heads = config.index_n_heads
        self.ratio = config.compress_ratio(layer)
        rows = config.index_n_heads * config.index_head_dim
        self.wq_b = QuantisedLinear(rows, config.q_lora_rank, precision)
        self.weights_proj = Linear(config.index_n_heads, config.hidden_size, precision)
        self.scale = config.index_head_dim**-0.5 * config.index_n_heads**-0.5
        self.precision = precision
        if layer in config.kv_source_layer_ids:
            self.wk = Linear(config.index_head_dim, config.head_dim, precision)
            self.k_norm = RMSNorm(config.index_head_dim, config.rms_norm_eps, precision)

    def keys(self, latents: Tensor) -> Tensor:
        """Index keys [groups, Di], before norm and rotation, of latents [groups, D] that are not
        rotated; KV source layers only.
        """
        keys: Tensor = self.wk(latents)
        return keys

    def forward(self, x: Tensor, latent_queries: Activation, state: SequenceState) -> None:
        """Select entries for rows `x` [rows, H] with query latents [rows, R] as wq_b sees them."""
        queries = self.wq_b(latent_queries).unflatten(-1, (self.heads, -1))
        queries = self.precision.operators.index_query(queries, state.rotations(self.ratio))
        weights = self.weights_proj(x).to(self.precision.accumulate) * self.scale
        state.select(self.layer, queries, weights)

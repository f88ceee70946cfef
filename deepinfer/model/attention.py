"""Attention of one layer: queries, window keys, compressed entries, grouped low-rank output.

Knows the projections; must not know where keys of other tokens are kept (that is the state).
"""

import torch
from torch import Tensor, nn

from deepinfer.config import ModelConfig
from deepinfer.model.compressor import Compressor
from deepinfer.model.indexer import Indexer
from deepinfer.model.linear import Linear, Precision, QuantisedLinear, parameter
from deepinfer.model.norm import RMSNorm
from deepinfer.model.state import AttentionState, SequenceState


class Attention(nn.Module):
    """Window attention plus selected compressed entries (model description 3.5 to 3.8).

    Args:
        layer: number that the state knows the layer by; draft blocks count from 0 of their own.
        ratio: tokens per compressed entry, 0 for window attention only.
    """

    def __init__(self, config: ModelConfig, layer: int, ratio: int, precision: Precision) -> None:
        super().__init__()
        self.layer = layer
        self.ratio = ratio
        self.heads = config.num_attention_heads
        self.groups = config.o_groups
        self.precision = precision
        heads_dim = config.num_attention_heads * config.head_dim
        output = config.o_groups * config.o_lora_rank
        eps = config.rms_norm_eps
        self.wq_a = QuantisedLinear(config.q_lora_rank, config.hidden_size, precision)
        self.q_norm = RMSNorm(config.q_lora_rank, eps, precision)
        self.wq_b = QuantisedLinear(heads_dim, config.q_lora_rank, precision)
        self.wkv = QuantisedLinear(config.head_dim, config.hidden_size, precision)
        self.kv_norm = RMSNorm(config.head_dim, eps, precision)
        self.attn_sink = parameter(config.num_attention_heads, dtype=precision.accumulate)
        self.wo_a = Linear(output, heads_dim // config.o_groups, precision)
        self.wo_b = QuantisedLinear(config.hidden_size, output, precision)
        self.compressor: Compressor | None = None
        self.indexer: Indexer | None = None
        if ratio and layer in config.kv_source_layer_ids:
            self.compressor = Compressor(config, layer, precision)
        if ratio and layer in config.index_source_layer_ids:
            self.indexer = Indexer(config, layer, precision)

    def store_entries(self, x: Tensor, state: SequenceState) -> None:
        """Hand the state the entries that rows `x` [rows, H] complete; KV source layers only.

        The index key comes from the latent before its rotation.
        """
        assert self.compressor is not None and self.indexer is not None
        latents = self.compressor(x, state)
        keys = self.indexer.keys(latents)
        state.store_entries(self.layer, latents, keys, self.indexer.k_norm)

    def forward(self, x: Tensor, state: AttentionState) -> Tensor:
        """Normalised sublayer input [rows, H] to attention output [rows, H]."""
        rotations = state.rotations(self.ratio)
        quantised = self.precision.activation(x)
        latent_queries = self.precision.activation(self.q_norm(self.wq_a(quantised)))
        queries = self.wq_b(latent_queries).unflatten(-1, (self.heads, -1))
        operators = self.precision.operators
        queries = operators.rope(queries, rotations.unsqueeze(-2))
        kv = self.wkv(quantised)
        if self.indexer is not None:
            self.indexer(x, latent_queries, state)
        mixed = state.attend(self.layer, queries, kv, self.kv_norm, self.attn_sink)
        return self._project(operators.rope(mixed, rotations.unsqueeze(-2), inverse=True))

    def _project(self, mixed: Tensor) -> Tensor:
        """Head outputs [rows, N, D] to [rows, H]: heads of one group share a low-rank product."""
        grouped = mixed.unflatten(-2, (self.groups, -1)).flatten(-2)
        if self.precision.packed:
            low = self.precision.operators.grouped_output(grouped.flatten(0, -3), self.wo_a.weight)
            low = low.view(*grouped.shape[:-2], low.shape[-1])
        else:
            weight = self.wo_a.weight.unflatten(0, (self.groups, -1))
            parts = torch.einsum("...gd,god->...go", grouped.to(weight.dtype), weight)
            low = parts.to(mixed.dtype).flatten(-2)
        return self.wo_b(self.precision.activation(low))

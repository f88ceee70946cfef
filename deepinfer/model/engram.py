"""N-gram memory: hashing of token classes, table look-up and the gate onto the streams.

Knows tables and multipliers; must not know how earlier tokens are remembered (that is the state).
"""

import numpy as np
import torch
from torch import Tensor, nn

from deepinfer.config import ModelConfig
from deepinfer.errors import ConfigError
from deepinfer.model.linear import Precision, QuantisedLinear, parameter
from deepinfer.model.state import SequenceState
from deepinfer.numerics import FP8_GROUP

# Seed of a layer's multipliers is this times the layer number (model description 3.10 b).
_SEED_STEP = 10007


def hash_multipliers(layer: int, orders: int, classes: int) -> list[int]:
    """Odd multipliers m_0 .. m_(orders - 1) of one layer, bounded so that products fit in int64."""
    bound = max(1, ((2**63 - 1) // classes) // 2)
    draws = np.random.default_rng(_SEED_STEP * layer).integers(
        0, bound, size=orders, dtype=np.int64
    )
    return [2 * int(draw) + 1 for draw in draws]


def _is_prime(number: int) -> bool:
    if number < 4:
        return number > 1
    if number % 2 == 0:
        return False
    return all(number % divisor for divisor in range(3, int(number**0.5) + 1, 2))


def table_primes(config: ModelConfig) -> list[list[list[int]]]:
    """Primes [layer][order][head]; each order searches anew, and no prime is used twice."""
    used: set[int] = set()
    layers = []
    for _ in config.engram_layer_ids:
        orders = []
        for _ in range(config.engram_max_ngram_size - 1):
            heads: list[int] = []
            candidate = config.engram_vocab_size - 1
            while len(heads) < config.engram_n_heads:
                candidate += 1
                if candidate not in used and _is_prime(candidate):
                    heads.append(candidate)
                    used.add(candidate)
            orders.append(heads)
        layers.append(orders)
    return layers


def table_rows(config: ModelConfig) -> list[int]:
    """Rows that each Engram layer's table needs: the sum of its primes."""
    return [sum(sum(heads) for heads in orders) for orders in table_primes(config)]


class PackedTable(nn.Module):
    """Table of FP8 rows, kept in their stored bytes; only the rows asked for are dequantised."""

    def __init__(self, rows: int, width: int, precision: Precision) -> None:
        super().__init__()
        self.weight = parameter(rows, width, dtype=torch.uint8)
        self.scale = parameter(rows, width // FP8_GROUP, dtype=torch.uint8)
        self.precision = precision

    def forward(self, rows: Tensor) -> Tensor:
        """Rows [..., C] int64 to their values side by side, [..., C * F]."""
        dtype, gather = self.precision.dtype, self.precision.operators.engram_gather
        values: Tensor = gather(self.weight, self.scale, rows, dtype)
        return values


class Engram(nn.Module):
    """N-gram memory of one layer (model description 3.10)."""

    multipliers: Tensor
    primes: Tensor
    offsets: Tensor

    def __init__(self, config: ModelConfig, layer: int, precision: Precision) -> None:
        super().__init__()
        place = config.engram_layer_ids.index(layer)
        rows = config.engram_num_embeddings[place]
        hidden, streams = config.hidden_size, config.hc_mult
        self.streams = streams
        self.eps = config.rms_norm_eps
        self.precision = precision
        self.embed = PackedTable(rows, config.engram_head_dim, precision)
        width = config.engram_columns * config.engram_head_dim
        self.wkv = QuantisedLinear((streams + 1) * hidden, width, precision)
        self.q_weight = parameter(streams, hidden, dtype=precision.accumulate)
        self.k_weight = parameter(streams, hidden, dtype=precision.accumulate)
        primes = table_primes(config)[place]
        needed = sum(sum(heads) for heads in primes)
        if rows < needed:
            raise ConfigError(
                f"config.json: engram_num_embeddings = {rows} for layer {layer}; the hash needs"
                f" {needed} rows"
            )
        multipliers = hash_multipliers(
            layer, config.engram_max_ngram_size, config.engram_compressed_vocab_size
        )
        with torch.device("cpu"):
            flat = torch.tensor(primes, dtype=torch.int64)
            offsets = flat.flatten().cumsum(0) - flat.flatten()
            self.register_buffer("multipliers", torch.tensor(multipliers), persistent=False)
            self.register_buffer("primes", flat, persistent=False)
            self.register_buffer("offsets", offsets.view_as(flat), persistent=False)

    def rows(self, classes: Tensor) -> Tensor:
        """Table rows [..., C] of n-gram classes [..., G]."""
        operators = self.precision.operators
        rows: Tensor = operators.engram_hash(classes, self.multipliers, self.primes, self.offsets)
        return rows

    def forward(self, streams: Tensor, state: SequenceState) -> Tensor:
        """Streams [..., S, H] with the gated n-gram value added to each."""
        rows = self.rows(state.ngram_classes())
        projected = self.wkv(self.precision.activation(self.embed(rows)))
        projected = projected.unflatten(-1, (self.streams + 1, -1))
        keys, value = projected[..., :-1, :], projected[..., -1, :]
        weight = self.q_weight * self.k_weight
        added: Tensor = self.precision.operators.engram_gate(streams, keys, value, weight, self.eps)
        return added

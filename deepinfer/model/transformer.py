"""The whole model, top to bottom: embedding, blocks, head.

Knows the order of layers; must not know caches or requests.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from deepinfer.config import ModelConfig
from deepinfer.model.block import Block
from deepinfer.model.dspark import Drafter
from deepinfer.model.engram import Engram
from deepinfer.model.linear import Embedding, Precision, WideLinear
from deepinfer.model.norm import RMSNorm
from deepinfer.model.rope import RotaryTables
from deepinfer.model.state import SequenceState


class Layer(Block):
    """A backbone block, with its n-gram memory where it has one."""

    def __init__(self, config: ModelConfig, layer: int, precision: Precision) -> None:
        experts = (config.n_routed_experts, config.num_experts_per_tok)
        super().__init__(config, layer, config.compress_ratio(layer), experts, precision)
        self.engram: Engram | None = None
        if layer in config.engram_layer_ids:
            self.engram = Engram(config, layer, precision)


@dataclass
class Hidden:
    """Result of a forward before the head; rows are those that went through all layers.

    Attributes:
        x: collapsed streams of the last layer [rows, H], before the final norm.
        taps: what the drafter reads [rows, A * H], None without a drafter.
        streams: state entering each layer that ran before its n-gram update, if asked for; all rows
            [T, S, H] up to the layer at which a truncated prefill drops some.
    """

    x: Tensor
    taps: Tensor | None
    streams: list[Tensor] = field(default_factory=list)


class Transformer(nn.Module):
    """A DeepSeek-V4.1 model; parameters carry the names of the checkpoint."""

    def __init__(self, config: ModelConfig, precision: Precision) -> None:
        super().__init__()
        self.config = config
        self.precision = precision
        vocabulary, hidden = config.vocab_size, config.hidden_size
        self.rotary = RotaryTables(config)
        self.embed = Embedding(vocabulary, hidden, precision)
        self.layers = nn.ModuleList(
            Layer(config, layer, precision) for layer in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(hidden, config.rms_norm_eps, precision)
        self.head = WideLinear(vocabulary, hidden, precision)
        self.mtp = Drafter(config, precision)

    def initial_streams(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Streams [..., S, H], S copies of the embedding, and the one-hot pre [..., S]."""
        count = self.config.hc_mult
        streams = self.embed(token_ids).unsqueeze(-2)
        streams = streams.expand(*streams.shape[:-2], count, -1)
        first = torch.arange(count, device=token_ids.device) == 0
        pre = first.to(self.precision.accumulate)
        return streams, pre.expand(*token_ids.shape, count)

    def forward(
        self, token_ids: Tensor, state: SequenceState, keep_streams: bool = False
    ) -> Hidden:
        """Run all layers on rows of token ids; the state supplies and keeps everything else."""
        streams, pre = self.initial_streams(token_ids)
        taps, before = [], []
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            if keep_streams:
                before.append(streams)
            if layer.engram is not None:
                streams = layer.engram(streams, state)
            if number in self.config.dspark_target_layer_ids:
                taps.append(self.precision.operators.stream_mean(streams))
            entering = layer.prepare(streams, pre)
            if layer.attn.compressor is not None:
                layer.attn.store_entries(entering.x, state)
                kept = state.truncate(number)
                if kept is not None:
                    rows, state = kept
                    entering = entering.keep(rows)
                    taps = [tap[rows] for tap in taps]
                    if rows.numel() == 0:
                        return self._nothing(entering.x, before)
            streams, pre = layer.finish(entering, state)
        x = self.precision.operators.collapse(streams, pre)
        return Hidden(x, torch.cat(taps, dim=-1) if taps else None, before)

    def _nothing(self, x: Tensor, before: list[Tensor]) -> Hidden:
        """The result when no row goes on: no layer or kernel has to work on 0 rows [0, H]."""
        taps = len(self.config.dspark_target_layer_ids)
        return Hidden(x, x.repeat(1, taps) if taps else None, before)

    def logits(self, x: Tensor) -> Tensor:
        """Collapsed streams [..., H] to logits [..., V], float32 or wider."""
        logits: Tensor = self.head(self.norm(x))
        return logits

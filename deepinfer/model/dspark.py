"""DSpark drafter: blocks that read the backbone's last layers and guess a few tokens.

Knows its blocks and heads; must not know how drafts are verified or where windows are kept.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from deepinfer.config import ModelConfig
from deepinfer.model.block import Block
from deepinfer.model.linear import Embedding, Precision, QuantisedLinear, WideLinear
from deepinfer.model.norm import RMSNorm
from deepinfer.model.state import AttentionState


class MarkovHead(nn.Module):
    """Low-rank bias of the next draft's logits by the token before it."""

    def __init__(self, config: ModelConfig, precision: Precision) -> None:
        super().__init__()
        size = (config.vocab_size, config.dspark_markov_rank)
        self.embed = Embedding(*size, precision)
        self.head = WideLinear(*size, precision)

    def forward(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [B] to their embeddings e [B, K] and logit biases [B, V]."""
        embedded = self.embed(token_ids)
        return embedded, self.head(embedded)


class ConfidenceHead(nn.Module):
    """Chance of a draft being accepted, given that those before it were."""

    def __init__(self, config: ModelConfig, precision: Precision) -> None:
        super().__init__()
        width = config.hidden_size + config.dspark_markov_rank
        self.proj = WideLinear(1, width, precision)
        self.operators = precision.operators

    def forward(self, x: Tensor, embedded: Tensor) -> Tensor:
        """Draft states before the norm [B, H] and previous-token embeddings [B, K] to [B]."""
        chance: Tensor = self.operators.confidence(x, embedded, self.proj.weight)
        return chance


class DraftBlock(Block):
    """One draft block; the first also projects the taps, the last also holds the heads."""

    def __init__(self, config: ModelConfig, stage: int, precision: Precision) -> None:
        experts = (config.dspark_n_routed_experts, config.dspark_num_experts_per_tok)
        super().__init__(config, stage, 0, experts, precision)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        if stage == 0:
            taps = len(config.dspark_target_layer_ids) * hidden
            self.main_proj = QuantisedLinear(hidden, taps, precision)
            self.main_norm = RMSNorm(hidden, eps, precision)
        if stage == config.num_nextn_predict_layers - 1:
            self.norm = RMSNorm(hidden, eps, precision)
            self.markov_head = MarkovHead(config, precision)
            self.confidence_head = ConfidenceHead(config, precision)


@dataclass
class Draft:
    """One draft round for B sequences of n slots.

    Attributes:
        base_logits: [B, n, V], before the Markov bias.
        token_ids: [B, n] drafts, slot 0 first.
        logits: [B, n, V] with the bias that each draft was chosen under.
        confidence: [B, n] estimated chance that a draft is accepted if those before it were.
    """

    base_logits: Tensor
    token_ids: Tensor
    logits: Tensor
    confidence: Tensor


def greedy(logits: Tensor, slot: int) -> Tensor:
    """The most likely token [B] of logits [B, V], lowest id among equals."""
    return logits.argmax(-1)


class Drafter(nn.ModuleList):
    """All draft blocks (model description 3.12); empty when the checkpoint has none."""

    def __init__(self, config: ModelConfig, precision: Precision) -> None:
        stages = range(config.num_nextn_predict_layers)
        super().__init__(DraftBlock(config, stage, precision) for stage in stages)
        self.block_size = config.dspark_block_size
        self.noise_token = config.dspark_noise_token_id
        self.precision = precision

    def stage(self, number: int) -> DraftBlock:
        """Draft block `number`, negative numbers from the end."""
        block = self[number]
        assert isinstance(block, DraftBlock)
        return block

    def context_keys(self, taps: Tensor) -> list[tuple[Tensor, RMSNorm]]:
        """Window keys [rows, D] as projected, with their norm, of each stage for target rows.

        Args:
            taps: [rows, A * H] of tokens that the target has processed.
        """
        first = self.stage(0)
        features = first.main_norm(first.main_proj(self.precision.activation(taps)))
        features = self.precision.activation(features)
        layers = [self.stage(i).attn for i in range(len(self))]
        return [(attention.wkv(features), attention.kv_norm) for attention in layers]

    def draft_inputs(self, next_ids: Tensor) -> Tensor:
        """Sampled tokens [B] to the ids of the draft slots [B, n]: the token, then noise."""
        noise = torch.full_like(next_ids, self.noise_token).unsqueeze(-1)
        return torch.cat([next_ids.unsqueeze(-1), noise.expand(-1, self.block_size - 1)], dim=-1)

    def hidden(self, streams: Tensor, pre: Tensor, state: AttentionState) -> Tensor:
        """Initial streams of the slots [..., S, H] to collapsed draft states [..., H]."""
        for number in range(len(self)):
            block = self.stage(number)
            streams, pre = block.finish(block.prepare(streams, pre), state)
        x: Tensor = self.precision.operators.collapse(streams, pre)
        return x

    def decode(
        self,
        x: Tensor,
        base_logits: Tensor,
        next_ids: Tensor,
        choose: Callable[[Tensor, int], Tensor] = greedy,
    ) -> Draft:
        """Draft states to tokens, one slot after the other because of the Markov bias.

        Args:
            x: [B, n, H] draft states before the norm; base_logits: [B, n, V] from the head.
            next_ids: [B] the tokens that slot 0 holds.
            choose: (logits [B, V], slot) to tokens [B].
        """
        last = self.stage(-1)
        previous = next_ids
        tokens, biased, confidence = [], [], []
        for slot in range(self.block_size):
            embedded, bias = last.markov_head(previous)
            confidence.append(last.confidence_head(x[:, slot], embedded))
            biased.append(base_logits[:, slot] + bias)
            previous = choose(biased[-1], slot)
            tokens.append(previous)
        return Draft(
            base_logits,
            torch.stack(tokens, dim=1),
            torch.stack(biased, dim=1),
            torch.stack(confidence, dim=1),
        )

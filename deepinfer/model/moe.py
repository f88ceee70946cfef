"""Mixture of experts: router, routed experts and the shared expert.

Knows one layer's experts; must not know where tokens come from.
"""

import torch
from torch import Tensor, nn

from deepinfer.config import ModelConfig
from deepinfer.model.linear import Linear, Precision, WideLinear, parameter
from deepinfer.ops.moe_gate import moe_gate
from deepinfer.ops.swiglu import swiglu


class Router(WideLinear):
    """Router weight [E, H] and selection bias [E], both in float32 or wider."""

    def __init__(self, experts: int, hidden: int, dtype: torch.dtype) -> None:
        super().__init__(experts, hidden, dtype)
        self.bias = parameter(experts, dtype=dtype)


class Experts(nn.Module):
    """Weights of all routed experts of a layer, stacked: w1, w3 [E, I, H] and w2 [E, H, I]."""

    def __init__(self, experts: int, hidden: int, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.w1 = parameter(experts, width, hidden, dtype=dtype)
        self.w3 = parameter(experts, width, hidden, dtype=dtype)
        self.w2 = parameter(experts, hidden, width, dtype=dtype)


class SharedExpert(nn.Module):
    """The expert that every token visits."""

    def __init__(self, hidden: int, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.w1 = Linear(width, hidden, dtype)
        self.w3 = Linear(width, hidden, dtype)
        self.w2 = Linear(hidden, width, dtype)


class MixtureOfExperts(nn.Module):
    """Feed-forward sublayer (model description 3.9).

    Args:
        experts: E, routed experts of this layer.
        selected: K, experts of each token.
    """

    def __init__(
        self, config: ModelConfig, experts: int, selected: int, precision: Precision
    ) -> None:
        super().__init__()
        self.config = config
        self.selected = selected
        self.precision = precision
        hidden, width = config.hidden_size, config.moe_intermediate_size
        self.gate = Router(experts, hidden, precision.accumulate)
        self.experts = Experts(experts, hidden, width, precision.matrix)
        self.shared_experts = SharedExpert(hidden, width, precision.matrix)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Expert ids [T, K] and route weights [T, K] of rows `x` [T, H]."""
        logits = self.gate(x) / self.config.gate_temp
        scaling, normalise = self.config.routed_scaling_factor, self.config.norm_topk_prob
        return moe_gate(logits, self.gate.bias, self.selected, scaling, normalise)

    def _expert(self, x: Tensor, w: tuple[Tensor, Tensor, Tensor], route: Tensor | None) -> Tensor:
        """w2 . act(w1 x, w3 x) of quantised rows `x`; every product is rounded to their dtype."""
        w1, w3, w2 = w
        linear = nn.functional.linear
        wide = x.to(w1.dtype)
        gate, up = linear(wide, w1).to(x.dtype), linear(wide, w3).to(x.dtype)
        hidden = self.precision.activation(swiglu(gate, up, self.config.swiglu_limit, route))
        return linear(hidden.to(w2.dtype), w2).to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] to [..., H]; routed and shared outputs are summed in float32, rounded once."""
        rows = x.reshape(-1, x.shape[-1])
        ids, weights = self.route(rows)
        quantised = self.precision.activation(rows)
        shared = self.shared_experts
        w = (shared.w1.weight, shared.w3.weight, shared.w2.weight)
        total = self._expert(quantised, w, None).to(self.precision.accumulate)
        # Rows sorted by expert, so that each expert multiplies its own rows once.
        order = ids.flatten().argsort(stable=True)
        tokens = order // self.selected
        weights = weights.flatten()[order]
        counts = torch.bincount(ids.flatten(), minlength=self.experts.w1.shape[0]).tolist()
        start = 0
        for expert, count in enumerate(counts):
            if count == 0:
                continue
            mine = tokens[start : start + count]
            w = (self.experts.w1[expert], self.experts.w3[expert], self.experts.w2[expert])
            y = self._expert(quantised[mine], w, weights[start : start + count])
            total = total.index_add(0, mine, y.to(total.dtype))
            start += count
        return total.to(x.dtype).view_as(x)

"""Mixture of experts: router, routed experts and the shared expert.

Knows one layer's experts; must not know where tokens come from.
"""

import torch
from torch import Tensor, nn

from deepinfer.config import ModelConfig
from deepinfer.model.linear import (
    Activation,
    Codes,
    Precision,
    QuantisedLinear,
    WideLinear,
    parameter,
)
from deepinfer.numerics import FP8_GROUP
from deepinfer.ops.expert_up.prepare import ExpertMatrices, prepare
from deepinfer.ops.grouped_linear import grouped_linear
from deepinfer.ops.moe_plan import plan_block
from deepinfer.ops.swiglu import swiglu

# Matrices are gathered per row up to this many values (of w13): copying them then costs less than
# launching every expert by itself, whose cost does not shrink with the rows.
_MOST_GATHERED = 2**18


class Router(WideLinear):
    """Router weight [E, H] and selection bias [E], the bias in float32 or wider."""

    def __init__(self, experts: int, hidden: int, precision: Precision) -> None:
        super().__init__(experts, hidden, precision)
        self.bias = parameter(experts, dtype=precision.accumulate)


class Experts(nn.Module):
    """Weights of all routed experts of a layer, stacked.

    Attributes:
        w13: [E, 2, I, H], gate and up projections together; w2: [E, H, I]. Packed, these are e2m1
            pairs with half as many bytes, and there are e8m0 scales; `prepare` replaces them all.
        up, down: the packed matrices in the layout of the operators.
    """

    w13: nn.Parameter
    w2: nn.Parameter
    w13_scale: nn.Parameter
    w2_scale: nn.Parameter
    up: ExpertMatrices
    down: ExpertMatrices

    def __init__(self, experts: int, hidden: int, width: int, precision: Precision) -> None:
        super().__init__()
        shapes = {"w13": (experts, 2, width, hidden), "w2": (experts, hidden, width)}
        for name, (*rows, columns) in shapes.items():
            if precision.packed:
                codes = parameter(*rows, columns // 2, dtype=torch.uint8)
                scales = parameter(*rows, -(-columns // FP8_GROUP), dtype=torch.uint8)
                setattr(self, f"{name}_scale", scales)
            else:
                codes = parameter(*rows, columns, dtype=precision.matrix)
            setattr(self, name, codes)

    def prepare(self) -> str:
        """Bring packed matrices into the layout of the operators; says what was done."""
        self.up = prepare(self.w13.flatten(1, 2), self.w13_scale.flatten(1, 2))
        self.down = prepare(self.w2, self.w2_scale)
        for name in ("w13", "w13_scale", "w2", "w2_scale"):
            delattr(self, name)
        return "FP4 experts: words of eight channels, scales relative to their row"


class SharedExpert(nn.Module):
    """The expert that every token visits."""

    def __init__(self, hidden: int, width: int, precision: Precision) -> None:
        super().__init__()
        self.w1 = QuantisedLinear(width, hidden, precision)
        self.w3 = QuantisedLinear(width, hidden, precision)
        self.w2 = QuantisedLinear(hidden, width, precision)


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
        self.gate = Router(experts, hidden, precision)
        self.experts = Experts(experts, hidden, width, precision)
        self.shared_experts = SharedExpert(hidden, width, precision)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Expert ids [T, K] and route weights [T, K] of rows `x` [T, H]."""
        logits = self.gate(x) / self.config.gate_temp
        scaling, normalise = self.config.routed_scaling_factor, self.config.norm_topk_prob
        gate = self.precision.operators.moe_gate
        found: tuple[Tensor, Tensor] = gate(
            logits, self.gate.bias, self.selected, scaling, normalise
        )
        return found

    def _activate(self, gate: Tensor, up: Tensor, route: Tensor | None) -> Tensor:
        hidden = self.precision.activation(swiglu(gate, up, self.config.swiglu_limit, route))
        assert isinstance(hidden, Tensor)
        return hidden

    def _shared(self, x: Activation) -> Tensor:
        """Shared expert on quantised rows [T, H], before the sum."""
        expert, limit = self.shared_experts, self.config.swiglu_limit
        gate, up = expert.w1(x), expert.w3(x)
        if isinstance(x, Codes):
            quantise = self.precision.operators.swiglu_quantise
            codes, scales = quantise(gate, up, limit)
            shared: Tensor = expert.w2(Codes(codes.view(torch.uint8), scales, x.lead))
        else:
            shared = expert.w2(self._activate(gate, up, None))
        return shared

    def _packed(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Routed and shared experts [T, H] of rows [T, H] by the operators for packed matrices."""
        operators, experts = self.precision.operators, self.experts
        block = plan_block(ids.numel(), experts.up.experts)
        plan = operators.moe_plan(ids, experts.up.experts, block)
        seen = self.precision.activation(x)
        assert isinstance(seen, Codes)
        # FP4 experts take groups of 32 channels, FP8 matrices with 128 x 128 scales do not.
        wide = self.precision.wide_scales
        codes, scales = operators.fp8_quantise(x) if wide else (seen.codes, seen.scales)
        hidden = operators.expert_up(
            codes, scales, experts.up, *plan, weights, block, self.config.swiglu_limit
        )
        y = operators.expert_down(*hidden, experts.down, *plan, block)
        shared = self._shared(seen)
        total: Tensor = operators.moe_combine(y, self.selected, shared)
        return total

    def _few_rows(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Sum of routed experts [T, H] by gathering each row's matrices: no sorting, no loop."""
        # index_select takes a third of the time of indexing with two axes.
        w13, w2 = (
            matrices.index_select(0, ids.flatten()).unflatten(0, ids.shape)
            for matrices in (self.experts.w13, self.experts.w2)
        )
        wide = x.to(w13.dtype).unsqueeze(-1)[:, None, None]
        gate, up = torch.matmul(w13, wide).squeeze(-1).to(x.dtype).unbind(-2)
        hidden = self._activate(gate, up, weights).to(w2.dtype)
        y = torch.matmul(w2, hidden.unsqueeze(-1)).squeeze(-1).to(x.dtype)
        return y.to(self.precision.accumulate).sum(1)

    def _many_rows(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The same with rows sorted by expert, so that each expert multiplies its rows once."""
        experts = self.experts
        order = ids.flatten().argsort(stable=True)
        numbers = torch.arange(experts.w2.shape[0], device=ids.device)
        ends = torch.searchsorted(ids.flatten()[order], numbers, right=True).to(torch.int32)
        sorted_rows = x.index_select(0, order // self.selected).to(experts.w2.dtype)
        both = grouped_linear(sorted_rows, experts.w13.flatten(1, 2), ends).to(x.dtype)
        gate, up = both.chunk(2, dim=-1)
        hidden = self._activate(gate, up, weights.flatten()[order])
        y = grouped_linear(hidden.to(experts.w2.dtype), experts.w2, ends).to(x.dtype)
        y = y.index_select(0, order.argsort()).to(self.precision.accumulate)
        return y.unflatten(0, (-1, self.selected)).sum(1)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] to [..., H]; routed and shared outputs are summed in float32, rounded once."""
        rows = x.reshape(-1, x.shape[-1])
        ids, weights = self.route(rows)
        if self.precision.packed:
            return self._packed(rows, ids, weights).view_as(x)
        quantised = self.precision.activation(rows)
        assert isinstance(quantised, Tensor)
        gathered = ids.numel() * self.experts.w13[0].numel()
        routed = self._few_rows if gathered <= _MOST_GATHERED else self._many_rows
        total = routed(quantised, ids, weights) + self._shared(quantised)
        return total.to(x.dtype).view_as(x)

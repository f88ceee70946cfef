"""How exactly a result has to be PyTorch's, by the kind of operator.

Knows operators by name and dtypes; must not know libraries. exact: bit for bit, which is all
whole numbers and all that only moves, picks or rounds values. sum: within float32's rounding of
the sum of magnitudes, which no order of adding can exceed by much. value: a few units in the last
place of each value. row: more of them, where a value depends on many. A value that is not further
from float64 than twice PyTorch's is right in any case, and so is a sum or a row whose largest error
is not larger than that of PyTorch's.
"""

from dataclasses import dataclass
from typing import Literal

from deepinfer.screening.schema import base_name, pointwise

Kind = Literal["exact", "sum", "value", "row"]

_EXACT = {
    "abs", "alias", "alias_copy", "amax", "amin", "arange", "argmax", "argmin", "argsort",
    "as_strided", "cat", "ceil", "clamp", "clamp_max", "clamp_min", "clip", "clone",
    "constant_pad_nd", "contiguous", "copy_", "copysign", "detach", "diag", "diag_embed",
    "diagonal", "embedding", "expand", "eye", "fill", "fill_", "flip", "floor", "full",
    "full_like", "gather", "hstack", "index", "index_copy", "index_copy_", "index_put",
    "index_put_", "_index_put_impl_", "index_select", "lift_fresh", "lift_fresh_copy",
    "masked_fill", "masked_fill_", "masked_scatter", "masked_select", "max", "maximum", "min",
    "minimum", "narrow", "neg", "new_full", "new_ones", "new_zeros", "nonzero", "ones",
    "ones_like", "pad", "permute", "relu", "repeat", "repeat_interleave", "reshape", "roll",
    "round", "scatter", "scatter_", "select", "select_scatter", "sign", "slice", "slice_scatter",
    "sort", "split", "squeeze", "stack", "t", "t_copy", "tile", "_to_copy", "to", "topk",
    "transpose", "tril", "triu", "trunc", "unbind", "unflatten", "unsqueeze", "view", "vstack",
    "where", "zero", "zero_", "zeros", "zeros_like", "scalar_tensor",
}  # fmt: skip
_SUM = {
    "sum", "mean", "mm", "bmm", "addmm", "addmv", "baddbmm", "matmul", "linear", "mv", "cumsum",
    "dot", "vdot", "einsum", "_grouped_mm", "index_add", "index_add_", "scatter_add",
    "scatter_add_",
}  # fmt: skip
# Which of several equal values comes first is nobody's promise.
_SELECTING = {"topk", "sort", "argsort"}
_UNINITIALISED = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_",
}  # fmt: skip
_RANDOM = {
    "rand", "rand_like", "randn", "randn_like", "randint", "randperm", "normal", "normal_",
    "uniform_", "exponential_", "bernoulli", "bernoulli_", "multinomial", "native_dropout",
}  # fmt: skip


@dataclass(frozen=True)
class Rule:
    """How a result is compared.

    Attributes:
        ulps: units in the last place that every value may be off; 0 for exact.
        selecting: whether places of equal values may be in another order.
    """

    kind: Kind
    ulps: int
    selecting: bool = False


def rule_of(operator: str) -> Rule | None:
    """The rule of an operator, None where there is nothing that could be compared."""
    name = base_name(operator)
    if name in _UNINITIALISED | _RANDOM:
        return None
    selecting = name in _SELECTING and operator.partition(".")[2] in ("", "values")
    if name in _EXACT or name.rstrip("_") in _EXACT:
        return Rule("exact", 0, selecting)
    if name in _SUM:
        return Rule("sum", 1)
    return Rule("value", 4) if pointwise(operator) else Rule("row", 32)

"""Calls whose result PyTorch leaves open, so that no answer to them is wrong.

Knows arguments; must not know libraries. Of two values that are written to one place any may stay,
and a number that a whole-number dtype cannot hold may become anything.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deepinfer.screening.schema import base_name, value_of

_BY_ROW = {"index_copy", "index_copy_"}
_BY_LIST = {"index_put", "index_put_", "_index_put_impl_"}
_BY_DIM = {"scatter", "scatter_"}
_CONVERTING = {"copy_", "_to_copy", "to"}
WRITING = _BY_ROW | _BY_LIST | _BY_DIM


def left_open(operator: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """What a call's result depends on that PyTorch does not define, "" if nothing."""
    if written_twice(operator, args, kwargs):
        return "places repeat: which of two values stays is left open"
    if _does_not_fit(operator, args, kwargs):
        return "values do not fit the dtype: what they become is left open"
    return ""


def _does_not_fit(operator: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a number is converted to whole numbers that do not reach so far."""
    base = base_name(operator)
    if base not in _CONVERTING:
        return False
    source, dtype = args[0], value_of(operator, "dtype", args, kwargs)
    if base == "copy_":
        source, dtype = args[1], args[0].dtype
    whole = dtype is not None and not (dtype.is_floating_point or dtype.is_complex)
    if not whole or dtype == torch.bool or not source.is_floating_point():
        return False
    limits, values = torch.iinfo(dtype), source.double()
    # Conversion drops the fraction; 2^63 - 1 itself is no float64.
    fits = (values > limits.min - 1.0) & (values < limits.max + 1.0)
    fits |= values == limits.min
    return not bool(fits.all())


def written_twice(operator: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of one of WRITING names a place more than once; False for others, and where
    values are added up."""
    base = base_name(operator)
    if base not in WRITING or value_of(operator, "accumulate", args, kwargs):
        return False
    target = args[0]
    if base in _BY_LIST:
        given = [i for i in value_of(operator, "indices", args, kwargs) if i is not None]
        if any(index.dtype == torch.bool for index in given):
            return False  # a mask has every place once
        sizes = [size for size, i in zip(target.shape, args[1], strict=False) if i is not None]
        places = torch.stack(torch.broadcast_tensors(*given)).flatten(1)
        places = places % torch.tensor(sizes, device=places.device).unsqueeze(1)
        return _repeats(places)
    index: Tensor = value_of(operator, "index", args, kwargs)
    if base in _BY_ROW:
        return _repeats(index.reshape(1, -1))
    if index.numel() == 0 or index.dim() == 0:
        return False
    ordered = index.sort(dim=value_of(operator, "dim", args, kwargs)).values
    along = ordered.movedim(value_of(operator, "dim", args, kwargs), -1)
    return bool((along[..., 1:] == along[..., :-1]).any())


def _repeats(places: Tensor) -> bool:
    """Whether a column of [n, m] occurs twice."""
    return places.shape[1] > 0 and places.unique(dim=1).shape[1] < places.shape[1]

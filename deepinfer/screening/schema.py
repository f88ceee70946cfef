"""What PyTorch says of its operators: arguments, and what a call writes to.

Knows schemas and tags; must not know values.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from deepinfer.libraries.replace import overload


def base_name(operator: str) -> str:
    """ "add" of "add.Tensor"."""
    return operator.partition(".")[0]


def pointwise(operator: str) -> bool:
    """Whether every value of the result depends on the values at its place alone."""
    return torch.Tag.pointwise in overload(operator).tags


def argument_names(operator: str) -> list[str]:
    """Names of all arguments, in order."""
    return [argument.name for argument in overload(operator)._schema.arguments]


def written(operator: str) -> list[int]:
    """Numbers of the arguments that a call writes to."""
    arguments = overload(operator)._schema.arguments
    return [n for n, a in enumerate(arguments) if a.alias_info and a.alias_info.is_write]


def in_order(operator: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """All arguments of a call in the order of the schema, None for those that were not given."""
    return [*args, *(kwargs.get(name) for name in argument_names(operator)[len(args) :])]


def value_of(operator: str, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """One argument of a call by name, its default where it was not given."""
    given = dict(zip(argument_names(operator), args, strict=False)) | dict(kwargs)
    defaults = {a.name: a.default_value for a in overload(operator)._schema.arguments}
    return given.get(name, defaults.get(name))

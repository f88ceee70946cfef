"""All operators, found by their folders.

Knows where specs are; must not know what they describe.
"""

import importlib
import pkgutil
from functools import cache

import deepinfer.ops
from deepinfer.ops.spec import OpSpec


@cache
def specs() -> dict[str, OpSpec]:
    """Every operator's spec by name, in alphabetical order.

    A folder of deepinfer.ops with a module `spec` defines one or more of them in `SPECS`.
    """
    found: dict[str, OpSpec] = {}
    for folder in pkgutil.iter_modules(deepinfer.ops.__path__):
        if not folder.ispkg:
            continue
        name = f"deepinfer.ops.{folder.name}.spec"
        if importlib.util.find_spec(name) is None:
            continue
        for spec in importlib.import_module(name).SPECS:
            assert spec.name not in found, f"two operators are called {spec.name}"
            found[spec.name] = spec
    return dict(sorted(found.items()))

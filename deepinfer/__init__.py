"""DeepInfer for Hopper: runs DeepSeek-V4.1 checkpoints on NVIDIA Hopper GPUs and on CPUs.

Importing the package imports no torch: the names below are loaded when they are first used.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepinfer.engine.llm import LLM, create_llm
    from deepinfer.sampling.params import SamplingParams

__version__ = "0.1.0"

_HOMES = {
    "LLM": "deepinfer.engine.llm",
    "create_llm": "deepinfer.engine.llm",
    "SamplingParams": "deepinfer.sampling.params",
}
__all__ = ["LLM", "SamplingParams", "__version__", "create_llm"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'deepinfer' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)

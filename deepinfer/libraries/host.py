"""Versions of what operators depend on: a library, torch, triton, and the GPU.

Knows how to ask for them; must not know what they mean for an operator.
"""

import importlib.metadata

import torch


def versions(device: str, package: str | None = None) -> dict[str, str]:
    """Versions that have to be equal for what was proven of `package` to hold.

    Args:
        device: "cuda" or "cpu".
    """
    found = {"torch": torch.__version__, "triton": _version("triton")}
    found["gpu"] = torch.cuda.get_device_name() if device == "cuda" else "none"
    if package is not None:
        found[package] = _version(package)
    return found


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"

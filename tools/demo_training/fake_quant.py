"""Straight-through quantisation of weights, equal to what the checkpoint writer stores.

Knows formats and parameters; must not know data or losses.
"""

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from deepinfer.checkpoint.loader import parameter_slot
from deepinfer.checkpoint.names import Format, tensor_specs
from deepinfer.checkpoint.quant import BLOCK
from deepinfer.model.linear import Embedding, Linear
from deepinfer.numerics import (
    E2M1_MAX,
    E4M3_MAX,
    ceil_power_of_two,
    decode_e4m3,
    encode_e4m3,
    round_e2m1,
    straight_through,
)

_SMALLEST = 2.0**-126


def _round_fp8(weight: Tensor) -> Tensor:
    rows, columns = weight.shape
    blocks = weight.view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
    amax = blocks.abs().amax(dim=(1, 3), keepdim=True)
    scale = ceil_power_of_two((amax / E4M3_MAX).clamp_min(_SMALLEST))
    return (decode_e4m3(encode_e4m3(blocks / scale)) * scale).view_as(weight)


def _round_fp8_row(rows: Tensor) -> Tensor:
    groups = rows.unflatten(-1, (-1, BLOCK))
    amax = groups.abs().amax(-1, keepdim=True)
    scale = ceil_power_of_two((amax / E4M3_MAX).clamp_min(_SMALLEST))
    return (decode_e4m3(encode_e4m3(groups / scale)) * scale).flatten(-2)


def _round_fp4(weight: Tensor) -> Tensor:
    groups = weight.unflatten(-1, (-1, BLOCK))
    amax = groups.abs().amax(-1, keepdim=True)
    scale = ceil_power_of_two((amax / E2M1_MAX).clamp_min(_SMALLEST))
    return (round_e2m1(groups / scale) * scale).flatten(-2)


class FakeQuant(nn.Module):
    """A weight as it will be read back from the checkpoint, in the dtype that products take."""

    def __init__(self, stored: Format, dtype: torch.dtype) -> None:
        super().__init__()
        self.function = _round_fp8 if stored == "fp8" else _round_fp4
        self.dtype = dtype

    def forward(self, weight: Tensor) -> Tensor:
        """Rounded weight; the gradient passes straight through."""
        return straight_through(weight, self.function).to(self.dtype)


class TrainableTable(nn.Module):
    """An n-gram table in float32 whose looked-up rows are rounded as stored."""

    def __init__(self, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.dtype = dtype
        self.weight = nn.Parameter(torch.zeros(rows, width, device=device))

    def forward(self, rows: Tensor) -> Tensor:
        """Rows [..., C] to their values side by side, [..., C * F]."""
        values = nn.functional.embedding(rows, self.weight)
        return straight_through(values, _round_fp8_row).to(self.dtype).flatten(-2)


def make_trainable(model: nn.Module, dtype: torch.dtype) -> None:
    """Turn every parameter of a Transformer into float32 with a gradient, quantised in use."""
    for module in list(model.modules()):
        if hasattr(module, "embed") and type(module).__name__ == "Engram":
            rows, width = module.embed.weight.shape
            device = module.q_weight.device
            module.embed = TrainableTable(rows, width, module.precision.dtype, device)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            values = parameter.detach().float()
            setattr(module, name, nn.Parameter(values, requires_grad=name != "bias"))
    modules = dict(model.named_modules())
    formats: dict[str, Format] = {}
    for spec in tensor_specs(model.config):
        formats[parameter_slot(spec.name)[0]] = spec.format
    for name, stored in formats.items():
        owner, _, attribute = name.rpartition(".")
        if stored in ("fp8", "fp4"):
            fake: nn.Module = FakeQuant(stored, dtype)
        elif stored == "bf16" and type(modules[owner]) in (Linear, Embedding):
            fake = _Cast(dtype)
        else:
            continue
        parametrize.register_parametrization(modules[owner], attribute, fake, unsafe=True)


class _Cast(nn.Module):
    """bfloat16 weights, in the dtype that products take."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, weight: Tensor) -> Tensor:
        """Rounded weight."""
        return weight.to(torch.bfloat16).to(self.dtype)


def master_values(model: nn.Module) -> dict[str, Tensor]:
    """float32 values by plain parameter name, for the checkpoint writer."""
    values = {}
    for name, parameter in model.named_parameters():
        plain = name.replace("parametrizations.", "").replace(".original", "")
        values[plain] = parameter.detach()
    return values

"""Initial values of the demo model.

Knows parameters by name; must not know training.
"""

import math
from pathlib import Path

import torch
from torch import Tensor, nn

from deepinfer.checkpoint.loader import load_model
from deepinfer.config import ModelConfig
from deepinfer.model.engram import PackedTable
from deepinfer.model.linear import Precision


def _mixing_base(config: ModelConfig) -> Tensor:
    """Start as a plain residual net: pre averages the streams, post is 1, comb the identity."""
    count = config.hc_mult
    pre = torch.full((count,), -math.log(count - 1.0))
    comb = torch.full((count, count), 0.0)
    comb.fill_diagonal_(6.0)
    return torch.cat([pre, torch.zeros(count), comb.flatten()])


@torch.no_grad()
def initialise(model: nn.Module, seed: int) -> None:
    """Draw all values; matrices N(0, 1/in), those that write to the streams damped by depth."""
    config: ModelConfig = model.config
    generator = torch.Generator().manual_seed(seed)
    depth = (2 * config.num_hidden_layers) ** -0.5
    for name, parameter in model.named_parameters():
        plain = name.replace("parametrizations.", "").replace(".original", "")
        shape = parameter.shape
        values = torch.randn(shape, generator=generator)
        if "norm" in plain or plain.endswith(("q_weight", "k_weight")):
            values = torch.ones(shape)
        elif plain.endswith(("hc_attn.base", "hc_ffn.base")):
            values = _mixing_base(config)
        elif plain.endswith(("hc_attn.scale", "hc_ffn.scale")):
            values = torch.full(shape, 0.1)
        elif plain.endswith((".bias", "attn_sink", "head.weight")):
            values = torch.zeros(shape)
        elif plain.endswith("embed.weight"):
            values = values * (0.05 if "engram" in plain or "markov" in plain else 0.5)
        elif plain.endswith("confidence_head.proj.weight"):
            values = torch.zeros(shape)
        else:
            damped = plain.endswith(("wo_b.weight", "w2", "w2.weight"))
            values = values * shape[-1] ** -0.5 * (depth if damped else 1.0)
        parameter.copy_(values)


@torch.no_grad()
def continue_from(model: nn.Module, folder: Path) -> None:
    """Take all values from a checkpoint of the same config, as its formats hold them."""
    wide = Precision(torch.float32, torch.float32)
    loaded = load_model(folder, model.config, wide, torch.device("cpu"))
    values = dict(loaded.named_parameters())
    for name, module in loaded.named_modules():
        if isinstance(module, PackedTable):
            rows = torch.arange(len(module.weight)).unsqueeze(-1)
            values[f"{name}.weight"] = module(rows)
    for name, parameter in model.named_parameters():
        plain = name.replace("parametrizations.", "").replace(".original", "")
        parameter.copy_(values[plain])

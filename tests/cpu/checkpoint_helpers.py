"""Checkpoint files taken apart and put together without the code under test."""

import json
import math
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from deepinfer.checkpoint.hf_config import load_model_config
from deepinfer.checkpoint.loader import load_model
from deepinfer.model.linear import Precision
from deepinfer.model.transformer import Transformer

CPU = torch.device("cpu")
FLOAT32 = Precision(torch.float32, torch.float32)


def load(folder: Path, precision: Precision = FLOAT32) -> Transformer:
    """The model of `folder` on the CPU."""
    return load_model(folder, load_model_config(folder), precision, CPU)


def same_parameters(a: nn.Module, b: nn.Module) -> bool:
    """Whether two models have the same parameters, bit for bit."""
    left, right = dict(a.named_parameters()), dict(b.named_parameters())
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype
        and torch.equal(left[name].view(torch.uint8), right[name].view(torch.uint8))
        for name in left
    )


def copy_of(folder: Path, target: Path) -> Path:
    """A copy of checkpoint `folder` that a test may change."""
    shutil.copytree(folder, target)
    return target


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Apply `change` to the tensors of a checkpoint of one file."""
    file = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(tensors)
    file.unlink()
    save_file(tensors, file, metadata={"format": "pt"})


def header_and_data(file: Path) -> tuple[dict[str, Any], bytes]:
    """The two parts of a safetensors file."""
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def join(header: dict[str, Any], data: bytes) -> bytes:
    """A safetensors file of its two parts."""
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def split_in_shards(folder: Path, shards: int, prefix: str = "") -> None:
    """Deal the tensors of a checkpoint of one file to several, with an index."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    weight_map = {}
    for number in range(shards):
        name = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = {prefix + key: tensors[key].clone() for key in sorted(tensors)[number::shards]}
        save_file(part, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    file.unlink()
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def is_mapped(tensor: Tensor, file: Path) -> bool:
    """Whether the tensor's memory is a mapping of `file`, by the kernel's word."""
    address = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, *_, path = line.split(maxsplit=5)
        start, end = (int(part, 16) for part in span.split("-"))
        if start <= address < end:
            return address + tensor.nbytes <= end and path == str(file.resolve())
    return False


_E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
_E4M3 = [
    math.ldexp(code % 8, -9) if code < 8 else math.ldexp(8 + code % 8, code // 8 - 10)
    for code in range(127)
]
E4M3 = torch.tensor([*_E4M3, math.nan, *(-value for value in _E4M3), math.nan], dtype=torch.float64)
E2M1 = torch.tensor([*_E2M1, *(-value for value in _E2M1)], dtype=torch.float64)
E8M0 = torch.tensor([math.ldexp(1.0, code - 127) for code in range(255)], dtype=torch.float64)


def stored_values(folder: Path) -> dict[str, Tensor]:
    """Every weight of a checkpoint of one file in float64, worked out from its bytes."""
    raw = load_file(folder / "model.safetensors")
    result = {}
    for name, tensor in raw.items():
        scale = raw.get(name.removesuffix("weight") + "scale") if "weight" in name else None
        if name.endswith(".scale"):
            continue
        if scale is None:
            result[name] = tensor.double()
            continue
        codes = tensor.view(torch.uint8).long()
        if tensor.dtype == torch.int8:
            values = torch.stack([E2M1[codes % 16], E2M1[codes // 16]], dim=-1).flatten(1)
        else:
            values = E4M3[codes]
        powers = E8M0[scale.view(torch.uint8).long()]
        rows, columns = (torch.arange(n) for n in values.shape)
        per_row = scale.shape[0] == values.shape[0]
        powers = powers[rows if per_row else rows // 32][:, columns // 32]
        result[name] = values * powers
    return result

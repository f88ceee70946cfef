"""Fills a model's parameters from a checkpoint, each exactly once.

Knows which tensor belongs to which parameter; must not know how a model runs.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from deepinfer.checkpoint.names import (
    SCALE_DTYPE,
    STORED_DTYPE,
    TensorSpec,
    is_image_tensor,
    tensor_specs,
)
from deepinfer.checkpoint.quant import dequantise_fp4, dequantise_fp8
from deepinfer.checkpoint.reader import CheckpointReader
from deepinfer.config import ModelConfig
from deepinfer.errors import CheckpointError
from deepinfer.log import logger, warn_once
from deepinfer.model.linear import Precision, QuantisedLinear
from deepinfer.model.moe import Experts
from deepinfer.model.transformer import Transformer

Progress = Callable[[Iterable[TensorSpec], int], Iterable[TensorSpec]]

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(w[123])\.weight")
_MIXING = re.compile(r"(.*\.hc_(?:attn|ffn))_(fn|base|scale)")


def parameter_slot(name: str) -> tuple[str, tuple[int, ...]]:
    """Parameter of tensor `name` in the model, and its place in it (experts are stacked)."""
    expert = _EXPERT.fullmatch(name)
    if expert:
        prefix, number, matrix = expert[1], int(expert[2]), expert[3]
        if matrix == "w2":
            return f"{prefix}.w2", (number,)
        return f"{prefix}.w13", (number, 0 if matrix == "w1" else 1)
    mixing = _MIXING.fullmatch(name)
    if mixing:
        return f"{mixing[1]}.{mixing[2]}", ()
    return name, ()


def load_model(
    folder: Path,
    config: ModelConfig,
    precision: Precision,
    device: torch.device,
    progress: Progress | None = None,
) -> Transformer:
    """The model of checkpoint `folder` on `device`, every parameter filled.

    Quantised matrices are dequantised exactly into the matrix dtype, or of a packed model brought
    into the layout of its operators; n-gram tables keep their packed bytes and, on a CPU, stay
    mapped to the file.

    Args:
        progress: wraps the iteration over tensors, for a progress bar.

    Raises:
        CheckpointError: lists missing, unknown, wrongly shaped or wrongly typed tensors.
    """
    specs = list(tensor_specs(config))
    with CheckpointReader(folder) as reader, torch.inference_mode(False), torch.no_grad():
        # First of all: sizes in config.json that no file has may be too large to build.
        _check_inventory(reader, specs)
        with torch.device("meta"):
            model = Transformer(config, precision)
        # Buffers (rotary tables, hash constants) are built on the CPU; only they can move now.
        for module in model.modules():
            for key, buffer in module.named_buffers(recurse=False):
                setattr(module, key, buffer.to(device))
        note = reader.note()
        if note:
            warn_once(f"{folder}: {note}")
        filled = _Filler(model, device)
        for spec in specs if progress is None else progress(specs, len(specs)):
            filled.fill(spec, reader)
        filled.check_complete()
        if precision.packed:
            _prepare(model)
    return model.eval()


def _prepare(model: nn.Module) -> None:
    """Bring packed matrices into the layout of the operators, and say so."""
    done: Counter[str] = Counter()
    for module in list(model.modules()):
        if isinstance(module, QuantisedLinear | Experts):
            done[module.prepare()] += 1
    for what, count in sorted(done.items()):
        logger.info(f"{count} x {what}")


def _check_inventory(reader: CheckpointReader, specs: list[TensorSpec]) -> None:
    expected: dict[str, tuple[str, tuple[int, ...]]] = {}
    for spec in specs:
        expected[spec.name] = (STORED_DTYPE[spec.format], spec.stored_shape)
        if spec.scale_name is not None:
            expected[spec.scale_name] = (SCALE_DTYPE, spec.scale_shape)
    missing = [name for name in expected if name not in reader]
    images = [name for name in reader if is_image_tensor(name) and name not in expected]
    unknown = [name for name in reader if name not in expected and not is_image_tensor(name)]
    wrong = []
    for name, (dtype, shape) in expected.items():
        if name in reader:
            found = reader.describe(name)
            accepted = {dtype, "U8"} if dtype in ("I8", SCALE_DTYPE) else {dtype}
            if found[0] not in accepted or found[1] != shape:
                wrong.append(f"{name} is {found[0]} {list(found[1])}, not {dtype} {list(shape)}")
    problems = [
        f"{len(names)} {kind} tensors: {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}"
        for kind, names in (("missing", missing), ("unknown", unknown), ("wrong", wrong))
        if names
    ]
    if problems:
        raise CheckpointError(f"{reader.folder} does not match its config.json; "
                              + "; ".join(problems))  # fmt: skip
    if images:
        warn_once(f"{len(images)} tensors for image input are skipped: only text is supported")


class _Filler:
    """Assigns tensors to parameters and counts what was filled."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._owners = dict(model.named_modules())
        self._parameters = {name for name, _ in model.named_parameters()}
        self._filled: dict[str, set[tuple[int, ...]]] = {}
        self._device = device

    def fill(self, spec: TensorSpec, reader: CheckpointReader) -> None:
        """Read one tensor and put it into its parameter."""
        values = reader.tensor(spec.name)
        name, place = parameter_slot(spec.name)
        if spec.scale_name is not None and self._is_packed(name):
            self._assign(name, place, values)
            scale_name = f"{name}_scale" if place else name.removesuffix("weight") + "scale"
            self._assign(scale_name, place, reader.tensor(spec.scale_name))
            return
        if spec.scale_name is not None:
            dequantise = dequantise_fp8 if spec.format == "fp8" else dequantise_fp4
            scale = reader.tensor(spec.scale_name).to(self._device)
            values = dequantise(values.to(self._device), scale)
        self._assign(name, place, values)

    def _is_packed(self, name: str) -> bool:
        owner, _, attribute = name.rpartition(".")
        packed: bool = getattr(self._owners[owner], attribute).dtype == torch.uint8
        return packed

    def _assign(self, name: str, place: tuple[int, ...], values: Tensor) -> None:
        assert name in self._parameters, f"no parameter {name} in the model"
        owner, _, attribute = name.rpartition(".")
        module = self._owners[owner]
        target = getattr(module, attribute)
        shape = target.shape[len(place) :]
        assert values.shape == shape, f"{name}: {tuple(values.shape)} into {tuple(shape)}"
        if not place:
            # A table of bytes on the CPU stays a view of the mapped file; the rest is converted.
            data = values.to(self._device, target.dtype)
            setattr(module, attribute, nn.Parameter(data, requires_grad=False))
        else:
            if target.is_meta:
                empty = torch.empty(target.shape, dtype=target.dtype, device=self._device)
                target = nn.Parameter(empty, requires_grad=False)
                setattr(module, attribute, target)
            target[place].copy_(values)
        filled = self._filled.setdefault(name, set())
        assert place not in filled, f"{name}{list(place)} filled twice"
        filled.add(place)

    def check_complete(self) -> None:
        """Every parameter, and every part of a stacked one, must have been filled."""
        for name in self._parameters:
            filled = self._filled.get(name, set())
            owner, _, attribute = name.rpartition(".")
            shape = getattr(self._owners[owner], attribute).shape
            depth = len(next(iter(filled), ()))
            assert len(filled) == math.prod(shape[:depth]), f"{name} is not filled completely"

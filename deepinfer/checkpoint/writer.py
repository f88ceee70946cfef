"""Writes a complete checkpoint in the released format from any state, trained or random.

Knows formats and files; must not know where values come from.
"""

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from deepinfer.checkpoint.hf_config import parse_model_config
from deepinfer.checkpoint.loader import parameter_slot
from deepinfer.checkpoint.names import Format, TensorSpec, tensor_specs
from deepinfer.checkpoint.quant import (
    dequantise_fp8_row,
    quantise_fp4,
    quantise_fp8,
    quantise_fp8_row,
)
from deepinfer.checkpoint.token_map import build_token_map
from deepinfer.config import ModelConfig
from deepinfer.errors import CheckpointError
from deepinfer.model.engram import table_rows

Values = Callable[[TensorSpec], Tensor]

_QUANTISERS: dict[Format, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "fp8": quantise_fp8,
    "fp8_row": quantise_fp8_row,
    "fp4": quantise_fp4,
}
_STORED_VIEW: dict[Format, torch.dtype] = {
    "fp8": torch.float8_e4m3fn,
    "fp8_row": torch.float8_e4m3fn,
    "fp4": torch.int8,
}


def complete_config(config: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """`config` (a config.json) with the n-gram sizes that follow from the tokenizer filled in."""
    result = copy.deepcopy(dict(config))
    text = result["text_config"]
    if text.get("engram_layer_ids"):
        text["engram_compressed_vocab_size"] = max(build_token_map(tokenizer)) + 1
        text["engram_num_embeddings"] = [1] * len(text["engram_layer_ids"])
        text["engram_num_embeddings"] = table_rows(parse_model_config(result))
    return result


def model_values(model: torch.nn.Module) -> Values:
    """Values of every tensor taken from a model's parameters, packed tables dequantised."""
    parameters = dict(model.named_parameters())

    def values(spec: TensorSpec) -> Tensor:
        name, place = parameter_slot(spec.name)
        tensor = parameters[name].detach()
        if tensor.dtype == torch.uint8:
            scale = parameters[name.removesuffix("weight") + "scale"].detach()
            return dequantise_fp8_row(tensor, scale).cpu()
        return tensor[place].float().cpu()

    return values


def _stored(spec: TensorSpec, values: Tensor) -> dict[str, Tensor]:
    if tuple(values.shape) != spec.shape:
        raise CheckpointError(f"{spec.name}: values of shape {tuple(values.shape)}; expected"
                              f" {spec.shape}")  # fmt: skip
    # Values past the range of the stored dtype become infinite on the way into it.
    values = values.to(torch.bfloat16 if spec.format == "bf16" else torch.float32)
    if not torch.isfinite(values).all():
        raise CheckpointError(f"{spec.name}: values that are not finite cannot be written")
    if spec.scale_name is None:
        return {spec.name: values.contiguous()}
    codes, scale = _QUANTISERS[spec.format](values)
    return {
        spec.name: codes.view(_STORED_VIEW[spec.format]),
        spec.scale_name: scale.contiguous().view(torch.float8_e8m0fnu),
    }


def _shards(config: ModelConfig, values: Values, most_bytes: int) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    size = 0
    for spec in tensor_specs(config):
        tensors = _stored(spec, values(spec))
        added = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        if shard and size + added > most_bytes:
            yield shard
            shard, size = {}, 0
        shard.update(tensors)
        size += added
    yield shard


def write_checkpoint(
    folder: Path,
    config: Mapping[str, Any],
    tokenizer: Tokenizer,
    values: Values,
    shard_bytes: int = 5 * 2**30,
    note: str | None = None,
) -> None:
    """Write config.json, tokenizer.json and safetensors into `folder`, made if needed.

    Args:
        config: a complete config.json (see `complete_config`).
        values: logical values [out, in] of each tensor; quantised here.
        shard_bytes: largest safetensors file; more than one gets an index.
        note: shown to everybody who loads the checkpoint.

    Raises:
        ConfigError: the config is not valid; CheckpointError: values of a wrong shape, or not
            finite. A checkpoint that `folder` holds already is left as it is then.
    """
    parsed = parse_model_config(config)
    folder.mkdir(parents=True, exist_ok=True)
    metadata = {"format": "pt"} | ({"note": note} if note else {})
    weight_map: dict[str, str] = {}
    files: list[Path] = []
    total = 0
    try:
        for number, shard in enumerate(_shards(parsed, values, shard_bytes), start=1):
            file = folder / f"part-{number:05d}.safetensors"
            files.append(file)
            save_file(shard, file, metadata=metadata)
            file.chmod(0o644)  # the library makes files that only their owner can read
            weight_map.update(dict.fromkeys(shard, file.name))
            total += sum(tensor.numel() * tensor.element_size() for tensor in shard.values())
    except BaseException:
        for file in files:
            file.unlink(missing_ok=True)
        raise
    for old in folder.glob("model*.safetensors*"):
        old.unlink()
    names = {file.name: "model.safetensors" if len(files) == 1 else
             f"model-{number:05d}-of-{len(files):05d}.safetensors"
             for number, file in enumerate(files, start=1)}  # fmt: skip
    for file in files:
        file.rename(folder / names[file.name])
    if len(files) > 1:
        index = {
            "metadata": {"total_size": total},
            "weight_map": {name: names[file] for name, file in weight_map.items()},
        }
        _write_json(folder / "model.safetensors.index.json", index)
    _write_json(folder / "config.json", config)
    tokenizer.save(str(folder / "tokenizer.json"))


def _write_json(file: Path, data: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

"""From options to a loaded model: the order in which a checkpoint folder is read and checked.

Knows which parts depend on which; must not know requests.
"""

import dataclasses
import difflib
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import Tensor

from deepinfer.checkpoint.hf_config import load_model_config
from deepinfer.checkpoint.loader import load_model
from deepinfer.checkpoint.names import TensorSpec
from deepinfer.checkpoint.token_map import checked_token_map
from deepinfer.checkpoint.tokenizer import Tokenizer
from deepinfer.config import Decision, EngineConfig, EngineOptions, Host, ModelConfig, resolve
from deepinfer.env import read_environment
from deepinfer.errors import ConfigError
from deepinfer.kv.plan import plan_memory, weight_bytes
from deepinfer.libraries.switch import switch
from deepinfer.model.linear import Precision
from deepinfer.model.transformer import Transformer
from deepinfer.ops.select import REFERENCE, Operators, Wishes, select


@dataclass(frozen=True)
class Loaded:
    """A checkpoint in memory with every setting decided.

    Attributes:
        token_map: [V] int64 n-gram class of every token id, None without n-gram layers.
    """

    config: EngineConfig
    decisions: list[Decision]
    model_config: ModelConfig
    tokenizer: Tokenizer
    model: Transformer
    token_map: Tensor | None


def options_from(model: str | Path, settings: dict[str, Any]) -> EngineOptions:
    """Settings by name as options.

    Raises:
        ConfigError: a name is unknown; the nearest known one is named.
    """
    known = [field.name for field in dataclasses.fields(EngineOptions)]
    for name in settings:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise ConfigError(f"unknown setting {name!r}; did you mean {near!r}?")
    return EngineOptions(model=str(model), **settings)


def this_host() -> Host:
    """What this machine offers."""
    return Host(cuda=torch.cuda.is_available(), cores=os.cpu_count() or 1)


def load(options: EngineOptions, progress: bool = False) -> Loaded:
    """Decide the settings and load the checkpoint; `progress` shows a bar.

    Also sets the number of CPU threads of this process, and exact sums in CUDA matrix products.

    Raises:
        ConfigError, CheckpointError, TokenizerError: what is wrong with which file or setting, or
            what does not fit the GPU.
    """
    folder = Path(options.model)
    model_config = load_model_config(folder)
    config, decisions = resolve(options, read_environment(), model_config, this_host())
    tokenizer = Tokenizer.load(Path(config.tokenizer))
    device = torch.device(config.device)
    # The process's device is set by now, and nothing is on it yet: FlagGems may be imported.
    switch(config.flaggems, Path(config.flaggems_allowlist) if config.flaggems_allowlist else None,
           device)  # fmt: skip
    token_map = None
    if model_config.engram_layer_ids:
        classes = checked_token_map(tokenizer.inner, model_config.engram_compressed_vocab_size)
        # Ids past the tokenizer's last (padding rows of the embedding) count as padding.
        pad = classes[model_config.engram_pad_token_id]
        classes += [pad] * (model_config.vocab_size - len(classes))
        token_map = torch.tensor(classes, dtype=torch.int64, device=device)
    torch.set_num_threads(config.threads)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    bar = _with_bar if progress else None
    precision = _precision(config, select(wishes(config)))
    if config.device == "cuda":
        config, decisions = _planned(config, decisions, model_config, precision)
    model = load_model(folder, model_config, precision, device, bar)
    return Loaded(config, decisions, model_config, tokenizer, model, token_map)


def wishes(config: EngineConfig) -> Wishes:
    """What the settings say about operators."""
    operators = dict(entry.split("=", 1) for entry in config.op)
    return Wishes(
        device=config.device,
        gpu=torch.cuda.get_device_name() if config.device == "cuda" else "",
        backend=config.ops_backend,
        operators=operators,
        tile_kernels={"tile": "tilelang"}.get(config.kernels, config.kernels),
        strict=config.ops_strict,
        batch_invariant=config.batch_invariant,
        without_tilelang=config.simulate_no_tilelang,
    )


def choose_operators(options: EngineOptions) -> Operators:
    """The operators that a checkpoint would run with, without loading it.

    Raises:
        ConfigError: a setting is wrong, or a wish cannot be met.
    """
    model_config = load_model_config(Path(options.model))
    config, _ = resolve(options, read_environment(), model_config, this_host())
    return select(wishes(config))


def _precision(config: EngineConfig, operators: Operators) -> Precision:
    """Matrices are kept in float32 on CPUs, few of which multiply bfloat16 (same values).

    They stay packed where kernels multiply them; these know the released dtypes alone.
    """
    dtype: torch.dtype = getattr(torch, config.dtype)
    narrow = config.device == "cuda" and dtype == torch.bfloat16
    matrix = dtype if narrow or dtype == torch.float64 else torch.float32
    multiply = (operators.fp8_linear, operators.expert_up, operators.expert_down)
    kernels = all(operator.backend != REFERENCE for operator in multiply)
    packed = narrow and config.act_quant and kernels
    return Precision(dtype, matrix, config.act_quant, packed=packed, operators=operators)


def _planned(
    config: EngineConfig, decisions: list[Decision], model: ModelConfig, precision: Precision
) -> tuple[EngineConfig, list[Decision]]:
    """The same with a cache as large as the GPU allows, unless somebody has said how large.

    Raises:
        ConfigError: model or cache do not fit.
    """
    free, total = torch.cuda.mem_get_info()
    matrix = None if precision.packed else precision.matrix.itemsize
    memory = min(total, int(free / config.gpu_memory))
    plan = plan_memory(model, config, memory, weight_bytes(model, matrix))
    wanted = {decision.name: decision for decision in decisions}["cache_tokens"]
    if wanted.decided_by != "default":
        if plan.cache_tokens < config.cache_tokens:
            raise ConfigError(
                f"cache_tokens = {config.cache_tokens}; {plan.cache_tokens} fit this GPU's memory"
                " (deepinfer doctor --plan shows what takes it)"
            )
        return config, decisions
    if not plan.fits:
        raise ConfigError(
            f"{config.model} with a sequence of {config.max_model_len} tokens does not fit this"
            f" GPU's {total / 2**30:.0f} GiB, of which {free / 2**30:.0f} are free; change:"
            f" {'; or '.join(plan.advice)}"
        )
    # Twice what can run at a time: the other half is for prefixes to come back to.
    most = 2 * config.max_num_seqs * config.max_model_len
    tokens = min(plan.cache_tokens, max(config.cache_tokens, most))
    decided = [replace(d, value=tokens) if d is wanted else d for d in decisions]
    return replace(config, cache_tokens=tokens), decided


def _with_bar(specs: Iterable[TensorSpec], count: int) -> Iterable[TensorSpec]:
    return track(specs, description="loading", total=count, transient=True)

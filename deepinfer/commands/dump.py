"""`deepinfer dump`: logits and residual streams of a token sequence, for people who port.

Knows the file it writes and the ways of running; must not know requests.
"""

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from deepinfer.config import EngineOptions, max_rollback
from deepinfer.engine.loading import Loaded, load
from deepinfer.errors import ConfigError, RequestError
from deepinfer.kv.geometry import cache_geometry
from deepinfer.kv.pool import CachePool
from deepinfer.model.cached import run
from deepinfer.model.recompute import recompute
from deepinfer.model.step import SequenceRows, StepLayout


def _chunk_tokens(mode: str, length: int) -> int | None:
    """Tokens per forward of `mode`: None = recompute, the whole sequence = cached."""
    if mode == "recompute":
        return None
    if mode == "cached":
        return length
    kind, _, count = mode.partition(":")
    if kind == "chunked" and count.isascii() and count.isdigit() and int(count) > 0:
        return int(count)
    raise ConfigError(f"mode = {mode!r}; expected recompute, cached or chunked:N with N > 0")


def _cached(loaded: Loaded, ids: Tensor, chunk: int) -> tuple[Tensor, list[Tensor]]:
    config = loaded.config
    model = loaded.model
    geometry = cache_geometry(
        loaded.model_config, config.page_tokens, max_rollback(loaded.model_config)
    )
    pages = geometry.pages_for(len(ids))
    pool = CachePool(geometry, pages, 1, ids.device, model.precision.accumulate)
    logits, streams = [], []
    for start in range(0, len(ids), chunk):
        part = ids[start : start + chunk]
        rows = SequenceRows(0, range(pages), start, len(part))
        layout = StepLayout([rows], geometry, ids.device)
        output = run(model, pool, layout, part, loaded.token_map, keep_streams=True)
        logits.append(model.logits(output.hidden.x))
        streams.append(output.hidden.streams)
    return torch.cat(logits), [torch.cat(parts) for parts in zip(*streams, strict=True)]


@torch.inference_mode()
def states(loaded: Loaded, token_ids: list[int], chunk: int | None) -> tuple[Tensor, list[Tensor]]:
    """Logits [T, V] and the streams [T, S, H] that enter each block, of tokens that fit the model.

    Args:
        chunk: tokens of each forward through the cache; None = no cache.
    """
    ids = torch.tensor(token_ids, dtype=torch.int64, device=loaded.config.device)
    if chunk is not None:
        return _cached(loaded, ids, chunk)
    hidden = recompute(loaded.model, ids.unsqueeze(0), loaded.token_map, True)
    return loaded.model.logits(hidden.x)[0], [part[0] for part in hidden.streams]


def dump(options: EngineOptions, token_ids: list[int], out: Path, mode: str) -> dict[str, Tensor]:
    """Write `logits` [T, V] and `streams.<i>` [T, S, H], float32, to a safetensors file.

    Streams are the state that enters block i before its n-gram update.

    Args:
        mode: recompute (no cache), cached (one forward through the cache) or chunked:N.

    Raises:
        ConfigError: unknown mode; RequestError: no ids, or ids out of range.
    """
    chunk = _chunk_tokens(mode, len(token_ids))
    loaded = load(options)
    vocabulary = loaded.model_config.vocab_size
    if not token_ids or not all(0 <= token < vocabulary for token in token_ids):
        raise RequestError(f"token ids {token_ids[:8]}; expected at least one, all in 0 <= id"
                           f" < {vocabulary}")  # fmt: skip
    if len(token_ids) > loaded.config.max_model_len:
        raise RequestError(
            f"{len(token_ids)} token ids; expected at most max_model_len ="
            f" {loaded.config.max_model_len}"
        )
    logits, streams = states(loaded, token_ids, chunk)
    tensors = {"logits": logits}
    tensors |= {f"streams.{number}": part for number, part in enumerate(streams)}
    tensors = {name: part.to("cpu", torch.float32).contiguous() for name, part in tensors.items()}
    try:
        save_file(tensors, out, metadata={"mode": mode, "dtype": loaded.config.dtype,
                                          "act_quant": str(loaded.config.act_quant)})  # fmt: skip
    except Exception as error:  # the library raises its own, bare kinds
        raise ConfigError(f"--out {out} cannot be written ({error})") from None
    return tensors

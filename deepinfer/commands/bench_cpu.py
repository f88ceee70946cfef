"""`deepinfer bench cpu`: tokens per second of prefill and decode, and where the time goes.

Knows clocks and modules; must not know what a good figure is.
"""

import json
import platform
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich import box
from rich.table import Table
from torch import nn

from deepinfer import __version__
from deepinfer.commands.console import console
from deepinfer.config import EngineOptions
from deepinfer.engine.llm import LLM
from deepinfer.errors import ConfigError
from deepinfer.model.attention import Attention
from deepinfer.model.compressor import Compressor
from deepinfer.model.engram import Engram
from deepinfer.model.hyper_connection import HyperConnection
from deepinfer.model.indexer import Indexer
from deepinfer.model.moe import MixtureOfExperts
from deepinfer.model.norm import RMSNorm
from deepinfer.sampling.params import SamplingParams

_PARTS: tuple[tuple[type[nn.Module], str], ...] = (
    (Attention, "attention"),
    (Compressor, "compressor"),
    (Indexer, "indexer"),
    (MixtureOfExperts, "experts"),
    (Engram, "n-gram memory"),
    (HyperConnection, "hyper-connections"),
    (RMSNorm, "norms"),
)


@dataclass(frozen=True)
class Phase:
    """Figures of prefill or decode.

    Attributes:
        tokens_per_s: from the median time of a repetition; best_tokens_per_s from the shortest.
        shares: part of the time spent in each kind of module, its own children excluded.
    """

    tokens_per_s: float
    best_tokens_per_s: float
    shares: dict[str, float]


class _Clock:
    """Exclusive time of module kinds: entering a module stops the clock of the one around it."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)
        self._stack: list[str] = ["rest"]
        self._since = time.perf_counter()

    def _charge(self) -> None:
        now = time.perf_counter()
        self.spent[self._stack[-1]] += now - self._since
        self._since = now

    def enter(self, name: str) -> None:
        self._charge()
        self._stack.append(name)

    def leave(self) -> None:
        self._charge()
        self._stack.pop()


@contextmanager
def _timed_modules(model: nn.Module) -> Iterator[_Clock]:
    clock = _Clock()
    handles = []
    for module in model.modules():
        for kind, name in _PARTS:
            if isinstance(module, kind):
                handles.append(
                    module.register_forward_pre_hook(lambda *_, name=name: clock.enter(name))
                )
                handles.append(module.register_forward_hook(lambda *_: clock.leave()))
    clock._since = time.perf_counter()
    try:
        yield clock
        clock._charge()
    finally:
        for handle in handles:
            handle.remove()


def _seconds(llm: LLM, ids: list[int], params: SamplingParams) -> list[float]:
    """Time of each step that gave a token, the first one included."""
    times = []
    before = time.perf_counter()
    for _ in llm.stream(ids, params):
        now = time.perf_counter()
        times.append(now - before)
        before = now
    return times


def _shares(llm: LLM, ids: list[int], tokens: int) -> tuple[dict[str, float], dict[str, float]]:
    """Shares of prefill and of decode, measured apart from the figures (hooks cost time)."""
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    with _timed_modules(llm.model) as clock:
        stream = llm.stream(ids, params)
        next(stream)
        prefill = dict(clock.spent)
        for _ in stream:
            pass
    decode = {name: spent - prefill.get(name, 0.0) for name, spent in clock.spent.items()}
    return _normalise(prefill), _normalise(decode)


def _normalise(spent: dict[str, float]) -> dict[str, float]:
    total = sum(spent.values())
    return {name: part / total for name, part in sorted(spent.items(), key=lambda i: -i[1])}


def measure(
    options: EngineOptions, prompt_tokens: int, output_tokens: int, repeats: int
) -> dict[str, Any]:
    """Prefill of `prompt_tokens` random tokens and decode of `output_tokens` after them, alone.

    Returns:
        host, settings, and a Phase for "prefill" and "decode".

    Raises:
        ConfigError: a count is too small to measure anything.
    """
    counts = {"prompt_tokens": (prompt_tokens, 1), "output_tokens": (output_tokens, 2),
              "repeats": (repeats, 1)}  # fmt: skip
    for name, (count, least) in counts.items():
        if count < least:
            raise ConfigError(f"{name} = {count}; expected at least {least}")
    llm = LLM.from_options(options)
    vocabulary = min(llm.tokenizer.vocab_size, llm.model_config.vocab_size)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (prompt_tokens,), generator=generator).tolist()
    params = SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
    few = min(4, output_tokens)
    _seconds(llm, ids[:64], SamplingParams(max_tokens=few, temperature=0.0, ignore_eos=True))
    prefill, decode = [], []
    for _ in range(repeats):
        first, *rest = _seconds(llm, ids, params)
        prefill.append(first)
        decode += rest
    prefill_shares, decode_shares = _shares(llm, ids, output_tokens)
    return {
        "version": __version__,
        "cpu": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "threads": llm.config.threads,
        "dtype": llm.config.dtype,
        "act_quant": llm.config.act_quant,
        "model": llm.config.model,
        "parameters": sum(p.numel() for p in llm.model.parameters()),
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "prefill": Phase(
            prompt_tokens / statistics.median(prefill), prompt_tokens / min(prefill), prefill_shares
        ),
        "decode": Phase(1 / statistics.median(decode), 1 / min(decode), decode_shares),
    }


def show(result: dict[str, Any], as_json: bool) -> None:
    """Print what `measure` found."""
    phases = [result["prefill"], result["decode"]]
    if as_json:
        plain = {**result, "prefill": asdict(phases[0]), "decode": asdict(phases[1])}
        sys.stdout.write(json.dumps(plain) + "\n")
        return
    table = Table("", "prefill", "decode", box=box.SIMPLE)
    table.add_row("tokens/s (median)", *(f"{phase.tokens_per_s:,.1f}" for phase in phases))
    table.add_row("tokens/s (best)", *(f"{phase.best_tokens_per_s:,.1f}" for phase in phases))
    for part in phases[1].shares:
        table.add_row(f"time in {part}", *(f"{p.shares.get(part, 0):.0%}" for p in phases))
    settings = {k: v for k, v in result.items() if k not in ("prefill", "decode")}
    screen = console()
    screen.print(", ".join(f"{name} {value}" for name, value in settings.items()))
    screen.print(table)

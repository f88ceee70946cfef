"""Throughput and latency of the whole engine, without a server: `python benchmarks/offline.py`.

On a CPU the demo model is measured, on a GPU seven layers of released widths with random weights
(`slice.py`). For every number of sequences and length of prompts: prompt and generated tokens per
second, time to the first token, time between tokens, the part of a decode step in which no kernel
runs, the time that a decode step needs at least for the bytes that it reads, and what the prompts
need at least for their products in FP8. The time to the first token of a long prompt that an
earlier one begins like is measured first. Rows are JSON; `--out` keeps them.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deepinfer import LLM, SamplingParams
from deepinfer.config import EngineConfig, EngineOptions, Host, ModelConfig, resolve
from deepinfer.engine.engine import Engine
from deepinfer.engine.output import OutputText
from deepinfer.engine.request import Completion, Request
from deepinfer.engine.sequence import Sequence
from deepinfer.engine.warmup import capture, warm_up
from deepinfer.model.moe import Experts
from deepinfer.ops.expert_up.prepare import ExpertMatrices

DEMO = Path(__file__).resolve().parents[1] / "models" / "demo"
GPU_SETTINGS = [(1, 1024), (8, 1024), (32, 1024), (128, 1024), (1, 8192), (8, 8192), (32, 8192),
                (128, 8192), (1, 65536), (8, 65536)]  # fmt: skip
CPU_SETTINGS = [(1, 128), (8, 128), (1, 1024)]
PREFIX = {"cuda": 32768, "cpu": 1024}
Row = dict[str, Any]


@dataclass(frozen=True)
class Ceilings:
    """What this GPU reaches: bytes of a copy, and operations of a dense FP8 product."""

    copy_bytes_per_s: float
    fp8_flops_per_s: float


class _NoText:
    """Decodes every token to nothing: the slice has no tokenizer."""

    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


class Load:
    """An engine and the requests that it is given.

    Args:
        vocabulary: prompts are drawn from so many ids.
    """

    def __init__(self, engine: Engine, vocabulary: int) -> None:
        self.engine = engine
        self._draw = np.random.default_rng(0)
        self._vocabulary = vocabulary
        self._numbers = count()

    def ids(self, tokens: int) -> list[int]:
        """A random prompt."""
        return self._draw.integers(20, self._vocabulary, tokens).tolist()

    def request(self, ids: list[int], tokens: int) -> Request:
        """A request of greedy continuation that is not queued yet."""
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        request = Request(str(next(self._numbers)), None, ids, params)
        sequence = Sequence(request.request_id, list(ids), len(ids) + tokens)
        text = OutputText(_NoText(), [])
        request.completions.append(Completion(request, 0, 0, text, sequence))
        return request

    def run(self, requests: list[Request]) -> "Times":
        """Queue all at once and run them to their end."""
        first: dict[str, float] = {}
        decode_steps: list[float] = []
        last = began = time.perf_counter()
        for request in requests:
            self.engine.add(request)
        prefilled = began
        while self.engine.has_work:
            chunks = self.engine.step()
            now = time.perf_counter()
            for chunk in chunks:
                if chunk.token_ids and chunk.request_id not in first:
                    first[chunk.request_id] = now - began
                    prefilled = now
                assert chunk.finish_reason != "error", chunk.error
            if len(chunks) == len(requests) and len(first) == len(requests):
                decode_steps.append(now - last)
            last = now
        # The step in which the last prompt ends is no decode step, the last one has no successor.
        return Times(list(first.values()), decode_steps[2:-2], prefilled - began)


@dataclass
class Times:
    """Seconds: to the first token of each request, of decode steps with all of them, of prefill."""

    first_token: list[float]
    steps: list[float]
    prefill: float


def kernel_seconds(load: Load, requests: list[Request], steps: int) -> float | None:
    """Seconds of one decode step in which kernels run, by the profiler; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    from torch.profiler import ProfilerActivity, profile

    engine = load.engine
    for request in requests:
        engine.add(request)
    while any(request.completions[0].count < 4 for request in requests):
        engine.step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as recorded:
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end) for event in recorded.events() or ()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )  # fmt: skip
    busy, end = 0.0, 0.0
    for start, stop in spans:  # copies run beside kernels
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    for request in requests:
        engine.abort(request.request_id)
    return busy * 1e-6 / steps


def least_bytes(engine: Engine, batch: int, tokens: int) -> float:
    """Bytes that a decode step of `batch` sequences of `tokens` tokens has to read.

    Every matrix once, of experts those that `batch` tokens are expected to choose; of the cache the
    window, the selected entries, and all index keys, or those of the candidates.
    """
    model, geometry = engine.runner.model, engine.runner.geometry
    config = model.config
    chosen = 1 - (1 - config.num_experts_per_tok / config.n_routed_experts) ** batch
    total = 0.0
    for name, parameter in model.named_parameters():
        if not name.startswith(("embed.", "mtp.")) and ".embed." not in name:
            share = chosen if ".experts." in name else 1.0
            total += share * parameter.numel() * parameter.element_size()
    for module in model.modules():
        if isinstance(module, Experts) and isinstance(getattr(module, "up", None), ExpertMatrices):
            for matrices in (module.up, module.down):
                parts = (matrices.codes, matrices.shifts, matrices.base)
                total += chosen * sum(part.numel() * part.element_size() for part in parts)
    return total + batch * _cache_bytes(config, geometry, tokens)


def _cache_bytes(config: ModelConfig, geometry: Any, tokens: int) -> float:
    window = min(tokens, config.sliding_window) * geometry.window_bytes
    key = geometry.index_code_bytes + geometry.index_scale_bytes
    found = 0.0
    for layer in range(config.num_hidden_layers):
        found += window
        ratio = config.compress_ratio(layer)
        if ratio:
            entries = tokens // ratio
            found += min(entries, config.index_topk) * geometry.compressed_bytes
            if layer in config.index_source_layer_ids:
                blocks = config.candidate_topk_blocks * config.candidate_block_size
                scored = min(entries, blocks) if config.restricts_to_candidates(layer) else entries
                found += scored * key
    return found


def least_flops(engine: Engine, tokens: int) -> float:
    """Operations that one prompt of `tokens` tokens needs in products.

    Every matrix but the head once a token, of experts the chosen ones; of attention the window and
    the selected entries; index scores of all entries, or of the candidates.
    """
    model = engine.runner.model
    config = model.config
    chosen = config.num_experts_per_tok / config.n_routed_experts
    weights = 0.0
    for name, parameter in model.named_parameters():
        left_out = name.startswith(("embed.", "head.", "mtp.")) or name.endswith("scale")
        if parameter.dim() > 1 and not left_out and not (".embed." in name or ".experts." in name):
            weights += parameter.numel()
    for module in model.modules():
        if isinstance(module, Experts) and isinstance(getattr(module, "up", None), ExpertMatrices):
            weights += chosen * 2 * (module.up.codes.numel() + module.down.codes.numel())
    found = 2.0 * weights * tokens
    positions = np.arange(1, tokens + 1, dtype=np.float64)
    for layer in range(config.num_hidden_layers):
        keys = np.minimum(positions, config.sliding_window)
        ratio = config.compress_ratio(layer)
        if ratio:
            entries = positions // ratio
            keys = keys + np.minimum(entries, config.index_topk)
            if layer in config.index_source_layer_ids:
                most = config.candidate_topk_blocks * config.candidate_block_size
                scored = entries
                if config.restricts_to_candidates(layer):
                    scored = np.minimum(entries, most)
                width = config.index_n_heads * config.index_head_dim
                found += 2.0 * width * scored.sum()
        found += 4.0 * config.num_attention_heads * config.head_dim * keys.sum()
    return found


def measure(load: Load, batch: int, prompt: int, tokens: int, ceilings: Ceilings | None) -> Row:
    """One row: `batch` requests of `prompt` tokens each, queued at once."""
    prompts = [load.ids(prompt) for _ in range(batch)]
    # While the last prompts are computed the first sequences go on, and must not end.
    tokens += 2 * (batch * prompt // load.engine.config.max_num_batched_tokens)
    load.engine.manager.tree.clear()
    times = load.run([load.request(ids, tokens) for ids in prompts])
    # The prompts come from the prefix cache now, so that decode steps come soon.
    busy = kernel_seconds(load, [load.request(ids, tokens) for ids in prompts], 20)
    step = statistics.median(times.steps)
    row: Row = {
        "batch": batch, "prompt": prompt, "generated": tokens,
        "prompt_tokens_per_s": batch * prompt / times.prefill,
        "tokens_per_s": batch / step,
        "first_token_s": statistics.median(times.first_token),
        "first_token_s_largest": max(times.first_token),
        "between_tokens_s": step, "between_tokens_s_largest": max(times.steps),
    }  # fmt: skip
    if busy is not None:
        row |= {"kernels_s": busy, "not_kernels": max(0.0, 1 - busy / step)}
    if ceilings is not None:
        needed = least_bytes(load.engine, batch, prompt + tokens)
        floor = needed / ceilings.copy_bytes_per_s
        row |= {"bytes": needed, "floor_s": floor, "share_of_floor": floor / step}
        flops = batch * least_flops(load.engine, prompt)
        floor = flops / ceilings.fp8_flops_per_s
        row |= {"prompt_flops": flops, "prompt_floor_s": floor,
                "share_of_prompt_floor": floor / times.prefill}  # fmt: skip
    return row


def measure_prefix(load: Load, prompt: int) -> Row:
    """Time to the first token of a prompt, and of another one that begins with it."""
    load.engine.manager.tree.clear()
    ids = load.ids(prompt)
    cold = load.run([load.request(ids, 2)]).first_token[0]
    hits = []
    for _ in range(5):
        longer = [*ids, *load.ids(10)]
        hits.append(load.run([load.request(longer, 2)]).first_token[0])
    hit = statistics.median(hits)
    return {"prefix": prompt, "cold_first_token_s": cold, "hit_first_token_s": hit,
            "times": cold / hit}  # fmt: skip


def _print(row: Row) -> None:
    if "prefix" in row:
        print(f"prefix of {row['prefix']:,}: first token {row['cold_first_token_s'] * 1e3:,.1f} ms"
              f" cold, {row['hit_first_token_s'] * 1e3:,.1f} ms hit, {row['times']:.0f} x",
              flush=True)  # fmt: skip
        return
    text = (
        f"{row['batch']:4} x {row['prompt']:6,}: {row['prompt_tokens_per_s']:10,.0f} prompt"
        f" tokens/s, {row['tokens_per_s']:9,.1f} tokens/s, first {row['first_token_s'] * 1e3:9,.1f}"
        f" ms, between {row['between_tokens_s'] * 1e3:7.2f} ms"
    )
    if "not_kernels" in row:
        text += f", {row['not_kernels']:.1%} not kernels"
    if "floor_s" in row:
        text += f", floor {row['floor_s'] * 1e3:.2f} ms"
        text += f" ({row['share_of_prompt_floor']:.0%} of FP8's ceiling in prompts)"
    print(text, flush=True)


def demo_on_cpu() -> tuple[Load, Row]:
    """The demo model on this CPU."""
    llm = LLM(DEMO, device="cpu", max_num_seqs=8, max_model_len=2048, cache_tokens=32768)
    about = {"model": "models/demo", "device": "cpu", "threads": llm.config.threads,
             "dtype": llm.config.dtype}  # fmt: skip
    return Load(llm.engine, llm.tokenizer.inner.get_vocab_size()), about


def slice_on_gpu(overlap: bool, eager: bool) -> tuple[Load, Row]:
    """Seven layers of released widths on this GPU, random weights."""
    from slice import random_model, slice_config

    from deepinfer.engine.loading import wishes
    from deepinfer.model.linear import Precision
    from deepinfer.ops.select import select

    model_config = slice_config()
    options = EngineOptions(
        "released slice", device="cuda", max_num_seqs=128, max_model_len=66_000,
        cache_tokens=1_400_000, max_num_batched_tokens=8192, overlap=overlap, enforce_eager=eager,
        prefix_checkpoints=160,
    )  # fmt: skip
    config, _ = resolve(options, {}, model_config, Host(cuda=True, cores=1))
    device, dtype = torch.device("cuda"), torch.bfloat16
    operators = select(wishes(config))
    precision = Precision(dtype, dtype, packed=True, operators=operators)
    with torch.inference_mode(False):
        model = random_model(model_config, precision, device)
    classes = model_config.engram_compressed_vocab_size
    token_map = torch.randint(classes, (model_config.vocab_size,), device=device)
    began = time.perf_counter()
    engine = _engine(config, model, token_map)
    kernels = warm_up(engine)
    warm = time.perf_counter()
    if not eager:
        capture(engine, progress=False)
    torch.cuda.synchronize()
    about = {
        "model": f"{model_config.num_hidden_layers} layers of released widths", "device": "cuda",
        "overlap": overlap, "eager": eager, "max_num_batched_tokens": 8192, "kernels": kernels,
        "warm_up_s": warm - began, "capture_s": time.perf_counter() - warm,
        "graphs": 0 if eager else engine.runner.graph_count,
        "allocated_bytes": torch.cuda.memory_allocated(),
        "reserved_bytes": torch.cuda.memory_reserved(),
    }  # fmt: skip
    return Load(engine, model_config.vocab_size), about


def _engine(config: EngineConfig, model: Any, token_map: Any) -> Engine:
    grammars: Any = None  # no request asks for one
    return Engine(replace(config), model, token_map, grammars)


def main() -> int:
    """Measure and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="file of JSON lines to write")
    parser.add_argument("--tokens", type=int, default=64, help="to generate for each request")
    parser.add_argument("--plain", action="store_true", help="the loop that is not overlapped")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--only", nargs="*", help="settings like 32x8192, or prefix")
    arguments = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    load, about = slice_on_gpu(not arguments.plain, arguments.eager) if on_gpu else demo_on_cpu()
    ceilings = None
    if on_gpu:
        from timing import copy_bandwidth, fp8_throughput

        ceilings = Ceilings(copy_bandwidth(), fp8_throughput())
        about |= {"gpu": torch.cuda.get_device_name(), **asdict(ceilings)}
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True,
                          check=False)  # fmt: skip
    about |= {"torch": torch.__version__, "revision": done.stdout.strip()}
    print(json.dumps(about), flush=True)
    rows = [about]

    def keep(row: Row) -> None:
        _print(row)
        rows.append(row)
        if arguments.out is not None:
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text("".join(json.dumps(r) + "\n" for r in rows))

    if not arguments.only or "prefix" in arguments.only:
        keep(measure_prefix(load, PREFIX["cuda" if on_gpu else "cpu"]))
    for batch, prompt in GPU_SETTINGS if on_gpu else CPU_SETTINGS:
        if not arguments.only or f"{batch}x{prompt}" in arguments.only:
            keep(measure(load, batch, prompt, arguments.tokens, ceilings))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Where the time of a forward goes: seven layers of released widths, by operator.

`python benchmarks/slice.py --out benchmarks/results/slice.jsonl` builds the layers on the GPU of
this machine with random weights in the released formats, one layer of every role, and runs decode
steps of several batches and one long prefill. Rows are JSON: the first says on what, then one per
setting and operator. Operators are timed by events around each call, in a forward that is queued up
as a whole before it begins; what lies between the calls is "rest". `graph` is the time of the same
forward as one CUDA graph, without events.
"""

import argparse
import copy
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from timing import copy_bandwidth, measure
from torch import Tensor, nn

from deepinfer.checkpoint.hf_config import parse_model_config
from deepinfer.checkpoint.released import RELEASED_CONFIG
from deepinfer.config import ModelConfig, max_rollback
from deepinfer.engine.warmup import compiling
from deepinfer.kv.geometry import cache_geometry
from deepinfer.kv.pool import CachePool
from deepinfer.model.cached import run
from deepinfer.model.engram import table_rows
from deepinfer.model.linear import Precision, QuantisedLinear
from deepinfer.model.moe import Experts
from deepinfer.model.step import SequenceRows, StepLayout
from deepinfer.model.transformer import Transformer
from deepinfer.ops.select import Operator, Wishes, select

PAGE = 64
CONTEXT = 8192  # tokens of every sequence
BATCHES = (1, 32, 128)
_REPEATS = 5
_QUEUE_CYCLES = 200_000_000  # a tenth of a second, in which the host queues a forward
# One layer of every role: window only; window and n-gram memory; KV and index source of two tokens
# per entry; its reader; KV, index and candidate source of one token; its reader; one that selects
# among its candidates. The n-gram table has a sixteenth of its rows.
ROLES: dict[str, Any] = {
    "num_hidden_layers": 7, "compress_ratios": [0, 0, 2, 2, 1, 1, 1],
    "kv_source_layer_ids": [2, 4], "index_source_layer_ids": [2, 4, 6],
    "candidate_source_layer_id": 4, "engram_layer_ids": [1], "engram_vocab_size": 1_000_000,
    "num_nextn_predict_layers": 0,
}  # fmt: skip
Row = dict[str, Any]


def slice_config() -> ModelConfig:
    """The released config with seven layers."""
    data = copy.deepcopy(RELEASED_CONFIG)
    text = data["text_config"]
    text |= ROLES
    text["engram_num_embeddings"] = [2**40]
    text["engram_num_embeddings"] = table_rows(parse_model_config(data))
    return parse_model_config(data)


def _random(name: str, like: Tensor, device: torch.device) -> Tensor:
    """Values of a parameter: codes of every kind, scales that keep products near 1."""
    shape = like.shape
    if like.dtype == torch.uint8:
        if name.endswith("scale"):
            # e8m0: 2^-13 for e4m3 bytes, 2^-8 for e2m1 pairs, of matrices with 5,120 channels.
            return torch.full(shape, 119 if "w13" in name or "w2" in name else 114,
                              dtype=torch.uint8, device=device)  # fmt: skip
        codes = torch.randint(0, 127, shape, dtype=torch.uint8, device=device)
        # Signs apart: e4m3 has its NaN at 0x7F and 0xFF.
        return codes | (torch.randint(0, 2, shape, dtype=torch.uint8, device=device) << 7)
    if len(shape) == 1 or name in ("q_weight", "k_weight"):
        ones = name in ("weight", "scale", "q_weight", "k_weight")
        return torch.full(shape, float(ones), dtype=like.dtype, device=device)
    return torch.randn(shape, dtype=like.dtype, device=device) * shape[-1] ** -0.5


@torch.no_grad()
def random_model(config: ModelConfig, precision: Precision, device: torch.device) -> Transformer:
    """The model with random parameters, made and prepared one module at a time."""
    with torch.device("meta"):
        model = Transformer(config, precision)
    for module in list(model.modules()):
        for key, buffer in module.named_buffers(recurse=False):
            setattr(module, key, buffer.to(device))
        for name, parameter in list(module.named_parameters(recurse=False)):
            values = nn.Parameter(_random(name, parameter, device), requires_grad=False)
            setattr(module, name, values)
        if isinstance(module, QuantisedLinear | Experts) and precision.packed:
            module.prepare()
    return model.eval()


class Slice:
    """The layers, a cache in which every sequence is CONTEXT tokens long, and forwards.

    Attributes:
        settings: by name, what runs one forward again and again with the same rows.
    """

    def __init__(self, config: ModelConfig, precision: Precision, device: torch.device) -> None:
        self.device = device
        self.model = random_model(config, precision, device)
        self.geometry = cache_geometry(config, PAGE, max_rollback(config))
        self.pages = CONTEXT // PAGE
        most = max(BATCHES)
        self.pool = CachePool(self.geometry, most * self.pages, most, device)
        classes = (config.vocab_size,)
        self.token_map = torch.randint(config.engram_compressed_vocab_size, classes, device=device)
        self.settings: dict[str, Callable[[], Tensor]] = {
            f"prefill {CONTEXT}": self._forward([self._rows(0, 0, CONTEXT)])
        }
        for batch in BATCHES:
            rows = [self._rows(slot, CONTEXT - 1, 1) for slot in range(batch)]
            self.settings[f"decode {batch}"] = self._forward(rows)

    def _rows(self, slot: int, start: int, count: int) -> SequenceRows:
        pages = range(slot * self.pages, (slot + 1) * self.pages)
        return SequenceRows(slot, pages, start, count)

    def _forward(self, rows: list[SequenceRows]) -> Callable[[], Tensor]:
        layout = StepLayout(rows, self.geometry, self.device)
        vocabulary = self.model.config.vocab_size
        ids = torch.randint(vocabulary, (layout.total,), device=self.device)

        def forward() -> Tensor:
            hidden = run(self.model, self.pool, layout, ids, self.token_map).hidden
            # A step needs the logits of the last row of each sequence.
            return self.model.logits(hidden.x[-len(rows) :])

        return forward

    def fill(self) -> None:
        """Run the prefill, and give every sequence its cache."""
        self.settings[f"prefill {CONTEXT}"]()
        pool = self.pool
        for tables in (pool.compressed, pool.index_codes, pool.index_scales):
            for table in tables.values():
                table.view(-1, self.pages, *table.shape[1:])[1:] = table[: self.pages]
        for slot in range(1, max(BATCHES)):
            pool.copy_slot(0, slot)


def by_operator(forward: Callable[[], Tensor]) -> tuple[dict[str, list[float]], float]:
    """Microseconds of every call by operator, and of the whole forward, of one run."""
    call = Operator.__call__
    marks: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    def event() -> torch.cuda.Event:
        made = torch.cuda.Event(enable_timing=True)
        made.record()
        return made

    def timed(operator: Operator, *args: Any, **kwargs: Any) -> Any:
        start = event()
        result = call(operator, *args, **kwargs)
        marks.append((operator.spec.name, start, event()))
        return result

    torch.cuda.synchronize()
    with patch.object(Operator, "__call__", timed):
        torch.cuda._sleep(_QUEUE_CYCLES)
        first = event()
        forward()
        last = event()
    torch.cuda.synchronize()
    found: dict[str, list[float]] = defaultdict(list)
    for name, start, end in marks:
        found[name].append(start.elapsed_time(end) * 1000)
    return found, first.elapsed_time(last) * 1000


def measure_setting(name: str, forward: Callable[[], Tensor]) -> list[Row]:
    """Rows of one setting, most time first, of the repeat whose whole is the median."""
    by_operator(forward)
    runs = sorted((by_operator(forward) for _ in range(_REPEATS)), key=lambda found: found[1])
    operators, whole = runs[_REPEATS // 2]
    times = {name: sum(found) for name, found in operators.items()}
    times["rest"] = whole - sum(times.values())
    graph = measure([forward])
    return [
        {"setting": name, "operator": operator, "calls": len(operators.get(operator, ())),
         "microseconds": time, "share": time / whole, "whole": whole, "graph": graph.median}
        for operator, time in sorted(times.items(), key=lambda item: -item[1])
    ]  # fmt: skip


def _print(rows: list[Row]) -> None:
    first = rows[0]
    whole, graph = first["whole"], first["graph"]
    print(f"{first['setting']}: {whole:.0f} us by events, {graph:.0f} us as a graph")
    for row in rows:
        print(f"  {row['operator']:22} {row['calls']:4} calls {row['microseconds']:10.1f} us "
              f"{row['share']:6.1%}", flush=True)  # fmt: skip


def main() -> int:
    """Build, measure and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="file of JSON lines to write")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.stderr.write("error: benchmarks need a CUDA GPU, and torch sees none\n")
        return 2
    device, gpu = torch.device("cuda"), torch.cuda.get_device_name()
    operators = select(Wishes(device="cuda", gpu=gpu, strict=True))
    precision = Precision(torch.bfloat16, torch.bfloat16, packed=True, operators=operators)
    command = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    head = {"gpu": gpu, "torch": torch.__version__, "revision": done.stdout.strip(),
            "copy_bytes_per_s": copy_bandwidth(), "layers": ROLES["num_hidden_layers"],
            "context": CONTEXT}  # fmt: skip
    rows: list[Row] = [head]
    with torch.inference_mode():
        layers = Slice(slice_config(), precision, device)
        with compiling():
            for forward in layers.settings.values():
                forward()
        layers.fill()
        for name, forward in layers.settings.items():
            found = measure_setting(name, forward)
            _print(found)
            rows += found
            arguments.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())

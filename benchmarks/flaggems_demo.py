"""The demo model without FlagGems and with what an allow-list holds: tokens, counts, speed.

`python benchmarks/flaggems_demo.py ALLOWLIST --out FILE` runs greedy and sampled requests in strict
mode, twice for each setting of flaggems, and says whether tokens are equal: between two runs of one
setting, and with those without FlagGems, else where they part. Counts are of the first run, whose
decode steps are recorded as CUDA graphs; a replay calls no operator.
"""

import argparse
import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from deepinfer import LLM, SamplingParams
from deepinfer.libraries.switch import active

PROMPTS = ("Once upon a time", "One day, a fox", "The capital of France is")
Row = dict[str, Any]


def first_difference(a: list[list[int]], b: list[list[int]]) -> list[int] | None:
    """[request, token] at which two runs part, None if they are equal."""
    for number, (x, y) in enumerate(zip(a, b, strict=True)):
        for place, (token, other) in enumerate(zip(x, y, strict=False)):
            if token != other:
                return [number, place]
        if len(x) != len(y):
            return [number, min(len(x), len(y))]
    return None


def run(model: str, mode: str, allowlist: str, device: str) -> tuple[Row, list[list[int]]]:
    """Two runs of one setting: what is said about them, and the tokens of the first."""
    settings: Row = {"device": device, "ops_strict": True, "flaggems": mode}
    if mode != "off":
        settings["flaggems_allowlist"] = allowlist
    llm = LLM(model, **settings)
    params = [
        SamplingParams(max_tokens=48, temperature=0.0, ignore_eos=True),
        SamplingParams(max_tokens=48, temperature=0.8, top_p=0.9, seed=7, ignore_eos=True),
        SamplingParams(max_tokens=48, temperature=0.0, ignore_eos=True),
    ]
    tokens, seconds = [], []
    for _ in range(2):
        start = time.perf_counter()
        replies = llm.generate(list(PROMPTS), params)
        seconds.append(time.perf_counter() - start)
        tokens.append([reply.outputs[0].token_ids for reply in replies])
    operators = llm.model.precision.operators.all()
    row: Row = {
        "mode": mode,
        "runs_part_at": first_difference(*tokens),
        "fallbacks": sum(operator.fallbacks for operator in operators),
        "seconds": seconds,
        "text": [reply.outputs[0].text for reply in replies],
    }
    enabled = active()
    if enabled is not None:
        row["line"] = enabled.line()
        row["operators"] = {
            name: {"calls": use.calls, "kept": use.kept, "sites": sorted(use.sites)}
            for name, use in sorted(enabled.replacement.uses.items())
        }
    return row, tokens[0]


def main() -> int:
    """Run all settings; the exit status is 1 if two runs of one setting part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("allowlist")
    parser.add_argument("--model", default="models/demo")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rows: list[Row] = []
    plain: list[list[int]] = []
    for mode in ("off", "right", "fast"):
        row, tokens = run(options.model, mode, options.allowlist, options.device)
        plain = plain or tokens
        row["parts_from_off_at"] = first_difference(plain, tokens)
        rows.append(row)
        print(json.dumps({k: v for k, v in row.items() if k != "operators"}), flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    options.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return int(any(row["runs_part_at"] is not None for row in rows))


if __name__ == "__main__":
    sys.exit(main())

"""Write deepinfer/ops/winners.json from measured rows: `python benchmarks/winners.py FILE...`.

Knows rows of benchmarks/ops.py; must not know operators. Cases of one operator with equal numbers
of rows count together, by the geometric mean of their times; between two measured numbers the
border lies in the middle (geometrically). Rows of several files about one GPU count together.
"""

import argparse
import json
import math
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

TABLE = Path(__file__).resolve().parents[1] / "deepinfer" / "ops" / "winners.json"
Times = dict[int, dict[str, list[float]]]


def fastest(times: Times) -> list[list[Any]]:
    """Buckets [rows or None, backend], from the microseconds of every backend by rows."""
    best = []
    for rows in sorted(times):
        complete = max(map(len, times[rows].values()))
        means = {
            name: math.fsum(map(math.log, found)) / len(found)
            for name, found in times[rows].items()
            if len(found) == complete
        }
        best.append((rows, min(means, key=means.__getitem__)))
    buckets: list[list[Any]] = []
    for (rows, backend), (more, other) in pairwise(best):
        if backend != other:
            buckets.append([math.isqrt(rows * more), backend])
    return [*buckets, [None, best[-1][1]]]


def table(lines: list[dict[str, Any]]) -> dict[str, list[list[Any]]]:
    """Buckets of every operator that has more than one kernel.

    Twins that apply every scale (docs/numerics.md) and cuBLAS are for those who ask for them: no
    winners. A product by cuBLAS may depend on the number of rows, and gains a few per cent.
    """
    times: dict[str, Times] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for line in lines:
        name = line["backend"]
        if name in ("ref", "torch") or name.endswith("_exact"):
            continue
        if "baseline" in line or "failed" in line:
            continue
        times[line["operator"]][line["rows"]][name].append(line["median"])
    return {
        name: fastest(found)
        for name, found in sorted(times.items())
        if len({backend for backends in found.values() for backend in backends}) > 1
    }


def main() -> None:
    """Put what was measured into the table; other GPUs and operators keep what they have."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, help="JSON lines of benchmarks/ops.py")
    known = json.loads(TABLE.read_text(encoding="utf-8"))
    measured: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for file in parser.parse_args().files:
        head, *lines = map(json.loads, file.read_text(encoding="utf-8").splitlines())
        if "gpu" in head:  # a CPU has no kernels to choose from
            measured[head["gpu"]] += [line for line in lines if "backend" in line]
    for gpu, lines in measured.items():
        known[gpu] = {**known.get(gpu, {}), **table(lines)}
    TABLE.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

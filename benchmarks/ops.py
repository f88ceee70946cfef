"""Speed of every operator at released sizes, beside its ceiling and its reference in the same run.

`python benchmarks/ops.py --out benchmarks/results/h200.jsonl` measures on the GPU of this machine.
A backend is timed only after it gave the reference's answer to the same case in this run; others
get a row that says what was wrong. Rows are JSON, one per operator, case and backend.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import triton
from timing import Timing, copy_bandwidth, matrix_throughput, measure

from deepinfer.ops.registry import specs
from deepinfer.ops.spec import Case, OpSpec, size_of
from deepinfer.testing.operators import check_case, load_backend

DEVICE = torch.device("cuda")
_ROTATED = 150_000_000  # bytes that all copies of the inputs have together: three L2 caches
_MOST_COPIES = 64
Row = dict[str, Any]


def _copies(case: Case) -> list[dict[str, Any]]:
    first = case.arguments(DEVICE)
    tensors = [value for value in first.values() if isinstance(value, torch.Tensor)]
    count = min(_MOST_COPIES, max(1, -(-_ROTATED // max(1, size_of(*tensors)))))
    return [first, *(case.arguments(DEVICE) for _ in range(count - 1))]


def _time(function: Callable[..., Any], case: Case) -> Timing:
    copies = _copies(case)
    return measure([lambda given=given: function(**given) for given in copies])


def _row(spec: OpSpec, case: Case, backend: str, timing: Timing, ceilings: Row) -> Row:
    work = spec.work(case.arguments(DEVICE))
    seconds = timing.median * 1e-6
    return {
        "operator": spec.name, "case": case.name, "backend": backend, **asdict(timing),
        "bytes": work.bytes, "flops": work.flops,
        "share_of_copy": work.bytes / seconds / ceilings["copy_bytes_per_s"],
        "share_of_matrix": work.flops / seconds / ceilings["matrix_flops_per_s"],
    }  # fmt: skip


def measure_case(spec: OpSpec, case: Case, ceilings: Row) -> Iterator[Row]:
    """Rows of the reference and of every backend."""
    reference = _time(spec.reference, case)
    yield _row(spec, case, "ref", reference, ceilings)
    for backend in spec.backends:
        known = {"operator": spec.name, "case": case.name, "backend": backend.name}
        try:
            function = load_backend(backend)
            check_case(spec, function, case, DEVICE)
        except Exception as error:
            # A failed case is a result, and the other operators are still to be measured.
            yield {**known, "failed": f"{type(error).__name__}: {error}"[:300]}
            continue
        timing = _time(function, case)
        row = _row(spec, case, backend.name, timing, ceilings)
        yield {**row, "times_ref": reference.median / timing.median}


def environment() -> Row:
    """What the figures hold for."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
        "triton": triton.__version__, "revision": done.stdout.strip(),
        "copy_bytes_per_s": copy_bandwidth(), "matrix_flops_per_s": matrix_throughput(),
    }  # fmt: skip


def _line(row: Row) -> str:
    name = f"{row['operator']} {row['case']} {row['backend']}"
    if "failed" in row:
        return f"{name}: {row['failed']}"
    text = f"{name}: {row['median']:.1f} us, {row['share_of_copy']:.0%} of copy"
    if row["flops"]:
        text += f", {row['share_of_matrix']:.0%} of matrix"
    return text + (f", {row['times_ref']:.1f} x ref" if "times_ref" in row else "")


def main() -> int:
    """Measure and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="file of JSON lines to write")
    parser.add_argument("--op", nargs="*", help="only these operators")
    parser.add_argument("--case", help="only cases whose name contains this")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.stderr.write("error: benchmarks need a CUDA GPU, and torch sees none\n")
        return 2
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    ceilings = environment()
    rows: list[Row] = [ceilings]
    for spec in specs().values():
        for case in spec.cases():
            chosen = not arguments.op or spec.name in arguments.op
            if case.kind == "released" and chosen and (arguments.case or "") in case.name:
                for row in measure_case(spec, case, ceilings):
                    rows.append(row)
                    print(_line(row), flush=True)
                arguments.out.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return 1 if any("failed" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())

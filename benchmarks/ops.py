"""Speed of every operator at released sizes, beside its ceiling and its reference in the same run.

`python benchmarks/ops.py --out benchmarks/results/ops.jsonl` measures on the GPU of this machine.
A backend is timed only after it gave the reference's answer to the same case in this run; others
get a row that says what was wrong. Rows are JSON, one per operator, case and backend or baseline;
baselines are not judged. The first row holds the ceilings that all shares are of.
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
from baselines import baselines
from timing import Timing, copy_bandwidth, fp8_throughput, matrix_throughput, measure

from deepinfer.errors import Unsupported
from deepinfer.ops.registry import specs
from deepinfer.ops.select import installed
from deepinfer.ops.spec import Case, OpSpec, size_of
from deepinfer.testing.operators import check_case, copies_of, load_backend

DEVICE = torch.device("cuda")
_ROTATED = 150_000_000  # bytes that all copies of the inputs have together: three L2 caches
_MOST_COPIES = 64
Row = dict[str, Any]


def _copies(case: Case) -> list[dict[str, Any]]:
    first = case.arguments(DEVICE)
    tensors = [value for value in first.values() if isinstance(value, torch.Tensor)]
    count = min(_MOST_COPIES, max(1, -(-_ROTATED // max(1, size_of(*tensors)))))
    return [first] if count == 1 else copies_of(case, DEVICE, count)


def _rows(copy: dict[str, Any]) -> int:
    first = next(value for value in copy.values() if isinstance(value, torch.Tensor))
    return first.shape[0]


def measure_case(spec: OpSpec, case: Case, ceilings: Row, compiled: bool) -> Iterator[Row]:
    """Rows of the reference, of every backend and of every baseline.

    compiled: with torch.compile among the baselines.
    """
    copies = _copies(case)
    work = spec.work(copies[0])
    known = {"operator": spec.name, "case": case.name, "rows": _rows(copies[0])}
    reference: Timing | None = None

    def row(backend: str, timing: Timing) -> Row:
        seconds = timing.median * 1e-6
        found = {
            **known, "backend": backend, **asdict(timing), "bytes": work.bytes,
            "flops": work.flops,
            "share_of_copy": work.bytes / seconds / ceilings["copy_bytes_per_s"],
            "share_of_matrix": work.flops / seconds / ceilings["matrix_flops_per_s"],
            "share_of_fp8": work.flops / seconds / ceilings["fp8_flops_per_s"],
        }  # fmt: skip
        if reference is not None:
            found["times_ref"] = reference.median / timing.median
        return found

    def timed(function: Callable[..., Any]) -> Timing:
        return measure([lambda given=given: function(**given) for given in copies])

    if case.kind != "large":
        reference = timed(spec.reference)
        yield row("ref", reference)
    for backend in spec.backends:
        if not installed(backend.name):
            continue
        try:
            function = load_backend(backend)
            check_case(spec, function, case, DEVICE)
        except Unsupported as error:
            if not backend.narrow:
                yield {**known, "backend": backend.name, "failed": f"Unsupported: {error}"}
            continue
        except Exception as error:
            # A failed case is a result, and the other operators are still to be measured.
            failed = f"{type(error).__name__}: {error}"[:300]
            yield {**known, "backend": backend.name, "failed": failed}
            continue
        yield row(backend.name, timed(function))
    for name, make in baselines(spec.name, spec.reference, compiled):
        yield {**row(name, measure([make(given) for given in copies])), "baseline": True}


def environment() -> Row:
    """What the figures hold for."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
        "triton": triton.__version__, "revision": done.stdout.strip(),
        "copy_bytes_per_s": copy_bandwidth(), "matrix_flops_per_s": matrix_throughput(),
        "fp8_flops_per_s": fp8_throughput(),
    }  # fmt: skip


def _line(row: Row) -> str:
    name = f"{row['operator']} {row['case']} {row['backend']}"
    if "failed" in row:
        return f"{name}: {row['failed']}"
    text = f"{name}: {row['median']:.1f} us, {row['share_of_copy']:.0%} of copy"
    if row["flops"]:
        text += f", {row['flops'] / row['median'] * 1e-6:.0f} TFLOP/s"
    return text + (f", {row['times_ref']:.1f} x ref" if "times_ref" in row else "")


def main() -> int:
    """Measure and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="file of JSON lines to write")
    parser.add_argument("--op", nargs="*", help="only these operators, in this order")
    parser.add_argument("--case", nargs="*", help="only cases whose name contains one of these")
    parser.add_argument("--no-compile", action="store_true",
                        help="without torch.compile, which takes seconds a case")  # fmt: skip
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.stderr.write("error: benchmarks need a CUDA GPU, and torch sees none\n")
        return 2
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    ceilings = environment()
    print(json.dumps(ceilings), flush=True)
    rows: list[Row] = [ceilings]
    known, compiled = specs(), not arguments.no_compile
    for spec in [known[name] for name in arguments.op or known]:
        cases = [c for c in spec.cases() if c.kind in ("released", "large")]
        wanted = arguments.case or [""]
        cases = [c for c in cases if any(part in c.name for part in wanted)]
        for case in cases:
            for row in measure_case(spec, case, ceilings, compiled and case is cases[-1]):
                rows.append(row)
                print(_line(row), flush=True)
            arguments.out.write_text("".join(json.dumps(r) + "\n" for r in rows))
            torch.cuda.empty_cache()
    return 1 if any("failed" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())

"""Seconds until the demo model is ready, with no and with all compiled kernels on disk.

`python benchmarks/cold_start.py --out benchmarks/results/cold-start.jsonl` starts a process for
each on the GPU of this machine. Rows are JSON, one for each stage: loading the checkpoint, warming
up every kernel, capturing the graphs of decode steps.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

DEMO = Path(__file__).resolve().parents[1] / "models" / "demo"


def start_up() -> None:
    """Print a row for each stage of this process."""
    import torch
    import triton

    from deepinfer import LLM
    from deepinfer.engine.warmup import capture

    known = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
        "triton": triton.__version__, "cores": os.cpu_count(),
    }  # fmt: skip
    began = time.monotonic()

    def done(stage: str, **found: int) -> None:
        nonlocal began
        torch.cuda.synchronize()
        row = {**known, "stage": stage, "seconds": time.monotonic() - began, **found}
        print(json.dumps(row), flush=True)
        began = time.monotonic()

    llm = LLM(DEMO, device="cuda", ops_strict=True, enforce_eager=True)
    done("load")
    done("warm up", kernels=llm.warm_up())
    capture(llm.engine, progress=False)
    done("capture", graphs=llm.engine.runner.graph_count)


def main() -> int:
    """Measure twice over one cache folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="file of JSON lines to write")
    out = parser.parse_args().out
    if out is None:
        start_up()
        return 0
    failed = 0
    with tempfile.TemporaryDirectory() as cache, out.open("w", encoding="utf-8") as file:
        environment = os.environ | {"TRITON_CACHE_DIR": cache}
        for kernels_on_disk in (False, True):
            command = [sys.executable, __file__]
            done = subprocess.run(
                command, env=environment, check=False, stdout=subprocess.PIPE, text=True
            )
            failed |= done.returncode
            for line in done.stdout.splitlines():
                row = {"kernels_on_disk": kernels_on_disk, **json.loads(line)}
                file.write(json.dumps(row) + "\n")
                print(json.dumps(row), flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())

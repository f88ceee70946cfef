"""Seconds until every kernel of the demo model is ready, with none and with all of them on disk.

`python benchmarks/cold_start.py --out benchmarks/results/cold-start.jsonl` starts a process for
each on the GPU of this machine. Rows are JSON: seconds to load the checkpoint, seconds of
`LLM.warm_up`, and the number of kernels.
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


def warm_up() -> None:
    """Print the row of this process."""
    import torch
    import triton

    from deepinfer import LLM

    start = time.monotonic()
    llm = LLM(DEMO, device="cuda", ops_strict=True)
    loaded = time.monotonic()
    kernels = llm.warm_up()
    row = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
        "triton": triton.__version__, "cores": os.cpu_count(), "kernels": kernels,
        "load_seconds": loaded - start, "warm_up_seconds": time.monotonic() - loaded,
    }  # fmt: skip
    print(json.dumps(row))


def main() -> int:
    """Measure twice over one cache folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="file of JSON lines to write")
    out = parser.parse_args().out
    if out is None:
        warm_up()
        return 0
    rows = []
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"TRITON_CACHE_DIR": cache}
        for kernels_on_disk in (False, True):
            done = subprocess.run([sys.executable, __file__], env=environment, check=True,
                                  stdout=subprocess.PIPE, text=True)  # fmt: skip
            row = {"kernels_on_disk": kernels_on_disk, **json.loads(done.stdout.splitlines()[-1])}
            rows.append(json.dumps(row) + "\n")
            print(rows[-1], end="", flush=True)
    out.write_text("".join(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())

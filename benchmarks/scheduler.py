"""Time of the control plane alone: planning a step, committing it, taking its tokens.

    python benchmarks/scheduler.py [--sequences 1024] [--steps 2000] [--json]

All sequences decode, as in a long-running server at full load, in the overlapped order: a step is
planned before the tokens of the one before are known. No model runs and nothing is on a device.
Beside the time that passed stands the processor time of the thread, which other processes on a busy
machine do not lengthen.
"""

import argparse
import gc
import json
import statistics
import time

from deepinfer.engine.scheduler import Scheduler, SchedulerLimits, StepPlan
from deepinfer.engine.sequence import Sequence
from deepinfer.kv.manager import KVManager

PAGE_TOKENS = 64
PHASES = ("plan", "commit", "append")


def loaded_scheduler(sequences: int, steps: int, prompt_tokens: int) -> Scheduler:
    """`sequences` running ones that can decode for `steps` more steps, at staggered borders."""
    most = prompt_tokens + PAGE_TOKENS + steps + 8
    pages = sequences * (-(-most // PAGE_TOKENS) + 1)
    manager = KVManager(pages, sequences + 64, PAGE_TOKENS, 64)
    limits = SchedulerLimits(sequences, max(sequences, 8192), sequences, 8192)
    scheduler = Scheduler(limits, manager)
    for number in range(sequences):
        length = prompt_tokens + number % PAGE_TOKENS
        scheduler.add(Sequence(str(number), [number] * length, most))
    plan = None
    while scheduler.waiting or plan is None or plan.decodes < sequences:
        plan = scheduler.plan()
        scheduler.commit(plan)
        append(scheduler, plan)
    return scheduler


def append(scheduler: Scheduler, plan: StepPlan) -> None:
    """A token for every row that samples."""
    for row in plan.rows:
        if row.samples:
            scheduler.append(row.sequence, 1)


Times = dict[str, list[tuple[float, float]]]


def measure(sequences: int, steps: int, prompt_tokens: int) -> Times:
    """Seconds of every phase of every step: passed, and on the processor."""
    scheduler = loaded_scheduler(sequences, steps, prompt_tokens)
    times: Times = {phase: [] for phase in PHASES}
    before = scheduler.plan()
    scheduler.commit(before)
    gc.collect()
    gc.freeze()
    for _ in range(steps):
        stamps = [now()]
        plan = scheduler.plan()
        stamps.append(now())
        scheduler.commit(plan)
        stamps.append(now())
        append(scheduler, before)
        stamps.append(now())
        assert plan.decodes == len(plan.rows) == sequences
        assert all(row.from_device for row in plan.rows)
        before = plan
        for phase, start, end in zip(PHASES, stamps, stamps[1:], strict=False):
            times[phase].append((end[0] - start[0], end[1] - start[1]))
    gc.unfreeze()
    return times


def now() -> tuple[float, float]:
    """Clock and processor time of this thread."""
    return time.perf_counter(), time.thread_time()


def summary(seconds: list[tuple[float, float]]) -> dict[str, float]:
    """Median and 99th percentile of both, in microseconds."""
    found = {}
    for name, values in zip(("", "cpu_"), zip(*seconds, strict=True), strict=True):
        found[f"{name}median_us"] = round(statistics.median(values) * 1e6, 1)
        found[f"{name}p99_us"] = round(statistics.quantiles(values, n=100)[98] * 1e6, 1)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sequences", type=int, nargs="+", default=[32, 256, 1024])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--json", action="store_true", help="one JSON line per row instead")
    args = parser.parse_args()
    columns = ("median_us", "p99_us", "cpu_median_us", "cpu_p99_us")
    if not args.json:
        print(f"{'sequences':>9}  {'phase':8}" + "".join(f"{name:>15}" for name in columns))
    for sequences in args.sequences:
        for phase, seconds in measure(sequences, args.steps, args.prompt_tokens).items():
            found = summary(seconds)
            if args.json:
                row = {"benchmark": "scheduler", "sequences": sequences, "phase": phase}
                print(json.dumps({**row, "steps": args.steps, **found}))
            else:
                print(f"{sequences:9}  {phase:8}" + "".join(f"{found[n]:15.1f}" for n in columns))


if __name__ == "__main__":
    main()

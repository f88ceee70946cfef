"""Write the demo model's card and its loss curves from the figures that were measured.

`python tools/demo_card.py models/demo` reads figures/training-*.json (of tools/train_demo.py, in
order), evaluation-*.json (`deepinfer eval models/demo --json`, one per device), retraining-*.json
and retraining.json (both again, of weights trained anew, on the GPU) and breakage.json
(`tools/break_demo.py models/demo --json`), and writes README.md and figures/loss.svg. Words are in
demo_card.md beside this program; no figure is typed by hand.
"""

import argparse
import json
from pathlib import Path
from string import Template
from typing import Any

Figures = dict[str, Any]


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def quality(evaluations: dict[str, Figures]) -> str:
    """Right answers of each task on each device."""
    first = next(iter(evaluations.values()))
    rows = []
    for task in first["tasks"]:
        row = [task]
        for figures in evaluations.values():
            score = figures["tasks"][task]
            row.append(f"{score['right']} of {score['total']} ({score['accuracy']:.1%})")
        rows.append(row)
    losses = [f"{f['text_loss']:.3f} nats per token" for f in evaluations.values()]
    rows.append(["held-out text, loss", *losses])
    for kind in first["drafter"]:
        scores = [f["drafter"][kind] for f in evaluations.values()]
        accepted = [f"{s['mean_accepted']:.2f} of {s['block_size']}" for s in scores]
        errors = [f"{s['calibration_error']:.3f}" for s in scores]
        rows.append([f"drafts accepted per round, {kind}", *accepted])
        rows.append([f"calibration error of confidence, {kind}", *errors])
    return table(["task", *evaluations], rows)


def breakages(figures: Figures) -> str:
    """What each broken part costs."""
    intact = figures["rows"][0]
    rows = []
    for row in figures["rows"]:
        fell = [f"{task} {row['right'][task][0]}/{row['right'][task][1]}" for task in row["fell"]]
        where = f" ({row['shift_in']})" if row["shift"] else ""
        accepted = "" if row["accepted"] is None else f"{row['accepted']:.2f}"
        rows.append([
            f"`{row['name']}`", str(row["changed"]), f"{row['shift']:.4f}{where}",
            f"{row['text_loss']:.3f}", accepted, ", ".join(fell) or "–",
        ])  # fmt: skip
    total = sum(total for _, total in intact["right"].values())
    header = [
        "part broken", f"answers changed of {total}", "shift, nats (where)", "text loss",
        "drafts taken", "tasks that lost right answers",
    ]  # fmt: skip
    return table(header, rows)


def training(runs: list[Figures]) -> str:
    """Length, tokens and rates of every part of the training."""
    rows = []
    for number, run in enumerate(runs, start=1):
        for part, curve in run["curves"].items():
            settings = run["settings"][part]
            rows.append([
                f"{number}, {part}", f"{curve['steps'][-1]:,}",
                f"{curve['tokens'][-1] / 1e6:.1f} M", f"{curve['seconds'][-1]:.0f} s",
                f"{settings['rate']:g}",
            ])  # fmt: skip
    return table(["run, part", "steps", "tokens", "time", "peak rate"], rows)


def plot(runs: list[Figures], file: Path) -> None:
    """Loss over tokens, run after run."""
    import matplotlib

    matplotlib.use("svg")
    # The same figures give the same bytes.
    matplotlib.rcParams["svg.hashsalt"] = "demo"
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for part, panel in zip(("backbone", "drafter"), panels, strict=True):
        start = 0.0
        for number, run in enumerate(runs, start=1):
            curve = run["curves"][part]
            tokens = [start + count / 1e6 for count in curve["tokens"]]
            panel.plot(tokens, curve["loss"], label=f"run {number}")
            start = tokens[-1]
        panel.set(title=f"{part}: loss", xlabel="million tokens", yscale="log")
        panel.grid(True, which="both", alpha=0.3)
        panel.legend()
    figure.savefig(file, metadata={"Date": None})


def main() -> None:
    """Read the figures, write the card and the plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="folder of the demo checkpoint")
    folder: Path = parser.parse_args().model
    figures = folder / "figures"

    def read(file: Path) -> Figures:
        loaded: Figures = json.loads(file.read_text(encoding="utf-8"))
        return loaded

    runs = [read(file) for file in sorted(figures.glob("training-*.json"))]
    again = [read(file) for file in sorted(figures.glob("retraining-*.json"))]
    evaluations = {
        file.stem.removeprefix("evaluation-").upper(): read(file)
        for file in sorted(figures.glob("evaluation-*.json"))
    }
    words = Template(Path(__file__).with_suffix(".md").read_text(encoding="utf-8"))
    card = words.substitute(
        quality=quality(evaluations),
        retraining=quality(
            {
                "shipped": evaluations["GPU"],
                "trained again": read(figures / "retraining.json"),
            }
        ),
        retraining_runs=training(again),
        breakages=breakages(read(figures / "breakage.json")),
        training=training(runs),
        plot="![loss over tokens](figures/loss.svg)",
        device=runs[0]["device"],
        torch=runs[0]["torch"],
        seconds=f"{sum(run['seconds'] for run in runs) / 60:.0f}",
    )
    (folder / "README.md").write_text(card, encoding="utf-8")
    plot(runs, figures / "loss.svg")


if __name__ == "__main__":
    main()

"""Train the demo checkpoint from scratch: `python tools/train_demo.py --out models/demo`.

Knows the order of the parts; the parts are in demo_corpus (text) and demo_training (learning).
Needs the packages of the `demo` extra. About nine minutes on one H200.
"""

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import torch
from demo_corpus.corpus import build_tokenizer, fill_batch
from demo_corpus.evaluation import demo_questions, evaluation_items
from demo_training.backbone import Batch, Trainer, train_backbone
from demo_training.drafter import DrafterTrainer, train_drafter
from demo_training.fake_quant import make_trainable, master_values
from demo_training.initialise import continue_from, initialise
from demo_training.recipe import LOOKUP_TRAINING, DrafterTraining, Training, demo_config
from demo_training.truncated_sinkhorn import install
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from deepinfer.checkpoint.hf_config import parse_model_config
from deepinfer.checkpoint.loader import parameter_slot
from deepinfer.checkpoint.names import TensorSpec
from deepinfer.checkpoint.token_map import build_token_map
from deepinfer.checkpoint.writer import write_checkpoint
from deepinfer.model.linear import Precision
from deepinfer.model.transformer import Transformer


class _Batches(Dataset[tuple[Tensor, Tensor]]):
    """Batch number i of one kind, made on demand in a worker process."""

    def __init__(self, seed: int, kind: str, shape: tuple[int, int], count: int) -> None:
        self.seed, self.kind, self.shape, self.count = seed, kind, shape, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index >= self.count:
            raise IndexError(index)
        tokens, weights = fill_batch(self.seed, index, *self.shape, self.kind)
        return torch.from_numpy(tokens.astype("int64")), torch.from_numpy(weights.astype("float32"))


class Feed:
    """Batches of both kinds on the device, produced ahead by worker processes."""

    def __init__(
        self, seed: int, settings: Training, drafter: DrafterTraining, workers: int,
        device: torch.device,
    ) -> None:  # fmt: skip
        self.device = device
        steps = settings.steps + 64
        shapes = {"short": settings.short, "long": settings.long}
        counts = {"short": steps + drafter.steps, "long": steps}
        kinds = {"short": "short", "long": settings.long_kind}
        self.streams = {}
        for kind, shape in shapes.items():
            loader: DataLoader[Any] = DataLoader(
                _Batches(seed, kinds[kind], shape, counts[kind]),
                batch_size=None,
                num_workers=workers if kind == "short" else max(1, workers // 2),
                prefetch_factor=4 if workers else None,
                multiprocessing_context="spawn" if workers else None,
                pin_memory=device.type == "cuda",
            )  # fmt: skip
            self.streams[kind] = iter(loader)

    def __call__(self, kind: str) -> Batch:
        """The next batch of a kind."""
        tokens, weights = next(self.streams[kind])
        return (
            tokens.to(self.device, non_blocking=True),
            weights.to(self.device, non_blocking=True),
        )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="checkpoint folder to write")
    parser.add_argument(
        "--continue-from",
        type=Path,
        metavar="DIR",
        help="start from this checkpoint and practise copying from far away",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=12, help="processes that make text")
    for kind in ("", "drafter-"):
        parser.add_argument(f"--{kind}steps", type=int, help="most steps")
        parser.add_argument(f"--{kind}seconds", type=float, help="most seconds")
        parser.add_argument(f"--{kind}rate", type=float, help="peak learning rate of matrices")
    parser.add_argument("--small", action="store_true", help="tiny batches, to try the program")
    return parser.parse_args()


def _settings(arguments: argparse.Namespace) -> tuple[Training, DrafterTraining]:
    def given(prefix: str) -> dict[str, float]:
        names = ("steps", "seconds", "rate")
        values = {name: getattr(arguments, prefix + name) for name in names}
        return {name: value for name, value in values.items() if value is not None}

    first = Training() if arguments.continue_from is None else LOOKUP_TRAINING
    backbone: Training = dataclasses.replace(first, **given(""))  # type: ignore[arg-type]
    drafter = dataclasses.replace(DrafterTraining(), **given("drafter_"))  # type: ignore[arg-type]
    if arguments.small:
        backbone = dataclasses.replace(backbone, short=(2, 256), long=(1, 768), index_rows=16)
        drafter = dataclasses.replace(drafter, short=(2, 256), anchors=16)
    return backbone, drafter


def write_questions(folder: Path) -> None:
    """The evaluation's items (eval.jsonl) and the questions of reports (questions.json)."""
    lines = [json.dumps(item, ensure_ascii=False) for item in evaluation_items()]
    (folder / "eval.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    text = json.dumps(demo_questions(), ensure_ascii=False, indent=1)
    (folder / "questions.json").write_text(text + "\n", encoding="utf-8")


def main() -> None:
    """Train, write the checkpoint and training.json with the curves."""
    arguments = _arguments()
    start = time.monotonic()

    def log(message: str) -> None:
        print(f"[{time.monotonic() - start:6.1f}s] {message}", flush=True)

    backbone, drafter = _settings(arguments)
    install()
    # Router, head and mixing products in TF32: a third of the time, and gradients are noisy anyway.
    torch.backends.cuda.matmul.allow_tf32 = True
    device = torch.device(arguments.device)
    tokenizer = build_tokenizer()
    config_json = demo_config(tokenizer)
    config = parse_model_config(config_json)
    log(f"tokenizer of {tokenizer.get_vocab_size()} ids")
    feed = Feed(arguments.seed, backbone, drafter, arguments.workers, device)
    # Products of CPUs without bfloat16 arithmetic are far slower than in float32.
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.device(device):
        model = Transformer(config, Precision(dtype, dtype, True))
    make_trainable(model, dtype)
    if arguments.continue_from is None:
        initialise(model, arguments.seed)
    else:
        continue_from(model, arguments.continue_from)
    model.to(device)
    token_map = torch.tensor(build_token_map(tokenizer), device=device)
    log(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters on {device}")
    curves = {
        "backbone": train_backbone(Trainer(model, token_map, backbone), feed, arguments.seed, log),
        "drafter": train_drafter(
            DrafterTrainer(model, token_map, drafter), feed, arguments.seed, log
        ),
    }
    master = master_values(model)

    def values(spec: TensorSpec) -> Tensor:
        name, place = parameter_slot(spec.name)
        return master[name][place].float().cpu()

    write_checkpoint(arguments.out, config_json, tokenizer, values)
    record = {
        "seed": arguments.seed,
        "continued_from": arguments.continue_from.name if arguments.continue_from else "",
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "settings": {
            "backbone": dataclasses.asdict(backbone),
            "drafter": dataclasses.asdict(drafter),
        },
        "curves": {name: dataclasses.asdict(curve) for name, curve in curves.items()},
        "seconds": time.monotonic() - start,
    }  # fmt: skip
    (arguments.out / "training.json").write_text(json.dumps(record) + "\n", encoding="utf-8")
    write_questions(arguments.out)
    log(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()

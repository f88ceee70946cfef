"""`python tools/demo_corpus`: look at samples, measure speed, write the evaluation's items.

Knows the command line; must not know how text is made.
"""

import argparse
import json
import sys
import time
from pathlib import Path

if __name__ == "__main__":  # a folder or `-m tools.demo_corpus` does not put tools/ on the path
    sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[1:3]]

from deepinfer.checkpoint.tokenizer_training import SPECIAL_TOKENS
from demo_corpus.chat import tools_text
from demo_corpus.corpus import MIX, build_tokenizer, codec, fill_batch, sample_document
from demo_corpus.dice import dice
from demo_corpus.evaluation import demo_questions, evaluation_items

_KINDS = {"short": (32, 1024), "long": (12, 2816)}
_SECONDS = 1.0


def show(task: str, count: int) -> None:
    """Print samples; answers stand in brackets."""
    for number in range(count):
        document = sample_document(dice("show", task, number), task, codec(), 400)
        shown, was = "", False
        for token, weight in zip(document.token_ids, document.weights, strict=True):
            if (weight == 1.0) != was:
                shown += "\x1e[" if weight == 1.0 else "]\x1e"
                was = weight == 1.0
            shown += chr(0xE000 + token)
        parts = shown.split("\x1e")
        print(f"--- {task} {number}, {len(document.token_ids)} tokens")
        print("".join(_decoded(part) for part in parts) + "]" * was)


def _decoded(part: str) -> str:
    ids = [ord(c) - 0xE000 for c in part if ord(c) >= 0xE000]
    text = build_tokenizer().decode(ids, skip_special_tokens=False)
    return ("[" if part.startswith("[") else "") + text + ("]" if part.endswith("]") else "")


def statistics() -> None:
    """Print tokens per second and lengths of each task and of whole batches."""
    start = time.perf_counter()
    words = codec()
    print(f"tokenizer: {time.perf_counter() - start:.1f} s, tools preamble "
          f"{words.count(tools_text(()))} tokens")  # fmt: skip
    print("task         tokens/s   tokens  answer  characters/token")
    for task in MIX:
        rng, tokens, answers, count = dice("speed", task), 0, 0, 0
        start = time.perf_counter()
        texts = []
        while time.perf_counter() - start < _SECONDS:
            document = sample_document(rng, task, words, 900)
            tokens += len(document.token_ids)
            answers += document.weights.count(1.0)
            count += 1
            texts.append(document.token_ids)
        speed = tokens / (time.perf_counter() - start)
        sample = texts[:200]
        characters = sum(map(len, words.tokenizer.decode_batch(sample)))
        ratio = characters / sum(token >= len(SPECIAL_TOKENS) for ids in sample for token in ids)
        print(f"{task:11} {speed:9.0f} {tokens / count:8.1f} {answers / count:7.1f} {ratio:8.2f}")
    for kind, (sequences, length) in _KINDS.items():
        start, batches = time.perf_counter(), 4
        free = 0.0
        for index in range(batches):
            _, weights = fill_batch(0, index, sequences, length, kind)
            free += float((weights == 0).mean()) / batches
        speed = batches * sequences * length / (time.perf_counter() - start)
        print(f"{kind} batches: {speed:.0f} tokens/s, {free:.1%} of weight 0")


def main() -> None:
    """Do what the options say."""
    parser = argparse.ArgumentParser(prog="demo_corpus", description=__doc__.splitlines()[0])
    parser.add_argument("--show", type=int, metavar="N", help="print N samples of a task")
    parser.add_argument("--task", choices=sorted(MIX), help="only this task; default all")
    parser.add_argument("--speed", action="store_true", help="print tokens per second and lengths")
    parser.add_argument("--write", type=Path, metavar="DIR",
                        help="write eval.jsonl, questions.json and tokenizer.json")  # fmt: skip
    options = parser.parse_args()
    for task in [options.task] if options.task else MIX:
        if options.show:
            show(task, options.show)
    if options.speed:
        statistics()
    if options.write:
        options.write.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(item) + "\n" for item in evaluation_items()]
        (options.write / "eval.jsonl").write_text("".join(lines), encoding="utf-8")
        questions = json.dumps(demo_questions(), indent=1)
        (options.write / "questions.json").write_text(questions + "\n", encoding="utf-8")
        build_tokenizer().save(str(options.write / "tokenizer.json"))


if __name__ == "__main__":
    main()

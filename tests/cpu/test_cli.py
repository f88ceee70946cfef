"""The command line: what each command prints, and one line with status 2 for every mistake.

Commands run in this process through `deepinfer.cli.main`; a few start a real one.
"""

import errno
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

import deepinfer
from deepinfer import LLM
from deepinfer.cli import main
from deepinfer.commands.console import console
from deepinfer.commands.doctor import OPTIONAL_PACKAGES, Finding
from deepinfer.commands.pulse import Pulse
from deepinfer.model.transformer import Transformer

ROOT = Path(__file__).parents[2]


class Result(NamedTuple):
    """What a command left behind."""

    status: int
    out: str
    err: str


Run = Callable[..., Result]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], small_folder: Path) -> Run:
    """Runs a command in this process; "MODEL" stands for a small checkpoint."""

    def command(*arguments: object) -> Result:
        words = [str(small_folder) if a == "MODEL" else str(a) for a in arguments]
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_:
            main(words)
        out, err = capsys.readouterr()
        assert isinstance(exit_.value.code, int)
        return Result(exit_.value.code, out, err)

    return command


GENERATE = ("generate", "MODEL", "--threads", 1, "--max-tokens", 6)
PROMPT = ("--prompt", "A window of tokens")


# generate


def test_json_has_the_whole_reply(run: Run, small_folder: Path) -> None:
    result = run(*GENERATE, *PROMPT, "--seed", 3, "--ignore-eos", "--logprobs", 1, "--json")
    assert (result.status, result.err) == (0, "")
    assert result.out.count("\n") == 1
    reply = json.loads(result.out)
    llm = LLM(small_folder, threads=1)
    ids = llm.encode("A window of tokens")
    assert reply["prompt"] == "A window of tokens"
    assert reply["prompt_token_ids"] == ids
    assert len(reply["token_ids"]) == len(reply["logprobs"]) == 6
    assert reply["text"] == llm.tokenizer.decode(reply["token_ids"])
    assert (reply["finish_reason"], reply["stop_reason"]) == ("length", None)
    expected = {"prompt_tokens": len(ids), "completion_tokens": 6, "cached_tokens": 0}
    assert reply["usage"] == expected
    assert reply["speed"]["first_token_s"] > 0
    assert reply["speed"]["decode_tokens_per_s"] > 0


def test_text_is_that_of_the_json(run: Run) -> None:
    """The text alone on standard output, a summary on standard error."""
    options = (*GENERATE, *PROMPT, "--seed", 3, "--ignore-eos")
    reply = json.loads(run(*options, "--json").out)
    shown = run(*options)
    assert (shown.status, shown.out) == (0, reply["text"] + "\n")
    count = len(reply["prompt_token_ids"])
    assert shown.err.startswith(f"[{count} prompt + 6 generated tokens, length; first token")
    assert shown.err.count("\n") == 1


def test_echo(run: Run, small_folder: Path) -> None:
    options = (*GENERATE, "--temperature", 0, "--ignore-eos")
    plain = run(*options, *PROMPT).out
    assert run(*options, *PROMPT, "--echo").out == "A window of tokens" + plain
    ids = LLM(small_folder, threads=1).encode("A window of tokens")
    words = ",".join(map(str, ids))
    assert run(*options, "--prompt-token-ids", words, "--echo").out == "A window of tokens" + plain


def test_every_way_to_give_a_prompt(
    run: Run, small_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text, ids, a file of either, and standard input: all the same prompt."""
    text = "A window of t\u00f6kens\n"
    ids = LLM(small_folder, threads=1).encode(text)
    (tmp_path / "text").write_text(text, encoding="utf-8")
    (tmp_path / "ids").write_text("\n".join(map(str, ids)) + "\n", encoding="utf-8")
    stdin = io.TextIOWrapper(io.BytesIO(text.encode()))
    monkeypatch.setattr(sys, "stdin", stdin)
    options = (*GENERATE, "--temperature", 0, "--json")
    replies = [
        json.loads(run(*options, *prompt).out)
        for prompt in (
            ("--prompt", text),
            ("--prompt-token-ids", ",".join(map(str, ids))),
            ("--prompt-token-ids", f"@{tmp_path / 'ids'}"),
            ("--prompt-file", tmp_path / "text"),
            ("--prompt-file", "-"),
        )
    ]
    assert [reply["prompt_token_ids"] for reply in replies] == [ids] * 5
    assert len({tuple(reply["token_ids"]) for reply in replies}) == 1


@pytest.mark.parametrize("text", ["- like this", "--json"])
def test_a_prompt_may_begin_with_a_hyphen(run: Run, text: str) -> None:
    assert json.loads(run(*GENERATE, "--json", "--prompt", text).out)["prompt"] == text


def test_options_reach_the_engine(run: Run) -> None:
    """Stop tokens, stop strings, temperature, and how the model is computed."""
    base = (*GENERATE, *PROMPT, "--ignore-eos", "--json")
    greedy = json.loads(run(*base, "--temperature", 0).out)["token_ids"]
    place = next(i for i in range(1, 6) if greedy[i] not in greedy[:i])
    stops = ("--stop-token-ids", 511, "--stop-token-ids", greedy[place])
    stopped = json.loads(run(*base, "--temperature", 0, *stops).out)
    assert stopped["token_ids"] == greedy[: place + 1]
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", greedy[place])
    for top in (("--top-k", 1), ("--top-p", 1e-6), ("--min-p", 1)):
        assert json.loads(run(*base, "--temperature", 9, *top).out)["token_ids"] == greedy
    options = ("--dtype", "float32", "--no-act-quant", "--prompt-logprobs", 0, "--top-k", 0)
    first, second = (
        json.loads(run(*base, "--temperature", 0, *change).out)["prompt_logprobs"][1]["logprob"]
        for change in (options, ("--prompt-logprobs", 0))
    )
    assert first != second
    assert first == pytest.approx(second, abs=0.5)


def test_sampling_options_have_their_effect(run: Run) -> None:
    """Penalties, biases, allowed and banned tokens, several replies."""
    base = (*GENERATE, *PROMPT, "--ignore-eos", "--temperature", 0, "--json")
    plain = json.loads(run(*base).out)["token_ids"]
    ids = ("--allowed-token-ids", 70, "--allowed-token-ids", 71, "--banned-token-ids", 71)
    assert json.loads(run(*base, *ids).out)["token_ids"] == [70] * 6
    for option, value in (("--logit-bias", f"{plain[0]}=-100"), ("--banned-token-ids", plain[0])):
        assert plain[0] not in json.loads(run(*base, option, value).out)["token_ids"]
    biases = ("--logit-bias", "99=100", "--logit-bias", "98=-5", "--presence-penalty", 2)
    assert json.loads(run(*base, *biases).out)["token_ids"] == [99] * 6
    several = json.loads(run(*base, "--n", 2).out)
    assert [output["token_ids"] for output in several["outputs"]] == [plain, plain]
    shown = run(*GENERATE, *PROMPT, "--ignore-eos", "--temperature", 0, "--n", 2)
    text = several["outputs"][0]["text"]
    assert (shown.status, shown.out) == (0, f"[0] {text}\n[1] {text}\n")
    assert "12 generated tokens, length;" in shown.err


def test_forms_of_the_text(run: Run, tmp_path: Path) -> None:
    """Each in its option, grammars and schemas from files too."""
    (tmp_path / "form").write_text('root ::= "b" "!"?', encoding="utf-8")
    (tmp_path / "schema").write_text('{"enum": [37]}', encoding="utf-8")
    options = ("generate", "MODEL", "--threads", 1, *PROMPT, "--seed", 1, "--max-tokens", 30)
    for form, texts in (
        (("--choice", "yes", "--choice", "-no"), {"yes", "-no"}),
        (("--regex", "a{3}"), {"aaa"}),
        (("--ebnf", f"@{tmp_path / 'form'}"), {"b", "b!"}),
        (("--json-schema", f"@{tmp_path / 'schema'}"), {"37"}),
        (("--json-schema", '{"const": null}'), {"null"}),
    ):
        reply = json.loads(run(*options, *form, "--json").out)
        assert reply["text"] in texts
        assert reply["finish_reason"] == "stop"


SCRIPT = "n\u00e9 \u6f22\u5b57 \U0001f642!"


@pytest.fixture
def scripted(small_folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Makes the model say SCRIPT, whose characters are spread over tokens; their number."""
    ids = LLM(small_folder, threads=1).encode(SCRIPT)[1:]
    assert len(ids) > len(SCRIPT)
    left: list[int] = []

    def logits(self: Transformer, x: Tensor) -> Tensor:
        if not left:
            left.extend(ids)
        return torch.eye(512)[[left.pop(0)]] * 100

    monkeypatch.setattr(Transformer, "logits", logits)
    return len(ids)


def test_characters_are_never_split(
    run: Run, scripted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is written at once is whole characters, each as soon as its last token is there."""
    options = ("generate", "MODEL", "--threads", 1, *PROMPT, "--max-tokens", scripted,
               "--temperature", 0)  # fmt: skip
    assert json.loads(run(*options, "--json").out)["text"] == SCRIPT
    written: list[str] = []
    monkeypatch.setattr(sys.stdout, "write", written.append)
    run(*options)
    assert "".join(written) == SCRIPT + "\n"
    assert max(map(len, written)) <= 2  # no character waits for the next one


def test_a_broken_off_reply_has_status_1(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Transformer, "logits", lambda self, x: torch.full((len(x), 512), float("nan"))
    )
    result = run(*GENERATE, *PROMPT)
    assert (result.status, result.out) == (1, "\n")
    assert "0 generated tokens, error" in result.err
    result = run(*GENERATE, *PROMPT, "--json")
    assert (result.status, json.loads(result.out)["finish_reason"]) == (1, "error")


def test_interrupting(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(self: Transformer, x: Tensor) -> Tensor:
        raise KeyboardInterrupt

    monkeypatch.setattr(Transformer, "logits", interrupt)
    assert run(*GENERATE, *PROMPT).status == 130


# Mistakes


def assert_refused(result: Result, *words: str) -> None:
    """Status 2, nothing on standard output, one line that holds the words."""
    assert (result.status, result.out) == (2, ""), result
    assert result.err.startswith("error: ")
    assert result.err.count("\n") == 1
    assert result.err.endswith("\n")
    for word in words:
        assert word in result.err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--prompt", ""), ["empty"]),
        (("--prompt-token-ids", ""), ["empty"]),
        (("--prompt-token-ids", "5,512"), ["512", "0 <= id < 512"]),
        (("--prompt-token-ids", "5,-1"), ["-1"]),
        (("--prompt-token-ids", "5,x"), ["'x'", "whole numbers"]),
        (("--prompt-token-ids", "5.0"), ["'5.0'"]),
        (("--prompt-token-ids", "@/no/such/file"), ["/no/such/file", "cannot be read"]),
        (("--prompt-file", "/no/such/file"), ["/no/such/file", "cannot be read"]),
        (("--prompt-file", "MODEL"), ["cannot be read"]),
        ((), ["none given", "--prompt-file"]),
        ((*PROMPT, "--prompt-token-ids", "5"), ["--prompt and --prompt-token-ids given"]),
        ((*PROMPT, "--temperature", "-1"), ["temperature = -1.0", ">= 0"]),
        ((*PROMPT, "--temperature", "warm"), ["--temperature", "warm"]),
        ((*PROMPT, "--max-tokens", "0"), ["max_tokens = 0"]),
        ((*PROMPT, "--max-tokens", "9999"), ["9999", "max_model_len = 1024"]),
        ((*PROMPT, "--seed", "-1"), ["seed = -1"]),
        ((*PROMPT, "--stop", ""), ["stop"]),
        ((*PROMPT, "--stop-token-ids", "512"), ["stop_token_ids", "512"]),
        ((*PROMPT, "--allowed-token-ids", "512"), ["allowed_token_ids", "512"]),
        ((*PROMPT, "--logit-bias", "5"), ["--logit-bias '5'", "ID=BIAS"]),
        ((*PROMPT, "--logit-bias", "5=x"), ["--logit-bias '5=x'", "ID=BIAS"]),
        ((*PROMPT, "--logit-bias", "5=101"), ["logit_bias", "[-100, 100]"]),
        ((*PROMPT, "--regex", "a", "--choice", "b"), ["regex and choice given"]),
        ((*PROMPT, "--regex", "(?=a)"), ["structured.regex", "not supported"]),
        ((*PROMPT, "--json-schema", "{"), ["structured.json_schema", "JSON schema"]),
        ((*PROMPT, "--ebnf", "@/no/such/file"), ["/no/such/file", "cannot be read"]),
        ((*PROMPT, "--ebnf", "root ::= x"), ["cannot be compiled", "x"]),
        ((*PROMPT, "--after-thinking"), ["after_thinking", "json_schema"]),
        ((*PROMPT, "--logprobs", "2"), ["--logprobs", "--json"]),
        ((*PROMPT, "--prompt-logprobs", "2"), ["--prompt-logprobs", "--json"]),
        ((*PROMPT, "--frobnicate", "1"), ["--frobnicate"]),
        ((*PROMPT, "--dtype", "float16"), ["float16", "bfloat16"]),
        ((*PROMPT, "--page-tokens", "7"), ["page_tokens = 7"]),
        (
            (*PROMPT, "--max-num-seqs", "999", "--max-num-batched-tokens", "5"),
            ["max_num_batched_tokens = 5"],
        ),
        ((*PROMPT, "--tokenizer", "/no/such/file"), ["/no/such/file", "missing"]),
    ],
)
def test_wrong_requests(run: Run, options: tuple[str, ...], words: list[str]) -> None:
    assert_refused(run("generate", "MODEL", "--threads", 1, *options), *words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("generate",), ["model"]),
        (("generate", "/no/such/folder", *PROMPT), ["/no/such/folder"]),
        (("dump", "/no/such/folder", "--token-ids", "5", "--out", "x"), ["/no/such/folder"]),
        (("dump", "MODEL", "--token-ids", "5"), ["--out"]),
        (("doctor", "/no/such/folder"), ["/no/such/folder"]),
        (("bench", "cpu", "/no/such/folder"), ["/no/such/folder"]),
        (("bench", "cpu", "MODEL", "--repeats", "0"), ["repeats = 0"]),
        (("bench", "cpu", "MODEL", "--prompt-tokens", "-3"), ["prompt_tokens = -3"]),
        (("bench", "cpu", "MODEL", "--output-tokens", "1"), ["output_tokens = 1", "at least 2"]),
        (("no-such-command",), ["no-such-command"]),
    ],
)
def test_wrong_commands(run: Run, arguments: tuple[str, ...], words: list[str]) -> None:
    assert_refused(run(*arguments), *words)


def test_text_that_is_no_text(run: Run, tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for option in (("--prompt-file", tmp_path / "bytes"),
                   ("--prompt-token-ids", f"@{tmp_path / 'bytes'}")):  # fmt: skip
        assert_refused(run(*GENERATE, *option), "cannot be read")
    assert_refused(run(*GENERATE, "--prompt", "half \udc80"), "cannot be tokenized")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("DEEPINFER_YOCO_PREFILL", "off", ["DEEPINFER_YOCO_PREFILL is unknown", "did you mean"]),
        ("DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE", "on", ["'on'", "off, mask or compact"]),
        ("DEEPINFER_YOCO_PREFILL_KEEP_TOKENS", "-1", ["'-1'", "a whole number"]),
    ],
)
def test_wrong_environment(
    run: Run, monkeypatch: pytest.MonkeyPatch, name: str, value: str, words: list[str]
) -> None:
    monkeypatch.setenv(name, value)
    assert_refused(run(*GENERATE, *PROMPT), *words)


@pytest.fixture
def copied(small_folder: Path, tmp_path: Path) -> Path:
    """A checkpoint folder that a test may damage."""
    return shutil.copytree(small_folder, tmp_path / "checkpoint")


def test_a_checkpoint_without_a_tokenizer(run: Run, copied: Path) -> None:
    (copied / "tokenizer.json").unlink()
    assert_refused(run("generate", copied, *PROMPT), "tokenizer.json", "missing")


def test_another_kind_of_model(run: Run, copied: Path) -> None:
    config = json.loads((copied / "config.json").read_text(encoding="utf-8"))
    config["model_type"] = "llama"
    (copied / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert_refused(run("generate", copied, *PROMPT), "model_type", "llama")


def test_a_checkpoint_without_weights(run: Run, copied: Path) -> None:
    for file in copied.glob("*.safetensors"):
        file.unlink()
    assert_refused(run("generate", copied, *PROMPT), str(copied))


# dump


@pytest.mark.parametrize("mode", ["recompute", "cached", "chunked:1", "chunked:2"])
def test_dump(run: Run, tmp_path: Path, mode: str) -> None:
    file = tmp_path / "dump.safetensors"
    options = ("--token-ids", "0,57,91,33,120", "--out", file, "--mode", mode, "--dtype", "float64")
    result = run("dump", "MODEL", "--threads", 1, *options)
    assert (result.status, result.err) == (0, "")
    assert result.out == f"{file}: logits [5, 512] and 3 streams\n"
    tensors = load_file(file)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert shapes == {"logits": (5, 512)} | {f"streams.{i}": (5, 4, 128) for i in range(3)}
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    with safe_open(file, "pt") as opened:
        assert opened.metadata() == {"mode": mode, "dtype": "float64", "act_quant": "True"}
    run("dump", "MODEL", "--threads", 1, *options[:4], "--dtype", "float64")  # mode: recompute
    for name, tensor in load_file(file).items():
        assert (tensor - tensors[name]).abs().max() < 1e-5, name


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--token-ids", "5,512"), ["512"]),
        (("--token-ids", ""), ["at least one"]),
        (("--token-ids", "5", "--mode", "chunked:0"), ["chunked:0", "N > 0"]),
        (("--token-ids", "5", "--mode", "chunked"), ["'chunked'"]),
        (("--token-ids", "5", "--mode", "dense"), ["'dense'", "recompute"]),
        (("--token-ids", "5,5,5", "--max-model-len", "2"), ["max_model_len = 2"]),
    ],
)
def test_wrong_dumps(run: Run, tmp_path: Path, options: tuple[str, ...], words: list[str]) -> None:
    result = run("dump", "MODEL", "--out", tmp_path / "x", *options)
    assert_refused(result, *words)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("out", [".", "no/such/folder/x"])
def test_dumps_that_cannot_be_written(run: Run, tmp_path: Path, out: str) -> None:
    result = run("dump", "MODEL", "--token-ids", "5", "--out", tmp_path / out)
    assert_refused(result, str(tmp_path), "cannot be written")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_being_asked_to_end_unwinds(
    run: Run, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """As Ctrl-C does: what was started is stopped, and temporary folders go. A signal that is
    ignored, as nohup has it, stays so."""
    unwound = []

    def stubborn(*_: Any, **__: Any) -> list[Finding]:
        try:
            signal.raise_signal(number)
        finally:
            unwound.append(True)
        return []

    monkeypatch.setattr("deepinfer.commands.doctor.examine", stubborn)
    before = signal.signal(number, signal.SIG_DFL)
    try:
        assert run("doctor").status == 128 + number
        assert unwound == [True]
        assert signal.getsignal(number) is signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN)
        assert run("doctor").status == 0
    finally:
        signal.signal(number, before)


# doctor and bench


def test_lists_have_no_flag_for_their_absence(run: Run) -> None:
    for command in ("generate", "chat", "eval", "report", "screen", "doctor"):
        assert "--empty" not in run(command, "--help").out


def test_doctor(run: Run, small_folder: Path) -> None:
    shown = run("doctor", "MODEL")
    assert (shown.status, shown.err) == (0, "")
    for word in (deepinfer.__version__, "Python", torch.__version__, "DeepSeek-V4.1-Flash"):
        assert word in shown.out
    findings = json.loads(run("doctor", "MODEL", "--json").out)
    assert all(set(finding) == {"subject", "fact", "state"} for finding in findings)
    by_subject = {finding["subject"]: finding for finding in findings}
    assert by_subject["deepinfer"]["fact"] == deepinfer.__version__
    assert by_subject[str(small_folder)]["state"] == "ok"
    assert "DeepSeek-V4.1-Flash" in by_subject
    assert {name for name, _ in OPTIONAL_PACKAGES} <= by_subject.keys()
    alone = json.loads(run("doctor", "--json").out)
    assert str(small_folder) not in {finding["subject"] for finding in alone}


def test_doctor_counts_memory(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The released checkpoint takes 4 bytes a value on a CPU, n-gram tables stay on the disk."""

    def state(free: int) -> Any:
        monkeypatch.setattr("deepinfer.commands.doctor.memory_bytes", lambda: free)
        return json.loads(run("doctor", "--json").out)[-1]

    poor, rich = state(2**40), state(2**42)
    assert (poor["state"], rich["state"]) == ("missing", "ok")
    # 763.2 billion parameters without 196.6 billion in tables, 4 bytes each.
    assert "2,1" in poor["fact"]
    assert "GiB of weights on the CPU, 1,024.0 GiB are free" in poor["fact"]


def test_doctor_plans_memory(run: Run) -> None:
    """Without a checkpoint the released one, for GPUs that are common or that are named."""
    shown = run("doctor", "--plan", "--max-num-seqs", 8)
    assert (shown.status, shown.err) == (0, "")
    for word in ("8 x H20", "cache_tokens", "at least 5 such GPUs", "runs on one GPU"):
        assert word in " ".join(shown.out.split())
    (plan,) = json.loads(run("doctor", "MODEL", "--gpus", "1x80", "--json").out)
    assert plan["fits"]
    assert plan["usable"] > plan["weights"] + plan["workspace"] + plan["graphs"] + plan["states"]
    assert_refused(run("doctor", "--gpus", "many"), "gpus = 'many'", "8x96")
    assert_refused(run("doctor", "--plan", "--max-queue", 0), "max_queue")


BENCH = ("bench", "cpu", "MODEL", "--threads", 1, "--prompt-tokens", 9, "--output-tokens", 3)


def test_bench(run: Run) -> None:
    result = run(*BENCH, "--repeats", 2, "--max-model-len", 12, "--json")
    assert (result.status, result.err) == (0, "")
    report = json.loads(result.out)
    assert (report["prompt_tokens"], report["output_tokens"], report["threads"]) == (9, 3, 1)
    assert report["dtype"] == "bfloat16"
    for phase in ("prefill", "decode"):
        figures = report[phase]
        assert figures["best_tokens_per_s"] >= figures["tokens_per_s"] > 0
        assert sum(figures["shares"].values()) == pytest.approx(1)
        assert {"attention", "experts", "n-gram memory"} <= set(figures["shares"])
    shown = run(*BENCH, "--repeats", 1)
    assert shown.status == 0
    for word in ("tokens/s (median)", "prefill", "decode", "time in experts"):
        assert word in shown.out


def test_a_full_disk_is_told_with_the_file(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "big.safetensors")

    monkeypatch.setattr("deepinfer.commands.doctor.examine", full)
    assert_refused(run("doctor"), "big.safetensors cannot be written (No space left on device)")


# Lines for those who see no bar


def test_a_pulse_is_slow_and_can_be_silent(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    pulses = [Pulse(shown, lambda: now) for shown in (True, False)]
    for second in range(61):
        now = float(second)
        for pulse in pulses:
            pulse.tell(f"second {second}")
    assert capsys.readouterr().err == "second 20\nsecond 40\nsecond 60\n"


def test_tables_are_not_cut_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_terminal(_: int) -> os.terminal_size:
        raise OSError

    monkeypatch.setattr(os, "get_terminal_size", no_terminal)
    monkeypatch.delenv("COLUMNS", raising=False)
    assert console().width == 160
    for columns in (80, 100):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert console().width == columns


# A process of its own


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_output_that_cannot_be_written_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "deepinfer", "doctor"], stdout=full,
                              stderr=subprocess.PIPE, text=True, timeout=120, check=False,
                              cwd=ROOT)  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == "error: the output cannot be written (No space left on device)\n"


def test_help_and_version_need_no_torch() -> None:
    program = (
        "import sys\nfrom deepinfer.cli import main\n"
        "for words in (['--version'], ['--help'], ['generate', '--help'], ['screen', '--help'],\n"
        "              ['generate', '--x']):\n"
        "    try: main(words)\n    except SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True,
                          text=True, timeout=120, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(deepinfer.__version__ + "\n")
    assert "--prompt-token-ids" in done.stdout
    assert "Unknown option" in done.stderr


def test_a_real_process(run: Run, small_folder: Path) -> None:
    """A prompt from standard input; an output that lacks most characters still shows the rest."""
    options = ("--seed", 1, "--max-tokens", 40, "--ignore-eos", "--threads", 1)
    reply = json.loads(
        run("generate", "MODEL", *options, "--json", "--prompt", "A wind\u00f6w").out
    )
    assert not reply["text"].isascii()
    done = subprocess.run(
        [sys.executable, "-m", "deepinfer", "generate", small_folder, "--prompt-file", "-",
         *map(str, options)],
        cwd=ROOT, env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"},
        input="A wind\u00f6w".encode(), capture_output=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == reply["text"].encode("ascii", "replace") + b"\n"
    assert done.stderr.count(b"\n") == 1


# ops


def test_operators_are_listed_with_their_calls(run: Run) -> None:
    result = run("ops", "MODEL", "--threads", 1, "--try-out", "--json")
    assert (result.status, result.err) == (0, "")
    lines = {line["operator"]: line for line in json.loads(result.out)}
    assert lines["rms_norm"]["backend"] == "ref"
    assert lines["rms_norm"]["backends"] == ["ref", "triton"]
    assert lines["rms_norm"]["calls"] > 8
    assert lines["rms_norm"]["fallbacks"] == 0
    plain = run("ops", "MODEL").out
    assert "sparse_attention" in plain
    assert "calls: " not in plain
    assert "0: they did not need it here" in run("ops", "MODEL", "--threads", 1, "--try-out").out


def test_an_operator_that_does_not_exist_is_named(run: Run) -> None:
    result = run("ops", "MODEL", "--op", "rmsnorm=ref")
    assert result.status == 2
    assert result.err == "error: operator 'rmsnorm' is unknown; did you mean 'rms_norm'?\n"

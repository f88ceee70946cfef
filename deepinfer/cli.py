"""The command line: options, help texts and exit statuses.

Knows names and documentation of options; the commands package does the work.
"""

import json
import logging
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, NoReturn

from cyclopts import App, Parameter

from deepinfer import __version__
from deepinfer.commands.ending import exit_with
from deepinfer.commands.options import (
    FORM,
    PLAN,
    SAMPLING,
    Form,
    PlanOptions,
    Switch,
    TerminalSampling,
    Text,
)
from deepinfer.commands.report.plan import ReportOptions
from deepinfer.config import EngineOptions
from deepinfer.errors import RequestError
from deepinfer.screening.options import ScreenOptions

app = App(
    name="deepinfer",
    help="Run DeepSeek-V4.1 checkpoints on NVIDIA Hopper GPUs and on CPUs.",
    version=__version__,
    default_parameter=Parameter(negative_iterable=()),  # no --empty-... beside lists
)
bench = App(name="bench", help="Measure speed.")
app.command(bench)

Options = Annotated[EngineOptions, Parameter(name="*")]
Json = Annotated[bool, Parameter(name="--json", negative="")]
Sampling = Annotated[TerminalSampling, Parameter(name="*")]
FormOptions = Annotated[Form, Parameter(name="*")]
Wanted = Annotated[ReportOptions, Parameter(name="*")]
_EVERYTHING = ReportOptions()


@app.command
def generate(
    options: Options,
    *,
    prompt: Text | None = None,
    prompt_token_ids: str | None = None,
    prompt_file: Text | None = None,
    sampling: Sampling = SAMPLING,
    form: FormOptions = FORM,
    echo: Annotated[bool, Switch] = False,
    as_json: Json = False,
) -> int:
    """Continue a prompt; text appears as it is generated, a summary follows on standard error.

    Parameters
    ----------
    prompt:
        Text to continue.
    prompt_token_ids:
        Token ids to continue, like 0,5,9, or @FILE with such a list.
    prompt_file:
        File whose text to continue, - for standard input.
    echo:
        Show the prompt before the reply.
    as_json:
        Print one JSON object at the end instead: token_ids, text, finish_reason, usage, speed, ...
    """
    from deepinfer.commands.generate import generate as run

    return run(
        options, form.add_to(sampling), prompt=prompt, prompt_token_ids=prompt_token_ids,
        prompt_file=prompt_file, echo=echo, as_json=as_json,
    )  # fmt: skip


@app.command
def chat(
    options: Options,
    *,
    message: list[Text] | None = None,
    system: Text | None = None,
    thinking: Annotated[bool, Switch] = False,
    sampling: Sampling = SAMPLING,
    form: FormOptions = FORM,
    as_json: Json = False,
) -> int:
    """Talk to a checkpoint in the V4.1 prompt format, or ask a few questions and end.

    Parameters
    ----------
    message:
        Ask this and end. May be given several times: each starts a conversation of its own.
    system:
        System message.
    thinking:
        Let the model think before it answers.
    as_json:
        Print one JSON object per reply: message, thinking, text, tool_calls, finish_reason, ...
    """
    from deepinfer.commands.chat import chat as run

    if form.after_thinking:
        raise RequestError("after_thinking is for prompts; a conversation takes --thinking")
    return run(
        options,
        replace(form, after_thinking=form.is_given and thinking).add_to(sampling),
        messages=message or [],
        system=system,
        thinking=thinking,
        as_json=as_json,
    )


@app.command
def dump(options: Options, *, token_ids: str, out: Path, mode: str = "recompute") -> None:
    """Write logits and residual streams of a token sequence to a safetensors file.

    The file holds logits [T, V] and streams.<i> [T, S, H] (the state that enters block i before its
    n-gram update), all float32.

    Parameters
    ----------
    token_ids:
        Token ids like 0,5,9, or @FILE with such a list.
    out:
        File to write.
    mode:
        recompute (no cache), cached (one forward through the cache) or chunked:N (N tokens each).
    """
    from deepinfer.commands.dump import dump as run
    from deepinfer.commands.generate import parse_token_ids

    tensors = run(options, parse_token_ids(token_ids), out, mode)
    print(f"{out}: logits {list(tensors['logits'].shape)} and {len(tensors) - 1} streams")


@app.command(name="eval")
def evaluate(
    options: Options,
    *,
    task: list[str] | None = None,
    limit: int | None = None,
    draft_items: int = 40,
    show_wrong: Annotated[bool, Switch] = False,
    as_json: Json = False,
) -> None:
    """Answer the questions that a checkpoint ships with, and count what is right.

    Parameters
    ----------
    task:
        Only this task; may be given several times.
    limit:
        At most so many questions of each task.
    draft_items:
        Texts, and questions of all tasks, that are also decoded speculatively; 0 for none.
    show_wrong:
        Print a few wrong answers of each task.
    as_json:
        Print JSON instead of a table.
    """
    from deepinfer.commands.evaluate import evaluate as run
    from deepinfer.commands.evaluate import show

    report = run(options, task or (), limit, draft_items, progress=not as_json)
    if as_json:
        print(json.dumps(report.to_dict()))
    else:
        show(report, show_wrong)


@app.command
def report(
    options: Options,
    *,
    wanted: Wanted = _EVERYTHING,
    as_json: Json = False,
) -> int:
    """Run a checkpoint end to end in several configurations and say whether everything is right.

    Each configuration answers the checkpoint's questions twice, on every rank, in processes of its
    own. Exit status 0 only if all answers are right, ranks and runs are equal bit for bit, and
    nothing crashed, hung or fell back in strict mode.

    Parameters
    ----------
    as_json:
        Print JSON instead of tables.
    """
    from deepinfer.commands.report.run import report as run
    from deepinfer.commands.report.show import Bar, show, write

    with Bar(not as_json) as bar:
        found = run(options, wanted, look=bar.look)
    if wanted.out is not None:
        write(found, wanted.out)
    if as_json:
        print(json.dumps(found.to_dict()))
    else:
        show(found, wanted.out)
    return found.exit_status


@app.command
def ops(
    options: Options,
    *,
    try_out: Annotated[bool, Switch] = False,
    as_json: Json = False,
) -> None:
    """List the operators: which implementation runs here, why, and how often it was called.

    Parameters
    ----------
    try_out:
        Load the checkpoint and generate a few tokens first, so that calls are counted.
    as_json:
        Print JSON instead of a table.
    """
    from deepinfer.commands.ops import list_operators, show

    show(list_operators(options, try_out), as_json)


@app.command
def doctor(
    options: Annotated[PlanOptions, Parameter(name="*")] = PLAN,
    *,
    plan: Annotated[bool, Switch] = False,
    gpus: str | None = None,
    as_json: Json = False,
) -> None:
    """Say what this machine can run, and why not more; or what a GPU's memory would be used for.

    Without a checkpoint folder the released checkpoint is examined.

    Parameters
    ----------
    plan:
        Print where the memory of GPUs goes with the given settings, and what to change if not
        everything fits.
    gpus:
        GPUs to plan for, like 8xH20, or 8x96: eight of 96 GiB each, which divide experts and n-gram
        tables.
        Default: those of this machine, or common ones.
    as_json:
        Print JSON instead of a table.
    """
    from deepinfer.commands.doctor import examine, plan_for, show, show_plans

    if plan or gpus is not None:
        plans = plan_for(options, gpus)
        if as_json:
            print(json.dumps([planned.to_dict() for planned in plans]))
        else:
            show_plans(plans)
        return
    findings = examine(Path(options.model) if options.model else None)
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings]))
    else:
        show(findings)


@app.command
def requant(
    model: Path,
    *,
    out: Path | None = None,
    dry_run: Annotated[bool, Switch] = False,
    as_json: Json = False,
) -> None:
    """Write a checkpoint in FP8 with 128 x 128 blocks for other engines, where nothing is lost.

    FP4 experts and FP8 matrices become e4m3 with one power-of-two scale per 128 x 128 block if
    every value stays what it was, bit for bit; a matrix with a block that does not fit stays as it
    is, and so does everything else. requant.json in the result lists each matrix. deepinfer itself
    reads the released formats only and refuses the result.

    Parameters
    ----------
    model:
        Checkpoint folder of the released format.
    out:
        Folder to write; it must not exist, and appears only once it is complete.
    dry_run:
        Only say what would be converted; of --out, whether it may be written.
    as_json:
        Print what requant.json says instead of a table.
    """
    from deepinfer.commands.requant import requant as run
    from deepinfer.commands.requant import show

    report = run(model, out, dry_run, progress=not as_json)
    if as_json:
        print(json.dumps(report))
    else:
        show(report)


Screened = Annotated[ScreenOptions, Parameter(name="*")]
_SCREENED = ScreenOptions()


@app.command
def screen(
    options: Options,
    *,
    screening: Screened = _SCREENED,
    as_json: Json = False,
) -> None:
    """Find out which operators of a library are right and fast, on this machine, for a checkpoint.

    A short run of the checkpoint is traced; every operator of PyTorch's that it calls is then tried
    with the library's in its place, in processes of its own: with the run's calls, and with hostile
    ones. The folder gets a report (Markdown and HTML), everything as JSON, and an allow-list.

    Parameters
    ----------
    as_json:
        Print the JSON instead of a summary.
    """
    from deepinfer.commands.screen import screen_library, show

    found, files = screen_library(options, screening, progress=not as_json)
    if as_json:
        print(json.dumps(found.to_data()))
    else:
        show(found, files)


@bench.command(name="cpu")
def bench_cpu(
    options: Options,
    *,
    prompt_tokens: int = 512,
    output_tokens: int = 64,
    repeats: int = 3,
    as_json: Json = False,
) -> None:
    """Tokens per second of one sequence on the CPU: prefill, decode, and where the time goes.

    Parameters
    ----------
    prompt_tokens:
        Tokens of the random prompt.
    output_tokens:
        Tokens to generate after it.
    repeats:
        How often to measure; the median counts, the best is shown too.
    as_json:
        Print JSON instead of a table.
    """
    from deepinfer.commands.bench_cpu import measure, show

    show(measure(replace(options, device="cpu"), prompt_tokens, output_tokens, repeats), as_json)


def screen_ops() -> NoReturn:
    """Entry point of the script `screen_ops`: `deepinfer screen` by another name."""
    main(["screen", *sys.argv[1:]])


def main(arguments: list[str] | None = None) -> NoReturn:
    """Entry point; `commands.ending` says which exit status means what."""
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    logging.addLevelName(logging.WARNING, "note")
    exit_with(lambda: app(
        arguments, exit_on_error=False, print_error=False, result_action="return_value"
    ))  # fmt: skip

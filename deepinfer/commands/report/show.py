"""A report on a terminal, as JSON and as Markdown; and the bar while it is made.

Knows files and a console; must not know what a report says.
"""

from pathlib import Path

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table as RichTable
from rich.text import Text

from deepinfer.commands.console import console
from deepinfer.commands.pulse import Pulse
from deepinfer.commands.report.records import write_json
from deepinfer.commands.report.run import Report
from deepinfer.commands.report.tables import Lines, Table, headline, parts
from deepinfer.errors import ConfigError


class Bar:
    """A progress bar on standard error; a line now and then where that is no terminal."""

    def __init__(self, shown: bool) -> None:
        stderr = Console(stderr=True)
        self._pulse = Pulse(shown and not stderr.is_terminal)
        self._bar = Progress(
            SpinnerColumn(), BarColumn(20), "{task.completed}/{task.total}", TimeElapsedColumn(),
            TextColumn("{task.description}"), console=stderr, transient=True,
            disable=not (shown and stderr.is_terminal),
        )  # fmt: skip
        self._task = self._bar.add_task("", total=None)

    def __enter__(self) -> "Bar":
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def look(self, text: str, done: int, total: int) -> None:
        """What is being done now, and how much of everything is."""
        self._bar.update(self._task, description=text, completed=done, total=total)
        self._pulse.tell(f"{text}, {done} of {total}")


def show(report: Report, out: Path | None) -> None:
    """Print a report for a person."""
    screen = console()
    for part in parts(report):
        if isinstance(part, Lines):
            screen.print(Text(part.title, style="bold"))
            for line in part.lines:
                screen.print(Text(f"  {line}"), soft_wrap=True)
            for name, block in part.blocks:
                screen.print(Text(f"  {name}:"))
                screen.print(Text(block), soft_wrap=True)
            screen.print()
        elif not part.detail:
            screen.print(Text(part.title, style="bold"))
            table = RichTable(box=box.SIMPLE)
            for number, name in enumerate(part.header):
                table.add_column(name, no_wrap=number == 0)
            for row in part.rows:
                table.add_row(*(Text(cell) for cell in row))
            screen.print(table)
    if out is not None:
        screen.print(Text(f"{out / 'report.md'}, {out / 'report.json'}"), soft_wrap=True)
    screen.print(Text(headline(report), style="bold"), soft_wrap=True)


def write(report: Report, out: Path) -> None:
    """Write report.json and report.md.

    Raises:
        ConfigError: they cannot be written.
    """
    try:
        write_json(out / "report.json", report.to_dict())
        (out / "report.md").write_text(markdown(report), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be written ({error})") from None


def markdown(report: Report) -> str:
    """The report as a page."""
    lines = ["# End-to-end report", "", headline(report), ""]
    for part in parts(report):
        lines += [f"## {part.title}", ""]
        lines += _table(part) if isinstance(part, Table) else _lines(part)
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _table(table: Table) -> list[str]:
    rows = [table.header, tuple("---" for _ in table.header), *table.rows]
    return [f"| {' | '.join(_cell(cell) for cell in row)} |" for row in rows]


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _lines(part: Lines) -> list[str]:
    lines = [f"- {' '.join(line.split())}" for line in part.lines]
    for name, block in part.blocks:
        fence = "````"  # logs may hold three of them
        lines += ["", f"{name}:", "", f"{fence}text", block, fence]
    return lines

"""A screening as a page for people, in Markdown and as one HTML file.

Knows what is worth saying first; must not know how it was found. Both are made from the JSON data,
so that they can be made again from a committed file.
"""

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Data = Mapping[str, Any]
Rows = Sequence[Sequence[str]]
_SECTIONS = {
    "pass": ("Right", "Every case in scope gave what PyTorch gives."),
    "fail": ("Wrong", "At least one case in scope is wrong; these operators stay with PyTorch."),
    "skip": ("Not shown", "Nothing was shown, for the reason given; these stay with PyTorch."),
}


def counts(data: Data) -> dict[str, int]:
    """Operators by verdict, those that are also fast, and cases."""
    operators = data["operators"]
    found = {v: sum(o["verdict"] == v for o in operators) for v in _SECTIONS}
    found["fast"] = sum(_is_fast(o) for o in operators)
    found["cases"] = sum(len(o["cases"]) for o in operators)
    return found


def _is_fast(operator: Data) -> bool:
    speed = operator["speed"]
    passed = operator["verdict"] == "pass" and speed is not None
    return bool(passed and speed["graph"] and speed["part"] <= 1.0)


def sentence(data: Data) -> str:
    """One line: how many operators are right, wrong, not shown, and fast."""
    n = counts(data)
    return (
        f"{data['library']}: of {len(data['operators'])} operators {n['pass']} are right"
        f" ({n['fast']} of them not slower than PyTorch), {n['fail']} wrong and {n['skip']} not"
        f" shown, in {n['cases']} cases"
    )


def _facts(data: Data) -> Rows:
    traced = data.get("traced", {})
    rows = [[name, str(value)] for name, value in data["made_with"].items()]
    rows += [[name, str(value)] for name, value in data["machine"].items()]
    rows += [["made by", f"{data['made_by']}, revision {data['revision']}, {data['date']}"]]
    if traced.get("calls"):
        told = f"{traced['calls']} calls of {traced['operators']} operators in"
        told += f" {traced['distinct']} forms, from {traced['sites']} lines"
        rows.append(["traced run", told])
    return rows


def _table(data: Data, verdict: str) -> tuple[list[str], Rows]:
    """Header and rows of one section."""
    chosen = [o for o in data["operators"] if o["verdict"] == verdict]
    if verdict == "skip":
        return ["operator", "calls", "why"], [
            [o["operator"], f"{o['calls']:,}", o["reason"]] for o in chosen
        ]
    if verdict == "fail":
        return ["operator", "name", "calls", "cases wrong", "the first of them"], [
            [o["operator"], o["name"], f"{o['calls']:,}", _wrong(o), o["reason"]] for o in chosen
        ]
    header = ["operator", "name", "calls", "cases", "nearer to float64", "time", "first call",
              "wrong outside of what is called"]  # fmt: skip
    return header, [
        [o["operator"], o["name"], f"{o['calls']:,}", str(len(o["cases"])), _nearer(o), _time(o),
         _first(o), "; ".join(o["limits"][:3])] for o in chosen
    ]  # fmt: skip


def _wrong(operator: Data) -> str:
    wrong = sum(c["verdict"] == "fail" and c["in_scope"] for c in operator["cases"])
    return f"{wrong} of {sum(c['in_scope'] for c in operator['cases'])}"


def _nearer(operator: Data) -> str:
    library, pytorch = (operator["nearer"].get(who, 0) for who in ("library", "pytorch"))
    if not library and not pytorch:
        return "the same"
    return f"library {library}, PyTorch {pytorch}"


def _time(operator: Data) -> str:
    speed = operator["speed"]
    if speed is None:
        return "not measured"
    return f"{speed['part']:.2f} of PyTorch's" + ("" if speed["graph"] else ", no CUDA graph")


def _first(operator: Data) -> str:
    return f"{operator['speed']['first_seconds']:.1f} s" if operator["speed"] else ""


# ---------------------------------------------------------------- Markdown


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def markdown_table(header: Sequence[str], rows: Rows) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def markdown(data: Data) -> str:
    """The report in Markdown."""
    parts = [f"# Screening of {data['library']}", sentence(data) + "."]
    parts.append(markdown_table(["", ""], _facts(data)))
    for name, near in data["unknown"].items():
        parts.append(f"`{name}` stands for no operator; nearest: {', '.join(near) or 'nothing'}.")
    for verdict, (title, meaning) in _SECTIONS.items():
        header, rows = _table(data, verdict)
        if rows:
            parts += [f"## {title}: {len(rows)}", meaning, markdown_table(header, rows)]
    details = list(_details(data))
    parts += ["## Cases that are wrong", *details] if details else []
    return "\n\n".join(parts) + "\n"


def _details(data: Data) -> Iterable[str]:
    for operator in data["operators"]:
        wrong = [case for case in operator["cases"] if case["verdict"] == "fail"]
        if wrong:
            rows = [_detail(case) for case in wrong]
            yield f"### {operator['operator']}"
            yield markdown_table(["case", "in scope", "arguments", "what is wrong"], rows)


def _detail(case: Data) -> list[str]:
    scope = "yes" if case["in_scope"] else "no"
    return [case["case"], scope, case.get("shown", ""), case.get("reason", "")]


# ---------------------------------------------------------------- HTML

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem;
  color: #222; background: #fff; }
table { border-collapse: collapse; margin: .5rem 0 1.5rem; font-size: .9rem; }
th, td { text-align: left; vertical-align: top; padding: .3rem .7rem; border-bottom: 1px solid #ddd; }
th { border-bottom: 2px solid #888; }
td:first-child { font-family: ui-monospace, monospace; white-space: nowrap; }
details { margin: .3rem 0; } summary { cursor: pointer; }
.pass { color: #176117; } .fail { color: #a11616; } .skip { color: #6b5900; }
@media (prefers-color-scheme: dark) {
  body { color: #ddd; background: #181818; } th, td { border-color: #444; }
  .pass { color: #7ccf7c; } .fail { color: #ff8a8a; } .skip { color: #e0c860; } }
"""  # noqa: E501


def page(data: Data) -> str:
    """The report as one HTML file that needs nothing else."""
    title = html.escape(f"Screening of {data['library']}")
    body = [f"<h1>{title}</h1>", f"<p>{html.escape(sentence(data))}.</p>"]
    body.append(_html_table(["", ""], _facts(data)))
    for name, near in data["unknown"].items():
        told = f"{name} stands for no operator; nearest: {', '.join(near) or 'nothing'}."
        body.append(f"<p class=skip>{html.escape(told)}</p>")
    for verdict, (heading, meaning) in _SECTIONS.items():
        header, rows = _table(data, verdict)
        if rows:
            body.append(f"<h2 class={verdict}>{heading}: {len(rows)}</h2><p>{meaning}</p>")
            body.append(_html_table(header, rows))
    body.append("<h2>All cases</h2>")
    body += [_html_cases(operator) for operator in data["operators"] if operator["cases"]]
    return (
        f"<!doctype html>\n<html lang=en><meta charset=utf-8><title>{title}</title>"
        f"<style>{_STYLE}</style>\n" + "\n".join(body) + "\n</html>\n"
    )


def _html_table(header: Sequence[str], rows: Rows) -> str:
    head = "".join(f"<th>{html.escape(cell)}" for cell in header)
    lines = ["<tr>" + "".join(f"<td>{html.escape(cell)}" for cell in row) for row in rows]
    return f"<table><tr>{head}\n" + "\n".join(lines) + "</table>"


def _html_cases(operator: Data) -> str:
    rows = [
        [*_detail(case)[:3], case["verdict"], case.get("reason", "") or case.get("remark", ""),
         _number(case.get("error_library")), _number(case.get("error_pytorch"))]
        for case in operator["cases"]
    ]  # fmt: skip
    header = ["case", "in scope", "arguments", "verdict", "why", "library off float64",
              "PyTorch off float64"]  # fmt: skip
    name = html.escape(operator["operator"])
    told = f"<span class={operator['verdict']}>{operator['verdict']}</span>"
    inner = _html_table(header, rows)
    return f"<details><summary><code>{name}</code> {told}</summary>{inner}</details>"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"

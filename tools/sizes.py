"""Sizes of the package: code lines per file, longest functions, and the limits on both.

`python tools/sizes.py` prints the tables and what is over a limit; tests/meta/test_sizes.py fails
on the same list. A code line is a line with something on it besides comments and docstrings.
"""

import ast
import io
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "deepinfer"

MAX_FILE_LINES = 400
MAX_KERNEL_FILE_LINES = 500  # files named triton.py
MAX_FUNCTION_LINES = 60
MAX_KERNEL_LINES = 150  # functions compiled for the device
MAX_PARAMETERS = 8  # without self and cls; device kernels are not counted
MAX_OPERATOR_PARAMETERS = 14  # files of ops/: an operator takes every tensor that it needs
MAX_MAIN_PATH_LINES = 1500

# The files from a command to an operator. Together they stay readable in one sitting.
MAIN_PATH = (
    "cli.py",
    "engine/llm.py",
    "engine/engine.py",
    "engine/scheduler.py",
    "engine/runner.py",
    "model/cached.py",
    "model/transformer.py",
    "model/block.py",
)

# "file.py" or "file.py::Class.function" (relative to deepinfer/) that may pass its limit, and why.
# An entry that is no longer needed is an error too.
EXCEPTIONS: dict[str, str] = {}

KERNEL_DECORATORS = {"jit", "prim_func"}
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Function:
    """One function or method: where it is, how long it is, how many parameters it takes."""

    file: str
    name: str
    line: int
    lines: int
    parameters: int
    is_kernel: bool

    @property
    def key(self) -> str:
        """The name by which EXCEPTIONS knows the function."""
        return f"{self.file}::{self.name}"


@dataclass(frozen=True)
class File:
    """One module of the package and its functions; `name` is relative to deepinfer/."""

    name: str
    lines: int
    functions: tuple[Function, ...]


def _docstring_lines(tree: ast.AST) -> set[int]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            doc = node.body[0]
            lines.update(range(doc.lineno, (doc.end_lineno or doc.lineno) + 1))
    return lines


def code_lines(source: str, tree: ast.AST) -> set[int]:
    """Numbers of the lines of `source` that hold code."""
    skipped = {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in skipped:
            lines.update(range(token.start[0], token.end[0] + 1))
    return lines - _docstring_lines(tree)


def _is_kernel(node: FunctionNode) -> bool:
    for decorator in node.decorator_list:
        target = decorator.func if isinstance(decorator, ast.Call) else decorator
        name = target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", "")
        if name in KERNEL_DECORATORS:
            return True
    return False


def _count_parameters(node: FunctionNode, in_class: bool) -> int:
    args = node.args
    static = any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in node.decorator_list)
    named = [*args.posonlyargs, *args.args, *args.kwonlyargs]
    stars = (args.vararg is not None) + (args.kwarg is not None)
    return len(named) + stars - (in_class and not static)


def named_functions(
    node: ast.AST, prefix: str = "", in_class: bool = False
) -> Iterator[tuple[FunctionNode, str, bool]]:
    """Every function below `node`, nested ones too: (node, qualified name, is a method)."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, FunctionNode):
            yield child, prefix + child.name, in_class
            yield from named_functions(child, f"{prefix}{child.name}.", False)
        elif isinstance(child, ast.ClassDef):
            yield from named_functions(child, f"{prefix}{child.name}.", True)
        else:
            yield from named_functions(child, prefix, in_class)


def measure(source: str, name: str) -> File:
    """Sizes of one module given as text; `name` is what reports call it."""
    tree = ast.parse(source)
    code = code_lines(source, tree)
    functions = []
    for node, qualified, in_class in named_functions(tree):
        last = node.end_lineno or node.lineno
        functions.append(
            Function(
                file=name,
                name=qualified,
                line=node.lineno,
                lines=sum(node.lineno <= line <= last for line in code),
                parameters=_count_parameters(node, in_class),
                is_kernel=_is_kernel(node),
            )
        )
    return File(name, len(code), tuple(functions))


def measure_package(package: Path = PACKAGE) -> list[File]:
    """Sizes of every module under `package`, by name."""
    paths = sorted(package.rglob("*.py"))
    return [measure(p.read_text("utf-8"), p.relative_to(package).as_posix()) for p in paths]


def _over_limit(files: list[File]) -> Iterator[tuple[str, str]]:
    """(key, message) of everything over a limit, exceptions included."""
    for file in files:
        is_kernel_file = Path(file.name).name == "triton.py"
        limit = MAX_KERNEL_FILE_LINES if is_kernel_file else MAX_FILE_LINES
        if file.lines > limit:
            yield file.name, f"{file.name}: {file.lines} code lines, at most {limit}"
        for f in file.functions:
            limit = MAX_KERNEL_LINES if f.is_kernel else MAX_FUNCTION_LINES
            where = f"{f.file}:{f.line} {f.name}"
            if f.lines > limit:
                yield f.key, f"{where}: {f.lines} code lines, at most {limit}"
            most = MAX_OPERATOR_PARAMETERS if f.key.startswith("ops/") else MAX_PARAMETERS
            if f.parameters > most and not f.is_kernel:
                yield f.key, f"{where}: {f.parameters} parameters, at most {most}"


def problems(
    files: list[File],
    exceptions: dict[str, str] = EXCEPTIONS,
    main_path: tuple[str, ...] = MAIN_PATH,
) -> list[str]:
    """What is over a limit without being an exception, and exceptions that nothing needs."""
    over = list(_over_limit(files))
    found = [message for key, message in over if key not in exceptions]
    keys = {key for key, _ in over}
    found += [
        f"EXCEPTIONS[{key!r}] is not needed any more" for key in exceptions if key not in keys
    ]
    found += [f"EXCEPTIONS[{key!r}] gives no reason" for key, why in exceptions.items() if not why]
    names = {file.name for file in files}
    found += [
        f"MAIN_PATH names {name}, which does not exist" for name in main_path if name not in names
    ]
    total = main_path_lines(files, main_path)
    if total > MAX_MAIN_PATH_LINES:
        found.append(f"the main path has {total} code lines, at most {MAX_MAIN_PATH_LINES}")
    return found


def main_path_lines(files: list[File], main_path: tuple[str, ...] = MAIN_PATH) -> int:
    """Code lines of the files of `main_path` together."""
    return sum(file.lines for file in files if file.name in main_path)


def main() -> int:
    """Print the tables; the exit status is 1 when something is over a limit."""
    files = measure_package()
    print("code lines  file")
    for file in sorted(files, key=lambda f: -f.lines):
        print(f"{file.lines:10}  {file.name}")
    print(f"{sum(f.lines for f in files):10}  all {len(files)} files")
    print(f"{main_path_lines(files):10}  main path, at most {MAX_MAIN_PATH_LINES}")
    print("\ncode lines  parameters  longest functions")
    functions = [function for file in files for function in file.functions]
    for f in sorted(functions, key=lambda f: -f.lines)[:20]:
        print(f"{f.lines:10}  {f.parameters:10}  {f.key}{'  (device kernel)' * f.is_kernel}")
    found = problems(files)
    if found:
        print("\nto mend", *found, sep="\n  ")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

"""Allow-lists: which operators of a library were shown to be right, for which versions and GPU.

Knows the file; must not know how operators are judged or put in. A list holds for exactly the
versions and the GPU it was made with; for others it is refused, with what to run.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from deepinfer.errors import ConfigError

FORMAT = 1
SHIPPED = Path(__file__).with_name("allowlists")
Mode = Literal["off", "fast", "right"]


@dataclass(frozen=True)
class Entry:
    """One operator that is right.

    Attributes:
        name: by which the library takes it.
        kinds: signatures of arguments that were tried; others stay with PyTorch.
        time: part of PyTorch's time that the engine's calls took, None where nobody measured.
        graph: false if its calls cannot be part of a CUDA graph where PyTorch's can: the engine
            has no use for it then.
        calls, sites: in the traced run: how many calls, from how many lines of the engine.
    """

    name: str
    kinds: tuple[tuple[str, ...], ...]
    time: float | None
    graph: bool
    calls: int
    sites: int

    @property
    def fast(self) -> bool:
        """Right and not slower than PyTorch, CUDA graphs included."""
        return self.graph and self.time is not None and self.time <= 1.0


@dataclass(frozen=True)
class AllowList:
    """Operators by name, and what they were tried with.

    Attributes:
        library: its name; made_with: names and versions of what has to be the same here: the
            library, torch, triton and the GPU.
        made_by: deepinfer's version and revision, and the date.
    """

    library: str
    made_with: Mapping[str, str]
    made_by: str
    operators: Mapping[str, Entry]

    def chosen(self, mode: Mode) -> dict[str, Entry]:
        """Operators of a mode: none, the right ones that are fast, or all right ones."""
        if mode == "off":
            return {}
        return {
            name: entry for name, entry in self.operators.items()
            if (entry.fast if mode == "fast" else entry.graph)
        }  # fmt: skip

    def mismatch(self, here: Mapping[str, str]) -> list[str]:
        """What differs here, as "torch 2.11 there, 2.13 here"; empty if the list holds."""
        return [
            f"{name} {made} there, {here.get(name, 'none')} here"
            for name, made in self.made_with.items() if here.get(name) != made
        ]  # fmt: skip

    def write(self, file: Path) -> None:
        """Write the file."""
        data = {"format": FORMAT, **asdict(self)}
        file.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def read(file: Path) -> AllowList:
    """Read a file that `write` wrote.

    Raises:
        ConfigError: it cannot be read or is no allow-list.
    """
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        if data["format"] != FORMAT:
            raise ValueError(f"format {data['format']}")
        operators = {name: _entry(entry) for name, entry in data["operators"].items()}
        return AllowList(data["library"], dict(data["made_with"]), data["made_by"], operators)
    except OSError as error:
        raise ConfigError(f"allow-list {file} cannot be read ({error})") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"allow-list {file} is none of format {FORMAT} ({type(error).__name__}: {error}); make"
            " one with `deepinfer screen`"
        ) from None


def _entry(data: Mapping[str, Any]) -> Entry:
    kinds = tuple(tuple(map(str, kinds)) for kinds in data["kinds"])
    rest = {name: data[name] for name in ("name", "time", "graph", "calls", "sites")}
    return Entry(kinds=kinds, **rest)


def find(library: str, here: Mapping[str, str], file: Path | None) -> AllowList:
    """The list in `file`, or the shipped one that holds here.

    Args:
        here: versions and GPU of this machine, named as in `made_with`.

    Raises:
        ConfigError: there is none that holds here; the message says what differs and what to run.
    """
    files = sorted(SHIPPED.glob("*.json")) if file is None else [file]
    lists = {f: read(f) for f in files}
    lists = {f: found for f, found in lists.items() if found.library == library}
    for found in lists.values():
        if not found.mismatch(here):
            return found
    run = (
        f"run `deepinfer screen MODEL --library {library} --out FOLDER` and name"
        " FOLDER/allowlist.json with --flaggems-allowlist"
    )
    if not lists:
        what = f"{library}: no allow-list is shipped" if file is None else f"{file}: not {library}"
        raise ConfigError(f"{what}; {run}")
    told = "; ".join(f"{f.name}: {', '.join(found.mismatch(here))}" for f, found in lists.items())
    raise ConfigError(f"no allow-list of {library} holds here ({told}); {run}")

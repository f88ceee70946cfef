"""safetensors files of a checkpoint folder: what they hold, and tensors by name.

Knows single files and index + shards; must not know what a tensor is for. Files are memory-mapped:
a tensor is a view of the file until somebody converts it.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from deepinfer.errors import CheckpointError

# Formats that torch may lack or that are only wanted as bytes.
_BYTE_DTYPES = {torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.int8}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose keys must differ; json would keep the last of them in silence."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key twice")
    return found


def _line(error: Exception) -> str:
    """The text of a library's error on one line."""
    return " ".join(str(error).split())


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that no file can have, as one of 300 characters
        return False


class CheckpointReader:
    """Tensors of one checkpoint folder, by name; a context manager that keeps the files mapped.

    A `model.` prefix on every name is dropped. Raises CheckpointError for missing, truncated or
    corrupt files and for an index that does not match its shards.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[Path, Any] = {}
        self._home = self._find_tensors()

    def __enter__(self) -> "CheckpointReader":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._files.clear()

    def __iter__(self) -> Iterator[str]:
        return iter(self._home)

    def __contains__(self, name: str) -> bool:
        return name in self._home

    def _find_tensors(self) -> dict[str, tuple[Path, str]]:
        index = self.folder / "model.safetensors.index.json"
        single = self.folder / "model.safetensors"
        if index.is_file():
            pairs = self._read_index(index)
        elif single.is_file():
            pairs = [(single, name) for name in self._open(single).keys()]  # noqa: SIM118
        else:
            raise CheckpointError(
                f"{self.folder}: no model.safetensors and no model.safetensors.index.json"
            )
        corrupt = sorted(ascii(name) for _, name in pairs if not name.isprintable())
        if corrupt:
            raise CheckpointError(
                f"{self.folder}: control characters in tensor names: {', '.join(corrupt[:5])};"
                " the files are corrupt, copy them again"
            )
        prefixed = all(name.startswith("model.") for _, name in pairs)
        strip = len("model.") if prefixed else 0
        return {name[strip:]: (file, name) for file, name in pairs}

    def _read_index(self, index: Path) -> list[tuple[Path, str]]:
        try:
            text = index.read_text(encoding="utf-8")
            weight_map = json.loads(text, object_pairs_hook=_unique)["weight_map"]
            pairs = [(self.folder / str(file), str(name)) for name, file in weight_map.items()]
        except OSError as error:
            raise CheckpointError(f"{index}: cannot be read ({_line(error)})") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise CheckpointError(
                f"{index}: not a JSON index with a weight_map that has every tensor once;"
                " copy it again"
            ) from None
        missing = sorted({file.name for file, _ in pairs if not _is_file(file)})
        if missing:
            raise CheckpointError(f"{self.folder}: shards of the index are missing: {missing[:5]}")
        held = {file: set(self._open(file).keys()) for file in {file for file, _ in pairs}}
        absent = sorted(name for file, name in pairs if name not in held[file])
        if absent:
            raise CheckpointError(
                f"{index}: {len(absent)} tensors are not in the shard that it names: {absent[:5]}"
            )
        return pairs

    def _open(self, file: Path) -> Any:
        if file not in self._files:
            try:
                self._files[file] = safe_open(file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(
                    f"{file}: truncated or corrupt safetensors file ({_line(error)}); copy it again"
                ) from None
        return self._files[file]

    def note(self) -> str | None:
        """What the writer of the files wanted users to be told, from the files' metadata."""
        files = sorted({file for file, _ in self._home.values()})
        notes = [(self._open(file).metadata() or {}).get("note") for file in files]
        return next((note for note in notes if note), None)

    def describe(self, name: str) -> tuple[str, tuple[int, ...]]:
        """safetensors dtype name and shape of tensor `name`, without reading its data."""
        file, stored = self._home[name]
        try:
            part = self._open(file).get_slice(stored)
            return part.get_dtype(), tuple(part.get_shape())
        except SafetensorError as error:
            raise CheckpointError(f"{file}: cannot read {stored} ({_line(error)})") from None

    def tensor(self, name: str) -> Tensor:
        """Tensor `name` as a view of its file; FP8, FP4 and scale tensors as uint8 bytes."""
        file, stored = self._home[name]
        try:
            tensor: Tensor = self._open(file).get_tensor(stored)
        except SafetensorError as error:
            raise CheckpointError(f"{file}: cannot read {stored} ({_line(error)})") from None
        return tensor.view(torch.uint8) if tensor.dtype in _BYTE_DTYPES else tensor

"""FP4 and FP8 matrices to FP8 with one scale per 128 x 128 block, where not one value changes.

Knows the two formats, when a block fits, and files; must not know who will read the result.

A power-of-two scale shifts exponents only. So a block of the new format can hold blocks of 32
columns with different scales: what their scales differ by goes into the exponents of the e4m3
codes, which has room for it or has not. A code that doubles stays exact until it passes 448, so
the smallest scale that holds the largest value of a block is exact whenever any scale is.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, Literal

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn.functional import pad

from deepinfer.checkpoint.names import SCALE_DTYPE, STORED_DTYPE, TensorSpec, tensor_specs
from deepinfer.checkpoint.quant import BLOCK
from deepinfer.checkpoint.reader import CheckpointReader
from deepinfer.config import ModelConfig
from deepinfer.errors import CheckpointError
from deepinfer.numerics import E4M3_MAX, decode_e4m3, encode_e4m3, unpack_e2m1

GROUP = 128
Reason = Literal["range", "underflow", "nan"]
Advance = Callable[[int], object]

# Why a group does not fit; the numbers of `Requantised.misfit`, 0 is a group that fits.
REASONS: tuple[Reason, ...] = ("range", "underflow", "nan")

# Scale bytes that are written. Some readers take byte 0 for zero rather than for 2^-127, and 255 is
# NaN. An empty group could have any scale: 1 is a harmless one in every format.
_LOWEST, _HIGHEST, _EMPTY = 1, 254, 127
# No code but zero is exact when shifted by so many binades or more, in either direction.
_FARTHEST = 18
_NAN = 0x7F
_NOTHING = -1000  # exponent of a block without values: below every other
_BAND = 2**22  # values that are converted at a time
_CHUNK = 2**26  # bytes that are written at a time


@dataclass(frozen=True)
class Requantised:
    """One matrix [out, in] in the new format.

    Attributes:
        codes: [out, in] uint8, e4m3; only what lies in groups that fit has a meaning.
        scale: [ceil(out/128), ceil(in/128)] uint8, e8m0, from 2^-126 to 2^127.
        misfit: uint8 like `scale`: 0 where the group has the very same values, else 1 + the index
            in REASONS. range: its values span more binades than e4m3; underflow: they would fit
            under a scale below 2^-126; nan: a code or a scale is no number.
    """

    codes: Tensor
    scale: Tensor
    misfit: Tensor


@dataclass(frozen=True)
class TensorReport:
    """What became of one matrix: its groups of 128 x 128, and how many do not fit and why."""

    name: str
    stored: Literal["fp8", "fp4"]
    groups: int
    misfits: Mapping[Reason, int]

    @property
    def not_exact(self) -> int:
        """Groups that do not fit."""
        return sum(self.misfits.values())

    @property
    def converted(self) -> bool:
        """Whether every group fits; if not, the tensor stays as it is."""
        return not self.not_exact

    def to_dict(self) -> dict[str, Any]:
        """The tensor's entry in requant.json."""
        was = {"fp8": "fp8_32x32", "fp4": "fp4_1x32"}[self.stored]
        now = f"fp8_{GROUP}x{GROUP}" if self.converted else was
        counts = {"groups": self.groups, "not_exact": self.not_exact}
        return {"was": was, "format": now, **counts, "why": dict(self.misfits)}


@cache
def _shifted(stored: Literal["fp8", "fp4"]) -> Tensor:
    """[2 * 18 + 1, 256]: e4m3 code of a byte's value times 2^(row - 18), NaN where that is inexact.

    A byte of two e2m1 codes gives two e4m3 codes (int16), a byte of e4m3 gives one (uint8).
    """
    byte = torch.arange(256, dtype=torch.uint8)
    values = unpack_e2m1(byte.unsqueeze(1)) if stored == "fp4" else decode_e4m3(byte).unsqueeze(1)
    powers = torch.tensor([2.0**shift for shift in range(-_FARTHEST, _FARTHEST + 1)])
    wanted = values * powers.view(-1, 1, 1)
    codes = encode_e4m3(wanted.clamp(-E4M3_MAX, E4M3_MAX))
    codes = torch.where(decode_e4m3(codes) == wanted, codes, _NAN)
    return codes.view(torch.int16 if stored == "fp4" else torch.uint8).squeeze(-1)


@cache
def _binades(stored: Literal["fp8", "fp4"]) -> Tensor:
    """int16 per code without sign: smallest n with value <= 448 * 2^n; far below for zero."""
    if stored == "fp4":
        values = unpack_e2m1(torch.tensor([0x10, 0x32, 0x54, 0x76], dtype=torch.uint8)).tolist()
    else:
        values = [*decode_e4m3(torch.arange(_NAN, dtype=torch.uint8)).tolist(), 0.0]
    found = [math.ceil(math.log2(value / E4M3_MAX)) if value else _NOTHING for value in values]
    return torch.tensor(found, dtype=torch.int16)


def _largest(codes: Tensor, stored: Literal["fp8", "fp4"]) -> Tensor:
    """Largest code without sign over the last axis, int64."""
    if stored == "fp8":
        return (codes & 0x7F).amax(-1).long()
    return torch.maximum((codes & 7).amax(-1), ((codes >> 4) & 7).amax(-1)).long()


def _shift(codes: Tensor, by: Tensor, stored: Literal["fp8", "fp4"]) -> Tensor:
    """[..., n] bytes to e4m3 codes of their values times 2^`by`, NaN where inexact (uint8)."""
    rows = by.clamp(-_FARTHEST, _FARTHEST).int() + _FARTHEST
    index = codes.int() + (rows * 256).unsqueeze(-1)
    found = _shifted(stored).flatten().index_select(0, index.flatten())
    return found.view(torch.uint8).view(*codes.shape[:-1], -1)


def _convert(codes: Tensor, scale: Tensor, stored: Literal["fp8", "fp4"]) -> Requantised:
    """`requantise` for one band; `scale` is per row and 32 columns."""
    rows, columns = codes.shape
    width = BLOCK // 2 if stored == "fp4" else BLOCK
    height = min(GROUP, rows)
    parts = GROUP // BLOCK
    codes = pad(codes, (0, -columns % (parts * width), 0, -rows % height))
    codes = codes.view(codes.shape[0] // height, height, -1, parts, width)
    given = pad(scale, (0, -scale.shape[1] % parts, 0, -rows % height)).to(torch.int16)
    given = given.view(codes.shape[:4])
    largest = _largest(codes, stored)
    lowest = (given + _binades(stored)[largest]).amax((1, 3), keepdim=True)
    # _NOTHING and the highest byte together are still below every exponent that values can ask for.
    empty = lowest < _NOTHING // 2
    chosen = torch.where(empty, _EMPTY, lowest.clamp(_LOWEST, _HIGHEST))
    shifted = _shift(codes, given - chosen, stored)
    inexact = (shifted & 0x7F).amax((1, 3, 4)) == _NAN
    misfit = inexact.to(torch.uint8) * (1 + REASONS.index("range"))
    # What was stored is a multiple of 2^-136, so a scale below 2^-126 would have been exact.
    forced = inexact & (lowest < _LOWEST)[:, 0, :, 0]
    misfit[forced] = 1 + REASONS.index("underflow")
    nan = given == 255
    if stored == "fp8":
        nan |= largest == _NAN
    misfit[nan.any(3).any(1)] = 1 + REASONS.index("nan")
    codes = shifted.flatten(2).flatten(0, 1)
    scale = chosen[:, 0, :, 0].to(torch.uint8)
    return Requantised(codes, scale, misfit)


def requantise(codes: Tensor, scale: Tensor, stored: Literal["fp8", "fp4"]) -> Requantised:
    """A matrix of the checkpoint in e4m3 with one power of two per 128 x 128 block.

    Args:
        codes: [out, in] e4m3 or [out, in/2] packed e2m1 pairs, uint8.
        scale: e8m0 (uint8), per 32 x 32 block for fp8, per row and 32 columns for fp4.

    Sizes that are no multiple of 128 have smaller blocks at the end. Signs of zeros are kept.
    """
    rows, bytes_wide = codes.shape
    columns = bytes_wide * 2 if stored == "fp4" else bytes_wide
    result = torch.empty(rows, columns, dtype=torch.uint8)
    step = max(1, _BAND // (columns * GROUP)) * GROUP
    scales, misfits = [], []
    for start in range(0, rows, step):
        band = slice(start, min(start + step, rows))
        if stored == "fp4":
            given = scale[band]
        else:
            given = scale[band.start // BLOCK :].repeat_interleave(BLOCK, 0)[: band.stop - start]
        part = _convert(codes[band], given, stored)
        result[band] = part.codes[: band.stop - start, :columns]
        scales.append(part.scale)
        misfits.append(part.misfit)
    return Requantised(result, torch.cat(scales), torch.cat(misfits))


def _matrices(reader: CheckpointReader, config: ModelConfig) -> dict[str, TensorSpec]:
    """The FP4 and FP8 matrices by name, once every tensor of `config` is there as it should be."""
    found = {}
    for spec in tensor_specs(config):
        expected = {spec.name: (STORED_DTYPE[spec.format], spec.stored_shape)}
        if spec.scale_name is not None:
            expected[spec.scale_name] = (SCALE_DTYPE, spec.scale_shape)
        for name, (dtype, shape) in expected.items():
            if name not in reader:
                raise CheckpointError(
                    f"{reader.folder}: tensor {name} is missing; the folder must hold a whole"
                    " checkpoint of the released format"
                )
            stored = reader.describe(name)
            accepted = {dtype, "U8"} if dtype in ("I8", SCALE_DTYPE) else {dtype}
            if stored[0] not in accepted or stored[1] != shape:
                raise CheckpointError(
                    f"{reader.folder}: {name} is {stored[0]} {list(stored[1])}; expected {dtype}"
                    f" {list(shape)}, the released format"
                )
        if spec.format in ("fp4", "fp8"):
            found[spec.name] = spec
    return found


def _requantise(
    reader: CheckpointReader, spec: TensorSpec, prefix: str
) -> tuple[TensorReport, Requantised]:
    assert spec.format in ("fp4", "fp8"), spec
    assert spec.scale_name is not None
    stored: Literal["fp8", "fp4"] = "fp4" if spec.format == "fp4" else "fp8"
    result = requantise(reader.tensor(spec.name), reader.tensor(spec.scale_name), stored)
    counts = Counter(result.misfit.flatten().tolist())
    misfits = {reason: counts[1 + number] for number, reason in enumerate(REASONS)}
    return TensorReport(prefix + spec.name, stored, result.misfit.numel(), misfits), result


def examine(
    reader: CheckpointReader, config: ModelConfig, advance: Advance | None = None
) -> list[TensorReport]:
    """What `write_requantised` would convert, tensor by tensor; writes nothing.

    Args:
        advance: called with the bytes of the checkpoint that were dealt with since the last call.

    Raises:
        CheckpointError: a tensor is missing or of another dtype or shape than the config says.
    """
    reports = []
    matrices = _matrices(reader, config)
    prefix = _stored_prefix(reader)
    for name in reader:
        if name in matrices:
            reports.append(_requantise(reader, matrices[name], prefix)[0])
        if advance is not None:
            advance(reader.tensor(name).nbytes)
    return reports


@dataclass(frozen=True)
class _Unit:
    """One tensor, or a matrix with its scale, that is written in one go."""

    name: str
    spec: TensorSpec | None
    item: int  # bytes of one element
    most: int  # bytes of the unit, converted or not
    slots: dict[str, str]  # by name: longest text that its entry in the header can have


def _entry(dtype: str, shape: tuple[int, ...]) -> str:
    """A header entry with the longest offsets there are."""
    offsets = [2**63, 2**63]
    return json.dumps({"dtype": dtype, "shape": list(shape), "data_offsets": offsets})


def _units(reader: CheckpointReader, matrices: dict[str, TensorSpec]) -> Iterator[_Unit]:
    scales = {spec.scale_name for spec in matrices.values()}
    for name in reader:
        if name in scales:
            continue
        spec = matrices.get(name)
        data = reader.tensor(name)
        slots = {name: _entry(*reader.describe(name))}
        most = data.nbytes
        if spec is not None and spec.scale_name is not None:
            most = math.prod(spec.shape) + math.prod(spec.scale_shape)
            slots[name] = max(slots[name], _entry(STORED_DTYPE["fp8"], spec.shape), key=len)
            slots[spec.scale_name] = _entry(SCALE_DTYPE, spec.scale_shape)
        yield _Unit(name, spec, data.element_size(), most, slots)


def _shards(units: Iterator[_Unit], most_bytes: int) -> list[list[_Unit]]:
    shards: list[list[_Unit]] = [[]]
    size = 0
    for unit in units:
        if shards[-1] and size + unit.most > most_bytes:
            shards.append([])
            size = 0
        shards[-1].append(unit)
        size += unit.most
    # Readers map files: a tensor has to begin at a multiple of its element's size.
    return [sorted(shard, key=lambda unit: -unit.item) for shard in shards]


def _stored_prefix(reader: CheckpointReader) -> str:
    """What the reader took off every name of the checkpoint."""
    index = reader.folder / "model.safetensors.index.json"
    if index.is_file():
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].keys()
    else:
        with safe_open(reader.folder / "model.safetensors", framework="pt") as file:
            names = file.keys()
    return "model." if all(name.startswith("model.") for name in names) else ""


class _Writer:
    """Writes shards tensor by tensor: no more than one of them is in memory."""

    def __init__(self, reader: CheckpointReader, advance: Advance | None) -> None:
        self._reader = reader
        self._advance = advance or (lambda done: None)
        self._prefix = _stored_prefix(reader)
        note = reader.note()
        self._metadata = {"format": "pt"} | ({"note": note} if note else {})
        self.reports: list[TensorReport] = []
        self.weight_map: dict[str, str] = {}
        self.total = 0

    def write(self, path: Path, units: list[_Unit]) -> None:
        """One file: room for the header, the data, then the header, filled up with spaces."""
        texts = [
            f"{json.dumps(self._prefix + name)}: {text}, "
            for unit in units
            for name, text in unit.slots.items()
        ]
        room = len(json.dumps({"__metadata__": self._metadata})) + sum(map(len, texts))
        room += -room % 8
        header: dict[str, Any] = {"__metadata__": self._metadata}
        with path.open("wb") as file:
            file.seek(8 + room)
            for unit in units:
                for name, dtype, data in self._tensors(unit):
                    start = file.tell() - 8 - room
                    self._data(file, data)
                    header[self._prefix + name] = {
                        "dtype": dtype, "shape": list(data.shape),
                        "data_offsets": [start, start + data.nbytes],
                    }  # fmt: skip
                    self.weight_map[self._prefix + name] = path.name
                    self.total += data.nbytes
                self._advance(sum(self._reader.tensor(name).nbytes for name in unit.slots))
            text = json.dumps(header).encode()
            assert len(text) <= room, (len(text), room)
            file.seek(0)
            file.write(room.to_bytes(8, "little") + text.ljust(room))

    def _tensors(self, unit: _Unit) -> Iterator[tuple[str, str, Tensor]]:
        """Name, dtype name and data of the one or two tensors of a unit."""
        if unit.spec is not None:
            report, result = _requantise(self._reader, unit.spec, self._prefix)
            self.reports.append(report)
            if report.converted and unit.spec.scale_name is not None:
                yield unit.name, STORED_DTYPE["fp8"], result.codes
                yield unit.spec.scale_name, SCALE_DTYPE, result.scale
                return
        for name in unit.slots:
            yield name, self._reader.describe(name)[0], self._reader.tensor(name)

    def _data(self, file: BinaryIO, data: Tensor) -> None:
        flat = data.contiguous().reshape(-1).view(torch.uint8)
        for start in range(0, flat.numel(), _CHUNK):
            file.write(flat[start : start + _CHUNK].numpy().tobytes())


def write_requantised(
    reader: CheckpointReader,
    config: ModelConfig,
    folder: Path,
    advance: Advance | None = None,
    shard_bytes: int = 5 * 2**30,
) -> list[TensorReport]:
    """Write the safetensors files of a checkpoint into `folder`, matrices that fit converted.

    A matrix of which one group does not fit is written as it is, and so is every other tensor;
    names stay as they are, a converted matrix keeps `.scale` for its scales.

    Args:
        advance: called with the bytes of the checkpoint that were dealt with since the last call.
        shard_bytes: largest safetensors file (one tensor may be larger); several get an index.

    Raises:
        CheckpointError: a tensor is missing or of another dtype or shape than the config says.
        OSError: a file cannot be written.
    """
    matrices = _matrices(reader, config)
    shards = _shards(_units(reader, matrices), shard_bytes)
    writer = _Writer(reader, advance)
    for number, units in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        writer.write(folder / (name if len(shards) > 1 else "model.safetensors"), units)
    if len(shards) > 1:
        index = {"metadata": {"total_size": writer.total}, "weight_map": writer.weight_map}
        text = json.dumps(index, indent=2, ensure_ascii=False) + "\n"
        (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")
    return writer.reports


def requantised_config(
    config: Mapping[str, Any], reports: list[TensorReport], file: str
) -> dict[str, Any]:
    """config.json of the result: `requant` is added to quantization_config.

    The keys of the released format change only where the new value is true of every tensor that
    they describe: expert_dtype once all experts are FP8, weight_block_size once all that was FP8
    has 128 x 128 blocks.

    Args:
        file: name of the file that lists the tensors.
    """
    section = dict(config["quantization_config"])
    if all(report.converted for report in reports if report.stored == "fp4"):
        section["expert_dtype"] = "fp8"
    if all(report.converted for report in reports if report.stored == "fp8"):
        section["weight_block_size"] = [GROUP, GROUP]
    converted = sum(report.converted for report in reports)
    section["requant"] = {
        "file": file,
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "weight_block_size": [GROUP, GROUP],
        "converted": converted,
        "left": len(reports) - converted,
    }
    return {**config, "quantization_config": section}

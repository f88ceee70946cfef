"""Requantisation: blocks are converted if and only if that is exact; files hold what they say."""

import json
import math
import os
import shutil
from collections.abc import Callable
from itertools import pairwise, product
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from deepinfer.checkpoint.hf_config import load_model_config
from deepinfer.checkpoint.reader import CheckpointReader
from deepinfer.checkpoint.requant import (
    REASONS,
    Requantised,
    examine,
    requantise,
    write_requantised,
)
from deepinfer.cli import main
from deepinfer.commands.requant import requant
from deepinfer.errors import CheckpointError, ConfigError
from deepinfer.testing.tiny import tiny_config, write_random_checkpoint
from tests.cpu.checkpoint_helpers import (
    E2M1,
    E4M3,
    change_tensors,
    copy_of,
    header_and_data,
    load,
    split_in_shards,
)
from tests.cpu.conftest import SMALL

pytestmark = pytest.mark.usefixtures("one_thread")

Stored = Literal["fp8", "fp4"]

POWERS = torch.tensor([math.ldexp(1.0, byte - 127) for byte in range(255)] + [math.nan]).double()
GRID = {abs(value) for value in E4M3.tolist() if not math.isnan(value)}


def values_of(codes: Tensor, scale: Tensor, stored: Stored, block: tuple[int, int]) -> Tensor:
    """float64 values of a stored matrix, worked out from its bytes."""
    bytes_ = codes.long()
    if stored == "fp4":
        values = torch.stack([E2M1[bytes_ % 16], E2M1[bytes_ // 16]], dim=-1).flatten(1)
    else:
        values = E4M3[bytes_]
    rows, columns = (torch.arange(n) // size for n, size in zip(values.shape, block, strict=True))
    return values * POWERS[scale.long()][rows][:, columns]


def original(codes: Tensor, scale: Tensor, stored: Stored) -> Tensor:
    return values_of(codes, scale, stored, (1, 32) if stored == "fp4" else (32, 32))


def fits(values: set[float], exponent: int) -> bool:
    """Whether every value is on the e4m3 grid under the scale 2^exponent."""
    return all(math.ldexp(value, -exponent) in GRID for value in values)


def why_not(group: Tensor) -> str | None:
    """The reason why no scale is exact, found by trying all of them; None if one is."""
    if group.isnan().any():
        return "nan"
    values = set(group.abs().flatten().tolist())
    if any(fits(values, byte - 127) for byte in range(1, 255)):
        return None
    return "underflow" if any(fits(values, e) for e in range(-160, -126)) else "range"


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int64), b.contiguous().view(torch.int64))


def check(codes: Tensor, scale: Tensor, stored: Stored) -> list[str | None]:
    """Compare a conversion with the brute force, group by group; returns the verdicts."""
    kept = codes.clone(), scale.clone()
    result = requantise(codes, scale, stored)
    assert torch.equal(codes, kept[0])
    assert torch.equal(scale, kept[1])
    before = original(codes, scale, stored)
    after = values_of(result.codes, result.scale, "fp8", (128, 128))
    assert result.codes.shape == before.shape
    expected = tuple(-(-size // 128) for size in before.shape)
    assert tuple(result.scale.shape) == tuple(result.misfit.shape) == expected
    verdicts = []
    for r, c in product(range(expected[0]), range(expected[1])):
        place = slice(128 * r, 128 * r + 128), slice(128 * c, 128 * c + 128)
        verdict = why_not(before[place])
        found = int(result.misfit[r, c])
        assert (REASONS[found - 1] if found else None) == verdict
        if verdict is None:
            assert same_bits(after[place], before[place])
            assert 1 <= int(result.scale[r, c]) <= 254
        verdicts.append(verdict)
    return verdicts


@st.composite
def scale_bytes(draw: st.DrawFn, shape: tuple[int, int], lowest: int, highest: int) -> Tensor:
    """Scales around a centre anywhere in the range, as far apart as can still fit or farther."""
    centre = draw(st.integers(lowest, highest))
    reach = draw(st.sampled_from([0, 1, 3, 7, 10, 15, 20]))
    seed = draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    drawn = centre + torch.randint(-reach, reach + 1, shape, generator=generator)
    if draw(st.booleans()):  # one block far away from the others
        drawn[-1, -1] = draw(st.integers(lowest, highest))
    return drawn.clamp(lowest, highest).to(torch.uint8)


@st.composite
def matrices(draw: st.DrawFn, stored: Stored) -> tuple[Tensor, Tensor]:
    """Small matrices over few codes or all, some blocks zero; at times with NaN."""
    rows = draw(st.sampled_from([1, 2, 31, 33, 128, 130]))
    blocks = draw(st.integers(1, 9))
    columns = 32 * blocks - (draw(st.sampled_from([0, 0, 5])) if stored == "fp8" else 0)
    scale_rows = rows if stored == "fp4" else -(-rows // 32)
    scale = draw(scale_bytes((scale_rows, blocks), 0, 254))
    width = columns // 2 if stored == "fp4" else columns
    numbers = [code for code in range(256) if stored == "fp4" or code & 0x7F != 0x7F]
    if draw(st.booleans()):
        numbers = draw(st.lists(st.sampled_from(numbers), min_size=1, max_size=4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    picks = torch.randint(0, len(numbers), (rows, width), generator=generator)
    codes = torch.tensor(numbers, dtype=torch.uint8)[picks]
    per_block = 16 if stored == "fp4" else 32
    for block in draw(st.sets(st.integers(0, blocks - 1), max_size=3)):
        zeros = torch.tensor([0x00, 0x80] if stored == "fp8" else [0x00, 0x88]).byte()
        codes[:, block * per_block : (block + 1) * per_block] = zeros[draw(st.integers(0, 1))]
    if draw(st.integers(0, 9)) == 0:
        if stored == "fp8" and draw(st.booleans()):
            codes[-1, 0] = draw(st.sampled_from([0x7F, 0xFF]))
        else:
            scale[0, -1] = 255
    return codes, scale


@settings(max_examples=250, deadline=None)
@given(matrices("fp4"))
def test_fp4_is_converted_where_that_is_exact(matrix: tuple[Tensor, Tensor]) -> None:
    check(*matrix, "fp4")


@settings(max_examples=250, deadline=None)
@given(matrices("fp8"))
def test_fp8_is_converted_where_that_is_exact(matrix: tuple[Tensor, Tensor]) -> None:
    check(*matrix, "fp8")


@pytest.mark.parametrize("stored", ["fp4", "fp8"])
@pytest.mark.parametrize("level", [0, 1, 10, 127, 235, 254])
def test_every_code_beside_every_other_scale(stored: Stored, level: int) -> None:
    """The largest code in one block, each code in another, from 20 binades above to 20 below."""
    biggest, per_block = (0x77, 16) if stored == "fp4" else (0x7E, 32)
    numbers = range(0, 256, 3) if stored == "fp4" else range(0x7F)
    pairs = [
        (code, other)
        for code in numbers[:: 1 if level == 127 else 5]
        for other in range(max(0, level - 20), min(254, level + 20) + 1)
    ]
    codes = torch.zeros(len(pairs), 4 * per_block, dtype=torch.uint8)
    codes[:, 0] = biggest
    codes[:, per_block] = torch.tensor([code for code, _ in pairs]).byte()
    scale = torch.full((len(pairs), 4), level, dtype=torch.uint8)
    scale[:, 1] = torch.tensor([other for _, other in pairs]).byte()
    # One row of many groups side by side.
    verdicts = check(codes.view(1, -1), scale.view(1, -1), stored)
    assert None in verdicts
    assert "range" in verdicts
    assert ("underflow" in verdicts) == (level == 0 and stored == "fp8")


@pytest.mark.parametrize(("apart", "converted"), [(14, True), (15, False)])
def test_how_far_scales_of_experts_may_lie_apart(apart: int, converted: bool) -> None:
    """All sixteen codes of e2m1 fit while the scales of a block differ by at most 2^14."""
    codes = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]).byte().repeat(1, 8)
    scale = torch.tensor([[120, 120 - apart, 120, 120]], dtype=torch.uint8)
    assert (check(codes, scale, "fp4") == [None]) == converted
    assert requantise(codes, scale, "fp4").scale.tolist() == [[114]]  # 6 becomes 384


def test_the_scale_of_an_empty_block_does_not_matter() -> None:
    """Quantisers give zeros the smallest scale, 100 binades below the neighbours' scales."""
    codes = torch.tensor([[0x32] * 16 + [0x80] * 16 + [0x32] * 16 + [0x00] * 16]).byte()
    assert check(codes, torch.tensor([[127, 1, 127, 254]]).byte(), "fp4") == [None]
    codes[0, 20] = 0x01
    assert check(codes, torch.tensor([[127, 1, 127, 254]]).byte(), "fp4") == ["range"]
    nothing = requantise(torch.full((4, 64), 0x88).byte(), torch.zeros(4, 4).byte(), "fp4")
    assert nothing.scale.tolist() == [[127]]
    assert nothing.misfit.tolist() == [[0]]
    assert nothing.codes.unique().tolist() == [0x80]


@pytest.mark.parametrize("stored", ["fp4", "fp8"])
def test_bands_make_no_difference(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 127, (300, 160), generator=generator).byte()
    columns = 320 if stored == "fp4" else 160
    shape = (300 if stored == "fp4" else 10, columns // 32)
    scale = torch.randint(110, 120, shape, generator=generator).byte()

    def parts(result: Requantised) -> list[Tensor]:
        return [result.codes, result.scale, result.misfit]

    whole = parts(requantise(codes, scale, stored))
    monkeypatch.setattr("deepinfer.checkpoint.requant._BAND", 1)
    assert all(map(torch.equal, whole, parts(requantise(codes, scale, stored))))


# Checkpoints


def matrix_names(folder: Path) -> list[str]:
    tensors = load_file(folder / "model.safetensors")
    return [
        name
        for name in tensors
        if name.removesuffix("weight") + "scale" in tensors and "engram.embed" not in name
    ]


def all_tensors(folder: Path) -> dict[str, Tensor]:
    return {
        name: tensor
        for file in sorted(folder.glob("model*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def raw(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def check_result(source: Path, out: Path) -> dict[str, Any]:
    """Every tensor of `out` against `source`, by the word of its requant.json; returns that."""
    report: dict[str, Any] = json.loads((out / "requant.json").read_text(encoding="utf-8"))
    before, after = all_tensors(source), all_tensors(out)
    assert before.keys() == after.keys()
    changed = set()
    for name, entry in report["tensors"].items():
        if entry["format"] != "fp8_128x128":
            assert entry["format"] == entry["was"]
            assert entry["not_exact"] == sum(entry["why"].values()) > 0
            continue
        scale = name.removesuffix("weight") + "scale"
        changed |= {name, scale}
        stored: Stored = "fp4" if entry["was"] == "fp4_1x32" else "fp8"
        assert after[name].dtype == torch.float8_e4m3fn
        assert after[scale].dtype == torch.float8_e8m0fnu
        assert entry["groups"] == after[scale].numel()
        old = original(before[name].view(torch.uint8), before[scale].view(torch.uint8), stored)
        new = values_of(
            after[name].view(torch.uint8), after[scale].view(torch.uint8), "fp8", (128, 128)
        )
        assert same_bits(new, old), name
    for name, tensor in before.items():
        if name not in changed:
            assert after[name].dtype == tensor.dtype
            assert after[name].shape == tensor.shape
            assert torch.equal(raw(after[name]), raw(tensor)), name
    assert report["converted"] * 2 == len(changed) > 0
    assert report["left"] == len(report["tensors"]) - report["converted"]
    return report


def spread(tensors: dict[str, Tensor]) -> None:
    """Give one expert matrix a block of 128 that does not fit, and one FP8 matrix two."""
    scale = tensors["layers.0.ffn.experts.1.w2.scale"].view(torch.uint8)
    scale[5, 0] = 254
    tensors["layers.0.ffn.experts.1.w2.weight"].view(torch.uint8)[4:6] = 0x77
    scale = tensors["layers.1.attn.wo_b.scale"].view(torch.uint8)
    scale[0, 0] = 0
    scale[-1, -1] = 255


def test_a_checkpoint(tiny_folder: Path, tmp_path: Path) -> None:
    source = copy_of(tiny_folder, tmp_path / "source")
    change_tensors(source, spread)
    (source / "notes").mkdir()
    (source / "notes" / "other.safetensors").write_bytes(b"kept")
    (source / "README.md").write_text("About", encoding="utf-8")
    (source / "stale.safetensors").write_bytes(b"not read by anybody")
    (source / "model.safetensors.index.json.old").write_text("{}", encoding="utf-8")
    out = tmp_path / "out"
    returned = requant(source, out, dry_run=False)
    report = check_result(source, out)
    assert returned == report
    assert set(report["tensors"]) == set(matrix_names(source))
    expert = report["tensors"]["layers.0.ffn.experts.1.w2.weight"]
    assert (expert["was"], expert["groups"], expert["not_exact"]) == ("fp4_1x32", 1, 1)
    assert expert["why"] == {"range": 1, "underflow": 0, "nan": 0}
    assert report["tensors"]["layers.1.attn.wo_b.weight"]["why"]["nan"] == 1
    assert {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()} == {
        "config.json", "tokenizer.json", "model.safetensors", "requant.json", "README.md",
        "notes/other.safetensors", "model.safetensors.index.json.old",
    }  # fmt: skip
    assert (out / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]
    assert requant(source, None, dry_run=True) == report
    assert requant(source, tmp_path / "looked", dry_run=True) == report
    assert not (tmp_path / "looked").exists()


def test_what_the_config_says(tiny_folder: Path, tmp_path: Path) -> None:
    """Keys of the released format change only where they are true of every tensor."""

    def configs(name: str, change: Callable[[dict[str, Tensor]], None]) -> tuple[Any, Any]:
        source = copy_of(tiny_folder, tmp_path / name)
        change_tensors(source, change)
        requant(source, tmp_path / f"{name}-out", dry_run=False)
        folders = (source, tmp_path / f"{name}-out")
        return tuple(json.loads((f / "config.json").read_text()) for f in folders)  # type: ignore[return-value]

    def plain(tensors: dict[str, Tensor]) -> None:
        """Every scale is 1, so that everything fits."""
        for name, tensor in tensors.items():
            if name.endswith(".scale"):
                tensor.view(torch.uint8).fill_(127)

    before, after = configs("plain", plain)
    section = before.pop("quantization_config")
    count = len(matrix_names(tiny_folder))
    assert after.pop("quantization_config") == {
        **section,
        "expert_dtype": "fp8",
        "weight_block_size": [128, 128],
        "requant": {
            "file": "requant.json", "fmt": "e4m3", "scale_fmt": "ue8m0",
            "weight_block_size": [128, 128], "converted": count, "left": 0,
        },
    }  # fmt: skip
    assert after == before

    def plain_but_two(tensors: dict[str, Tensor]) -> None:
        plain(tensors)
        spread(tensors)

    before, after = configs("spread", plain_but_two)
    changed = after["quantization_config"].pop("requant")
    assert (changed["converted"], changed["left"]) == (count - 2, 2)
    assert after == before


@pytest.mark.parametrize("prefix", ["", "model."])
def test_shards(small_folder: Path, tmp_path: Path, prefix: str) -> None:
    """Names, order and alignment of files that are cut small, with a tensor of an odd size."""
    source = copy_of(small_folder, tmp_path / "source")
    change_tensors(source, lambda t: t.update({"image_start": torch.arange(7).bfloat16()}))
    split_in_shards(source, 3, prefix)
    out = tmp_path / "out"
    out.mkdir()
    done: list[int] = []
    with CheckpointReader(source) as reader:
        config = load_model_config(source)
        total = sum(reader.tensor(name).nbytes for name in reader)
        reports = write_requantised(reader, config, out, done.append, shard_bytes=100_000)
        seen: list[int] = []
        assert examine(reader, config, seen.append) == reports
    assert sum(done) == sum(seen) == total
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 5
    index = json.loads((out / "model.safetensors.index.json").read_text(encoding="utf-8"))
    held = {}
    for number, file in enumerate(files, start=1):
        assert file.name == f"model-{number:05d}-of-{len(files):05d}.safetensors"
        header, data = header_and_data(file)
        assert header.pop("__metadata__") == {"format": "pt"}
        assert len(data) <= 100_000 or len(header) <= 2
        assert (file.stat().st_size - len(data)) % 8 == 0
        spans = sorted(entry["data_offsets"] for entry in header.values())
        assert spans[0][0] == 0
        assert spans[-1][1] == len(data)
        assert all(a[1] == b[0] for a, b in pairwise(spans))
        for entry in header.values():
            size = {"F32": 4, "BF16": 2}.get(entry["dtype"], 1)
            assert entry["data_offsets"][0] % size == 0
        with safe_open(file, "pt") as opened:
            held |= dict.fromkeys(opened.keys(), file.name)
    assert held == index["weight_map"]
    assert all(name.startswith(prefix) for name in held)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in all_tensors(out).values())
    tensors = {report.name: report.to_dict() for report in reports}
    converted = sum(report.converted for report in reports)
    report = {"tensors": tensors, "converted": converted, "left": len(tensors) - converted}
    (out / "requant.json").write_text(json.dumps(report), encoding="utf-8")
    check_result(source, out)


def test_the_note_stays(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path / "source", tiny_config(**SMALL), note="For tests")
    requant(tmp_path / "source", tmp_path / "out", dry_run=False)
    with CheckpointReader(tmp_path / "out") as reader:
        assert reader.note() == "For tests"


def test_the_demo(tmp_path: Path) -> None:
    """A trained model: all of its experts fit, and most of its FP8 matrices."""
    demo = Path(__file__).parents[2] / "models" / "demo"
    requant(demo, tmp_path / "out", dry_run=False)
    entries = check_result(demo, tmp_path / "out")["tensors"].values()
    assert all(not e["not_exact"] for e in entries if e["was"] == "fp4_1x32")
    assert sum(not e["not_exact"] for e in entries) > 0.8 * len(entries)


def test_this_engine_refuses_the_result(small_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    requant(small_folder, out, dry_run=False)
    for use in (load, lambda folder: requant(folder, tmp_path / "again", dry_run=False)):
        with pytest.raises(
            ConfigError, match=r"requant\.json.*load the checkpoint that it was made"
        ):
            use(out)
    # With the old config in its place the tensors are still not what that says.
    shutil.copy(small_folder / "config.json", out)
    with pytest.raises(CheckpointError, match="does not match its config"):
        load(out)


# Mistakes and interruptions


def refused(match: str, model: Path, out: Path | None, kind: type[Exception] = ConfigError) -> None:
    parent = model.parent if out is None else out.parent
    before = sorted(parent.iterdir()) if parent.is_dir() else []
    with pytest.raises(kind, match=match):
        requant(model, out, dry_run=False)
    assert (sorted(parent.iterdir()) if parent.is_dir() else []) == before


def test_no_folder_is_overwritten(small_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("folder", "file", "link"):
        refused("exists; name a new folder", small_folder, tmp_path / name)
        with pytest.raises(ConfigError, match="exists; name a new folder"):
            requant(small_folder, tmp_path / name, dry_run=True)
    assert list((tmp_path / "folder").iterdir()) == []
    assert (tmp_path / "file").read_text(encoding="utf-8") == "mine"


def test_folders_that_cannot_be_written(small_folder: Path, tmp_path: Path) -> None:
    refused("--out is missing", small_folder, None)
    refused("cannot be written", small_folder, tmp_path / "no" / "such" / "folder")
    refused("cannot be written", small_folder, tmp_path / ("x" * 250))
    source = copy_of(small_folder, tmp_path / "source")
    refused("lies in the checkpoint", source, source / "out")
    os.symlink(source, tmp_path / "link")
    refused("lies in the checkpoint", source, tmp_path / "link" / "out")


def test_checkpoints_that_are_not_whole(small_folder: Path, tmp_path: Path) -> None:
    def lose(tensors: dict[str, Tensor]) -> None:
        del tensors["layers.0.attn.wo_a.scale"]

    def widen(tensors: dict[str, Tensor]) -> None:
        name = "layers.0.ffn.experts.0.w1.weight"
        tensors[name] = torch.zeros(32, 128, dtype=torch.int8)

    for number, (change, words) in enumerate(
        [
            (lose, "wo_a.scale is missing"),
            (widen, "w1.weight is I8 .32, 128.; expected I8 .32, 64."),
        ]
    ):
        source = copy_of(small_folder, tmp_path / str(number))
        change_tensors(source, change)
        refused(words, source, tmp_path / "out", CheckpointError)
        with pytest.raises(CheckpointError, match=words):
            requant(source, None, dry_run=True)


def test_nothing_is_written_where_nothing_fits(small_folder: Path, tmp_path: Path) -> None:
    def ruin(tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if name.endswith(".scale"):
                tensor.view(torch.uint8).fill_(255)

    source = copy_of(small_folder, tmp_path / "source")
    change_tensors(source, ruin)
    refused("none of its .* fits", source, tmp_path / "out", CheckpointError)
    report = requant(source, None, dry_run=True)
    assert report["converted"] == 0
    assert all(e["why"]["nan"] == e["groups"] for e in report["tensors"].values())


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
@pytest.mark.parametrize("where", ["checkpoint.requant.requantise", "commands.requant._write_json"])
def test_nothing_stays_of_a_broken_run(
    small_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, error: Any
) -> None:
    calls = 0

    def broken(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == (1 if where.endswith("_write_json") else 20):
            assert list(tmp_path.iterdir()) != []
            raise error
        return requantise(*arguments)

    monkeypatch.setattr(f"deepinfer.{where}", broken)
    pressed = error is KeyboardInterrupt
    kind, words = (KeyboardInterrupt, "^$") if pressed else (ConfigError, "No space left")
    with pytest.raises(kind, match=words):
        requant(small_folder, tmp_path / "out", dry_run=False)
    assert calls > 0
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_appears_meanwhile_is_not_touched(
    small_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def meanwhile(*arguments: Any) -> None:
        (tmp_path / "out").mkdir(exist_ok=True)

    monkeypatch.setattr("deepinfer.commands.requant._write_json", meanwhile)
    with pytest.raises(ConfigError, match="exists"):
        requant(small_folder, tmp_path / "out", dry_run=False)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


# The command line


def command(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[object, str, str]:
    with pytest.raises(SystemExit) as exit_:
        main(["requant", *map(str, words)])
    return (exit_.value.code, *capsys.readouterr())


def test_the_command(
    capsys: pytest.CaptureFixture[str], small_folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    status, shown, err = command(capsys, small_folder, "--dry-run")
    assert (status, err) == (0, "")
    assert "layers.*.ffn.experts.*.w*" in shown
    assert not out.exists()
    status, printed, err = command(capsys, small_folder, "--dry-run", "--json")
    assert (status, err) == (0, "")
    looked = json.loads(printed)
    assert command(capsys, small_folder, "--out", out) == (0, shown, "")
    assert looked == json.loads((out / "requant.json").read_text(encoding="utf-8"))
    status, printed, err = command(capsys, small_folder, "--out", tmp_path / "two", "--json")
    assert (status, json.loads(printed), err) == (0, looked, "")
    for words in ([small_folder], [small_folder, "--out", out], [out, "--dry-run"], [tmp_path]):
        status, printed, err = command(capsys, *words)
        assert (status, printed) == (2, "")
        assert err.startswith("error: ")
        assert err.count("\n") == 1


def test_matrices_that_stay_are_named(
    capsys: pytest.CaptureFixture[str], small_folder: Path, tmp_path: Path
) -> None:
    source = copy_of(small_folder, tmp_path / "source")
    change_tensors(source, spread)
    _, shown, _ = command(capsys, source, "--dry-run")
    line = "layers.0.ffn.experts.1.w2.weight stays: 1 of 1 groups do not fit (1 range)"
    assert line in shown.splitlines()

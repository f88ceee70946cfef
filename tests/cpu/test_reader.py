"""safetensors files of a folder: what is read, and one clear error for what cannot be."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from deepinfer.checkpoint.reader import CheckpointReader
from deepinfer.errors import CheckpointError
from tests.cpu.checkpoint_helpers import header_and_data, is_mapped, join, split_in_shards

STORED = {
    "a.weight": torch.arange(12, dtype=torch.uint8).view(3, 4).view(torch.float8_e4m3fn),
    "a.scale": torch.tensor([[126, 127, 128]], dtype=torch.uint8).view(torch.float8_e8m0fnu),
    "b.weight": torch.tensor([[-128, 127], [3, -1]], dtype=torch.int8),
    "b.scale": torch.tensor([[1, 255]], dtype=torch.uint8),
    "c": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "d": torch.tensor([[0.1], [float("inf")]], dtype=torch.float32),
    "e": torch.zeros(0, 5, dtype=torch.float32),
}
DESCRIPTIONS = {
    "a.weight": ("F8_E4M3", (3, 4)), "a.scale": ("F8_E8M0", (1, 3)), "b.weight": ("I8", (2, 2)),
    "b.scale": ("U8", (1, 2)), "c": ("BF16", (2,)), "d": ("F32", (2, 1)), "e": ("F32", (0, 5)),
}  # fmt: skip
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with one small file of every dtype."""
    save_file(STORED, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path


def as_read(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype in (torch.bfloat16, torch.float32) else tensor.view(torch.uint8)


def check_content(folder: Path) -> None:
    with CheckpointReader(folder) as reader:
        assert set(reader) == set(STORED)
        assert {name: reader.describe(name) for name in reader} == DESCRIPTIONS
        for name, stored in STORED.items():
            assert name in reader
            found = reader.tensor(name)
            assert found.dtype == as_read(stored).dtype
            assert torch.equal(found, as_read(stored))
        assert "z" not in reader


def outcome(folder: Path) -> str:
    """What reading everything comes to: "read", or the error's text."""
    try:
        with CheckpointReader(folder) as reader:
            for name in reader:
                reader.describe(name)
                reader.tensor(name)
            reader.note()
    except CheckpointError as error:
        return str(error)
    return "read"


def error_of(folder: Path) -> str:
    """The one line that opening `folder` and reading all of it gives."""
    message = outcome(folder)
    assert message != "read"
    assert message.isprintable()
    assert str(folder) in message
    return message


def test_one_file(folder: Path) -> None:
    check_content(folder)


@pytest.mark.parametrize("shards", [1, 2, 7])
def test_shards_with_an_index(folder: Path, shards: int) -> None:
    split_in_shards(folder, shards)
    check_content(folder)


@pytest.mark.parametrize("shards", [0, 3])
def test_a_prefix_on_every_name_is_dropped(tmp_path: Path, shards: int) -> None:
    prefixed = {f"model.{name}": tensor for name, tensor in STORED.items()}
    save_file(prefixed, tmp_path / "model.safetensors")
    if shards:
        split_in_shards(tmp_path, shards)
    check_content(tmp_path)


def test_a_prefix_on_some_names_belongs_to_them(tmp_path: Path) -> None:
    save_file({"model.a": torch.zeros(1), "b": torch.ones(1)}, tmp_path / "model.safetensors")
    with CheckpointReader(tmp_path) as reader:
        assert set(reader) == {"model.a", "b"}
        assert reader.tensor("model.a") == 0


def test_the_index_decides_when_there_is_a_single_file_too(folder: Path) -> None:
    split_in_shards(folder, 2)
    save_file({"other": torch.zeros(1)}, folder / "model.safetensors")
    check_content(folder)


def test_tensors_are_views_of_the_file_and_outlive_the_reader(folder: Path) -> None:
    with CheckpointReader(folder) as reader:
        tensors = {name: reader.tensor(name) for name in STORED}
        assert all(is_mapped(tensors[name], folder / "model.safetensors") for name in "cd")
        assert is_mapped(tensors["a.weight"], folder / "model.safetensors")
    del reader
    (folder / "model.safetensors").unlink()
    assert all(torch.equal(tensors[name], as_read(STORED[name])) for name in STORED)
    assert not is_mapped(tensors["c"].clone(), folder / "model.safetensors")


def test_a_closed_reader_holds_no_file(folder: Path) -> None:
    def mapped() -> bool:
        return str(folder.resolve()) in Path("/proc/self/maps").read_text()

    with CheckpointReader(folder) as reader:
        assert torch.equal(reader.tensor("c"), STORED["c"])
        assert mapped()
    assert not mapped()


def test_writing_into_a_view_leaves_the_file_alone(folder: Path) -> None:
    before = (folder / "model.safetensors").read_bytes()
    with CheckpointReader(folder) as reader:
        reader.tensor("d").fill_(7.0)
    assert (folder / "model.safetensors").read_bytes() == before


def test_the_note_comes_from_any_file(tmp_path: Path) -> None:
    for note in (None, "", "an early version"):
        metadata = {"format": "pt"} | ({} if note is None else {"note": note})
        save_file({"a": torch.zeros(1)}, tmp_path / "one.safetensors")
        save_file({"b": torch.zeros(1)}, tmp_path / "two.safetensors", metadata=metadata)
        weight_map = {"a": "one.safetensors", "b": "two.safetensors"}
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
        with CheckpointReader(tmp_path) as reader:
            assert reader.note() == (note or None)


@pytest.mark.parametrize("kind", ["absent", "empty", "file", "folders"])
def test_folders_without_tensors(tmp_path: Path, kind: str) -> None:
    place = tmp_path / "checkpoint"
    if kind == "file":
        place.write_text("x")
    elif kind != "absent":
        place.mkdir()
    if kind == "folders":
        (place / "model.safetensors").mkdir()
        (place / INDEX).mkdir()
    assert "no model.safetensors and no model.safetensors.index.json" in error_of(place)


def test_every_truncation_is_an_error(folder: Path, tmp_path: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    for length in range(len(content)):
        cut = tmp_path / str(length)
        cut.mkdir()
        (cut / "model.safetensors").write_bytes(content[:length])
        assert "truncated or corrupt safetensors file" in error_of(cut)


def test_a_longer_file_is_an_error(folder: Path, tmp_path: Path) -> None:
    longer = tmp_path / "longer"
    longer.mkdir()
    content = (folder / "model.safetensors").read_bytes()
    (longer / "model.safetensors").write_bytes(content + b"\0")
    assert "truncated or corrupt" in error_of(longer)


@given(st.data())
def test_a_corrupt_header_is_one_line(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    place = tmp_path_factory.mktemp("corrupt")
    save_file(STORED, place / "model.safetensors", metadata={"format": "pt"})
    content = bytearray((place / "model.safetensors").read_bytes())
    header = 8 + int.from_bytes(content[:8], "little")
    likely = st.sampled_from(b'"\\{}[]:,0123456789nrtuBF_ ')
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, header - 1))
        content[at] = data.draw(st.integers(0, 255) if at < 8 else likely | st.integers(0, 255))
    (place / "model.safetensors").unlink()  # an open mapping must not change under its reader
    (place / "model.safetensors").write_bytes(content)
    assert outcome(place).isprintable()


def test_names_with_control_characters_are_shown_escaped(folder: Path) -> None:
    header, data = header_and_data(folder / "model.safetensors")
    header["c\nd"] = header.pop("c")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").write_bytes(join(header, data))
    assert "control characters in tensor names: 'c\\nd'" in error_of(folder)


@pytest.mark.parametrize("content", [
    b"", b"null", b"5", b"[]", b"{}", b'{"weight_map": null}', b'{"weight_map": 3}',
    b'{"weight_map": ["c"]}', b'{"weight_map": "c"}', b"{", b"\xff\xfe", b"[" * 100_000,
    b"1" * 5000, b'{"weight_map": {"c": "x.safetensors", "c": "x.safetensors"}}',
    b'{"weight_map": {}, "weight_map": {}}',
])  # fmt: skip
def test_a_garbage_index_is_named(folder: Path, content: bytes) -> None:
    (folder / INDEX).write_bytes(content)
    message = error_of(folder)
    assert f"{folder / INDEX}: not a JSON index" in message


@pytest.mark.parametrize("file", [
    "gone.safetensors", None, 3, "", ".", "x" * 300, "\0", "\ud800", "a\nb", ["model.safetensors"],
])  # fmt: skip
def test_missing_shards_are_named(folder: Path, file: object) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {"c": file}}))
    assert "shards of the index are missing: [" in error_of(folder)


def test_tensors_that_their_shard_lacks_are_named(folder: Path) -> None:
    split_in_shards(folder, 2)
    index = json.loads((folder / INDEX).read_text())
    first, second = sorted(set(index["weight_map"].values()))
    moved = next(name for name, file in index["weight_map"].items() if file == first)
    index["weight_map"][moved] = second
    index["weight_map"]["new"] = first
    (folder / INDEX).write_text(json.dumps(index))
    message = error_of(folder)
    assert f"2 tensors are not in the shard that it names: {sorted([moved, 'new'])}" in message


def test_a_truncated_shard_is_named(folder: Path) -> None:
    split_in_shards(folder, 2)
    shard = sorted(folder.glob("model-*"))[1]
    content = shard.read_bytes()
    shard.unlink()
    shard.write_bytes(content[:-1])
    assert f"{shard}: truncated or corrupt" in error_of(folder)


def test_a_shard_that_is_no_safetensors_file_is_named(folder: Path) -> None:
    split_in_shards(folder, 2)
    shard = sorted(folder.glob("model-*"))[0]
    shard.unlink()
    shard.write_text("<html>404: not found</html>")
    assert f"{shard}: truncated or corrupt" in error_of(folder)

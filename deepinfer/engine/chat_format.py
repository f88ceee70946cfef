"""Conversations in the V4.1 prompt format.

Knows messages and tools as OpenAI's interface writes them; deepseek-recipe knows the prompt format
and takes a reply apart into thinking, text and tool calls.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from deepinfer.checkpoint.tokenizer import Tokenizer
from deepinfer.errors import ConfigError, RequestError

Message = dict[str, Any]

_MODEL = "deepinfer"


def recipe() -> Any:
    """The package deepseek_recipe.

    Raises:
        ConfigError: it is missing.
    """
    try:
        import deepseek_recipe
    except ImportError:
        raise ConfigError(
            "chat needs the package deepseek-recipe: pip install 'deepinfer-hopper[chat]'"
        ) from None
    return deepseek_recipe


class ChatFormat:
    """The checkpoint's prompt format.

    Raises:
        ConfigError: the package deepseek-recipe is missing.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._recipe = recipe()
        self._tokenizer = self._recipe.Tokenizer.from_str(tokenizer.inner.to_str())
        self._encoding = self._recipe.DeepseekV41Encoding().with_tokenizer(self._tokenizer)

    def convert(
        self, messages: Sequence[Message], thinking: bool, tools: Sequence[Message] = ()
    ) -> Any:
        """The conversation as deepseek-recipe holds it.

        Raises:
            RequestError: a message or a tool is not as it should be.
        """
        package = self._recipe
        alias = package.ConversionOptions().with_model_alias(
            _MODEL, package.ModelVersion.DeepseekV41Flash
        )
        body: dict[str, Any] = {
            "model": _MODEL,
            "messages": list(messages),
            "thinking": {"type": "enabled" if thinking else "disabled"},
        }
        if tools:
            body["tools"] = list(tools)
        try:
            return package.ChatCompletionRequest(body).convert(alias)
        except UnicodeEncodeError:
            raise RequestError("a message is not valid UTF-8 text") from None
        except (TypeError, ValueError, package.ConversionError) as error:
            raise RequestError(f"the messages or tools cannot be used: {error}") from None

    def encode(self, converted: Any) -> list[int]:
        """Token ids of the prompt."""
        return list(self._encoding.encode(converted.conversation))

    def deltas(self, converted: Any, pieces: Iterator[list[int]]) -> Iterator[dict[str, Any]]:
        """Parts of the reply, {"reasoning_content" | "content" | "tool_calls": ...}, as they come.

        Args:
            pieces: token ids of the reply.
        """
        package = self._recipe
        generator = package.ChatCompletionRequest.chunk_generator(converted, "0", _MODEL)
        stream = package.StreamProcessor(generator, converted.parsing_options, self._tokenizer)
        usage = package.PromptUsage(prompt_tokens=1, prompt_cache_hit_tokens=0)
        chunks = stream.push(package.InferenceChunk.ready(prompt_usage=usage))
        for ids in pieces:
            chunks += stream.push(package.InferenceChunk.tokens(ids))
            yield from _deltas(chunks)
            chunks = []
        stop = package.InferenceFinishReason.Stop
        chunks += stream.push(package.InferenceChunk.finish(stop))
        chunks += stream.finish()
        yield from _deltas(chunks)


def _deltas(chunks: list[Any]) -> Iterator[dict[str, Any]]:
    for chunk in chunks:
        for choice in json.loads(chunk.to_json()).get("choices", ()):
            if choice.get("delta"):
                yield choice["delta"]

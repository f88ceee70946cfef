"""Questions with known answers, and whether a text is the answer.

Knows the file of questions; must not know how an answer is computed.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer.errors import ConfigError

QUESTIONS_FILE = "questions.json"
MAX_TOKENS = 32
_CHECKS = ("exact", "contains")


@dataclass(frozen=True)
class Question:
    """One question.

    Attributes:
        question: as it is shown; prompt: as the model gets it, special tokens included.
        answer: what is right, None = the reply is not judged.
        check: exact = the reply equals it but for space around; contains = it is in the reply.
        max_tokens: longest reply.
    """

    question: str
    prompt: str
    answer: str | None = None
    check: str = "exact"
    max_tokens: int = MAX_TOKENS


def is_right(question: Question, text: str) -> bool | None:
    """Whether `text` answers the question; None when that is not known."""
    if question.answer is None:
        return None
    if question.check == "contains":
        return question.answer in text
    return text.strip() == question.answer.strip()


def load_questions(file: Path, limit: int | None = None) -> list[Question]:
    """Questions of a JSON file, at most `limit`, in its order.

    The file holds a list of objects {prompt, question, answer, check, max_tokens}; all but the
    prompt may be left out.

    Raises:
        ConfigError: no such file, no JSON, an entry that cannot be asked, or a limit below 1.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"limit = {limit}; expected a whole number of at least 1")
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"{file}: no such file; name a file of questions with --questions"
        ) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{file}: not readable as JSON ({error})") from None
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{file}: expected a list of questions")
    return [_question(f"{file}[{number}]", entry) for number, entry in enumerate(entries)][:limit]


def _question(where: str, entry: Any) -> Question:
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: expected an object with a prompt")
    prompt = entry.get("prompt")
    question = entry.get("question", prompt)
    if not isinstance(prompt, str) or not prompt:
        raise ConfigError(f"{where}: prompt = {prompt!r}; expected a text")
    if not isinstance(question, str) or not question:
        raise ConfigError(f"{where}: question = {question!r}; expected a text")
    answer, check = entry.get("answer"), entry.get("check", "exact")
    most = entry.get("max_tokens", MAX_TOKENS)
    if answer is not None and (not isinstance(answer, str) or not answer.strip()):
        raise ConfigError(f"{where}: answer = {answer!r}; expected a text, or none")
    if check not in _CHECKS:
        raise ConfigError(f"{where}: check = {check!r}; expected {' or '.join(_CHECKS)}")
    if type(most) is not int or most < 1:
        raise ConfigError(f"{where}: max_tokens = {most!r}; expected a whole number of at least 1")
    return Question(question, prompt, answer, check, most)

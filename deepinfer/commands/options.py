"""Options of several commands: how tokens are drawn, the form of a reply, settings of a plan.

Knows their names and help texts; must not know what a command does.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter, Token

from deepinfer.config import EngineOptions
from deepinfer.errors import RequestError
from deepinfer.sampling.params import SamplingParams
from deepinfer.sampling.structured import StructuredOutput

Switch = Parameter(negative="")
Text = Annotated[str, Parameter(allow_leading_hyphen=True)]  # "- like this", or - alone


def _biases(type_: object, tokens: Sequence[Token]) -> tuple[tuple[int, float], ...]:
    """Pairs from 5=-1.5."""
    found = []
    for token in tokens:
        left, _, right = token.value.partition("=")
        try:
            found.append((int(left), float(right)))
        except ValueError:
            raise RequestError(
                f"--logit-bias {token.value!r}; expected ID=BIAS like 5=-1.5"
            ) from None
    return tuple(found)


@dataclass(frozen=True)
class TerminalSampling(SamplingParams):
    """SamplingParams with a default that suits a reader rather than a program.

    Attributes:
        logit_bias: ID=BIAS, added to the logit of the token, -100..100.
    """

    max_tokens: int | None = 128
    logit_bias: Annotated[
        tuple[tuple[int, float], ...],
        Parameter(converter=_biases, n_tokens=1, consume_multiple=False, negative=""),
    ] = ()
    structured: Annotated[StructuredOutput | None, Parameter(parse=False, show=False)] = None


@dataclass(frozen=True)
class Form:
    """The form that the text must have, at most one of them; needs the extra "structured".

    Attributes:
        json_schema: JSON schema that the text must validate against, or @FILE with one; true for
            any JSON.
        regex: regular expression that the whole text must match.
        ebnf: grammar that the text must follow, or @FILE with one; rules like root ::= "a" | "b".
        choice: a text that may come; may be given several times.
        after_thinking: the prompt leaves the model thinking, and the form begins after its end of
            thinking. In a conversation --thinking says so.
    """

    json_schema: str | None = None
    regex: Text | None = None
    ebnf: str | None = None
    choice: Annotated[list[str] | None, Parameter(negative="", allow_leading_hyphen=True)] = None
    after_thinking: Annotated[bool, Switch] = False

    @property
    def is_given(self) -> bool:
        """Whether there is any."""
        return any((self.json_schema, self.regex, self.ebnf, self.choice))

    def add_to(self, sampling: SamplingParams) -> SamplingParams:
        """The parameters with this form."""
        given = {name: value for name, value in self.__dict__.items() if value is not None}
        after_thinking = given.pop("after_thinking")
        if not given:
            if after_thinking:
                raise RequestError("after_thinking is about a form; give one, like json_schema")
            return sampling
        for name in given.keys() & {"json_schema", "ebnf"}:
            given[name] = _text_or_file(name, given[name])
        form = StructuredOutput(**given, after_thinking=after_thinking)
        return replace(sampling, structured=form)


def _text_or_file(name: str, text: str) -> str:
    if not text.startswith("@"):
        return text
    try:
        return Path(text[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{name} file {text[1:]!r} cannot be read ({error})") from None


@dataclass(frozen=True)
class PlanOptions(EngineOptions):
    """EngineOptions without which a plan of the released checkpoint can do."""

    model: str = ""


# What commands take where nothing is said.
SAMPLING, FORM, PLAN = TerminalSampling(), Form(), PlanOptions()

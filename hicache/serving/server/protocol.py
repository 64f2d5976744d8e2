"""The bodies of requests: OpenAI's fields, and those of vLLM that this server honours.

A field is honoured, or changes nothing at the only values that are accepted, or is refused. Values are not converted:
"1" is no number.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

_MAX_FIELDS = 128  # of an object; each unknown one is an error of its own
_MAX_SEED = (1 << 63) - 1
_MAX_PRIORITY = 1 << 31
_MAX_TOKENS = 1 << 31


def _with_utf8(text: str) -> str:
    """Refuse lone surrogates, which JSON can write and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError("no_utf8", "the text has no UTF-8 form: it has a lone surrogate") from None
    return text


def _truth_value(value: object) -> object:
    if not isinstance(value, bool):
        raise PydanticCustomError("not_false", "it must be false, or left out")
    return value


# Which branch of a union checks a value. All would, and a long list would have an error for each item and branch.
SHAPES = ("as text", "as texts", "as ids", "as lists of ids")


def _shape(value: object) -> str:
    if not isinstance(value, list):
        return "as text"
    if value and isinstance(value[0], list):
        return "as lists of ids"
    return "as texts" if value and isinstance(value[0], str) else "as ids"


def _text_or_list(value: object) -> str:
    return "as texts" if isinstance(value, list) else "as text"


Text = Annotated[str, AfterValidator(_with_utf8)]
StopText = Annotated[str, Field(min_length=1, max_length=1024), AfterValidator(_with_utf8)]
SaltText = Annotated[str, Field(min_length=1, max_length=256), AfterValidator(_with_utf8)]
# As a literal, False would be equal to 0, and 1 to True.
Never = Annotated[Literal[False], BeforeValidator(_truth_value)]
Zero = Annotated[float, Field(ge=0, le=0)]
One = Annotated[float, Field(ge=1, le=1)]
OneAnswer = Annotated[int, Field(ge=1, le=1)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1, fail_fast=True)]
Stop = Annotated[
    Annotated[StopText, Tag("as text")]
    | Annotated[list[StopText], Field(max_length=16, fail_fast=True), Tag("as texts")],
    Discriminator(_text_or_list),
]


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, value: object) -> object:
        if isinstance(value, dict) and len(value) > _MAX_FIELDS:
            raise PydanticCustomError("too_many_fields", f"more than {_MAX_FIELDS} fields")
        return value


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: Never | None = None


class GenerationBody(Body):
    """What completions and chats have in common."""

    model: Text | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=_MAX_TOKENS, description="0 or -1: all tokens")] | None = None
    seed: Annotated[int, Field(ge=-_MAX_SEED - 1, le=_MAX_SEED)] | None = None
    stop: Stop | None = None
    max_tokens: Annotated[int, Field(ge=1, le=_MAX_TOKENS)] | None = None
    ignore_eos: Annotated[bool, Field(description="as in vLLM: go on after an end token")] | None = None
    cache_salt: (
        Annotated[SaltText, Field(description="as in vLLM: only requests with the same salt share cached pages")] | None
    ) = None
    priority: (
        Annotated[int, Field(ge=-_MAX_PRIORITY, le=_MAX_PRIORITY, description="as in vLLM: lower is earlier")] | None
    ) = None

    # These change nothing here.
    user: Text | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None
    prompt_cache_retention: Text | None = None
    service_tier: Literal["auto", "default"] | None = None
    # These change nothing at the values that are accepted.
    n: OneAnswer | None = None
    frequency_penalty: Zero | None = None
    presence_penalty: Zero | None = None
    repetition_penalty: One | None = None
    min_p: Zero | None = None
    min_tokens: Annotated[int, Field(ge=0, le=0)] | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionBody(GenerationBody):
    """`/v1/completions`. `prompt`: a text, texts, token ids, or lists of them."""

    prompt: Annotated[
        Annotated[Text, Tag("as text")]
        | Annotated[list[Text], Field(fail_fast=True), Tag("as texts")]
        | Annotated[TokenIds, Tag("as ids")]
        | Annotated[list[TokenIds], Field(fail_fast=True), Tag("as lists of ids")],
        Discriminator(_shape),
    ]

    best_of: OneAnswer | None = None
    echo: Never | None = None
    logprobs: None = None
    suffix: None = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        prompt: Any = self.prompt
        return prompt if isinstance(prompt, list) and isinstance(prompt[0], str | list) else [prompt]


class TextPart(Body):
    type: Literal["text"]
    text: Text


class Message(Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        Annotated[Text, Tag("as text")] | Annotated[list[TextPart], Field(fail_fast=True), Tag("as texts")],
        Discriminator(_text_or_list),
    ]
    name: Text | None = None
    refusal: None = None

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ResponseFormat(Body):
    type: Literal["text"]


class ChatBody(GenerationBody):
    """`/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=_MAX_TOKENS)] | None = None

    store: Never | None = None
    logprobs: Never | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=0)] | None = None
    modalities: Annotated[list[Literal["text"]], Field(fail_fast=True)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None

"""The bodies of requests, with fields of OpenAI, vLLM and SGLang.

A declared field has its documented effect, and a field in `IGNORED` has no effect; docs/serving.md lists both kinds. A
request with any other field is refused with the field's name, unless the value is null or an empty list. A field that
is null counts as absent. Values are not converted: "1" is not a number.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from hicache.engine import MAX_NEXT_TURN_S
from hicache.serving.server.fields import (
    Bias,
    NumLogprobs,
    Penalty,
    SaltText,
    Stop,
    Text,
    TokenId,
    TokenIds,
    shape_of,
    text_or_list,
)
from hicache.serving.server.response_format import ResponseFormat

_MAX_FIELDS = 128  # maximum fields of a JSON object, because each unknown field causes an error message
_MAX_SEED = (1 << 63) - 1
_MAX_PRIORITY = 10
_MAX_TOKENS = 1 << 31
_MAX_LISTED_TOKENS = 1024  # maximum tokens in `logit_bias` and `stop_token_ids`, which every decode step processes
_MAX_FACTOR = 1e4
_MAX_ANSWERS = 128
_SAMPLING = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
)


# Fields of generation requests that are ignored. Ignoring `tool_choice` and similar fields is safe: they only select
# among the tools of a request, and a request with tools is refused.
IGNORED = frozenset(
    {
        "user",
        "metadata",
        "safety_identifier",
        "prompt_cache_key",
        "service_tier",
        "store",
        "tool_choice",
        "function_call",
        "parallel_tool_calls",
    }
)


class Body(BaseModel):
    """A JSON object in a request. `ignored`: names of fields that are accepted with any value and have no effect."""

    model_config = ConfigDict(strict=True, extra="forbid")
    ignored: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral_fields(cls, value: object) -> object:
        if not isinstance(value, dict):
            return value
        if len(value) > _MAX_FIELDS:
            raise PydanticCustomError("too_many_fields", f"more than {_MAX_FIELDS} fields")
        return {
            name: given
            for name, given in value.items()
            if name in cls.model_fields or not (given is None or given == [] or name in cls.ignored)
        }


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: Annotated[bool, Field(description="as in vLLM: usage with each event")] | None = None


class GenerationBody(Body):
    """The fields that completions and chats share."""

    ignored = IGNORED
    model: Text | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=_MAX_ANSWERS, description="answers to each prompt")] | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=_MAX_TOKENS, description="0 or -1: all tokens")] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=_MAX_FACTOR)] | None = None
    logit_bias: Annotated[dict[TokenId, Bias], Field(max_length=_MAX_LISTED_TOKENS)] | None = None
    seed: Annotated[int, Field(ge=-_MAX_SEED - 1, le=_MAX_SEED)] | None = None
    stop: Stop | None = None
    max_tokens: Annotated[int, Field(ge=1, le=_MAX_TOKENS)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=_MAX_TOKENS)] | None = None
    stop_token_ids: Annotated[TokenIds, Field(min_length=0, max_length=_MAX_LISTED_TOKENS)] | None = None
    skip_special_tokens: Annotated[bool, Field(description="as in vLLM: without their text")] | None = None
    return_tokens_as_token_ids: Annotated[bool, Field(description="as in vLLM: of logprobs")] | None = None
    response_format: ResponseFormat | None = None
    ignore_eos: Annotated[bool, Field(description="as in vLLM: go on after an end token")] | None = None
    cache_salt: (
        Annotated[SaltText, Field(description="as in vLLM: only requests with the same salt share cached pages")] | None
    ) = None
    priority: (
        Annotated[int, Field(ge=-_MAX_PRIORITY, le=_MAX_PRIORITY, description="as in vLLM: lower is earlier")] | None
    ) = None
    expected_reuse: (
        Annotated[int, Field(ge=1, le=_MAX_TOKENS, description="how often the prompt will be used again")] | None
    ) = None
    session_end: Annotated[bool, Field(description="no prompt will continue this one and its answer")] | None = None
    next_turn_within_s: (
        Annotated[
            float, Field(ge=0, le=MAX_NEXT_TURN_S, description="seconds until a prompt that continues it is expected")
        ]
        | None
    ) = None

    @field_validator("session_end")
    @classmethod
    def _require_no_reuse(cls, value: bool | None, info: ValidationInfo) -> bool | None:
        if value and info.data.get("expected_reuse") is not None:
            raise PydanticCustomError("session_goes_on", "a session that ends has no expected_reuse")
        return value

    @field_validator("next_turn_within_s")
    @classmethod
    def _require_open_session(cls, value: float | None, info: ValidationInfo) -> float | None:
        if value is not None and info.data.get("session_end"):
            raise PydanticCustomError("session_goes_on", "a session that ends has no next turn")
        return value

    @field_validator("stream_options")
    @classmethod
    def _of_a_stream(cls, value: StreamOptions | None, info: ValidationInfo) -> StreamOptions | None:
        if value is not None and not info.data.get("stream"):
            raise PydanticCustomError("no_stream", "only a stream has options; set stream to true too")
        return value

    @property
    def num_answers(self) -> int:
        """Number of answers to all prompts."""
        return self.n or 1

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def echoes(self) -> bool:
        """Return whether answers begin with their prompt."""
        return False

    @property
    def num_logprobs(self) -> int | None:
        """Return the number of most likely tokens whose log probabilities the answer has, in addition to that of the
        chosen token. None means no log probabilities."""
        raise NotImplementedError

    @property
    def bias(self) -> dict[int, float]:
        return {int(token): value for token, value in (self.logit_bias or {}).items()}

    @property
    def sampling(self) -> dict[str, Any]:
        """Return the fields of `SamplingParams` that the body sets, except for the seed."""
        given: dict[str, Any] = {name: getattr(self, name) for name in _SAMPLING}
        given |= {"top_k": None if self.top_k is None else max(0, self.top_k), "logit_bias": (*self.bias.items(),)}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def wants_usage(self) -> bool:
        """Return whether a stream ends with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def wants_usage_always(self) -> bool:
        """Return whether each event of a stream contains the usage so far."""
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)


class CompletionBody(GenerationBody):
    """The body of `/v1/completions`. `prompt`: a text, a list of texts, a list of token ids, or several lists of token
    ids."""

    prompt: Annotated[
        Annotated[Text, Tag("as text")]
        | Annotated[list[Text], Field(fail_fast=True), Tag("as texts")]
        | Annotated[TokenIds, Tag("as ids")]
        | Annotated[list[TokenIds], Field(fail_fast=True), Tag("as lists of ids")],
        Discriminator(shape_of),
    ]
    echo: Annotated[bool, Field(description="begin the answer with the prompt")] | None = None
    max_tokens: Annotated[int, Field(ge=0, le=_MAX_TOKENS, description="0: with echo alone")] | None = None
    logprobs: NumLogprobs | None = None

    @property
    def echoes(self) -> bool:
        return bool(self.echo)

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    def without_texts(self) -> CompletionBody:
        """Return a copy of the body without the prompt's text. The server keeps this copy until the request ends."""
        return self.model_copy(update={"prompt": [0]})

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        prompt: Any = self.prompt
        return prompt if isinstance(prompt, list) and isinstance(prompt[0], str | list) else [prompt]

    @property
    def num_answers(self) -> int:
        return len(self.prompts) * (self.n or 1)


class TextPart(Body):
    type: Literal["text"]
    text: Text


class Message(Body):
    """A message of a chat. The `content` of the assistant may be null, which means no text."""

    role: Literal["system", "developer", "user", "assistant"]
    content: (
        Annotated[
            Annotated[Text, Tag("as text")] | Annotated[list[TextPart], Field(fail_fast=True), Tag("as texts")],
            Discriminator(text_or_list),
        ]
        | None
    )
    name: Annotated[Text, Field(description="for templates that read it")] | None = None

    @field_validator("content")
    @classmethod
    def _require_content(cls, value: str | list[TextPart] | None, info: ValidationInfo) -> str | list[TextPart] | None:
        if value is None and info.data.get("role") != "assistant":
            raise PydanticCustomError("no_content", "only an assistant's content may be null")
        return value

    def with_text(self) -> dict[str, str]:
        """Return the message with its content as one text."""
        content = self.content or ""
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        return {"role": self.role, "content": text, **({} if self.name is None else {"name": self.name})}


class ChatBody(GenerationBody):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=_MAX_TOKENS)] | None = None
    chat_template_kwargs: (
        Annotated[dict[Text, Any], Field(description="as in vLLM: variables of the model's chat template")] | None
    ) = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None

    @field_validator("top_logprobs")
    @classmethod
    def _of_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and not info.data.get("logprobs"):
            raise PydanticCustomError("no_logprobs", "set logprobs to true too")
        return value

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def without_texts(self) -> ChatBody:
        """Return a copy of the body without the text of its messages. The server keeps this copy until the request
        ends."""
        none = Message(role="user", content="")
        return self.model_copy(update={"messages": [none], "chat_template_kwargs": None})

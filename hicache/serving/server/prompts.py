"""Converts request bodies to prompts of token ids within the model's limits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from hicache.errors import ConfigError
from hicache.serving.models import ChatTokens, Tokenizer
from hicache.serving.server.fields import SHAPES
from hicache.serving.server.protocol import ChatBody, CompletionBody, Message
from hicache.serving.server.replies import ApiError, invalid
from hicache.serving.server.side_protocol import (
    DetokenizeBody,
    ResetBody,
    TokenizeBody,
    TokenizeChatBody,
    TokenizeTextBody,
)

AnyBody = CompletionBody | ChatBody | TokenizeBody | DetokenizeBody | ResetBody
BODIES: dict[str, type[AnyBody]] = {
    "completion": CompletionBody,
    "chat": ChatBody,
    "tokenize": TokenizeBody,
    "detokenize": DetokenizeBody,
    "reset": ResetBody,
}
NO_OBJECT = "the body must be a JSON object, sent with Content-Type: application/json"
_DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default
# assumed maximum tokens of a generation prompt with an empty thought, if the client applied the chat template itself
_GENERATION_PROMPT_TOKENS = 8
_MAX_REASONS = 3  # maximum reasons in the message of a refused body
_MAX_NAME = 64  # maximum characters of a client's field name in a message
_REASONS = {"extra_forbidden": "this route does not support this field", "missing": "the field is required"}
_TYPICAL_CHARS = 8  # characters per token; only texts that repeat a few long tokens have more on average
_PIECE_CHARS = 1 << 16


@dataclass(frozen=True)
class Prompt:
    """A prompt. `tokens`: int64 [len]; `tokens` and `max_new_tokens` together do not exceed the model's context.
    `text`: text of the prompt, if answers begin with this text. `shared_len`: number of tokens at the beginning of this
    prompt with which the prompt of a next turn also begins, or fewer."""

    tokens: npt.NDArray[np.int64]
    max_new_tokens: int
    text: str = ""
    shared_len: int = 0


@dataclass(frozen=True)
class Prepared:
    """A checked body without the texts of its prompts, and the prompts as tokens."""

    body: AnyBody
    prompts: list[Prompt]


@dataclass(frozen=True)
class PromptLimits:
    """Limits of prompts. `max_len`: maximum number of tokens of a prompt and its answer together. `max_answers`:
    maximum number of answers that one body may request. Token ids are below `vocab_size`."""

    max_len: int
    max_answers: int
    vocab_size: int


class PromptEncoder:
    """Parses bodies and tokenizes their texts. Both may take long, so the event loop must not call these methods."""

    def __init__(self, tokenizer: Tokenizer, limits: PromptLimits) -> None:
        self._tokenizer = tokenizer
        self.limits = limits

    def prepare(self, kind: str, raw: bytes | bytearray) -> Prepared:
        """Parse a body and tokenize its prompts. `kind`: a key of `BODIES`. Raises `ApiError`."""
        try:
            body = BODIES[kind].model_validate_json(raw)
        except ValidationError as error:
            raise _refusal(error) from None
        return Prepared(body.without_texts(), self._prompts(body))

    def _prompts(self, body: AnyBody) -> list[Prompt]:
        if isinstance(body, TokenizeBody):
            return [Prompt(np.array(self._tokens(body.root), dtype=np.int64), 0)]
        if isinstance(body, ResetBody):
            return []
        if isinstance(body, DetokenizeBody):
            return [self._detokenized(body.tokens)]
        if (num := body.num_answers) > self.limits.max_answers:
            param = "prompt" if num > (body.n or 1) else "n"
            raise invalid(
                f"a request has at most {self.limits.max_answers} answers here, this one asks for {num}", param
            )
        return [self._of_chat(body)] if isinstance(body, ChatBody) else self._of_completion(body)

    def _of_completion(self, body: CompletionBody) -> list[Prompt]:
        if body.max_tokens == 0 and not body.echo:
            raise invalid("max_tokens: 0 leaves nothing to answer; give at least 1, or set echo to true", "max_tokens")
        max_new_tokens = _DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else max(1, body.max_tokens)
        prompts = []
        for given in body.prompts:
            ids = self._encoded(given, self._tokenizer.encode_prompt) if isinstance(given, str) else given
            prompt = self._checked(ids, max_new_tokens, "prompt")
            if body.echo:
                text = given if isinstance(given, str) else self._tokenizer.decode(given)
                prompt = dataclasses.replace(prompt, text=text)
            prompts.append(prompt)
        return prompts

    def _of_chat(self, body: ChatBody) -> Prompt:
        """Return the prompt of a chat. Without a maximum in the body, the answer may be as long as the context
        allows."""
        chat = self._chat(body.messages, body.chat_template_kwargs or {})
        rest = max(1, self.limits.max_len - len(chat.ids))
        prompt = self._checked(chat.ids, body.max_completion_tokens or body.max_tokens or rest, "messages")
        return dataclasses.replace(prompt, shared_len=min(prompt.shared_len, chat.history_len))

    def _chat(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> ChatTokens:
        given = [message.with_text() for message in messages]
        self._require_plausible_length("".join(message["content"] for message in given), "messages")
        try:
            return self._tokenizer.encode_chat(given, variables)
        except ConfigError as error:
            raise invalid(str(error), "messages") from error

    def _tokens(self, body: TokenizeTextBody | TokenizeChatBody) -> list[int]:
        if isinstance(body, TokenizeTextBody):
            encode = self._tokenizer.encode if body.add_special_tokens is False else self._tokenizer.encode_prompt
            return self._encoded(body.prompt, encode)
        variables = body.chat_template_kwargs or {}
        if body.add_generation_prompt is not None:
            variables = {**variables, "add_generation_prompt": body.add_generation_prompt}
        return self._chat(body.messages, variables).ids

    def _detokenized(self, tokens: Sequence[int]) -> Prompt:
        if max(tokens, default=0) >= self.limits.vocab_size:
            raise invalid(f"a token id is not below the size of the vocabulary, {self.limits.vocab_size}", "tokens")
        return Prompt(np.empty(0, dtype=np.int64), 0, self._tokenizer.decode(tokens))

    def _encoded(self, text: str, encode: Callable[[str], list[int]]) -> list[int]:
        self._require_plausible_length(text, "prompt")
        return encode(text)

    def _require_plausible_length(self, text: str, param: str) -> None:
        """Refuse a text that cannot fit in the context, without tokenizing it completely. A text is refused if it has
        too many characters even for the longest tokens, or if its first pieces have more than twice the tokens of the
        context."""
        max_len = self.limits.max_len
        is_too_long = len(text) > max_len * self._tokenizer.max_token_chars
        if not is_too_long and len(text) > max_len * _TYPICAL_CHARS:
            num_tokens = 0
            for start in range(0, len(text), _PIECE_CHARS):
                num_tokens += len(self._tokenizer.encode(text[start : start + _PIECE_CHARS]))
                if is_too_long := num_tokens > 2 * max_len:
                    break
        if is_too_long:
            raise invalid(
                f"this model's maximum context length is {max_len} tokens, and a text of {len(text)} characters has "
                "more; shorten it",
                param,
                "context_length_exceeded",
            )

    def _checked(self, ids: Sequence[int], max_new_tokens: int, param: str) -> Prompt:
        limits = self.limits
        if not ids:
            raise invalid("the prompt is empty; give at least one token", param)
        if max(ids) >= limits.vocab_size:
            raise invalid(f"a token id is not below the size of the vocabulary, {limits.vocab_size}", param)
        if len(ids) + max_new_tokens > limits.max_len:
            raise invalid(
                f"this model's maximum context length is {limits.max_len} tokens, but {len(ids) + max_new_tokens} were "
                f"requested ({len(ids)} of the prompt, {max_new_tokens} of the answer); shorten one of them",
                param,
                "context_length_exceeded",
            )
        tokens, shared_len = np.array(ids, dtype=np.int64), max(0, len(ids) - _GENERATION_PROMPT_TOKENS)
        return Prompt(tokens, max_new_tokens, shared_len=shared_len)


def _refusal(error: ValidationError) -> ApiError:
    """Return the error for an invalid body: the reasons by field, without the values of the fields."""
    reasons: dict[str, str] = {}
    for detail in error.errors(include_url=False, include_input=False):
        if detail["type"] == "json_invalid":
            return invalid(f"the body is not valid JSON: {detail['ctx']['error']}")
        location = [str(part)[:_MAX_NAME] for part in detail["loc"] if part not in SHAPES]
        reason = _REASONS.get(detail["type"], str(detail["msg"]))
        if not location:
            return invalid(reason if detail["type"] == "too_many_fields" else NO_OBJECT)
        reasons.setdefault(location[0], f"{'.'.join(location)}: {reason}")
    return invalid("; ".join([*reasons.values()][:_MAX_REASONS]), next(iter(reasons)))

"""The bodies of vLLM's routes `/tokenize`, `/detokenize` and `/reset_prefix_cache`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Discriminator, Field, RootModel, Tag
from pydantic_core import PydanticCustomError

from hicache.engine import MemoryTier
from hicache.serving.server.fields import Text
from hicache.serving.server.protocol import Body, Message


class TokenizeTextBody(Body):
    model: Text | None = None
    prompt: Text
    add_special_tokens: (
        Annotated[bool, Field(description="tokens before and after a complete prompt; true unless given")] | None
    ) = None
    return_token_strs: bool | None = None

    def without_texts(self) -> TokenizeTextBody:
        return self.model_copy(update={"prompt": ""})


class TokenizeChatBody(Body):
    model: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[Text, Any] | None = None
    return_token_strs: bool | None = None

    def without_texts(self) -> TokenizeChatBody:
        return self.model_copy(update={"messages": [Message(role="user", content="")], "chat_template_kwargs": None})


def _kind(value: object) -> str:
    has_messages = isinstance(value, dict) and value.get("messages") is not None
    return "as chat" if has_messages or isinstance(value, TokenizeChatBody) else "as text"


class TokenizeBody(
    RootModel[
        Annotated[
            Annotated[TokenizeTextBody, Tag("as text")] | Annotated[TokenizeChatBody, Tag("as chat")],
            Discriminator(_kind),
        ]
    ]
):
    """The body of `/tokenize`, as in vLLM: a text or messages."""

    @property
    def model(self) -> str | None:
        return self.root.model

    def without_texts(self) -> TokenizeBody:
        return TokenizeBody(self.root.without_texts())


class DetokenizeBody(Body):
    """The body of `/detokenize`, as in vLLM."""

    model: Text | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)]

    def without_texts(self) -> DetokenizeBody:
        return self.model_copy(update={"tokens": []})


def _of_memory(tier: object) -> object:
    if tier in ("disk", "remote"):
        raise PydanticCustomError(
            "not_of_memory",
            "a store may have other users, and remains after the server; send a new cache_salt, or remove the store",
        )
    return tier


class ResetBody(Body):
    """The body of `/reset_prefix_cache`; without a body, both tiers are reset."""

    model: Text | None = None
    tiers: Annotated[list[Annotated[MemoryTier, BeforeValidator(_of_memory)]], Field(fail_fast=True)] | None = None

    def without_texts(self) -> ResetBody:
        return self

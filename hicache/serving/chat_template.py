"""Converts a chat to a form that a checkpoint's chat template can read, so that the prompt contains every message.

Templates support different roles, and expect a content either as text or as a list of parts. If a template does not
support a role or form, jinja skips the message without an error. To detect this, each chat is first rendered with a
short marker in place of each content. The chat itself is then rendered in the first form in which the rendered text
contains all markers. If no form has all markers, a ConfigError refuses the chat.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hicache.errors import ConfigError

Messages = Sequence[Mapping[str, Any]]
# Each entry is (as_system, in_parts). `as_system`: replace the role "developer" of newer OpenAI clients by "system".
# `in_parts`: convert contents to lists of parts.
_FORMS = ((False, False), (True, False), (False, True), (True, True))


class RenderedChat(NamedTuple):
    """A rendered chat. `generation_prompt`: the end of `text`, which begins the answer; empty if unknown."""

    text: str
    generation_prompt: str


def rendered_chat(tokenizer: Any, messages: Messages, variables: Mapping[str, Any]) -> RenderedChat:
    """Render a chat by the chat template of a transformers tokenizer. `variables`: values of the template's variables.
    Raises ConfigError if the template refuses the chat or skips a message."""
    given = _readable(tokenizer, messages, variables)
    text, generation_prompt = _applied(tokenizer, given, variables), ""
    if variables.get("add_generation_prompt"):
        try:
            history = _applied(tokenizer, given, {**variables, "add_generation_prompt": False})
        except ConfigError:  # this template needs add_generation_prompt
            history = text
        generation_prompt = text.removeprefix(history) if text.startswith(history) else ""
    return RenderedChat(text, generation_prompt)


def in_form(messages: Messages, as_system: bool, in_parts: bool) -> list[dict[str, Any]]:
    """Return the chat in one of the forms of `_FORMS`."""
    return [
        {
            **message,
            "role": "system" if as_system and message["role"] == "developer" else message["role"],
            "content": [{"type": "text", "text": message["content"]}] if in_parts else message["content"],
        }
        for message in messages
    ]


def _readable(tokenizer: Any, messages: Messages, variables: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the chat in the first form in which the template renders all messages. Empty contents are not checked."""
    marked = [{**each, "content": f"the message {i}." if each["content"] else ""} for i, each in enumerate(messages)]
    problems: list[ConfigError] = []
    for form in _FORMS:
        try:
            text = _applied(tokenizer, in_form(marked, *form), variables)
        except ConfigError as error:
            problems.append(error)
            continue
        lost = {each["role"] for each in marked if each["content"] not in text}
        if not lost:
            return in_form(messages, *form)
        problems.append(
            ConfigError(
                f"the model's chat template leaves out messages of the role {' and '.join(sorted(lost))}; send them "
                "under a role that it reads"
            )
        )
    raise problems[0]


def _applied(tokenizer: Any, messages: Messages, variables: Mapping[str, Any]) -> str:
    try:
        return str(tokenizer.apply_chat_template([dict(m) for m in messages], tokenize=False, **variables))
    # the template comes from the checkpoint, and its variables from the client, so any error is possible
    except Exception as error:
        raise ConfigError(f"the model's chat template refuses the messages: {error}") from error

"""Chats in the form that a checkpoint's chat template reads, so that every message is in the prompt.

Templates know different roles, and read a content as a text or as a list of parts. jinja passes over a role or form
that a template does not know without an error, so a message would be missing from the prompt. Each chat is therefore
rendered first with a short marker in place of each content: in the first form in which all markers are in the text, the
chat itself is rendered. A chat without such a form is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hicache.errors import ConfigError

Messages = Sequence[Mapping[str, Any]]
# (as_system, in_parts): whether the role "developer" of OpenAI's newer clients becomes "system", and whether contents
# become lists of parts.
_FORMS = ((False, False), (True, False), (False, True), (True, True))


class RenderedChat(NamedTuple):
    """`generation_prompt`: the end of `text` with which the template begins an answer; empty if it is not known."""

    text: str
    generation_prompt: str


def rendered_chat(tokenizer: Any, messages: Messages, variables: Mapping[str, Any]) -> RenderedChat:
    """The text of a chat by the template of a transformers tokenizer. `variables`: of the template. Raises ConfigError
    if the template refuses the chat or leaves out a message."""
    given = _readable(tokenizer, messages, variables)
    text, generation_prompt = _applied(tokenizer, given, variables), ""
    if variables.get("add_generation_prompt"):
        try:
            history = _applied(tokenizer, given, {**variables, "add_generation_prompt": False})
        except ConfigError:  # of a template that renders no other chats than those to answer
            history = text
        generation_prompt = text.removeprefix(history) if text.startswith(history) else ""
    return RenderedChat(text, generation_prompt)


def in_form(messages: Messages, as_system: bool, in_parts: bool) -> list[dict[str, Any]]:
    """The same chat as a template may read it, see `_FORMS`."""
    return [
        {
            **message,
            "role": "system" if as_system and message["role"] == "developer" else message["role"],
            "content": [{"type": "text", "text": message["content"]}] if in_parts else message["content"],
        }
        for message in messages
    ]


def _readable(tokenizer: Any, messages: Messages, variables: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The chat in the first form in which the template reads all messages. An empty content cannot be lost."""
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
    except Exception as error:  # the template is the checkpoint's, and its variables are the client's
        raise ConfigError(f"the model's chat template refuses the messages: {error}") from error

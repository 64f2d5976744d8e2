"""The conversations of the demo: each fact can be looked up, and chats about a document share it."""

from __future__ import annotations

import pytest

from hicache.errors import ConfigError
from hicache.serving.document_chats import Conversation, chats_about_diaries, document_lengths
from hicache.serving.models import ByteTokenizer

BYTES = ByteTokenizer()

FACTS = [
    ("Clara Finch", "Albatross", "Norway"),
    ("pear", "fox", "Leeds"),
    ("Rosa Delgado", "violin", "Max and Molly"),
    ("Oscar Lund", "1612", "Paris"),
]


def texts(conversation: Conversation) -> list[str]:
    return [BYTES.decode(prompt) for prompt in conversation.prompts]


def test_diaries_have_their_facts_and_their_lengths() -> None:
    """A diary has complete days up to its length, three of them with a fact. Each turn asks another question until all
    were asked. Diaries are reproducible, and two diaries of one kind differ."""
    made = chats_about_diaries(5, 4, 6000, BYTES)
    assert made == chats_about_diaries(5, 4, 6000, BYTES)
    for conversation, num_tokens, facts in zip(made, document_lengths(5, 6000), [*FACTS, FACTS[0]], strict=True):
        document, *_ = texts(conversation)[0].partition("\n\nQuestion: ")
        assert num_tokens - 300 < len(document.encode()) <= num_tokens + len("user\n")
        days = document.splitlines()[3:]
        assert all(day.endswith(".") for day in days)
        assert [sum(fact in day for day in days) for fact in facts] == [1, 1, 1]
        assert len(set(conversation.questions)) == 3 and conversation.questions[3] == conversation.questions[0]
    assert texts(made[0])[0] != texts(made[4])[0] and made[4].questions == made[0].questions


def test_a_document_too_short_for_its_facts_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="--document-tokens"):
        chats_about_diaries(2, 3, 600, BYTES)

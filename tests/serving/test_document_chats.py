"""What the demo asks a model that can answer: each fact can be looked up, and chats about a document share it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hicache.errors import ConfigError
from hicache.serving.document_chats import chats_about_diaries, chats_about_files
from hicache.serving.models import ByteTokenizer
from hicache.serving.workload import DocumentShape, RecordedConversation

BYTES = ByteTokenizer()
SHAPE = DocumentShape(documents=5, turns=4, document_tokens=6000)

FACTS = [
    ("Clara Finch", "Albatross", "Norway"),
    ("pear", "fox", "Leeds"),
    ("Rosa Delgado", "violin", "Max and Molly"),
    ("Oscar Lund", "1612", "Paris"),
]


def texts(conversation: RecordedConversation) -> list[str]:
    return [BYTES.decode(prompt) for prompt in conversation.prompts]


def test_diaries_have_their_facts_and_their_lengths() -> None:
    """As many whole days as the length allows, three of them with a fact; each turn asks another question, until all
    were asked. The same diaries each time, and more of them than there are kinds differ."""
    made = chats_about_diaries(SHAPE, BYTES)
    assert made == chats_about_diaries(SHAPE, BYTES)
    for conversation, num_tokens, facts in zip(made, SHAPE.lengths(), [*FACTS, FACTS[0]], strict=True):
        document, *_ = texts(conversation)[0].partition("\n\nQuestion: ")
        assert num_tokens - 300 < len(document.encode()) <= num_tokens + len("user\n")
        days = document.splitlines()[3:]
        assert all(day.endswith(".") for day in days)
        assert [sum(fact in day for day in days) for fact in facts] == [1, 1, 1]
        assert len(set(conversation.questions)) == 3 and conversation.questions[3] == conversation.questions[0]
    assert texts(made[0])[0] != texts(made[4])[0] and made[4].questions == made[0].questions


def test_chats_share_the_document_and_nothing_else(tmp_path: Path) -> None:
    """Prompts of a conversation are chats of one message: the document, cut to its length, and one question."""
    (tmp_path / "long.txt").write_text("All work and no play. " * 100)
    (tmp_path / "short.txt").write_text("Nothing.")
    shape = DocumentShape(turns=2, document_tokens=500)
    for conversation in chats_about_files([str(tmp_path / "long.txt"), str(tmp_path / "short.txt")], shape, BYTES):
        (shared,) = conversation.branch_points
        first, second = conversation.prompts
        assert first[:shared] == second[:shared] and first[shared] != second[shared]
        assert all(text.startswith("user\n") and text.endswith("assistant\n") for text in texts(conversation))
        document, _, question = texts(conversation)[0].partition("\n\nQuestion: ")
        assert question.startswith(conversation.questions[0])
        assert document == "user\n" + (tmp_path / conversation.name).read_text()[:500]


def test_what_cannot_be_asked_about(tmp_path: Path) -> None:
    """A document too short for its facts, and an empty file, are named."""
    with pytest.raises(ConfigError, match="--document-tokens"):
        chats_about_diaries(DocumentShape(documents=2, document_tokens=600), BYTES)
    (tmp_path / "empty").write_text("")
    with pytest.raises(ConfigError, match="empty"):
        chats_about_files([str(tmp_path / "empty")], SHAPE, BYTES)

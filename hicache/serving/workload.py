"""The demo's workload: conversations about long documents, and the requests made from them.

A conversation yields one prompt per turn: its document, which all of them share, and one question.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hicache.console import read_text
from hicache.errors import ConfigError
from hicache.layout import ModelGeometry
from hicache.serving.models import LoadedModel, Tokenizer
from hicache.serving.request import Request

QUESTIONS = (
    "What is this document about?",
    "Which names does it define, and what is each one for?",
    "Which of its parts depend on one another?",
    "What happens when an input is wrong?",
    "Which part would you test first, and why?",
    "What changed your mind since the first question?",
)
_BYTES_PER_TOKEN = 6  # of a document's text, at most


@dataclass(frozen=True)
class Conversation:
    """`prompts`: tokens of each turn; all turns share [0, `shared`), the document. `questions`: what each asks,
    as texts, where the model can answer."""

    name: str
    prompts: tuple[tuple[int, ...], ...]
    shared: int
    questions: tuple[str, ...] = ()

    def distinct_tokens(self, max_new_tokens: int) -> int:
        """Tokens whose KV the whole conversation needs; a prefix shared by several turns counts once."""
        distinct = 0
        for turn, prompt in enumerate(self.prompts):
            shared = max((common_len(prompt, other) for other in self.prompts[:turn]), default=0)
            distinct += len(prompt) - shared + max_new_tokens
        return distinct


@dataclass(frozen=True)
class DocumentShape:
    """`documents` conversations of `turns` turns each over documents of at most `document_tokens` tokens."""

    documents: int = 6
    turns: int = 3
    document_tokens: int = 12288

    def __post_init__(self) -> None:
        for name, value in (("documents", self.documents), ("turns", self.turns)):
            if value < 1:
                raise ConfigError(f"--{name} {value}: must be at least 1")
        if self.document_tokens < 128:
            raise ConfigError(f"--document-tokens {self.document_tokens}: must be at least 128")

    def lengths(self) -> list[int]:
        """Tokens of each document: from a third of the maximum up to it, in equal ratios, short and long
        alternating."""
        steps = max(1, self.documents - 1)
        ascending = [round(self.document_tokens / 3 ** ((steps - i) / steps)) for i in range(self.documents)]
        middle = (len(ascending) + 1) // 2
        mixed = [0] * len(ascending)
        mixed[0::2], mixed[1::2] = ascending[:middle], ascending[middle:]
        return mixed


@dataclass(frozen=True)
class Workload:
    """The model, the conversations and the limits of one demo. `chunk_tokens`: prompt tokens per step."""

    loaded: LoadedModel
    geometry: ModelGeometry
    conversations: Sequence[Conversation]
    max_new_tokens: int
    chunk_tokens: int

    @property
    def max_len(self) -> int:
        """Tokens of the longest prompt with its answer."""
        return max(len(prompt) for one in self.conversations for prompt in one.prompts) + self.max_new_tokens

    @property
    def working_set(self) -> int:
        """Tokens whose KV all conversations together need."""
        return sum(conversation.distinct_tokens(self.max_new_tokens) for conversation in self.conversations)

    @property
    def num_turns(self) -> int:
        return sum(len(conversation.prompts) for conversation in self.conversations)

    def request(self, conversation: int, turn: int, namespace: str = "") -> Request:
        """The request of a turn; its id is made of both numbers and the name of the conversation."""
        about = self.conversations[conversation]
        return Request(
            request_id=f"{conversation + 1}.{turn + 1} {about.name}",
            tokens=np.array(about.prompts[turn], dtype=np.int64),
            max_new_tokens=self.max_new_tokens,
            namespace=namespace,
            eos_ids=self.loaded.eos_ids,
            branch_points=(about.shared,),
        )


def standard_library(shape: DocumentShape, tokenizer: Tokenizer) -> list[Conversation]:
    """Conversations over long modules of Python's standard library, always the same ones."""
    folder = Path(sysconfig.get_path("stdlib"))
    # _sysconfigdata describes the build and differs between machines.
    files = (file for file in folder.glob("*.py") if not file.name.startswith("_sysconfigdata"))
    sizes = sorted((file.stat().st_size, file) for file in files)
    questions = [
        tuple(tokenizer.encode(f"\n\nQuestion {turn + 1}: {QUESTIONS[turn % len(QUESTIONS)]}\nAnswer: "))
        for turn in range(shape.turns)
    ]
    conversations: list[Conversation] = []
    for num_tokens in shape.lengths():
        # The smallest module that certainly has enough tokens, else the largest one left.
        index = next((i for i, (size, _) in enumerate(sizes) if size >= num_tokens * _BYTES_PER_TOKEN), len(sizes) - 1)
        if index < 0:
            raise ConfigError(f"{folder} has too few modules for --documents {shape.documents}")
        _, file = sizes.pop(index)
        document = tuple(tokenizer.encode_prompt(read_text(file)[: num_tokens * _BYTES_PER_TOKEN])[:num_tokens])
        prompts = tuple(document + question for question in questions)
        conversations.append(Conversation(file.stem, prompts, len(document)))
    return conversations


def zigzag(documents: int, turns: int) -> list[tuple[int, int]]:
    """The order of turns, as (conversation, turn): each round has one turn of every conversation, in alternating order.

    A round starts with the conversation that the previous one ended with, so all tiers get hits. If all rounds had the
    same order, each page would be the least recently used one when it is needed again.
    """
    rounds = [range(documents) if turn % 2 == 0 else reversed(range(documents)) for turn in range(turns)]
    return [(conversation, turn) for turn, one_round in enumerate(rounds) for conversation in one_round]


def common_len(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens that both begin with."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))

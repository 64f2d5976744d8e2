"""The demo's workload: conversations over long documents, or recorded sessions, and the requests made from them.

A conversation yields one prompt per turn. The first prompt of a document is the document and a question; each later one
is the previous prompt, its answer and the next question. A recorded session yields the prompts as they were recorded.
"""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from hicache.config.settings import Text
from hicache.console import read_text
from hicache.errors import ConfigError
from hicache.layout import ModelGeometry
from hicache.serving.models import LoadedModel, Tokenizer
from hicache.serving.request import Request
from hicache.serving.sampling import SamplingParams

Tokens = npt.NDArray[np.int64]

QUESTIONS = (
    "What is this document about?",
    "Which names does it define, and what is each one for?",
    "Which of its parts depend on one another?",
    "What happens when an input is wrong?",
    "Which part would you test first, and why?",
    "What changed your mind since the first question?",
)
_BYTES_PER_TOKEN = 6  # of a document's text, at most


class Conversation(Protocol):
    """One conversation with turns [0, num_turns).

    `branch_points`: positions after which prompts of different turns, or of other conversations, may differ.
    """

    @property
    def name(self) -> str: ...

    @property
    def num_turns(self) -> int: ...

    @property
    def branch_points(self) -> tuple[int, ...]: ...

    def prompt(self, turn: int, previous: Sequence[int], answer: Sequence[int]) -> Tokens:
        """int64, of a turn; `previous` and `answer`: prompt and answer of the turn before, empty at turn 0."""
        ...

    def turn_lengths(self, max_new_tokens: int) -> list[int]:
        """Tokens of prompt and answer of each turn, if every answer has its maximum length."""
        ...

    def distinct_tokens(self, max_new_tokens: int) -> int:
        """Tokens whose KV the whole conversation needs; a prefix shared by several turns counts once."""
        ...


@dataclass(frozen=True)
class DocumentConversation:
    """Questions about one document. `document`: its tokens; `questions`: the tokens of each turn's question."""

    name: str
    document: tuple[int, ...]
    questions: tuple[tuple[int, ...], ...]

    @property
    def num_turns(self) -> int:
        return len(self.questions)

    @property
    def branch_points(self) -> tuple[int, ...]:
        return (len(self.document),)

    def prompt(self, turn: int, previous: Sequence[int], answer: Sequence[int]) -> Tokens:
        return np.array([*(previous if turn else self.document), *answer, *self.questions[turn]], dtype=np.int64)

    def turn_lengths(self, max_new_tokens: int) -> list[int]:
        lengths = np.cumsum([len(question) + max_new_tokens for question in self.questions]) + len(self.document)
        return [int(length) for length in lengths]

    def distinct_tokens(self, max_new_tokens: int) -> int:
        return self.turn_lengths(max_new_tokens)[-1]


@dataclass(frozen=True)
class RecordedConversation:
    """Prompts that do not depend on answers. `questions`: what each asks, where that is known."""

    name: str
    prompts: tuple[tuple[int, ...], ...]
    branch_points: tuple[int, ...] = ()
    questions: tuple[str, ...] = ()

    @property
    def num_turns(self) -> int:
        return len(self.prompts)

    def prompt(self, turn: int, previous: Sequence[int], answer: Sequence[int]) -> Tokens:
        return np.array(self.prompts[turn], dtype=np.int64)

    def turn_lengths(self, max_new_tokens: int) -> list[int]:
        return [len(prompt) + max_new_tokens for prompt in self.prompts]

    def distinct_tokens(self, max_new_tokens: int) -> int:
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
    concurrency: int
    chunk_tokens: int
    sampling_params: SamplingParams

    @property
    def max_len(self) -> int:
        """Tokens of the longest prompt with its answer."""
        return max(max(conversation.turn_lengths(self.max_new_tokens)) for conversation in self.conversations)

    @property
    def working_set(self) -> int:
        """Tokens whose KV all conversations together need."""
        return sum(conversation.distinct_tokens(self.max_new_tokens) for conversation in self.conversations)

    @property
    def num_turns(self) -> int:
        return sum(conversation.num_turns for conversation in self.conversations)

    def request(self, conversation: int, turn: int, prompt: Tokens, namespace: str = "") -> Request:
        """The request of a turn; its id is made of both numbers and the name of the conversation."""
        return Request(
            request_id=f"{conversation + 1}.{turn + 1} {self.conversations[conversation].name}",
            tokens=prompt,
            max_new_tokens=self.max_new_tokens,
            sampling_params=self.sampling_params,
            namespace=namespace,
            eos_ids=self.loaded.eos_ids,
            branch_points=self.conversations[conversation].branch_points,
        )


def standard_library(shape: DocumentShape, tokenizer: Tokenizer) -> list[DocumentConversation]:
    """Conversations over long modules of Python's standard library, always the same ones."""
    folder = Path(sysconfig.get_path("stdlib"))
    # _sysconfigdata describes the build and differs between machines.
    files = (file for file in folder.glob("*.py") if not file.name.startswith("_sysconfigdata"))
    sizes = sorted((file.stat().st_size, file) for file in files)
    conversations: list[DocumentConversation] = []
    for num_tokens in shape.lengths():
        # The smallest module that certainly has enough tokens, else the largest one left.
        index = next((i for i, (size, _) in enumerate(sizes) if size >= num_tokens * _BYTES_PER_TOKEN), len(sizes) - 1)
        if index < 0:
            raise ConfigError(f"{folder} has too few modules for --documents {shape.documents}; give --input FILE...")
        _, file = sizes.pop(index)
        conversations.append(_document(file.stem, read_text(file), num_tokens, shape.turns, tokenizer))
    return conversations


def own_documents(paths: Sequence[str], shape: DocumentShape, tokenizer: Tokenizer) -> list[DocumentConversation]:
    """One conversation per file, each cut to `document_tokens`. Raises ConfigError for an unreadable or empty file."""
    return [
        _document(Path(path).name, read_text(Path(path)), shape.document_tokens, shape.turns, tokenizer)
        for path in paths
    ]


def recorded_session(
    path: str, turns: int | None, max_prompt_tokens: int, tokenizer: Tokenizer
) -> tuple[RecordedConversation, int]:
    """A session of JSON lines with the whole prompt of a turn as `input`, and the number of turns that were skipped.

    Skipped are turns after the first `turns`, empty prompts and prompts of more than `max_prompt_tokens`. Raises
    ConfigError with the line number.
    """
    prompts: list[tuple[int, ...]] = []
    skipped = 0
    for number, line in enumerate(read_text(Path(path)).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["input"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ConfigError(f'{path}:{number}: need a JSON object with the prompt as "input"') from None
        text = Text("the prompt").take(text, f'{path}:{number}: "input"')
        tokens = tuple(tokenizer.encode_prompt(text)) if text else ()
        if 0 < len(tokens) <= max_prompt_tokens and (turns is None or len(prompts) < turns):
            prompts.append(tokens)
        else:
            skipped += 1
    if not prompts:
        raise ConfigError(
            f"{path}: no turn with a prompt of 1 to {max_prompt_tokens} tokens; raise --max-prompt-tokens"
        )
    return RecordedConversation(Path(path).stem, tuple(prompts)), skipped


def zigzag(num_turns: Sequence[int]) -> list[tuple[int, int]]:
    """The order of turns, as (conversation, turn): each round has one turn of every conversation, in alternating order.

    A round starts with the conversation that the previous one ended with, so all tiers get hits. If all rounds had the
    same order, each page would be the least recently used one when it is needed again.
    """
    order: list[tuple[int, int]] = []
    for turn in range(max(num_turns)):
        one_round = [(conversation, turn) for conversation, turns in enumerate(num_turns) if turn < turns]
        order.extend(reversed(one_round) if turn % 2 else one_round)
    return order


def _document(name: str, text: str, num_tokens: int, turns: int, tokenizer: Tokenizer) -> DocumentConversation:
    if not text.strip():
        raise ConfigError(f"{name} is empty; give a document with text")
    document = tuple(tokenizer.encode_prompt(text[: num_tokens * _BYTES_PER_TOKEN])[:num_tokens])
    if not document:
        raise ConfigError(f"{name}: the tokenizer returns no tokens for it; give another document or model")
    questions = [f"\n\nQuestion {i + 1}: {QUESTIONS[i % len(QUESTIONS)]}\nAnswer: " for i in range(turns)]
    return DocumentConversation(name, document, tuple(tuple(tokenizer.encode(question)) for question in questions))


def common_len(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens that both begin with."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))

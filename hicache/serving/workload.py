"""What the demo asks: conversations over long documents, or sessions recorded elsewhere.

A conversation gives one prompt a turn. A document's first prompt is the document and a question; each later one is the
previous prompt, the answer to it and the next question. A recorded session gives the prompts it was recorded with.

May import numpy, config, settings and errors.
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

from hicache.errors import ConfigError
from hicache.serving.models import Tokenizer
from hicache.settings import Text

Tokens = npt.NDArray[np.int64]

_QUESTIONS = (
    "What is this document about?",
    "Which names does it define, and what is each one for?",
    "Which of its parts depend on one another?",
    "What happens when an input is wrong?",
    "Which part would you test first, and why?",
    "What changed your mind since the first question?",
)
# A document of n tokens takes up to this many bytes of text.
_BYTES_PER_TOKEN = 6


class Conversation(Protocol):
    """Turns of one conversation, [0, num_turns)."""

    @property
    def name(self) -> str: ...

    @property
    def num_turns(self) -> int: ...

    def prompt(self, turn: int, before: Sequence[int], answer: Sequence[int]) -> Tokens:
        """The prompt of a turn; `before` and `answer`: prompt and answer of the turn before, both empty at turn 0."""
        ...

    def most_tokens(self, max_new_tokens: int) -> list[int]:
        """Prompt and answer of each turn, in tokens, when every answer has its full length."""
        ...

    def distinct_tokens(self, max_new_tokens: int) -> int:
        """Tokens whose KV the whole conversation needs, each shared prefix counted once."""
        ...


@dataclass(frozen=True)
class DocumentTalk:
    """Questions about one document. `opening`: its tokens; `questions`: those of each turn."""

    name: str
    opening: tuple[int, ...]
    questions: tuple[tuple[int, ...], ...]

    @property
    def num_turns(self) -> int:
        return len(self.questions)

    def prompt(self, turn: int, before: Sequence[int], answer: Sequence[int]) -> Tokens:
        return np.array([*(before if turn else self.opening), *answer, *self.questions[turn]], dtype=np.int64)

    def most_tokens(self, max_new_tokens: int) -> list[int]:
        grown = np.cumsum([len(question) + max_new_tokens for question in self.questions]) + len(self.opening)
        return [int(tokens) for tokens in grown]

    def distinct_tokens(self, max_new_tokens: int) -> int:
        return self.most_tokens(max_new_tokens)[-1]


@dataclass(frozen=True)
class RecordedTalk:
    """The prompts of a recorded session, as they were."""

    name: str
    prompts: tuple[tuple[int, ...], ...]

    @property
    def num_turns(self) -> int:
        return len(self.prompts)

    def prompt(self, turn: int, before: Sequence[int], answer: Sequence[int]) -> Tokens:
        return np.array(self.prompts[turn], dtype=np.int64)

    def most_tokens(self, max_new_tokens: int) -> list[int]:
        return [len(prompt) + max_new_tokens for prompt in self.prompts]

    def distinct_tokens(self, max_new_tokens: int) -> int:
        distinct = 0
        for turn, prompt in enumerate(self.prompts):
            shared = max((_common_len(prompt, other) for other in self.prompts[:turn]), default=0)
            distinct += len(prompt) - shared + max_new_tokens
        return distinct


@dataclass(frozen=True)
class Shape:
    """`turns` of each conversation; `documents` of the standard library, the longest of `document_tokens` tokens."""

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
        """Tokens of each document: from a third of the longest up to it, in equal ratios, long and short mixed."""
        steps = max(1, self.documents - 1)
        rising = [round(self.document_tokens / 3 ** ((steps - i) / steps)) for i in range(self.documents)]
        middle = (len(rising) + 1) // 2
        mixed = [0] * len(rising)
        mixed[0::2], mixed[1::2] = rising[:middle], rising[middle:]
        return mixed


def standard_library(shape: Shape, tokenizer: Tokenizer, bos: Sequence[int] = ()) -> list[DocumentTalk]:
    """Long modules of this Python's standard library, the same ones each time."""
    folder = Path(sysconfig.get_path("stdlib"))
    # Without what describes the build: it differs between machines.
    files = (file for file in folder.glob("*.py") if not file.name.startswith("_sysconfigdata"))
    sizes = sorted((file.stat().st_size, file) for file in files)
    talks: list[DocumentTalk] = []
    for num_tokens in shape.lengths():
        # The smallest module that surely gives enough tokens, else the largest that is left.
        at = next((i for i, (size, _) in enumerate(sizes) if size >= num_tokens * _BYTES_PER_TOKEN), len(sizes) - 1)
        if at < 0:
            raise ConfigError(f"{folder} has too few modules for --documents {shape.documents}; give --input FILE...")
        _, file = sizes.pop(at)
        talks.append(_document(file.stem, _read(file), num_tokens, shape.turns, tokenizer, bos))
    return talks


def own_documents(
    paths: Sequence[str], shape: Shape, tokenizer: Tokenizer, bos: Sequence[int] = ()
) -> list[DocumentTalk]:
    """One conversation a file, cut to `document_tokens`. Raises ConfigError for a file that is unreadable or empty."""
    return [
        _document(Path(path).name, _read(Path(path)), shape.document_tokens, shape.turns, tokenizer, bos)
        for path in paths
    ]


def recorded_session(
    path: str, turns: int | None, max_prompt_tokens: int, tokenizer: Tokenizer, bos: Sequence[int] = ()
) -> tuple[RecordedTalk, int]:
    """A session of JSON lines with the whole prompt of a turn as `input`, and how many of its turns were left out.

    Left out are turns behind the first `turns`, empty prompts and those above `max_prompt_tokens`. Raises ConfigError
    with the line number.
    """
    prompts: list[tuple[int, ...]] = []
    skipped = 0
    for number, line in enumerate(_read(Path(path)).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["input"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ConfigError(f'{path}:{number}: need a JSON object with the prompt as "input"') from None
        text = Text("the prompt").take(text, f'{path}:{number}: "input"')
        tokens = (*bos, *tokenizer.encode(text)) if text else ()
        if 0 < len(tokens) <= max_prompt_tokens and (turns is None or len(prompts) < turns):
            prompts.append(tokens)
        else:
            skipped += 1
    if not prompts:
        raise ConfigError(
            f"{path}: no turn with a prompt of 1 to {max_prompt_tokens} tokens; raise --max-prompt-tokens"
        )
    return RecordedTalk(Path(path).stem, tuple(prompts)), skipped


def zigzag(num_turns: Sequence[int]) -> list[tuple[int, int]]:
    """The order of turns, as (conversation, turn): every conversation once a round, rounds forth and back.

    What was asked about last is asked about first in the next round, so that every tier has its share: in one direction
    only, each page would be the oldest at the moment it is wanted.
    """
    order: list[tuple[int, int]] = []
    for turn in range(max(num_turns)):
        one_round = [(talk, turn) for talk, turns in enumerate(num_turns) if turn < turns]
        order.extend(reversed(one_round) if turn % 2 else one_round)
    return order


def _document(
    name: str, text: str, num_tokens: int, turns: int, tokenizer: Tokenizer, bos: Sequence[int]
) -> DocumentTalk:
    if not text.strip():
        raise ConfigError(f"{name} is empty; give a document with text")
    opening = (*bos, *tokenizer.encode(text[: num_tokens * _BYTES_PER_TOKEN]))[:num_tokens]
    if not opening:
        raise ConfigError(f"{name}: the tokenizer finds no token in it; give another document or model")
    asked = [f"\n\nQuestion {i + 1}: {_QUESTIONS[i % len(_QUESTIONS)]}\nAnswer: " for i in range(turns)]
    return DocumentTalk(name, opening, tuple(tuple(tokenizer.encode(question)) for question in asked))


def _common_len(one: Sequence[int], other: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read {path}: not UTF-8 text ({error.reason} at byte {error.start})") from error

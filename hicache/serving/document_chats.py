"""The conversations of the demo: chats about generated documents.

A document is a diary whose days are similar, except for three days with one fact each. A small model finds such a fact,
but would not find one fact among many similar facts.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hicache.errors import ConfigError
from hicache.serving.models import Tokenizer

_MONTHS = ("January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November")
_MONTH_DAYS = 28
_SENTENCES = 3  # sentences of each day
_WORDS = {
    "side": ("north", "south", "east", "west"),
    "sea": ("calm", "rough", "grey", "smooth", "high"),
    "air": ("cold", "mild", "warm", "cool", "dry"),
    "sky": ("low", "grey", "white", "heavy", "thin"),
    "number": ("Two", "Three", "Four", "Five", "Six", "Seven", "Eight", "Nine"),
    "hour": ("seven", "eight", "nine", "ten", "eleven"),
}


class _Fact(NamedTuple):
    text: str
    question: str


class _Diary(NamedTuple):
    """A kind of diary. `days`: sentences of which three form the text of a day."""

    title: str
    days: tuple[str, ...]
    facts: tuple[_Fact, ...]


_DIARIES = (
    _Diary(
        "Logbook of the lighthouse at Cape Morrow",
        (
            "The wind came from the {side}, and the sea was {sea}.",
            "{number} fishing boats passed before noon.",
            "The lamp burned all night without a fault.",
            "Fog lay over the bay until {hour} o'clock.",
            "The air was {air}, and the clouds were {sky}.",
            "The stairs were swept and the windows were cleaned.",
        ),
        (
            _Fact(
                "The new keeper of the lighthouse arrived today. Her name is Clara Finch, and she brought a grey cat.",
                "What is the name of the new keeper of the lighthouse?",
            ),
            _Fact(
                "The ship Albatross ran onto the rocks. All of her sailors were saved.",
                "What is the name of the ship that ran onto the rocks?",
            ),
            _Fact(
                "The old red lamp broke in the storm. It was replaced by a green lamp from Norway.",
                "Where does the green lamp come from?",
            ),
        ),
    ),
    _Diary(
        "Diary of the garden of Ashby House",
        (
            "The beds along the {side} wall were watered in the morning.",
            "{number} baskets of weeds were carried away.",
            "The grass was cut, and the paths were raked.",
            "Rain fell until {hour} o'clock.",
            "The air was {air}, and the clouds were {sky}.",
            "The roses were tied to their frames.",
        ),
        (
            _Fact(
                "The gardener planted a pear tree in memory of his teacher, Jonas Weir.",
                "Which tree did the gardener plant?",
            ),
            _Fact(
                "A fox stole three hens in the night, so the fence was made higher.",
                "Which animal stole the hens?",
            ),
            _Fact(
                "The summer party will be on the ninth of August, and a band from Leeds will play.",
                "Where does the band come from?",
            ),
        ),
    ),
    _Diary(
        "Journal of the railway station of Lowfield",
        (
            "{number} trains stopped before noon.",
            "The express from the {side} was on time.",
            "The platform was swept and the lamps were cleaned.",
            "The waiting room was heated until {hour} o'clock.",
            "The air was {air}, and the clouds were {sky}.",
            "Milk and letters were loaded for the city.",
        ),
        (
            _Fact(
                "The mayor opened the new bridge over the line. It was designed by Rosa Delgado.",
                "Who designed the new bridge?",
            ),
            _Fact(
                "A traveller left a violin in the waiting room. It is kept in the office.",
                "What did the traveller leave in the waiting room?",
            ),
            _Fact(
                "A circus arrived by train with two elephants called Max and Molly.",
                "What are the elephants called?",
            ),
        ),
    ),
    _Diary(
        "Notes of the harbour library of Portwick",
        (
            "{number} books were lent before noon.",
            "The shelves along the {side} wall were dusted.",
            "The reading room was open until {hour} o'clock.",
            "The air was {air}, and the clouds were {sky}.",
            "The newspapers were bound and put away.",
            "A box of old maps was sorted.",
        ),
        (
            _Fact(
                "A sailor named Oscar Lund gave the library his collection of sea shells.",
                "Who gave the library the sea shells?",
            ),
            _Fact(
                "The oldest book of the library is an atlas from the year 1612.",
                "From which year is the oldest book of the library?",
            ),
            _Fact(
                "The librarian found a letter from Paris between the pages of a novel.",
                "Where did the letter come from?",
            ),
        ),
    ),
)


@dataclass(frozen=True)
class Conversation:
    """A conversation. `prompts`: tokens of the prompt of each turn; all prompts begin with the `shared` tokens of the
    document. `questions`: one question for each turn."""

    name: str
    prompts: tuple[tuple[int, ...], ...]
    shared: int
    questions: tuple[str, ...]

    def distinct_tokens(self, max_new_tokens: int) -> int:
        """Return the number of tokens whose KV the complete conversation needs. A prefix shared by several turns counts
        once."""
        distinct = 0
        for turn, prompt in enumerate(self.prompts):
            shared = max((_common_len(prompt, other) for other in self.prompts[:turn]), default=0)
            distinct += len(prompt) - shared + max_new_tokens
        return distinct


def chats_about_diaries(documents: int, turns: int, document_tokens: int, tokenizer: Tokenizer) -> list[Conversation]:
    """Create conversations about diaries of at most `document_tokens`. The conversations are the same in each run.
    Turns repeat a question only after all questions of the diary were asked.

    Raises ConfigError if a diary is too short for its facts, or if the model has no chat template.
    """
    made = []
    for number, num_tokens in enumerate(document_lengths(documents, document_tokens)):
        volume, at = divmod(number, len(_DIARIES))
        diary = _DIARIES[at]
        title = f"{diary.title}, volume {volume + 1}" if volume else diary.title
        text = _text_of(title, diary, number, num_tokens, tokenizer)
        questions = [diary.facts[turn % len(diary.facts)].question for turn in range(turns)]
        made.append(_chats(title, text, questions, tokenizer))
    return made


def document_lengths(documents: int, maximum: int) -> list[int]:
    """Return the number of tokens of each document. The numbers form a geometric sequence from a third of `maximum` to
    `maximum`, with short and long documents alternating."""
    steps = max(1, documents - 1)
    ascending = [round(maximum / 3 ** ((steps - i) / steps)) for i in range(documents)]
    middle = (documents + 1) // 2
    mixed = [0] * documents
    mixed[0::2], mixed[1::2] = ascending[:middle], ascending[middle:]
    return mixed


def _chats(name: str, text: str, questions: Sequence[str], tokenizer: Tokenizer) -> Conversation:
    """Return a conversation in which each question about the text is a separate chat."""
    prompts = [
        tuple(tokenizer.encode_chat([{"role": "user", "content": f"{text}\n\nQuestion: {question}"}]).ids)
        for question in questions
    ]
    shared = min((_common_len(prompts[0], prompt) for prompt in prompts[1:]), default=len(prompts[0]))
    return Conversation(name, tuple(prompts), shared, tuple(questions))


def _text_of(title: str, diary: _Diary, number: int, num_tokens: int, tokenizer: Tokenizer) -> str:
    """Return a title and the complete days that fit into `num_tokens`. Some days, at equal distances, are replaced by
    facts."""
    days, free_tokens = [], num_tokens - len(tokenizer.encode(title))
    for day in _days(diary, number):
        free_tokens -= len(tokenizer.encode(f"{day}\n"))
        if free_tokens < 0:
            break
        days.append(day)
    if len(days) < len(diary.facts):
        raise ConfigError(f"a document of {num_tokens} tokens is too short for its facts; raise --document-tokens")
    for i, fact in enumerate(diary.facts):
        day_index = (2 * i + 1) * len(days) // (2 * len(diary.facts))
        days[day_index] = f"{_date(day_index)}. {fact.text}"
    return "\n".join([title, "", *days])


def _days(diary: _Diary, number: int) -> Iterator[str]:
    """Yield the days of a diary, without end."""
    chosen = random.Random(number)
    for day in itertools.count():
        words = {name: chosen.choice(words) for name, words in _WORDS.items()}
        yield f"{_date(day)}. {' '.join(chosen.sample(diary.days, _SENTENCES)).format(**words)}"


def _date(day: int) -> str:
    year, of_year = divmod(day, _MONTH_DAYS * len(_MONTHS))
    date = f"{_MONTHS[of_year // _MONTH_DAYS]} {of_year % _MONTH_DAYS + 1}"
    return f"{date} of year {year + 1}" if year else date


def _common_len(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common prefix of two token sequences."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))

"""What the demo asks a model that can answer: chats about documents that are made here.

A document is a diary whose days are alike, but for three days that have a fact each. A small model finds such a fact;
among many alike it would not.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from hicache.errors import ConfigError
from hicache.serving.models import Tokenizer
from hicache.serving.workload import Conversation, DocumentShape, common_len

_MONTHS = ("January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November")
_MONTH_DAYS = 28
_SENTENCES = 3  # of a day
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
    """`days`: sentences that a day may have."""

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


def chats_about_diaries(shape: DocumentShape, tokenizer: Tokenizer) -> list[Conversation]:
    """Conversations about diaries, always the same ones, each turn with a question of its own.

    A document has at most eleven months. Raises ConfigError where it has no place for its facts.
    """
    made = []
    for number, num_tokens in enumerate(shape.lengths()):
        volume, at = divmod(number, len(_DIARIES))
        diary = _DIARIES[at]
        title = f"{diary.title}, volume {volume + 1}" if volume else diary.title
        text = _text_of(title, diary, number, num_tokens, tokenizer)
        questions = [diary.facts[turn % len(diary.facts)].question for turn in range(shape.turns)]
        made.append(_chats(title, text, questions, tokenizer))
    return made


def _chats(name: str, text: str, questions: Sequence[str], tokenizer: Tokenizer) -> Conversation:
    """Each question about the text in a chat of its own."""
    prompts = [
        tuple(tokenizer.encode_chat([{"role": "user", "content": f"{text}\n\nQuestion: {question}"}]).ids)
        for question in questions
    ]
    shared = min((common_len(prompts[0], prompt) for prompt in prompts[1:]), default=len(prompts[0]))
    return Conversation(name, tuple(prompts), shared, tuple(questions))


def _text_of(title: str, diary: _Diary, number: int, num_tokens: int, tokenizer: Tokenizer) -> str:
    """As many whole days of eleven months as have `num_tokens`; the facts take the place of some, spread evenly."""
    days = list(_days(diary, number))
    ends = accumulate((len(tokenizer.encode(f"{day}\n")) for day in days), initial=len(tokenizer.encode(title)))
    num_days = sum(end <= num_tokens for end in ends) - 1
    if num_days < len(diary.facts):
        raise ConfigError(f"a document of {num_tokens} tokens has no place for its facts; raise --document-tokens")
    for i, fact in enumerate(diary.facts):
        day = (2 * i + 1) * num_days // (2 * len(diary.facts))
        days[day] = f"{_date(day)}. {fact.text}"
    return "\n".join([title, "", *days[:num_days]])


def _days(diary: _Diary, number: int) -> Iterator[str]:
    chosen = random.Random(number)
    for day in range(_MONTH_DAYS * len(_MONTHS)):
        words = {name: chosen.choice(words) for name, words in _WORDS.items()}
        yield f"{_date(day)}. {' '.join(chosen.sample(diary.days, _SENTENCES)).format(**words)}"


def _date(day: int) -> str:
    return f"{_MONTHS[day // _MONTH_DAYS]} {day % _MONTH_DAYS + 1}"

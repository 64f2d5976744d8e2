"""The workload `documents` as data: the prompts, and the answers of a server.

A program (`hicache.bench.servers.vllm`) serves workloads in its own process and writes a `Served`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

ENDING_TOKENS = 3
_MOST_DEVICE_TOKENS = 196_608  # 24 GiB with 8B geometry


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Prompts of one workload, sent one after the other: documents of random tokens, each followed by an ending."""

    name: str
    documents: int
    tokens: int  # tokens of a document
    first_document: int = 0  # number of the first document; equal numbers are equal documents in all workloads
    repeats: int = 1  # how often each prompt is sent in a row
    forget: bool = False  # empty the device's own prefix cache first

    def requests(self) -> Iterator[int]:
        """The document of each request."""
        for document in range(self.first_document, self.first_document + self.documents):
            yield from [document] * self.repeats

    def prompt(self, document: int) -> list[int]:
        """Token ids of a prompt, which every vocabulary has."""
        text = random.Random(document).choices(range(10, 250), k=self.tokens)
        return text + random.Random(1).choices(range(10, 250), k=ENDING_TOKENS)


@dataclass(frozen=True)
class Answer:
    document: int
    cached: int  # tokens of the prompt that were not computed, by the server's count
    first_s: float  # time to the first token
    total_s: float  # time to the last token
    tokens: list[int]


@dataclass(frozen=True)
class Served:
    """The outcome of one process of a server: the answers by workload, in order."""

    answers: dict[str, list[Answer]]
    num_bytes: dict[str, int]  # bytes moved, by the server's own metrics
    start_s: float
    version: str

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Served:
        answers = {name: [Answer(**answer) for answer in some] for name, some in values["answers"].items()}
        return cls(**{**values, "answers": answers})

    def first(self, workload: str) -> list[Answer]:
        """The first answer to each prompt."""
        found: dict[int, Answer] = {}
        for answer in self.answers[workload]:
            found.setdefault(answer.document, answer)
        return list(found.values())

    def cached(self, workload: str) -> float:
        """Mean number of cached tokens of a prompt that is sent for the first time, by the server's count."""
        answers = self.first(workload)
        return sum(answer.cached for answer in answers) / len(answers)

    def first_ms(self, workload: str) -> list[float]:
        """Milliseconds to the first token of prompts that are sent for the first time."""
        return [answer.first_s * 1e3 for answer in self.first(workload)]

    def total_ms(self, workload: str) -> list[float]:
        """Milliseconds to the last token of prompts that are sent for the first time."""
        return [answer.total_s * 1e3 for answer in self.first(workload)]


def workloads(small: bool, tokens: int = 0) -> dict[str, Workload]:
    """All workloads by name. `small`: for a tiny model on two cores. `tokens` of a document; 0: the default. There are
    fewer documents if they are long."""
    usual, few = (1024, 3) if small else (16384, 6)
    few, tokens = (few if tokens <= 4 * usual else 3), tokens or usual
    every = (
        Workload(name="warm", documents=2, first_document=1000, repeats=2, tokens=min(tokens, usual)),
        Workload(name="first", documents=few, repeats=2, tokens=tokens),
        Workload(name="one_more", documents=1, first_document=few, tokens=tokens),
        Workload(name="host", documents=few, forget=True, tokens=tokens),
    )
    return {workload.name: workload for workload in every}


def device_tokens(tokens: int) -> int:
    """Size of the device's cache in tokens: four documents, limited to the memory of a GPU with an 8B model."""
    return max(min(4 * tokens, _MOST_DEVICE_TOKENS), tokens + 4096)


def compare_tokens(runs: Mapping[str, Served]) -> tuple[int, int]:
    """Compare answers to the same prompt with the same number of cached tokens, of different runs or repeats; raises
    AssertionError if they differ. Returns the number of comparisons, and the number of different answers: if all
    answers were equal, the comparison would show nothing.

    Other answers are not compared: for another number of tokens a GPU adds in another order, which changes the last
    bits and so, sometimes, a token.
    """
    known: dict[tuple[int, int], tuple[str, list[int]]] = {}
    compared = 0
    for name, served in runs.items():
        for answer in (answer for answers in served.answers.values() for answer in answers):
            key = (answer.document, answer.cached)
            other, tokens = known.setdefault(key, (name, answer.tokens))
            if answer.tokens != tokens:
                raise AssertionError(
                    f"{name} answers document {key[0]} with other tokens than {other}: {key[1]} cached"
                )
            compared += answer.tokens is not tokens
    return compared, len({tuple(tokens) for _, tokens in known.values()})

"""The workload `documents` as data: the prompts, and the answers of a server.

A program (`hicache.bench.servers.vllm`) serves workloads in its own process and writes a `Served`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ENDING_TOKENS = 3
_MOST_DEVICE_TOKENS = 196_608  # 24 GiB with 8B geometry


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Prompts of one workload: documents of random tokens, each followed by an ending. Each round sends all prompts."""

    name: str
    documents: int
    tokens: int  # tokens of a document
    first_document: int = 0  # number of the first document; equal numbers are equal documents in all workloads
    rounds: int = 1
    repeats: int = 1  # how often each prompt is sent in a row
    endings: int = 1  # prompts of a document
    concurrency: int = 1  # requests sent concurrently; the next ones are sent when all are answered
    answer_tokens: int = 8
    forget: bool = False  # empty the device's own prefix cache first

    def batches(self) -> Iterator[list[tuple[int, int]]]:
        """(document, ending) of requests that are sent concurrently, for one round."""
        last = self.first_document + self.documents
        documents = [n for n in range(self.first_document, last) for _ in range(self.repeats)]
        requests = [(document, ending) for document in documents for ending in range(self.endings)]
        for begin in range(0, len(requests), self.concurrency):
            yield requests[begin : begin + self.concurrency]

    def prompt(self, document: int, ending: int) -> list[int]:
        """Token ids of a prompt, which every vocabulary has."""
        text = random.Random(document).choices(range(10, 250), k=self.tokens)
        return text + random.Random(1 + ending).choices(range(10, 250), k=ENDING_TOKENS)


@dataclass(frozen=True)
class Answer:
    round: int
    document: int
    ending: int
    cached: int  # tokens of the prompt that were not computed, by the server's count
    first_s: float  # time to the first token
    total_s: float  # until all requests of its batch are answered
    tokens: list[int]


@dataclass(frozen=True)
class Served:
    """The outcome of one process of a server: the answers by workload, in order, and the seconds of each round."""

    answers: dict[str, list[Answer]]
    seconds: dict[str, list[float]]
    num_bytes: dict[str, int]  # bytes moved, by the server's own metrics
    start_s: float
    version: str

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Served:
        answers = {name: [Answer(**answer) for answer in some] for name, some in values["answers"].items()}
        return cls(**{**values, "answers": answers})

    def first(self, workload: str) -> list[Answer]:
        """The first answer to each prompt."""
        found: dict[tuple[int, int], Answer] = {}
        for answer in self.answers[workload]:
            found.setdefault((answer.document, answer.ending), answer)
        return list(found.values())

    def cached(self, workload: str) -> float:
        """Mean number of cached tokens of a prompt that is sent for the first time, by the server's count."""
        answers = self.first(workload)
        return sum(answer.cached for answer in answers) / len(answers)

    def first_ms(self, workload: str) -> list[float]:
        """Milliseconds to the first token of prompts that are sent for the first time."""
        return [answer.first_s * 1e3 for answer in self.first(workload)]

    def total_ms(self, workload: str) -> list[float]:
        """Milliseconds until all concurrent requests for a document are answered, for each document."""
        return [answer.total_s * 1e3 for answer in self.first(workload) if answer.ending == 0]

    def rates(self, workload: str) -> list[float]:
        """Output tokens per second, for each round."""
        num_tokens = sum(len(answer.tokens) for answer in self.answers[workload]) / len(self.seconds[workload])
        return [num_tokens / seconds for seconds in self.seconds[workload]]


def workloads(small: bool, tokens: int = 0) -> dict[str, Workload]:
    """All workloads by name. `small`: for a tiny model on two cores. `tokens` of a document; 0: the default. There are
    fewer documents if they are long."""
    usual, few, many, requests = (1024, 3, 6, 8) if small else (16384, 6, 12, 50)
    few, tokens = (few if tokens <= 4 * usual else 3), tokens or usual

    def workload(name: str, documents: int, first_document: int = 0, **about: Any) -> Workload:
        about = {"tokens": tokens, "first_document": first_document, **about}
        return Workload(name=name, documents=documents, **about)

    at_once = {"endings": requests, "concurrency": requests, "answer_tokens": 1, "forget": True}
    every = (
        workload("warm", 2, 1000, repeats=2, tokens=min(tokens, usual)),
        workload("first", few, repeats=2),
        workload("one_more", 1, few),
        workload("host", few, forget=True),
        workload("shared", 1, few, **at_once),
        workload("cold", many, 100, concurrency=many, answer_tokens=64),
        workload("throughput", many, 100, rounds=3, concurrency=many, answer_tokens=64),
    )
    return {workload.name: workload for workload in every}


def device_tokens(tokens: int) -> int:
    """Size of the device's cache in tokens: four documents, limited to the memory of a GPU with an 8B model."""
    return max(min(4 * tokens, _MOST_DEVICE_TOKENS), tokens + 4096)


def compare_tokens(runs: Mapping[str, Served], chosen: Sequence[Workload]) -> tuple[int, int]:
    """Compare answers to the same prompt with the same number of cached tokens, of different runs or repeats; raises
    AssertionError if they differ. Returns the number of comparisons, and the number of different answers: if all
    answers were equal, the comparison would show nothing.

    Other answers are not compared, nor requests that were sent concurrently: for another number of tokens a GPU adds
    in another order, which changes the last bits and so, sometimes, a token.
    """
    alone = [workload.name for workload in chosen if workload.concurrency == 1]
    known: dict[tuple[int, int, int], tuple[str, list[int]]] = {}
    compared = 0
    for name, served in runs.items():
        for answer in (answer for workload in alone for answer in served.answers.get(workload, ())):
            key = (answer.document, answer.ending, answer.cached)
            other, tokens = known.setdefault(key, (name, answer.tokens))
            if answer.tokens != tokens:
                raise AssertionError(
                    f"{name} answers document {key[0]} with other tokens than {other}: {key[2]} cached"
                )
            compared += answer.tokens is not tokens
    return compared, len({tuple(tokens) for _, tokens in known.values()})

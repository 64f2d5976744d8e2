"""The workload `documents` as data: the prompts, and the answers of a server.

A program (`hicache.bench.servers.vllm`) serves workloads in a process of its own and writes a `Served`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ENDING_TOKENS = 3
_MOST_DEVICE_TOKENS = 196_608  # 24 GiB of 8B geometry


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Documents of random tokens, each with an ending; all in each round."""

    name: str
    documents: int
    tokens: int  # of a document
    first_document: int = 0  # workloads that share numbers share documents
    rounds: int = 1
    repeats: int = 1  # of each prompt, one behind the other
    endings: int = 1  # prompts of a document
    concurrency: int = 1  # requests that are sent at once; the next ones follow when all are answered
    answer_tokens: int = 8
    forget: bool = False  # the device's own prefix cache is emptied first

    def batches(self) -> Iterator[list[tuple[int, int]]]:
        """(document, ending) of the requests that are sent at once, for one round."""
        last = self.first_document + self.documents
        documents = [n for n in range(self.first_document, last) for _ in range(self.repeats)]
        requests = [(document, ending) for document in documents for ending in range(self.endings)]
        for begin in range(0, len(requests), self.concurrency):
            yield requests[begin : begin + self.concurrency]

    def prompt(self, document: int, ending: int) -> list[int]:
        """Token ids that any vocabulary has."""
        text = random.Random(document).choices(range(10, 250), k=self.tokens)
        return text + random.Random(1 + ending).choices(range(10, 250), k=ENDING_TOKENS)


@dataclass(frozen=True)
class Answer:
    round: int
    document: int
    ending: int
    cached: int  # tokens of the prompt that were not computed, by the server's count
    first_s: float  # time to the first token
    total_s: float  # of all requests that were sent with it
    tokens: list[int]


@dataclass(frozen=True)
class Served:
    """What one process of a server did: the answers by workload, in order, and the seconds of each round."""

    answers: dict[str, list[Answer]]
    seconds: dict[str, list[float]]
    num_bytes: dict[str, int]  # moved, by the server's own metrics
    start_s: float
    version: str

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Served:
        answers = {name: [Answer(**answer) for answer in some] for name, some in values["answers"].items()}
        return cls(**{**values, "answers": answers})

    def first(self, workload: str) -> list[Answer]:
        """Of each prompt the first answer."""
        found: dict[tuple[int, int], Answer] = {}
        for answer in self.answers[workload]:
            found.setdefault((answer.document, answer.ending), answer)
        return list(found.values())

    def cached(self, workload: str) -> float:
        """Tokens of a prompt that is asked first, by the server's count."""
        answers = self.first(workload)
        return sum(answer.cached for answer in answers) / len(answers)

    def first_ms(self, workload: str) -> list[float]:
        """To the first token, when a prompt is asked first."""
        return [answer.first_s * 1e3 for answer in self.first(workload)]

    def total_ms(self, workload: str) -> list[float]:
        """To the last token of a document, of all requests for it that were sent at once."""
        return [answer.total_s * 1e3 for answer in self.first(workload) if answer.ending == 0]

    def rates(self, workload: str) -> list[float]:
        """Tokens a second of each round."""
        num_tokens = sum(len(answer.tokens) for answer in self.answers[workload]) / len(self.seconds[workload])
        return [num_tokens / seconds for seconds in self.seconds[workload]]


def workloads(small: bool, tokens: int = 0) -> dict[str, Workload]:
    """`small`: for a tiny model on two cores. `tokens`: of a document, fewer of which there are where they are long."""
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
    """Of the device's cache: four documents, or of long ones what a GPU has room for beside a model of 8B."""
    return max(min(4 * tokens, _MOST_DEVICE_TOKENS), tokens + 4096)


def compare_tokens(runs: Mapping[str, Served], chosen: Sequence[Workload]) -> tuple[int, int]:
    """How many answers equal another run's, or an earlier one's, to the same prompt with as many cached tokens, and how
    many different ones there are: all prompts end alike, so with one answer to all, equality would say nothing.
    AssertionError where one differs.

    Only such answers come from the same arithmetic, and only where a request is alone: a GPU adds up in another order
    for another number of tokens, which changes the last bits and so, now and then, a token.
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

"""The gate before SGLang's disk: loads that delay more than computing are not made, by what it has seen."""

from __future__ import annotations

import math
import struct

import pytest

from disk_case import Clock
from hicache.integrations.sglang.gate import LoadGate
from hicache.metrics import Metrics

PAGE_TOKENS, PAGE_BYTES = 64, 1 << 20
PROMPT = [f"page {n}" for n in range(160)]  # 10 240 tokens
NUM_TOKENS = len(PROMPT) * PAGE_TOKENS


def prompt(number: int) -> list[str]:
    return [f"prompt {number} {key}" for key in PROMPT]


class Store:
    """Keeps a note, as a store process does."""

    def __init__(self, note: bytes = b"") -> None:
        self.note = note

    def keep(self, note: bytes) -> None:
        self.note = note


class Server:
    """A gate, and what SGLang does around it."""

    def __init__(self, speed: float | str = "auto", store: Store | None = None) -> None:
        self.clock = Clock()
        self.gate = LoadGate(speed, PAGE_TOKENS, Metrics(), self.clock, store or Store())  # type: ignore[arg-type]

    def loads(self, keys: list[str], num_held: int | None = None) -> bool:
        return self.gate.weigh(keys, len(keys) if num_held is None else num_held, PAGE_BYTES)

    def reads(self, keys: list[str], seconds: float, num_read: int | None = None) -> None:
        self.clock.now_s += seconds
        self.gate.read(keys, len(keys) if num_read is None else num_read, PAGE_BYTES, seconds)

    def computes(self, number: int, seconds: float) -> None:
        """A prompt of which nothing is stored."""
        assert not self.loads(prompt(number), 0)
        self.clock.now_s += seconds
        self.gate.computed(NUM_TOKENS)
        self.gate.offered(prompt(number))

    def knows(self, read_s: float) -> None:
        """How long a prompt takes to read."""
        self.clock.now_s += 61  # after which the old speed is forgotten
        self.reads(PROMPT, read_s)

    @property
    def decisions(self) -> list[float]:
        return [counter.value for counter in (self.gate.accepted, self.gate.declined, self.gate.unmeasured)]


def test_the_others_that_computing_would_delay_count_and_reads_that_are_queued() -> None:
    """A load may take as long as computing costs all who wait for the GPU: those that were looked up, declined or not
    stored, until their pages are computed or stored, or half a minute has passed. Whoever waits for the disk delays
    the load and is not delayed by computing; when its pages have come, or did not, it waits for the GPU with the rest.
    """
    server = Server(10_000.0)
    server.knows(1.5)
    assert not server.loads(prompt(1))
    assert server.loads(prompt(2), 159)  # 1.5 s against 2 times 1.02
    assert not server.loads(prompt(3))  # 3 s, behind the other
    assert server.loads(prompt(4))  # against 3 times 1.02
    server.reads(prompt(2)[:159], 1.5)
    server.reads(prompt(4)[:128], 1.2, num_read=10)
    assert server.loads(prompt(5))  # 1, 2 and 3 are computed, nothing is queued
    server.reads(prompt(5), 1.5)
    server.gate.computed(2 * NUM_TOKENS)  # 1, and 2 or 3
    server.gate.offered(prompt(3)[100:])
    server.gate.offered(prompt(2)[100:])
    assert not server.loads(prompt(6))
    server.clock.now_s += 31
    server.knows(1.5)
    assert not server.loads(prompt(7))


def test_the_speed_of_prefill_is_learnt_under_load() -> None:
    """From prompts one behind the other, in chunks, together in a pass, or one of them stalled: the speed is that of
    the GPU, not that of a prompt that waited. Time in which nobody waits counts as nothing, and so do tokens that
    nobody waited for, like answers."""
    server = Server()
    for number in range(4):
        assert not server.loads(prompt(number), 0)
    for tokens in (NUM_TOKENS // 2, NUM_TOKENS // 2, NUM_TOKENS, 2 * NUM_TOKENS):
        server.clock.now_s += tokens / NUM_TOKENS
        server.gate.computed(tokens)
    assert server.gate.wait_s(160) == pytest.approx(1.0)
    server.clock.now_s += 1000.0
    server.gate.computed(50 * NUM_TOKENS)
    for number, seconds in enumerate((1.0, 9.0, 1.0), 4):
        server.computes(number, seconds)
    assert server.gate.wait_s(160) == pytest.approx(1.0)


def test_the_speed_of_prefill_outlives_the_server() -> None:
    """Left with the store, it decides until the next server measures its own; what is no speed is none."""
    store = Store()
    first = Server(store=store)
    for number in range(2):
        first.computes(number, 1.0)
    server = Server(store=store)
    server.knows(1.5)
    assert not server.loads(PROMPT)
    server.clock.now_s += 31
    for number in range(2):
        server.computes(number, 2.0)
    assert server.gate.wait_s(160) == pytest.approx(2.0)
    again = Server(store=store)
    again.knows(1.5)
    assert again.loads(PROMPT)
    for note in (
        b"\xff",
        bytes(17),
        *(struct.pack("<2d", *terms) for terms in ((-1, 2), (1, math.inf), (math.nan, 0))),
    ):
        server = Server(store=Store(note))
        server.knows(1.5)
        assert server.loads(PROMPT) and server.decisions == [0, 0, 1]

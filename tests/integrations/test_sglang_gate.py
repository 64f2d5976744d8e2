"""The gate before SGLang's disk: loads that are slower than computing are not made, by speeds that it has seen."""

from __future__ import annotations

import math
import struct

import pytest

from disk_case import Clock
from hicache.integrations.sglang.gate import LoadGate
from hicache.metrics import Metrics

PAGE_TOKENS, PAGE_BYTES = 64, 1 << 20
PROMPT = [f"page {n}" for n in range(160)]  # 10 240 tokens


def prompt(number: int) -> list[str]:
    return [f"prompt {number} {key}" for key in PROMPT]


def decisions(gate: LoadGate) -> list[float]:
    return [counter.value for counter in (gate.accepted, gate.declined, gate.unmeasured)]


class Store:
    """Keeps a note, as a store process does."""

    def __init__(self, note: bytes = b"") -> None:
        self.note = note

    def keep(self, note: bytes) -> None:
        self.note = note


def make(clock: Clock, speed: float | str = "auto", store: Store | None = None) -> LoadGate:
    return LoadGate(speed, PAGE_TOKENS, Metrics(), clock, store or Store())  # type: ignore[arg-type]


def compute(gate: LoadGate, clock: Clock, keys: list[str], seconds: float) -> None:
    """SGLang computes a prompt of which nothing is stored, and stores it."""
    assert not gate.weigh(keys, 0, PAGE_BYTES)
    clock.now_s += seconds
    gate.offered(keys)
    clock.now_s += 100 * seconds  # a slow disk
    gate.written()
    clock.now_s += 1


def test_a_load_that_is_slower_than_computing_is_not_made(caplog: pytest.LogCaptureFixture) -> None:
    """What the disk holds is loaded while its speed is unknown, and again once that was not seen for a while: a disk
    that is asked no more would never show that it has recovered."""
    caplog.set_level("INFO")
    clock = Clock()
    gate = make(clock, 10_000.0)  # 1.024 s
    assert gate.weigh(PROMPT, 160, PAGE_BYTES)
    gate.read(160 * PAGE_BYTES, 2.0)
    assert not gate.weigh(PROMPT, 160, PAGE_BYTES) and not gate.weigh(PROMPT, 16, PAGE_BYTES)
    assert caplog.text.count("is computed again") == 1
    clock.now_s += 61
    assert gate.weigh(PROMPT, 160, PAGE_BYTES)
    gate.read(160 * PAGE_BYTES, 0.5)
    assert gate.weigh(PROMPT, 160, PAGE_BYTES)
    assert decisions(gate) == [1, 2, 2]


def test_the_speed_of_prefill_is_learnt_from_what_is_stored() -> None:
    """Of prompts that are computed: what loads faster than that is loaded, what loads slower is not."""
    clock = Clock()
    gate = make(clock)
    for number in range(3):
        compute(gate, clock, prompt(number), 1.0)
    assert gate.wait_s(160) == pytest.approx(1.0)
    for seconds, loads in ((0.9, True), (1.5, False)):
        clock.now_s += 61
        gate.read(160 * PAGE_BYTES, seconds)
        assert gate.weigh(PROMPT, 160, PAGE_BYTES) is loads
        gate.offered(PROMPT)


def test_the_speed_of_prefill_outlives_the_server() -> None:
    """Left with the store, it decides until the next server measures its own; what is no speed is none."""
    clock, store = Clock(), Store()
    compute(make(clock, store=store), clock, PROMPT, 1.0)
    gate = make(clock, store=store)
    gate.read(160 * PAGE_BYTES, 1.5)
    assert not gate.weigh(PROMPT, 160, PAGE_BYTES)
    clock.now_s += 11  # until which the last prompt may delay others
    compute(gate, clock, prompt(1), 2.0)
    assert gate.wait_s(160) == pytest.approx(2.0)
    assert make(clock, store=store).weigh(PROMPT, 160, PAGE_BYTES)
    for note in (
        b"\xff",
        bytes(17),
        *(struct.pack("<2d", *terms) for terms in ((-1, 2), (1, math.inf), (math.nan, 0))),
    ):
        gate = make(clock, store=Store(note))
        gate.read(160 * PAGE_BYTES, 1.5)
        assert gate.weigh(PROMPT, 160, PAGE_BYTES) and decisions(gate) == [0, 0, 1]


def test_what_else_the_server_does_is_no_prefill() -> None:
    """Prompts that are loaded, or overlap another, and writes that waited for the one before say nothing."""
    clock = Clock()
    gate = make(clock)
    assumed_s = gate.wait_s(160)
    gate.weigh(PROMPT, 100, PAGE_BYTES)  # loaded, and the rest computed
    clock.now_s += 3
    gate.offered(PROMPT)
    gate.weigh(prompt(1), 0, PAGE_BYTES)
    gate.weigh(prompt(2), 0, PAGE_BYTES)  # before the first has ended
    clock.now_s += 3
    gate.offered(prompt(2))
    gate.written()
    gate.weigh(prompt(3), 0, PAGE_BYTES)
    clock.now_s += 3
    gate.written()
    gate.offered(prompt(3))  # it had waited
    gate.offered(prompt(0))  # nobody has looked it up
    assert gate.wait_s(160) == assumed_s
    compute(gate, clock, prompt(4), 2.0)
    assert gate.wait_s(160) == pytest.approx(2.0)


def test_zero_loads_everything() -> None:
    """Computing is never faster then."""
    clock = Clock()
    gate = make(clock, 0.0)
    gate.read(PAGE_BYTES, 1000.0)
    assert gate.weigh(PROMPT, 160, PAGE_BYTES) and decisions(gate) == [1, 0, 0]

"""The gate before the disk of SGLang's storage backend, with a clock that the test sets and without SGLang."""

from __future__ import annotations

from disk_case import Clock
from hicache.integrations.sglang.gate import LoadGate
from hicache.metrics import Metrics
from hicache.tiers import DISK, Store

PAGE_TOKENS, PAGE_BYTES, NUM_PAGES = 64, 1 << 20, 16


class NoNote:
    """A store that has no note and keeps none."""

    note = b""

    def keep(self, note: bytes) -> None:
        raise AssertionError(f"a speed that was not measured is stored: {note!r}")


def prompt(number: int) -> list[str]:
    return [f"{number}-{page}" for page in range(NUM_PAGES)]


def test_a_load_may_take_as_long_as_the_gpu_has_other_work() -> None:
    """A prompt is computed in 1 s and read in 0.8 s, after all reads that were queued before. The gate chooses the
    loads of four prompts at the same time, because the GPU would compute each prompt longer than the disk reads it.
    Prompts that are computed do not count."""
    clock = Clock()
    gate = LoadGate(PAGE_TOKENS * NUM_PAGES, PAGE_TOKENS, Metrics(), clock, NoNote(), [DISK])
    held: list[Store] = [DISK] * NUM_PAGES
    gate.read(prompt(0), held, PAGE_BYTES, 0.8)
    assert [gate.decide(prompt(number), held, PAGE_BYTES) for number in range(1, 5)] == [True] * 4
    for number in range(1, 5):
        gate.read(prompt(number), held, PAGE_BYTES, 0.8)
    clock.now_s += 61  # the rate of the disk is forgotten
    gate.read(prompt(0), held, PAGE_BYTES, 1.2)
    assert not gate.decide(prompt(5), held, PAGE_BYTES)
    assert gate.decide(prompt(6), held, PAGE_BYTES)  # computing it would delay prompt 5

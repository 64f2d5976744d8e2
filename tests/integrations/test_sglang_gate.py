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
    """A prompt is computed in 1 s and read in 0.8 s, after all reads that were queued before. If the disk has only the
    first half of each prompt, the GPU has to compute the second halves of the other prompts until a load ends, so the
    gate chooses all loads. If the disk has four complete prompts, the GPU would have no work, so it computes two."""
    for num_held, chosen in ((NUM_PAGES // 2, [True] * 4), (NUM_PAGES, [True, False, True, False])):
        clock = Clock()
        gate = LoadGate(PAGE_TOKENS * NUM_PAGES, PAGE_TOKENS, Metrics(), clock, NoNote(), [DISK])
        held: list[Store] = [DISK] * num_held
        gate.read(prompt(0), held, PAGE_BYTES, 0.8 * num_held / NUM_PAGES)
        assert [gate.decide(prompt(number), held, PAGE_BYTES) for number in range(1, 5)] == chosen


def test_a_load_may_take_as_long_as_computing_delays_others() -> None:
    """A prompt is computed in 1 s and read in 1.2 s. The gate chooses the load if computing would delay another
    prompt."""
    gate = LoadGate(PAGE_TOKENS * NUM_PAGES, PAGE_TOKENS, Metrics(), Clock(), NoNote(), [DISK])
    held: list[Store] = [DISK] * NUM_PAGES
    gate.read(prompt(0), held, PAGE_BYTES, 1.2)
    assert not gate.decide(prompt(5), held, PAGE_BYTES)
    assert gate.decide(prompt(6), held, PAGE_BYTES)

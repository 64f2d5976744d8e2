"""Process death at any moment: nothing acknowledged is lost, nothing torn is shown."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hicache.storage import StoreLocked
from storage_pages import PAGE_BYTES, found_numbers, open_store
from store_program import StoreProgram

BATCH = 4
SIZES = (PAGE_BYTES, 3_000, 4 * PAGE_BYTES)  # on average less than twice PAGE_BYTES


def acknowledged_until_killed(path: Path, settings: dict[str, Any], start: int, num_batches: int) -> list[int]:
    """The numbers whose puts returned in a process that is killed after so many batches, whatever it does then."""
    with StoreProgram(path, settings) as writer:
        writer.send("put_for_ever", start, BATCH)
        batches = [writer.answer() for _ in range(num_batches)]
        with pytest.raises(StoreLocked, match=f"process {writer.process.pid}"):
            open_store(path, **settings)
        return [number for batch in batches + writer.kill() for number in batch]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("page_bytes", "durability", "rounds"),
    [
        (SIZES, "relaxed", 3),
        (SIZES[:1], "commit", 1),
        *(pytest.param(s, d, 50, marks=pytest.mark.long) for s in (SIZES, SIZES[:1]) for d in ("relaxed", "commit")),
    ],
)
def test_kill(tmp_path: Path, page_bytes: Sequence[int], durability: str, rounds: int) -> None:
    """After SIGKILL at random moments every acknowledged page is present and right, and none is torn."""
    settings = {"page_bytes": page_bytes, "durability": durability, "budget_bytes": 4 << 30}
    generator, acknowledged = random.Random(durability), set[int]()
    for turn in range(rounds):
        recent = acknowledged_until_killed(tmp_path, settings, turn * 100_000, generator.randint(1, 60))
        acknowledged |= set(recent)
        store = open_store(tmp_path, **settings)
        assert found_numbers(store, recent, page_bytes) == set(recent)
        sample = generator.sample(sorted(acknowledged), min(200, len(acknowledged)))
        assert found_numbers(store, sample, page_bytes) == set(sample)
        unacknowledged = range(max(recent) + 1, max(recent) + 1 + 2 * BATCH)
        assert len(found_numbers(store, unacknowledged, page_bytes)) <= BATCH
        assert store.stats().corrupt == 0 and store.rebuilt_pages == store.stats().entries
        assert store.stats().entries - len(acknowledged) <= BATCH * (turn + 1)
        store.check()
        store.close()

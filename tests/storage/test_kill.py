"""Process death at any moment: nothing acknowledged is lost, nothing torn is shown.

Run as a script, this file is the process that gets killed.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hicache.storage import StoreLocked
from storage_pages import PAGE_BYTES, blocks_bytes, budget_of, found_numbers, open_store, put_numbers

BATCH = 4
SIZES = (PAGE_BYTES, 3_000, 4 * PAGE_BYTES)  # on average less than twice PAGE_BYTES
every_size = pytest.mark.parametrize("page_bytes", [SIZES[:1], SIZES], ids=["one size", "three sizes"])


def start_child(path: Path, durability: str, budget_bytes: int, page_bytes: Sequence[int]) -> subprocess.Popen[str]:
    numbers = map(str, (budget_bytes, *page_bytes))
    command = [sys.executable, __file__, str(path), durability, *numbers]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent
    )


def let_write(child: subprocess.Popen[str], first: int) -> str:
    """Let the child open the store and write from number `first` on; returns its first acknowledgement."""
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write(f"{first}\n")
    child.stdin.flush()
    return child.stdout.readline()


def kill(child: subprocess.Popen[str], seconds: float, acknowledged: str) -> list[int]:
    """Kill the child after `seconds`; returns the numbers it acknowledged, before as well."""
    assert child.stdin is not None and child.stdout is not None
    time.sleep(seconds)
    child.kill()
    acknowledged += child.stdout.read()
    child.wait()
    child.stdin.close()
    child.stdout.close()
    starts = [int(line) for line in acknowledged.splitlines(keepends=True) if line.endswith("\n")]
    return [start + i for start in starts for i in range(BATCH)]


def kill_rounds(path: Path, durability: str, page_bytes: Sequence[int], rounds: int) -> None:
    generator = random.Random(durability)
    acknowledged: set[int] = set()
    waiting: list[subprocess.Popen[str]] = []
    for turn in range(rounds):
        while len(waiting) < min(3, rounds - turn):  # interpreters start slowly: have the next ones ready
            waiting.append(start_child(path, durability, 4 << 30, page_bytes))
        child, first = waiting.pop(0), turn * 100_000
        recent = set(kill(child, generator.uniform(0.0, 0.3), let_write(child, first)))
        acknowledged |= recent
        store = open_store(path, durability=durability, budget_bytes=4 << 30, page_bytes=page_bytes)
        assert len(recent) >= BATCH
        assert found_numbers(store, sorted(recent), page_bytes) == recent
        sample = generator.sample(sorted(acknowledged), min(200, len(acknowledged)))
        assert found_numbers(store, sample, page_bytes) == set(sample)
        unacknowledged = range(max(recent) + 1, max(recent) + 1 + 2 * BATCH)
        assert len(found_numbers(store, unacknowledged, page_bytes)) <= BATCH
        assert store.stats().corrupt == 0 and store.rebuilt_pages == store.stats().entries
        assert store.stats().entries - len(acknowledged) <= BATCH * (turn + 1)
        store.check()
        store.close()


@pytest.mark.parametrize("durability", ["relaxed", "commit"])
@every_size
def test_kill(tmp_path: Path, page_bytes: Sequence[int], durability: str) -> None:
    """After SIGKILL at random moments every acknowledged page is present and right, and none is torn."""
    kill_rounds(tmp_path, durability, page_bytes, 3)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("durability", ["relaxed", "commit"])
@every_size
def test_kill_many_times(tmp_path: Path, page_bytes: Sequence[int], durability: str) -> None:
    """The same over 200 deaths in each mode."""
    kill_rounds(tmp_path, durability, page_bytes, 200)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("rounds", [1, pytest.param(60, marks=pytest.mark.long)])
@every_size
def test_kill_while_evicting(tmp_path: Path, page_bytes: Sequence[int], rounds: int) -> None:
    """Killed at the budget, a store keeps its last acknowledged pages, its indexes agree, and the files are bounded."""
    budget_bytes, generator = budget_of(60, max(page_bytes)), random.Random(rounds)
    settings: dict[str, Any] = {"budget_bytes": budget_bytes, "page_bytes": page_bytes}
    for turn in range(rounds):
        child = start_child(tmp_path, "relaxed", budget_bytes, page_bytes)
        acknowledgement = let_write(child, turn * 100_000)
        with pytest.raises(StoreLocked, match=f"process {child.pid}"):
            open_store(tmp_path, **settings)
        acknowledged = kill(child, 0.5 if not turn else generator.uniform(0.0, 0.3), acknowledgement)
        store = open_store(tmp_path, **settings)
        assert found_numbers(store, acknowledged[-20:], page_bytes) == set(acknowledged[-20:])
        assert max(store.stats().file_bytes, blocks_bytes(tmp_path)) <= 1.05 * budget_bytes
        store.check()
        again = range(turn * 100_000 + 50_000, turn * 100_000 + 50_030)
        assert put_numbers(store, again, page_bytes) == [True] * 30
        assert found_numbers(store, again, page_bytes) == set(again)
        store.check()
        store.close()


def write_for_ever(path: str, durability: str, budget_bytes: int, *page_bytes: int) -> None:
    first = int(sys.stdin.readline() or sys.exit())
    settings = {"budget_bytes": budget_bytes, "page_bytes": page_bytes}
    store = open_store(path, durability=durability, **settings)
    while True:
        if all(put_numbers(store, range(first, first + BATCH), page_bytes)):
            print(first, flush=True)
        first += BATCH


if __name__ == "__main__":
    write_for_ever(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))

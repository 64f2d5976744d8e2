"""Process death at any moment: nothing acknowledged is lost, nothing torn is shown.

Run as a script, this file is the process that gets killed.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hicache.storage import StoreLocked
from storage_pages import Layout, blocks_bytes, both_layouts, budget_of, found_numbers, open_store, put_numbers

BATCH = 4


def start_child(path: Path, durability: str, budget_bytes: int, layout: Layout) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, str(path), durability, str(budget_bytes), str(layout["slots_from_bytes"])]
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


def kill_rounds(path: Path, durability: str, layout: Layout, rounds: int) -> None:
    generator = random.Random(durability)
    acknowledged: set[int] = set()
    waiting: list[subprocess.Popen[str]] = []
    for turn in range(rounds):
        while len(waiting) < min(3, rounds - turn):  # interpreters start slowly: have the next ones ready
            waiting.append(start_child(path, durability, 4 << 30, layout))
        child, first = waiting.pop(0), turn * 100_000
        recent = set(kill(child, generator.uniform(0.0, 0.3), let_write(child, first)))
        acknowledged |= recent
        store = open_store(path, durability=durability, budget_bytes=4 << 30, **layout)
        assert len(recent) >= BATCH
        assert found_numbers(store, sorted(recent)) == recent
        sample = generator.sample(sorted(acknowledged), min(200, len(acknowledged)))
        assert found_numbers(store, sample) == set(sample)
        unacknowledged = range(max(recent) + 1, max(recent) + 1 + 2 * BATCH)
        assert len(found_numbers(store, unacknowledged)) in (0, BATCH)
        assert store.stats().entries - len(acknowledged) <= BATCH * (turn + 1)
        store.check()
        store.close()


@pytest.mark.parametrize("durability", ["relaxed", "commit"])
@both_layouts
def test_kill(tmp_path: Path, layout: Layout, durability: str) -> None:
    """After SIGKILL at random moments every acknowledged batch is present and right, and a batch is whole or absent."""
    kill_rounds(tmp_path, durability, layout, 3)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("durability", ["relaxed", "commit"])
@both_layouts
def test_kill_many_times(tmp_path: Path, layout: Layout, durability: str) -> None:
    """The same over 200 deaths in each mode."""
    kill_rounds(tmp_path, durability, layout, 200)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("rounds", [1, pytest.param(60, marks=pytest.mark.long)])
@both_layouts
def test_kill_while_evicting(tmp_path: Path, layout: Layout, rounds: int) -> None:
    """Killed at the budget, a store keeps its last acknowledged pages, its indexes agree, and the files are bounded."""
    budget_bytes, generator = budget_of(60, layout), random.Random(rounds)
    for turn in range(rounds):
        child = start_child(tmp_path, "relaxed", budget_bytes, layout)
        acknowledgement = let_write(child, turn * 100_000)
        with pytest.raises(StoreLocked, match=f"process {child.pid}"):
            open_store(tmp_path, budget_bytes=budget_bytes, **layout)
        acknowledged = kill(child, 0.5 if not turn else generator.uniform(0.0, 0.3), acknowledgement)
        store = open_store(tmp_path, budget_bytes=budget_bytes, **layout)
        assert found_numbers(store, acknowledged[-20:]) == set(acknowledged[-20:])
        assert max(store.stats().file_bytes, blocks_bytes(tmp_path)) <= 1.05 * budget_bytes
        store.check()
        again = range(turn * 100_000 + 50_000, turn * 100_000 + 50_030)
        assert put_numbers(store, again) == [True] * 30 and found_numbers(store, again) == set(again)
        store.check()
        store.close()


def write_for_ever(path: str, durability: str, budget_bytes: int, slots_from_bytes: int) -> None:
    first = int(sys.stdin.readline() or sys.exit())
    store = open_store(path, durability=durability, budget_bytes=budget_bytes, slots_from_bytes=slots_from_bytes)
    while True:
        if all(put_numbers(store, range(first, first + BATCH))):
            print(first, flush=True)
        first += BATCH


if __name__ == "__main__":
    write_for_ever(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))

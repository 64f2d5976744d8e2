"""The bench of the policies: hits of each against a cache of single blocks, and what a run keeps."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hicache.bench import policy as bench
from hicache.bench.common import BenchUnavailable, read_report
from hicache.cli import main
from hicache.replay.optimal import optimal_hits
from hicache.tree.key import Tokens
from hicache.tree.policy import ORDERS

Prefix = tuple[int, ...]


class Block:
    """One block of a naive cache: which request made it, which used it last, and how many did."""

    def __init__(self, now: int) -> None:
        self.made = self.used = now
        self.hits = 1


RANKS: dict[str, Callable[[Block], tuple[int, ...]]] = {
    "lru": lambda b: (b.used,),
    "lfu": lambda b: (b.hits, b.used),
    "fifo": lambda b: (b.made,),
    "mru": lambda b: (-b.used,),
    "filo": lambda b: (-b.made,),
    "priority": lambda b: (b.used,),
    "slru": lambda b: (int(b.hits >= 2), b.used),
}


def naive_hits(requests: list[Tokens], name: str, capacity: int) -> int:
    """A cache of single blocks, each known by its whole prefix: looks at all of them for every block that goes."""
    blocks: dict[Prefix, Block] = {}
    hits = 0
    for now, request in enumerate(requests):
        prefixes = [tuple(request[:end].tolist()) for end in range(1, len(request) + 1)]
        length = next((at for at, prefix in enumerate(prefixes) if prefix not in blocks), len(prefixes))
        hits += length
        mine = set(prefixes[:length])
        for prefix in mine:
            blocks[prefix].used = now
            blocks[prefix].hits += 1
        for prefix in prefixes[length:]:
            while capacity and len(blocks) >= capacity:
                parents = {other[:-1] for other in blocks}
                free = [other for other in blocks if other not in mine and other not in parents]
                if not free:
                    break
                del blocks[min(free, key=lambda other: RANKS[name](blocks[other]))]
            if capacity and len(blocks) >= capacity:
                break
            blocks[prefix] = Block(now)
            mine.add(prefix)
    return hits


def random_trace(dice: random.Random, num_requests: int, most_blocks: int) -> list[Tokens]:
    """Prompts over two ids: they share, repeat, extend and shorten each other's prefixes."""
    return [
        np.array([dice.randrange(2) for _ in range(dice.randrange(1, most_blocks + 1))]) for _ in range(num_requests)
    ]


@pytest.mark.parametrize("name", sorted(ORDERS.keys() - {"auto"}))  # auto: tests/tree/test_frequency.py
def test_the_tree_hits_what_single_blocks_would(name: str) -> None:
    """Hits equal those of a cache of single blocks at every capacity, one too small for some prompts included."""
    dice = random.Random(name)
    trace = random_trace(dice, 150, 8)
    rates = [naive_hits(trace, name, capacity) for capacity in (5, 12, 30, 60, 0)]
    assert [bench.replay(trace, name, capacity) for capacity in (5, 12, 30, 60, 0)] == rates
    assert len(set(rates)) == len(rates)
    chats = bench.synthetic_trace(num_requests=60)
    for capacity in (100, 400):
        assert bench.replay(chats, name, capacity) == naive_hits(chats, name, capacity) > 0


def test_equal_ids_behind_different_prefixes_are_different_blocks() -> None:
    """A block is hit only behind the prefix that it was computed behind."""
    trace = [np.array(ids) for ids in ([1, 2], [3, 2], [2], [1, 2])]
    assert optimal_hits(trace, 10).sum() == bench.replay(trace, "lru", 10) == 2


def test_the_synthetic_trace_is_always_the_same() -> None:
    """The same seed gives the same requests, another seed others; the ids are those a trace may have."""
    first, again, other = (bench.synthetic_trace(100, seed) for seed in (1, 1, 2))
    assert len(first) == 100
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))
    assert all(request.dtype == np.int64 and len(request) and request.min() >= 0 for request in first)


def written(path: Path, requests: list[Tokens]) -> Path:
    """A block trace of whole blocks."""
    lines = [
        {"timestamp": at, "input_length": 512 * len(ids), "output_length": 1, "hash_ids": ids.tolist()}
        for at, ids in enumerate(requests)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Requests come in the order of the file with all their ids; those without blocks are left out."""
    path = written(tmp_path / "trace.jsonl", [np.array([5, 6]), np.array([], int), np.array([2**32 - 1])])
    assert [ids.tolist() for ids in bench.read_trace(path)] == [[5, 6], [2**32 - 1]]


@pytest.mark.parametrize("text", ["", "{", '{"hash_ids": [1]}', None])
def test_what_is_no_trace_is_refused(text: str | None, tmp_path: Path) -> None:
    """A missing file, one without requests and one with anything else raises BenchUnavailable with its name."""
    path = tmp_path / "trace.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(BenchUnavailable, match=r"trace\.jsonl"):
        bench.read_trace(path)


def test_a_run_keeps_a_rate_for_every_policy_and_capacity(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file holds what the table shows, each rate beside the optimum, and no folder of the machine."""
    trace = bench.synthetic_trace(num_requests=100)
    path = written(tmp_path / "chats.jsonl", trace)
    arguments = ["--trace", str(path), "--capacities", "60", "500", "0", "--policies", "lru", "filo"]
    assert main(["bench", "run", "policy", "--device", "cpu", "--out", str(tmp_path / "out"), *arguments]) == 0
    shown = capsys.readouterr().out
    (file,) = (tmp_path / "out").iterdir()
    report = read_report(file)
    assert str(tmp_path) not in file.read_text() and "--trace chats.jsonl" in report.command
    capacities = {"60": 60, "500": 500, "unlimited": 0}
    policies = ("lru", "filo", "optimal")
    assert [c.name for c in report.cases[1:]] == [f"{p}.{capacity}" for p in policies for capacity in capacities]
    blocks = sum(map(len, trace))
    assert report.cases[0].value == blocks
    for case in report.cases[1:]:
        policy, capacity = case.name.split(".")
        optimum = int(optimal_hits(trace, capacities[capacity] or None).sum()) / blocks
        ours = optimum if policy == "optimal" else bench.replay(trace, policy, capacities[capacity]) / blocks
        assert (case.value, case.ceiling) == (ours, optimum)
        assert f"{case.value:.4f}" in next(line for line in shown.splitlines() if line.split()[:1] == [policy])


def test_a_negative_capacity_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line says so, and nothing is written."""
    out = tmp_path / "out"
    assert main(["bench", "run", "policy", "--device", "cpu", "--out", str(out), "--capacities", "10", "-5"]) == 2
    assert "--capacities -5" in capsys.readouterr().err and not out.exists()

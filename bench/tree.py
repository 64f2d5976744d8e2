"""Measures the prefix tree: matching and inserting compared with memcmp of the same bytes, and evictions for several
sizes of the tree.

    match.*, insert.*        100 000 packed tokens (800 000 bytes); the ceiling is one memcmp of these bytes, in turns
    evict.<policy>.<leaves>  one eviction: choose the pages, remove them and count them, in processor time of the
                             thread; .spread: maximum over minimum

Everything runs on the CPU, in one thread, with the garbage collector off as in timeit.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable

import numpy as np
import torch

from hicache.bench.common import BenchUnavailable, Report, interleave, no_collection, percentile
from hicache.pages.key import PageHasher, Tokens
from hicache.pages.order import RANK_POLICIES
from hicache.pages.tree import RadixTree
from hicache.tiers import FULL

NAME = "tree"
DESCRIPTION = "match, insert and evict in the prefix tree, against memcmp and across sizes"

TOKENS = 100_000
LEAVES = (1_000, 10_000, 100_000)
TARGETS = {"match.page64": 1.5, "match.page1": 3.0, "insert.page64": 10.0, "insert.page1": 10.0}
EVICT_SPREAD = 2.0
_BATCH = 200


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--samples", type=int, default=101, help="timed rounds (default: %(default)s)")


def run(args: argparse.Namespace, report: Report) -> None:
    if args.device.type != "cpu":
        raise BenchUnavailable("the prefix tree lives on the CPU; use --device cpu")
    torch.set_num_threads(1)
    for page_size in (64, 1):
        _match_and_insert(report, page_size, args.samples)
    for policy in RANK_POLICIES:
        _evictions(report, policy, max(5, args.samples // 5))


def _tree(page_size: int, policy: str = "lru") -> RadixTree:
    return RadixTree(page_size, PageHasher(b"bench", page_size), policy=policy)


def _memcmp(a: Tokens, b: Tokens) -> Callable[[], object]:
    compare = ctypes.CDLL(None).memcmp
    compare.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    left, right, size = a.ctypes.data, b.ctypes.data, a.nbytes

    def run() -> None:
        if compare(left, right, size):
            raise AssertionError("the tokens differ")

    return run


def _match_and_insert(report: Report, page_size: int, samples: int) -> None:
    rng = np.random.default_rng(page_size)
    held = rng.integers(0, 150_000, TOKENS // page_size * page_size)
    asked, slots = held.copy(), torch.arange(1, len(held) + 1)
    tree, fresh = _tree(page_size), _tree(page_size)
    tree.insert(tree.root, held, slots)
    if tree.match(asked).full_len != len(asked):
        raise AssertionError("the cached prefix does not match")
    inserted = fresh.insert(fresh.root, asked, slots)

    def insert() -> None:
        nonlocal inserted
        inserted = fresh.insert(fresh.root, asked, slots)

    seconds: dict[str, list[float]] = {"memcmp": [], "match": [], "insert": []}
    memcmp = _memcmp(held, asked)
    with no_collection():
        for _ in range(samples):
            fresh.evict(inserted.node.rows, FULL)
            for name, took in interleave(
                {"memcmp": memcmp, "match": lambda: tree.match(asked), "insert": insert}, samples=1, warmup=0
            ).items():
                seconds[name].extend(took)
    note = f"{len(held)} tokens, ceiling: memcmp of their {held.nbytes} bytes"
    for what in ("match", "insert"):
        name = f"{what}.page{page_size}"
        report.time(name, seconds[what], "us", ceiling_seconds=seconds["memcmp"], target=TARGETS[name], note=note)


def _evictions(report: Report, policy: str, samples: int) -> None:
    """Measure evictions among leaves below one common page. Each round evicts _BATCH leaves, which is timed, and then
    inserts _BATCH new leaves."""
    trees = {leaves: _tree(1, policy) for leaves in LEAVES}
    prefix, slot = np.array([7]), torch.ones(2, dtype=torch.int64)
    for leaves, tree in trees.items():
        for leaf in range(leaves):
            tree.insert(tree.root, np.array([7, 1000 + leaf]), slot)
        if tree.match(prefix).full_len != 1:
            raise AssertionError("the common page is not held")
    took: dict[int, list[float]] = {leaves: [] for leaves in LEAVES}
    next_leaf = 1000 + max(LEAVES)
    with no_collection():
        for _ in range(samples):
            for leaves, tree in trees.items():
                start = time.thread_time()
                for _ in range(_BATCH):
                    tree.evict(tree.pages[FULL].take(1), FULL)
                took[leaves].append((time.thread_time() - start) / _BATCH)
                for leaf in range(next_leaf, next_leaf + _BATCH):
                    tree.insert(tree.root, np.array([7, leaf]), slot)
            next_leaf += _BATCH
    for leaves, tree in trees.items():
        tree.check()
        report.time(f"evict.{policy}.{leaves}", took[leaves], "us", note=f"{_BATCH} at a time")
    medians, note = [percentile(values, 50) for values in took.values()], "maximum over minimum of the sizes"
    ceiling_seconds = [min(medians)]
    report.time(
        f"evict.{policy}.spread", [max(medians)], "us", ceiling_seconds=ceiling_seconds, target=EVICT_SPREAD, note=note
    )

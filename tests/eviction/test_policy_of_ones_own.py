"""An eviction policy of one's own: a strategy in one file, and an entry in the table of policies."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import largest_first
from hicache.eviction.policy import EVICTION_POLICIES
from hicache.tiers import FULL
from hicache.tree.core import RadixTree
from hicache.tree.key import PageHasher
from largest_first import LargestFirst


def test_a_policy_of_ones_own_is_one_file() -> None:
    """It imports what nodes and orders are, and nothing else of the project."""
    names = {getattr(value, "__module__", None) for value in vars(largest_first).values()}
    ours = {name for name in names if name is not None and name.startswith("hicache")}
    assert ours <= {"hicache.eviction.orders", "hicache.tree.node"}


def test_a_strategy_of_ones_own_ranks_what_a_tree_evicts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tree evicts the prompt of most tokens first, of equals the least recently used; under lru the oldest."""
    monkeypatch.setitem(EVICTION_POLICIES, "largest", LargestFirst)
    for policy, expected in (("largest", [(4, 1), (3, 4), (2, 0), (2, 3), (1, 2)]), ("lru", [(2, 0), (4, 1), (1, 2)])):
        tree, evicted = RadixTree(1, PageHasher(b"identity", 1), policy=policy), list[tuple[int, int]]()
        for first, length in enumerate((2, 4, 1, 2, 3)):
            tree.insert(tree.root, np.full(length, first), torch.arange(1, length + 1))
        while (victim := tree.victim(FULL)) is not None:
            assert victim.run is not None
            evicted.append((victim.num_tokens, int(victim.run.tokens[0])))
            tree.drop(victim, FULL)
            tree.check()
        assert evicted[: len(expected)] == expected

"""A custom eviction policy for host pages: ranks of rows in one file, and an entry in the table of policies."""

from __future__ import annotations

import numpy as np
import pytest

import deepest_first
from deepest_first import DeepestFirst
from hicache.pages.order import RANK_POLICIES
from hicache.pages.states import COPY, TierPages
from hicache.replay.blocks import BlockPool

PROMPTS = [[b"a0", b"a1"], [b"b0", b"b1", b"b2", b"b3"], [b"c0", b"c1", b"c2"]]


def test_a_rank_policy_of_ones_own_is_one_file() -> None:
    """The file of a custom policy imports only rows and policies from the project."""
    names = {getattr(value, "__module__", None) for value in vars(deepest_first).values()}
    ours = {name for name in names if name is not None and name.startswith("hicache")}
    assert ours <= {"hicache.pages.policy", "hicache.pages.table"}


@pytest.mark.parametrize(
    ("policy", "expected"), [("deepest", "b3 c2 b2 c1 b1 a1 c0 b0 a0"), ("lru", "a1 a0 b3 b2 b1 b0 c2 c1 c0")]
)
def test_it_ranks_the_pages_that_a_tier_evicts(policy: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the custom policy the tier evicts the deepest pages of all prompts first, and of equally deep ones the
    youngest. With lru the tier evicts the oldest prompt from its end."""
    monkeypatch.setitem(RANK_POLICIES, "deepest", DeepestFirst)
    tier = TierPages(BlockPool(9), policy)
    for keys in PROMPTS:
        tier.complete(tier.reserve(tier.table.add(keys), COPY))
    tier.check()
    assert b" ".join(tier.table.keys_of(tier.order.eviction_order())).decode() == expected
    evicted = list[bytes]()
    while len(rows := tier.order.take(1)):
        evicted += tier.table.keys_of(rows)
        tier.drop(rows)
    assert b" ".join(evicted).decode() == expected
    tier.check(np.zeros(len(tier.table.age), np.int32))

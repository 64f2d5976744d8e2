"""The replay compared with the engine: a request hits equally many blocks of each tier in both."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict
from itertools import product

import numpy as np
import pytest

from hicache import CacheEngine, CacheRequest, build_engine
from hicache.flow.page_transfer import settle
from hicache.pages.key import Tokens
from hicache.pages.order import RANK_POLICIES
from hicache.pages.writes import BUCKET_S, Clock, WriteBudget
from hicache.replay.cache import BlockHits, CacheSimulation
from hicache.replay.hints import NO_HINT, Hint
from hicache.replay.settings import WRITE_POLICIES, ReplaySettings
from hicache.replay.trace import prefix_ids
from memory_store import MemoryPageStore
from toy_model import GEOMETRY, config
from waiting import BOUND_S, eventually

TOKEN_BYTES = 192
NO_LIMIT = 8 << 20  # limit of the disk in bytes


def serve(
    engine: CacheEngine,
    request_id: str,
    blocks: list[int],
    hint: Hint = NO_HINT,
    pass_time: Callable[[], None] = lambda: None,
) -> BlockHits:
    """Serve one request alone. One more token follows the blocks of the prompt, because the engine computes the last
    token and does not commit it. The disk is written at the end, after the call of `pass_time`."""
    seen, tokens = engine.inspect, np.array([*blocks, 1 << 20])
    copies = [seen.copies]
    engine.poll()  # applies the time of the engine's clock
    handle = engine.prefetch(request_id, tokens)
    if (prefetcher := seen.prefetcher) is not None:
        eventually(lambda: (prefetcher.poll(), handle.ended)[1])
    is_exclusive = seen.context.exclusive is not None
    reserve = 0 if is_exclusive else None
    lease = engine.acquire(CacheRequest(request_id, tokens, reserve_tokens=reserve, **asdict(hint)))
    hit = lease.hit
    settle(copies, BOUND_S)
    if is_exclusive:  # slots for new tokens are allocated after the load has ended
        engine.extend(lease, len(blocks) - lease.length)
    engine.commit(lease, tokens[:-1])
    settle(copies, BOUND_S)
    engine.release(lease)
    pass_time()
    settle([*copies, *seen.writes], BOUND_S)
    return BlockHits(hit.device, hit.host, hit.disk)


def random_hints(seed: str, num_requests: int) -> list[Hint]:
    """Random hints: about half of the requests have one. Hints may be wrong."""
    dice, found = random.Random(seed), list[Hint]()
    for _ in range(num_requests):
        kind = dice.random()
        found.append(Hint(kind < 0.2, dice.choice((0.0, 2.0, 50.0)) if kind > 0.7 else None))
    return found


def branching_prompts(seed: str, num_requests: int, most_blocks: int) -> list[Tokens]:
    """The beginnings of six texts, some of which continue differently."""
    dice = random.Random(seed)
    texts = [[dice.randrange(3) for _ in range(most_blocks)] for _ in range(6)]
    prompts = []
    for _ in range(num_requests):
        blocks = dice.choice(texts)[: dice.randrange(1, most_blocks + 1)]
        if dice.random() < 0.3:
            blocks[dice.randrange(len(blocks)) :] = [dice.randrange(3) for _ in range(dice.randrange(1, 6))]
        prompts.append(np.array(blocks[:most_blocks]))
    return prompts


WRITING = list(product(WRITE_POLICIES, (False, True)))
# By default each policy once, and each write policy with some of them.
CASES = [
    pytest.param(policy, *writing, marks=() if at == number % len(WRITING) else pytest.mark.long)
    for number, policy in enumerate(sorted(RANK_POLICIES))
    for at, writing in enumerate(WRITING)
]


def sizes_and_rules(
    policy: str, write_policy: str, *, has_disk: bool
) -> tuple[int, int, dict[str, int], dict[str, str]]:
    """Blocks of device and host, and the settings of an engine that has them."""
    device, host = (26, 26) if write_policy == "exclusive" else (30, 40)
    num_slots = device + (write_policy != "exclusive")  # one more slot for the token after the blocks
    sizes = {"device_tokens": num_slots, "host_bytes": (host + 1) * TOKEN_BYTES, "page_size": 1, "host_page_size": 1}
    rules = {"eviction_policy": policy, "write_policy": write_policy, "prefetch_mode": "wait_complete"}
    if write_policy == "exclusive" and policy != "auto" and not has_disk:  # with "auto" the host has lru
        rules["host_eviction_policy"] = "auto"
    if has_disk and policy == "auto":  # "auto" ranks pages again that were locked while they were written
        rules["host_eviction_policy"] = "lru"
    return device, host, sizes, rules


@pytest.mark.parametrize("hinted", [True, pytest.param(False, marks=pytest.mark.long)])
@pytest.mark.parametrize(("policy", "write_policy", "has_disk"), CASES)
def test_the_engine_hits_as_much(policy: str, write_policy: str, has_disk: bool, hinted: bool) -> None:
    """Pages have one token, requests run one after the other, each copy ends before the next step, and the disk is
    written when a request ends. A read from the disk has several jobs. With hints there is one request a second. Under
    `auto` the engine's device counts uses by nodes of the tree, and the replay by blocks, so only the sums over all
    requests are compared."""
    device, host, sizes, rules = sizes_and_rules(policy, write_policy, has_disk=has_disk)
    store = MemoryPageStore(NO_LIMIT) if has_disk else None
    order = rules.get("host_eviction_policy", "")
    simulation = CacheSimulation(
        ReplaySettings(device, host, None if has_disk else 0, policy, write_policy, host_policy=order)
    )
    hits, of_engine, now = [], [], 0
    prompts = prefix_ids(branching_prompts(policy, 120, 24))
    hints = random_hints(policy, len(prompts)) if hinted else [NO_HINT] * len(prompts)
    with build_engine(config(**sizes, **rules), GEOMETRY, store=store, clock=lambda: now) as engine:
        for now, (blocks, hint) in enumerate(zip(prompts, hints, strict=True)):
            hits.append(simulation.serve(blocks, hint, now))
            of_engine.append(serve(engine, f"r{now}", blocks.tolist(), hint))
            assert policy == "auto" or of_engine[-1] == hits[-1], f"request {now}: {blocks}, {hint}"
    on_device, on_host, on_disk = (sum(tier) for tier in zip(*hits, strict=True))
    assert on_device > 0 and on_host + on_disk > 0
    assert on_disk > 0 or not has_disk
    num_blocks = sum(map(len, prompts))
    assert abs(sum(map(sum, of_engine)) - sum(map(sum, hits))) < 0.05 * num_blocks


@pytest.mark.parametrize("host", [1, 2, 5])
def test_a_host_of_a_few_pages_adds_what_it_holds(host: int) -> None:
    """A host of a few pages adds hits for the pages that it holds. Victims for which it has no capacity would also have
    left one tier of the total size."""
    settings = ReplaySettings(26, host, 0, "lru", "exclusive"), ReplaySettings(26 + host, 0, 0, "lru", "write_through")
    simulation, one_tier = (CacheSimulation(each) for each in settings)
    sizes = {"device_tokens": 26, "host_bytes": (host + 1) * TOKEN_BYTES, "page_size": 1, "host_page_size": 1}
    num_hits = num_in_one = 0
    with build_engine(config(**sizes, eviction_policy="lru"), GEOMETRY) as engine:
        for now, blocks in enumerate(prefix_ids(branching_prompts("few", 120, 24))):
            hits = simulation.serve(blocks)
            assert serve(engine, f"r{now}", blocks.tolist()) == hits, f"request {now}: {blocks}"
            num_hits, num_in_one = num_hits + sum(hits), num_in_one + sum(one_tier.serve(blocks))
        assert abs(num_hits - num_in_one) <= 2 < engine.stats()["backup.skipped_tokens"]


@pytest.mark.parametrize("policy", ["lru", "slru"])
@pytest.mark.parametrize("budget", [0.125, 0.5])
def test_the_engine_writes_as_much_within_a_budget(policy: str, budget: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a write budget, hits and the blocks on the disk are equal after each request. The bucket has a few blocks,
    and the budget is below the rate of new pages. The clock counts requested blocks."""
    device, host, sizes, rules = sizes_and_rules(policy, "write_through", has_disk=True)
    num_asked, num_held = 0, list[int]()

    def limited(bytes_per_s: float, clock: Clock) -> WriteBudget:
        return WriteBudget(budget * TOKEN_BYTES, clock)

    monkeypatch.setattr("hicache.flow.writes.WriteBudget", limited)
    settings = ReplaySettings(device, host, None, policy, "write_through", disk_write_budget=budget)
    simulation, store = CacheSimulation(settings, 1.0), MemoryPageStore(NO_LIMIT)
    with build_engine(config(**sizes, **rules), GEOMETRY, store=store, clock=lambda: num_asked) as engine:
        for now, blocks in enumerate(prefix_ids(branching_prompts("budget", 200, 24))):

            def pass_time(num_blocks: int = len(blocks)) -> None:
                nonlocal num_asked
                num_asked += num_blocks

            expected = simulation.serve(blocks)
            assert serve(engine, f"r{now}", blocks.tolist(), pass_time=pass_time) == expected, (
                f"request {now}: {blocks}"
            )
            assert store.stats().puts == simulation.copies.written, f"request {now}"
            num_held.append(store.stats().puts)
    written, asked = num_held[-1], num_asked
    assert 0 < written <= budget * (asked + BUCKET_S)
    assert len({*num_held}) > 20, "the bucket filled again and again"

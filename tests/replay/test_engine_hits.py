"""The replay against the engine itself: a request hits as much of each tier in both."""

from __future__ import annotations

import random
from dataclasses import asdict
from itertools import product

import numpy as np
import pytest

from hicache import CacheEngine, CacheRequest, build_engine
from hicache.eviction.policy import EVICTION_POLICIES
from hicache.replay.cache import WRITE_POLICIES, BlockHits, CacheSimulation, ReplaySettings
from hicache.replay.hints import NO_HINT, Hint
from hicache.replay.trace import prefix_ids
from hicache.tree.key import Tokens
from memory_store import MemoryPageStore
from toy_model import GEOMETRY, config
from waiting import eventually

TOKEN_BYTES = 192
NO_LIMIT = 8 << 20  # of the disk, in bytes


def serve(engine: CacheEngine, request_id: str, blocks: list[int], hint: Hint) -> BlockHits:
    """One request, alone: a token behind the blocks is computed and not committed, for the engine computes the last."""
    tokens = np.array([*blocks, 1 << 20])
    engine.poll()  # by its clock
    handle = engine.prefetch(request_id, tokens)
    eventually(lambda: engine.poll() or handle.ended)
    is_exclusive = engine.inspect.context.exclusive is not None
    reserve = 0 if is_exclusive else None
    lease = engine.acquire(CacheRequest(request_id, tokens, reserve_tokens=reserve, **asdict(hint)))
    hit = lease.hit
    engine.flush()
    if is_exclusive:  # what is computed gets its room once the load has ended
        engine.extend(lease, len(blocks) - lease.length)
    engine.commit(lease, tokens[:-1])
    engine.flush()
    engine.release(lease)
    engine.flush()
    return BlockHits(hit.device, hit.host, hit.disk)


def random_hints(seed: str, num_requests: int) -> list[Hint]:
    """True or not, of about half of the requests."""
    dice, found = random.Random(seed), list[Hint]()
    for _ in range(num_requests):
        kind = dice.random()
        found.append(Hint(kind < 0.2, dice.choice((0.0, 2.0, 50.0)) if kind > 0.7 else None))
    return found


def branching_prompts(seed: str, num_requests: int, most_blocks: int) -> list[Tokens]:
    """The beginnings of six texts, some of which go on in another way."""
    dice = random.Random(seed)
    texts = [[dice.randrange(3) for _ in range(most_blocks)] for _ in range(6)]
    prompts = []
    for _ in range(num_requests):
        blocks = dice.choice(texts)[: dice.randrange(1, most_blocks + 1)]
        if dice.random() < 0.3:
            blocks[dice.randrange(len(blocks)) :] = [dice.randrange(3) for _ in range(dice.randrange(1, 6))]
        prompts.append(np.array(blocks[:most_blocks]))
    return prompts


# Between two evictions of one request, what these send to the disk is locked on the host.
AT_EVICTION = ("write_back", "exclusive")
WRITING = [case for case in product(WRITE_POLICIES, (False, True)) if not (case[1] and case[0] in AT_EVICTION)]
# By default each order once, and each way of writing with some of them.
CASES = [
    pytest.param(policy, *writing, marks=() if at == number % len(WRITING) else pytest.mark.long)
    for number, policy in enumerate(sorted(EVICTION_POLICIES))
    for at, writing in enumerate(WRITING)
]


@pytest.mark.parametrize("hinted", [False, True])
@pytest.mark.parametrize(("policy", "write_policy", "has_disk"), CASES)
def test_the_engine_hits_as_much(policy: str, write_policy: str, has_disk: bool, hinted: bool) -> None:
    """Pages of one token, requests one after the other, each copy ended before the next step; a read from the disk is
    several jobs. With hints, one request a second."""
    device, host = (26, 26) if write_policy == "exclusive" else (30, 40)
    store = MemoryPageStore(NO_LIMIT) if has_disk else None
    num_slots = device + (write_policy != "exclusive")  # for the token behind
    sizes = {"device_tokens": num_slots, "host_bytes": (host + 1) * TOKEN_BYTES, "page_size": 1, "host_page_size": 1}
    rules = {"eviction_policy": policy, "write_policy": write_policy, "prefetch_mode": "wait_complete"}
    if write_policy == "exclusive" and policy != "auto":  # whose host has lru
        rules["host_eviction_policy"] = "auto"
    order = rules.get("host_eviction_policy", "")
    simulation = CacheSimulation(
        ReplaySettings(device, host, None if has_disk else 0, policy, write_policy, host_policy=order), 1, 1
    )
    hits, now = [], 0
    prompts = prefix_ids(branching_prompts(policy, 120, 24))
    hints = random_hints(policy, len(prompts)) if hinted else [NO_HINT] * len(prompts)
    with build_engine(config(**sizes, **rules), GEOMETRY, store=store, clock=lambda: now) as engine:
        for now, (blocks, hint) in enumerate(zip(prompts, hints, strict=True)):
            hits.append(simulation.serve(blocks, hint, now))
            assert serve(engine, f"r{now}", blocks.tolist(), hint) == hits[-1], f"request {now}: {blocks}, {hint}"
    on_device, on_host, on_disk = (sum(tier) for tier in zip(*hits, strict=True))
    assert on_device > 0 and on_host + on_disk > 0
    assert on_disk > 0 or not has_disk or write_policy != "write_through"

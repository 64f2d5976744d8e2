"""Replays through the tiers: known answers, a twin that keeps single blocks, and the figures of a real trace."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import numpy as np
import pytest

from hicache.errors import ConfigError
from hicache.replay.cache import WRITE_POLICIES, BlockHits, CacheSimulation, ReplaySettings
from hicache.replay.simulation import ReplayResult, optimal, replay
from hicache.replay.trace import Trace, TraceRequest, read_trace
from hicache.tree.policy import ORDERS
from replay_case import CONVERSATION, SESSIONS, synthetic_trace, trace_of

Prefix = tuple[int, ...]


def hits_of(result: ReplayResult) -> list[BlockHits]:
    return [BlockHits(*map(int, hits)) for hits in zip(*result.hit_blocks.values(), strict=True)]


class Twin:
    """The rules of docs/replay.md for single blocks under LRU: a list a tier, least recently used first, each block
    known by its whole prefix. Looks at all of them for every block that goes."""

    def __init__(self, settings: ReplaySettings) -> None:
        self.s = settings
        self.device: list[Prefix] = []
        self.host: list[Prefix] = []
        self.disk: list[Prefix] = []
        self.uses: dict[Prefix, int] = {}
        self.stored: set[Prefix] = set()

    def serve(self, ids: list[int]) -> BlockHits:
        path = [tuple(ids[: at + 1]) for at in range(len(ids))]
        on_host = self.run(path, self.host)
        self.prefetch(path, on_host)
        in_memory = self.run(path, [*self.device, *self.host])
        most = len(path) if self.s.device_blocks is None else self.s.device_blocks
        length = min(in_memory, most)
        on_device = min(length, self.run(path, self.device))
        used = path[:length]
        for block in used:
            self.uses[block] += 1
        need = min(len(path), most)
        while self.s.device_blocks is not None and len({*self.device, *used}) + need - length > self.s.device_blocks:
            self.device.remove(self.oldest(self.device, used))
        self.use(self.device, used)
        self.backup(used)
        computed = path[length:need]
        for block in computed:
            self.uses.setdefault(block, 1)
        used = path[:need]
        self.use(self.device, used)
        self.backup(used)
        self.use(self.host, [block for block in used if block in self.host])
        self.use(self.disk, [block for block in used if block in self.disk and block in self.stored])
        self.forget()
        host_hits = max(0, min(length, on_host) - on_device)
        return BlockHits(on_device, host_hits, length - on_device - host_hits)

    def prefetch(self, path: list[Prefix], on_host: int) -> None:
        if not self.s.host_blocks and self.s.host_blocks is not None:
            return
        found = self.run(path[on_host:], self.disk)
        if self.s.host_blocks is not None:
            found = min(found, self.s.host_blocks - on_host)
        read = path[on_host : on_host + found]
        self.make_room(read, path[:on_host])
        self.use(self.host, [*path[:on_host], *read] if read else [])
        self.use(self.disk, read)
        for block in read:
            self.uses.setdefault(block, 1)
        self.stored |= set(read)

    def backup(self, path: list[Prefix]) -> None:
        wanted = path[self.run(path, self.host) :]
        if self.s.write_policy == "write_through_selective":
            few = [at for at, block in enumerate(wanted) if self.uses[block] < self.s.selective_hits]
            wanted = wanted[: few[0]] if few else wanted
        kept = path[: self.run(path, self.host)]
        if not wanted or (self.s.host_blocks is not None and len(kept) + len(wanted) > self.s.host_blocks):
            return
        self.make_room(wanted, kept)
        self.use(self.host, [*kept, *wanted])
        unstored = [block for block in wanted if block not in self.stored]
        self.use(self.disk, [block for block in unstored if block in self.disk])
        for block in [block for block in reversed(unstored) if block not in self.disk]:
            self.disk.append(block)
            if self.s.disk_blocks is not None and len(self.disk) > self.s.disk_blocks:
                self.disk.pop(0)
        self.stored |= set(unstored)

    def make_room(self, blocks: list[Prefix], kept: list[Prefix]) -> None:
        while self.s.host_blocks is not None and len(self.host) + len(blocks) > self.s.host_blocks:
            self.host.remove(self.oldest(self.host, kept))

    def forget(self) -> None:
        """What no memory holds is unknown: how often it was used, and that the disk had it."""
        held = {*self.device, *self.host}
        self.uses = {block: uses for block, uses in self.uses.items() if block in held}
        self.stored &= held

    @staticmethod
    def run(path: list[Prefix], tier: list[Prefix]) -> int:
        return next((at for at, block in enumerate(path) if block not in tier), len(path))

    @staticmethod
    def oldest(tier: list[Prefix], kept: list[Prefix]) -> Prefix:
        parents = {block[:-1] for block in tier}
        return next(block for block in tier if block not in kept and block not in parents)

    @staticmethod
    def use(tier: list[Prefix], path: list[Prefix]) -> None:
        """The path becomes the most recently used, its first block last."""
        for block in reversed(path):
            if block in tier:
                tier.remove(block)
            tier.append(block)


def test_blocks_come_from_the_tier_that_held_them() -> None:
    """Two blocks on the device, four on the host, all on disk: each prompt comes back from where it had gone."""
    settings = ReplaySettings(2, 4, None)
    result = replay(trace_of([1, 2], [3, 4], [1, 2], [5, 6], [7, 8], [3, 4], [7, 8], [7, 9]), settings)
    expected = [(0, 0, 0), (0, 0, 0), (0, 2, 0), (0, 0, 0), (0, 0, 0), (0, 0, 2), (0, 2, 0), (1, 0, 0)]
    assert hits_of(result) == [BlockHits(*hits) for hits in expected]
    assert result.hit_rate == 7 / 16
    assert result.tier_hit_rates == {"device": 1 / 16, "host": 4 / 16, "disk": 2 / 16}
    assert result.tokens_saved == 28
    assert result.disk_tokens.tolist() == [0, 0, 0, 0, 0, 8, 0, 0]
    assert np.isnan(result.ttft_s).all()


def test_a_scan_has_known_answers() -> None:
    """Fifty documents read in turn, twenty times: LRU hits nothing in a tier with room for all but one, and every
    repetition in a tier with room for all; the optimum keeps as many as there is room for."""
    rounds, documents = 20, 50
    trace = trace_of(*([document] for _ in range(rounds) for document in range(documents)))
    repeated = (rounds - 1) / rounds

    def rates(*blocks: int | None) -> tuple[float, ...]:
        return tuple(replay(trace, ReplaySettings(*blocks)).tier_hit_rates.values())

    assert rates(49) == (0, 0, 0) and rates(50) == rates(None) == (repeated, 0, 0)
    assert rates(10, 49) == rates(10, 20, 49) == (0, 0, 0)
    assert rates(10, 50) == rates(49, 50, 49) == (0, repeated, 0)
    assert rates(10, 20, 50) == rates(1, 1, None) == (0, 0, repeated)
    for blocks in (10, 49, 50):
        assert optimal(trace, ReplaySettings(blocks)).hit_rate == pytest.approx(repeated * blocks / documents)


def test_the_tail_goes_first() -> None:
    """LRU on one tier keeps the front of a prompt when room is needed: known by hand."""
    result = replay(trace_of([1, 2, 3, 4], [5, 6], [1, 2, 3, 4], [5, 6]), ReplaySettings(4))
    # [1 2 | 5 6] after the second; the third evicts 6, 5; the fourth 4, 3.
    assert [hits.device for hits in hits_of(result)] == [0, 0, 2, 0]


def test_a_partial_block_counts_for_its_tokens() -> None:
    """A prompt that is hit whole saves its tokens, not those of whole blocks."""
    requests = tuple(TraceRequest(float(at), np.array([1, 2]), 7, 1) for at in range(2))
    result = replay(Trace("generated", 4, requests), ReplaySettings(8))
    assert result.hit_rate == 0.5 and result.tokens_saved == 7 and result.device_tokens.tolist() == [0, 7]


@pytest.mark.parametrize("write_policy", ["write_through", "write_through_selective"])
@pytest.mark.parametrize("seed", [pytest.param(seed, marks=pytest.mark.long if seed > 7 else ()) for seed in range(40)])
def test_the_tree_hits_what_single_blocks_would(seed: int, write_policy: str) -> None:
    """Each request hits as many blocks of each tier as in a cache of single blocks, tiers of all sizes included."""
    dice = random.Random(f"{seed}{write_policy}")
    sizes = (dice.choice([3, 6, 12]), dice.choice([0, 4, 8, 20, None]), dice.choice([0, 5, 10, 40, None]))
    settings = ReplaySettings(sizes[0], sizes[1], sizes[2] if sizes[1] != 0 else 0, "lru", write_policy)
    cache, twin = CacheSimulation(settings), Twin(settings)
    for now in range(200):
        ids = [dice.randrange(2) for _ in range(dice.randrange(9))]
        assert cache.serve(np.array(ids, np.int64)) == twin.serve(ids), f"request {now} of {settings}"
        cache.check()


@pytest.mark.parametrize(("policy", "write_policy"), list(zip(sorted(ORDERS), itertools.cycle(WRITE_POLICIES))))
def test_tiers_add_up(policy: str, write_policy: str) -> None:
    """Whatever the order: no tier holds more than it may, tiers hit no more than the optimum of their sum, and
    unlimited ones all that came before."""
    dice = random.Random(policy)
    trace = trace_of(*([dice.randrange(3) for _ in range(dice.randrange(1, 9))] for _ in range(300)))
    settings = ReplaySettings(10, 20, 40, policy, write_policy)
    result = replay(trace, settings)
    assert 0 < result.hit_rate <= optimal(trace, settings).hit_rate
    whole = replay(trace, ReplaySettings(None, None, None, policy, write_policy))
    assert whole.hit_rate == optimal(trace, ReplaySettings(None)).hit_rate > result.hit_rate
    assert whole.tier_hit_rates["device"] == whole.hit_rate


@pytest.mark.parametrize(
    "wrong", [{"disk_blocks": 1.5}, {"disk_blocks": 10}, {"host_blocks": -1}, {"selective_hits": 0}]
)
def test_what_no_cache_can_have_is_refused(wrong: dict[str, object]) -> None:
    """The message names the setting. What flags can give is in tests/cli/test_wrong_input.py."""
    with pytest.raises(ConfigError, match=next(iter(wrong)).split("_")[0]):
        ReplaySettings(**{"device_blocks": 10, **wrong})  # type: ignore[arg-type]


def test_progress_is_told_and_may_stop_a_replay() -> None:
    """Counts rise to the number of requests; what the callback raises ends the replay."""
    trace = trace_of(*([at] for at in range(200)))
    counts: list[int] = []
    replay(trace, ReplaySettings(10), counts.append)
    assert counts == sorted(set(counts)) and counts[-1] == 200 and len(counts) > 2

    def stop(count: int) -> None:
        if count:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        replay(trace, ReplaySettings(10), stop)


PUBLISHED: list[tuple[Path, int, int, dict[int | None, float]]] = [
    # a chat service
    (CONVERSATION, 12_031, 512, {1_000: 0.0445, 3_000: 0.0653, 10_000: 0.2116, 30_000: 0.3257, None: 0.3664}),
    # coding agents
    (SESSIONS, 1_532, 64, {4_000: 0.4388, 8_000: 0.7376, 16_000: 0.9285, 32_000: 0.9570, None: 0.9623}),
]


@pytest.mark.long
@pytest.mark.parametrize(("path", "num_requests", "block_tokens", "expected"), PUBLISHED, ids=["chat", "agents"])
def test_published_figures(path: Path, num_requests: int, block_tokens: int, expected: dict[int | None, float]) -> None:
    """On one tier LRU and no limit hit what others measured, to four places."""
    if not path.exists():
        pytest.skip("the trace is not here")
    trace = read_trace(path)
    assert (len(trace.requests), trace.block_tokens) == (num_requests, block_tokens)
    assert {size: round(replay(trace, ReplaySettings(size)).hit_rate, 4) for size in expected} == expected


def test_another_simulator_hits_as_much() -> None:
    """LRU on one tier hits what libcachesim's does, asked for each block in the order in which the tree uses them."""
    libcachesim = pytest.importorskip("libcachesim")
    prompts, known = synthetic_trace(num_requests=600), dict[Prefix, int]()
    paths = [
        [known.setdefault(tuple(prompt[: end + 1].tolist()), len(known) + 1) for end in range(len(prompt))]
        for prompt in prompts
    ]
    longest = max(map(len, prompts))
    for capacity in (longest, 2 * longest, 2000):
        cache, request, hits = libcachesim.LRU(capacity), libcachesim.Request(), []
        request.obj_size = 1
        for path in paths:
            length = 0
            for request.obj_id in path:
                if cache.find(request, False) is None:
                    break
                length += 1
            hits.append(length)
            for request.obj_id in [*path[:length], *reversed(path)]:  # the prefix stays while the rest finds room
                cache.get(request)
        assert 0 < sum(hits) < sum(map(len, paths)) - len(known)
        assert replay(trace_of(*prompts), ReplaySettings(capacity)).hit_blocks["device"].tolist() == hits

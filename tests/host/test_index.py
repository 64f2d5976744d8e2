"""The index of host pages against dictionaries: what comes, what is locked, and what leaves first."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch

from cases import long
from hicache.errors import InvariantError
from hicache.eviction.policy import EVICTION_POLICIES
from hicache.host.exclusive import ExclusiveIndex
from hicache.host.index import PageIndex
from hicache.host.pool import HostPagePool
from hicache.host.run import HostRun, NewPages, RunPart, end_of, ids_of, pages_of, path_of, second_pages_of
from hicache.layout import BufferSpec, PoolLayout
from hicache.replay.blocks import BlockPool

NUM_PAGES, RUN_PAGES = 40, 16
LAYOUT = PoolLayout((BufferSpec("k", torch.bfloat16, (8,), "token", (0,)),), 1)
# Prompts that share beginnings: a key names a page and all before it.
TEXTS = ("abcdefghijklmnopqrstuvwxyz", "abcdefghijklmnopqrst123", "abcx", "0123456789", "01234abcdefghijklmnop", "z")
EACH_KIND = [(kind, is_packed, range(4)) for kind in (PageIndex, ExclusiveIndex) for is_packed in (False, True)]
PROMPTS = [[text[: end + 1].encode() for end in range(len(text))] for text in TEXTS]


class Model:
    """An index, and beside it what it should hold: `ids` and runs by key. `device`: what the device holds."""

    def __init__(self, policy: str, seed: int, kind: type[PageIndex] = PageIndex) -> None:
        pool = HostPagePool(LAYOUT, 8, (NUM_PAGES + 1) * LAYOUT.page_bytes(8), pin=False)
        self.index = kind(pool, policy, self.came, self.left)
        self.device = dict[bytes, None]()
        self.dice = random.Random(f"{policy} {seed}")
        self.ids: dict[bytes, int] = {}
        self.second_pages: dict[bytes, int] = {}
        self.runs: dict[bytes, HostRun] = {}
        self.in_flight: list[HostRun] = []
        self.locked: list[list[HostRun]] = []
        self.evicted = self.refused = self.twice = self.now_s = 0

    def came(self, run: HostRun) -> None:
        assert not self.ids.keys() & set(run.keys), "a page came twice"
        self.ids.update(zip(run.keys, run.ids, strict=True))
        self.second_pages.update(run.second_pages)
        self.runs.update(dict.fromkeys(run.keys, run))

    def left(self, run: HostRun, keys: Sequence[bytes]) -> None:
        """The last keys of a run that nobody has locked, and that nothing held follows."""
        for key in keys:
            of_key = self.runs.pop(key)
            assert of_key is run or isinstance(self.index, ExclusiveIndex)  # the first of a run may leave alone
            del self.ids[key]
            self.second_pages.pop(key, None)
        if isinstance(self.index, ExclusiveIndex) and not {*keys} <= self.device.keys():
            runs = [self.index.get(key) for key in self.index.duplicates()]
            assert all(at is not None and at.locks for at in runs), "left, and a duplicate stayed"
        assert run.locks == 0 and not run.after and list(keys) == sorted(keys)
        assert not any(at.parent_run is run for at in self.runs.values() if not run.keys)
        self.evicted += len(keys)

    def to_device(self) -> None:
        """It computes or loads a prompt; what the host has of it is a duplicate from now on."""
        assert isinstance(self.index, ExclusiveIndex)
        keys = self.prompt()
        self.device.update(dict.fromkeys(keys))
        self.index.came_to_device(self.index.parts(keys))

    def off_device(self) -> None:
        """It evicts the end of a prompt, and what follows that."""
        assert isinstance(self.index, ExclusiveIndex)
        keys = self.prompt()
        gone = [key for key in self.device if key.startswith(keys[-1])]
        for key in sorted(gone, key=len, reverse=True):
            del self.device[key]
            self.index.left_device([key])

    def prompt(self) -> list[bytes]:
        keys = self.dice.choice(PROMPTS)
        return keys[: self.dice.randrange(1, len(keys) + 1)]

    def reserve(self) -> None:
        """From the device what is lacking, or from a store what may be in flight already."""
        keys = self.prompt()
        is_read = self.dice.random() < 0.5
        start = self.dice.randrange(len(keys)) if is_read else 0
        is_known = start > 0 and self.dice.random() < 0.7
        new = NewPages(keys[start:], keys[start - 1] if is_known else None, start, event_pages=keys, offset=start)
        pieces = self.index.absent(new)
        capacity = NUM_PAGES - sum(run.num_held for run in {*self.runs.values()} if run.locks)
        capacity -= sum(run.num_held for run in self.in_flight)
        wanted = sum(len(piece.keys) for piece in pieces)
        before, chain = len(self.ids), set[HostRun]()  # what they follow does not leave for them
        for piece in pieces:
            at = self.runs.get(piece.previous_key) if piece.previous_key else None
            while at is not None and not at.locks and not at.is_duplicate:
                chain.add(at)
                at = at.needs
        runs = self.index.reserve(pieces)
        if runs is None:
            assert len(self.ids) == before and wanted > self.index.capacity - sum(at.num_held for at in chain)
            self.refused += 1
            return
        assert wanted <= capacity and chain <= {*self.runs.values()}
        for run in runs:
            run.job = "a read" if is_read else None
            assert run.event_pages[run.offset :][: len(run.keys)] == run.keys and len(run.keys) <= RUN_PAGES
            assert is_read or all(self.index.is_coming(key) for key in run.keys)
        self.in_flight += runs

    def reserve_second_pages(self) -> None:
        """Some pages in flight did not fit."""
        if not self.in_flight:
            return
        run, before, capacity = self.dice.choice(self.in_flight), dict(self.ids), self.index.capacity
        keys = [key for key in run.keys if key not in run.second_pages and self.dice.random() < 0.3]
        if self.index.reserve_second_pages(run, keys):
            assert len(keys) <= capacity and run.second_pages.keys() >= {*keys}
        else:
            assert len(keys) > capacity and self.ids == before
            self.refused += 1

    def land(self) -> None:
        if self.in_flight:
            run = self.in_flight.pop(self.dice.randrange(len(self.in_flight)))
            if self.dice.random() < 0.2:
                self.index.abandon(run)
                return
            ok = None if self.dice.random() < 0.7 else [self.dice.random() < 0.7 for _ in run.keys]
            good = [key for i, key in enumerate(run.keys) if ok is None or ok[i]]
            self.twice += any(key in self.ids for key in good)
            wanted = [key for key in good if key not in self.ids]
            published = self.index.publish(run, ok)
            assert [key for part in published for key in part.keys] == wanted
            assert all(part.event_pages[part.offset :][: len(part.keys)] == part.keys for part in published)

    def lock(self) -> None:
        parts = self.index.parts(self.prompt())
        self.index.lock([part.run for part in parts])
        if parts and isinstance(self.index, ExclusiveIndex):
            end, keys = self.dice.randrange(1, parts[-1].end + 1), [key for part in parts for key in part.keys]
            others = {run for runs in self.locked for run in runs}
            parts = self.index.divided(parts, end)
            assert [key for part in parts for key in part.keys] == keys
            assert all(part.run in others for part in parts if part.start < end < part.end)
        self.locked.append([part.run for part in parts])

    def unlock(self) -> None:
        if self.locked:
            self.index.unlock(self.locked.pop(self.dice.randrange(len(self.locked))))

    def use(self) -> None:
        keys = self.prompt()
        used = self.index.count_use(self.index.parts(keys))
        assert all(
            part.run.keys[part.skipped :][: part.end - part.start] == keys[part.start : part.end] for part in used
        )
        self.index.touch(self.index.runs_of(keys))

    def keep(self) -> None:
        """A prompt is kept for some seconds, of which one passes."""
        self.now_s += 1
        self.index.expire(self.now_s)
        self.index.keep(self.prompt(), self.now_s + self.dice.randrange(20), NUM_PAGES * 0.9)

    def link(self) -> None:
        """Of pages that were named together none leaves while one behind it is held, unless that has come before."""
        keys = self.prompt()
        self.index.link(keys)
        for upper, lower in pairwise(self.index.parts(keys)):
            if upper.end == lower.start:
                assert lower.run.parent_run is not None or lower.run in path_of(upper.run)

    def check(self) -> None:
        for key in self.ids:  # runs may have been divided
            run = self.index.get(key)
            assert run is not None and key in run.keys
            self.runs[key] = run
        if isinstance(self.index, ExclusiveIndex):
            duplicates = self.index.duplicates()
            assert {*duplicates} <= self.device.keys() & self.ids.keys()
            assert len({*duplicates}) == len(duplicates) == self.index.num_duplicates
        locks = Counter(run for runs in self.locked for run in runs)
        self.index.check(locks + Counter(self.in_flight))
        assert len(self.index) == len(self.ids) and self.index.num_raw == len(self.second_pages)
        for keys in PROMPTS:
            parts = self.index.parts(keys)
            assert ids_of(parts).tolist() == [self.ids[key] for key in keys if key in self.ids]
            rest, wanted = second_pages_of(parts), [self.second_pages.get(key, 0) for key in keys if key in self.ids]
            assert (rest is None) == (not any(wanted)) and (rest is None or rest.tolist() == wanted)
            assert [i for part in parts for i in range(part.start, part.end)] == [
                i for i, key in enumerate(keys) if key in self.ids
            ]
            end = next((at for at, key in enumerate(keys) if key not in self.ids), len(keys))
            assert end_of(self.index.parts(keys), 0) == end


@pytest.mark.parametrize(
    ("kind", "are_packed", "seeds"),
    [(PageIndex, False, (0, 1)), (PageIndex, True, (1,)), (ExclusiveIndex, True, (1,)), *long(*EACH_KIND)],
)
@pytest.mark.parametrize("policy", sorted(EVICTION_POLICIES))
def test_an_index_holds_what_came_and_was_not_needed_elsewhere(
    policy: str, kind: type[PageIndex], are_packed: bool, seeds: Sequence[int]
) -> None:
    """Over random histories no page has two keys, nothing locked leaves, and of a prompt the end leaves first. Of
    packed pages some have a second one, which leaves with them. In an exclusive one duplicates leave first."""
    evicted = refused = twice = 0
    for seed in seeds:
        model = Model(policy, seed, kind)
        ops = [
            model.reserve,
            model.reserve,
            model.land,
            model.land,
            model.lock,
            model.lock,
            model.unlock,
            model.use,
            model.keep,
        ]
        ops += [model.link, model.reserve_second_pages] if are_packed else [model.link]
        ops += [model.to_device, model.to_device, model.off_device] if kind is ExclusiveIndex else []
        for _ in range(600):
            model.dice.choice(ops)()
            model.check()
        while model.in_flight:
            model.land()
        while model.locked:
            model.unlock()
        model.check()
        while model.device:
            model.off_device()
        model.index.clear()
        assert not model.ids and model.index.pool.available() == NUM_PAGES
        evicted, refused, twice = evicted + model.evicted, refused + model.refused, twice + model.twice
    assert (
        evicted > 20 * len(seeds)
        and refused > 0
        and (are_packed or kind is ExclusiveIndex or twice > 0 or len(seeds) < 4)
    )


def test_of_prompts_the_one_used_longest_ago_leaves_first() -> None:
    """And of it the end, page by page."""
    model = Model("lru", 0)
    prompts = [[bytes([name, at]) for at in range(13)] for name in range(3)]
    for keys in prompts:
        (run,) = model.index.reserve([NewPages(keys)]) or ()
        model.index.publish(run)
    model.index.touch(model.index.runs_of(prompts[0]))
    (run,) = model.index.reserve([NewPages([b"new"] + [bytes([9, at]) for at in range(8)])]) or ()
    assert [end_of(model.index.parts(keys), 0) for keys in prompts] == [13, 5, 13]
    model.index.abandon(run)


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_a_part_of_a_run_that_leaves_is_no_use_of_the_rest(policy: str) -> None:
    """Requests that use two runs have not ended. The run that loses a page goes on losing them until it is gone."""
    index = PageIndex(BlockPool(32), policy)
    runs = [(index.reserve([NewPages([bytes([prompt, at]) for at in range(16)])]) or [])[0] for prompt in range(2)]
    for run in runs:
        index.publish(run)
    index.count_use([RunPart(run, 0, 0, 16) for run in runs])
    in_flight = [run for at in range(16) for run in index.reserve([NewPages([bytes([9, at])])]) or ()]
    assert len(in_flight) == 16 and sorted(len(run.ids) * run.is_published for run in runs) == [0, 16]
    index.check(Counter(in_flight))


def test_pieces_that_come_together_follow_each_other() -> None:
    """Of two pieces of one prompt the second leaves first, though it is the younger."""
    model, keys = Model("fifo", 0), [bytes([at]) for at in range(12)]
    runs = model.index.reserve([NewPages(keys[:5]), NewPages(keys[5:], keys[4], 5)])
    assert runs is not None and [run.parent_run for run in runs] == [None, runs[0]]
    for run in runs:
        model.index.publish(run)
    (new,) = model.index.reserve([NewPages([bytes([99, at]) for at in range(8)])] * 1) or ()
    more = model.index.reserve([NewPages([bytes([98, at]) for at in range(NUM_PAGES - 12)])])
    assert end_of(model.index.parts(keys), 0) == 4 and more is not None
    for run in (new, *more):
        model.index.abandon(run)


def test_runs_that_came_apart_follow_each_other_once_they_were_named_together() -> None:
    """Then the ends leave first, the older of two before the other, though both are younger than what they follow."""
    model, keys = Model("fifo", 0), [bytes([at]) for at in range(12)]
    for piece in (keys[:5], keys[5:], [b"other"]):
        (run,) = model.index.reserve([NewPages(piece)]) or ()
        model.index.publish(run)
    model.index.lock([run])
    model.index.link([*keys[:5], b"absent", *keys[5:]])
    assert [run.parent_run for run in model.index.runs_of(keys)] == [None, None]
    for prompt in (keys, [*keys[:5], b"other"], keys):
        model.index.link(prompt)
    model.index.check(Counter([run]))
    model.index.unlock([run])
    for num_pages, left in ((NUM_PAGES - 13 + 3, 10), (4, 6), (1, 5), (1, 4)):
        assert model.index.reserve([NewPages([b"%d %d" % (left, at) for at in range(num_pages)])])
        assert len(model.index) == left and end_of(model.index.parts(keys), 0) == left - (b"other" in model.index)


def test_pages_are_whole_where_none_is_lacking() -> None:
    """A read's page that did not come is lacking, whatever came behind it, until it comes; from the device they count
    at once."""
    model, keys = Model("fifo", 0), [bytes([at]) for at in range(40)]
    runs = model.index.reserve([NewPages(keys[:35])]) or ()
    assert [model.index.is_whole(keys[:end]) for end in (1, 20, 35, 36)] == [True, True, True, False]
    for run in runs:
        run.job = "a read"
    assert not model.index.is_whole(keys[:20])
    for run in runs:
        model.index.publish(run, [key != keys[20] for key in run.keys])
    ends = {(start, end) for start in (0, 3, 20, 21, 30) for end in (20, 21, 35) if start < end}
    assert {at for at in ends if model.index.is_whole(keys[slice(*at)])} == {(0, 20), (3, 20), (21, 35), (30, 35)}
    (filling,) = model.index.reserve([NewPages(keys[20:21], keys[19], 20)]) or ()
    assert model.index.is_whole(keys[:35]) and not model.index.is_whole(keys[:36])
    model.index.publish(filling)
    assert {at for at in ends if model.index.is_whole(keys[slice(*at)])} == ends


@pytest.mark.parametrize("is_second_first", [False, True])
def test_runs_of_the_same_pages_follow_each_other_once(is_second_first: bool) -> None:
    """A read brings again what its own run follows: whichever comes first, no run follows itself, and all can leave."""
    model, keys = Model("fifo", 0), [bytes([at]) for at in range(8)]
    (first,) = model.index.reserve([NewPages(keys[:5])]) or ()
    (second,) = model.index.reserve([NewPages(keys[2:], keys[1], 2)]) or ()
    assert second.parent_run is first
    for run in (second, first) if is_second_first else (first, second):
        model.index.publish(run)
    assert end_of(model.index.parts(keys), 0) == 8
    model.index.check(Counter())
    model.index.clear()
    assert model.index.pool.available() == NUM_PAGES


def test_the_audit_finds_planted_faults() -> None:
    """It can fail: a lock of nobody, a page in flight of nobody, and one counted as evictable or kept that is not."""
    model = Model("lru", 0)
    runs = model.index.reserve([NewPages(PROMPTS[0], None)])
    assert runs is not None
    with pytest.raises(InvariantError, match="26 pages are in flight, 0 of copies"):
        model.index.check(Counter())
    for run in runs:
        model.index.publish(run)
    model.index.check(Counter())
    with pytest.raises(InvariantError, match="has 0 locks, 1 are somebody's"):
        model.index.check(Counter([runs[1]]))
    model.index.num_evictable += 1
    with pytest.raises(InvariantError, match="27 pages were counted as evictable"):
        model.index.check(Counter())
    assert sorted(pages_of(runs).tolist()) == sorted(model.ids.values())
    model.index.num_evictable -= 1
    model.index.keep(PROMPTS[0], 1, NUM_PAGES)
    model.index.check(Counter())
    runs[0].keep = None
    with pytest.raises(InvariantError, match="26 pages were counted as kept, 10 are"):
        model.index.check(Counter())


def test_what_the_device_has_as_well_leaves_first() -> None:
    """The head of the prompt that was used last, though another run follows it; then the one before. What has left the
    device is no duplicate any more, and of what was dropped it is to be copied again."""
    index, prompts = (
        ExclusiveIndex(BlockPool(96), "lru"),
        [[bytes([name, at]) for at in range(32)] for name in range(3)],
    )
    for keys in prompts:
        for run in index.reserve([NewPages(keys)]) or ():
            index.publish(run)
    for keys in (prompts[2], prompts[1]):
        index.came_to_device(index.parts(keys[:20]))
    for keys in prompts[1:]:
        index.touch(index.runs_of(keys[:20]))
    index.left_device(prompts[2][18:20])
    index.lock(index.runs_of(prompts[2][20:]))  # and so its head, was it no duplicate
    held = [(32, 32, 32), (32, 32, 31), (32, 32, 16), (32, 31, 16), (32, 16, 16), (32, 12, 16), (31, 12, 16)]
    for num_pages, wanted in zip((0, 1, 15, 1, 15, 4, 1), held, strict=True):
        assert num_pages == 0 or index.reserve([NewPages([bytes([9, num_pages, at]) for at in range(num_pages)])])
        assert tuple(sum(key in index for key in keys) for keys in prompts) == wanted
        assert [keys[0] in index for keys in prompts[1:]] == [num_held == 32 for num_held in wanted[1:]]
    assert prompts[2][16] in index and prompts[2][0] not in index
    index.left_device(prompts[2][8:18])
    assert index.num_returned == 8 and index.num_duplicates == 0

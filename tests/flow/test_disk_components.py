"""Full pages, windows and recurrent states on disk: a pass reads back the same bytes that an earlier pass wrote."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from component_case import EACH_MODEL, FULL, MODELS, POLICIES, STATES, WINDOW, WINDOWS, WITH_COMPONENTS, config, prefill
from disk_case import TroubledStore, page_keys
from hicache import AdvancedConfig, CacheEngine, CacheRequest, DiskConfig, Hit, ModelGeometry, build_engine
from hicache.flow.write_policy import POLICIES as POLICIES_BY_NAME
from hicache.pages.key import component_keys
from hicache.storage import PageBuffer, list_pages
from hicache.tiers import MAMBA, SWA
from memory_store import MemoryPageStore
from priority_write import PriorityWriteThrough
from toy_model import prompt, settled, until_ready
from waiting import BOUND_S, eventually

PAGE = 8

Stores = list[TroubledStore]


def engine_at(path: Path, model: ModelGeometry, **changes: object) -> CacheEngine:
    settings = {"prefetch_mode": "wait_complete", "advanced": AdvancedConfig(disk_reader_threads=2), **changes}
    return build_engine(config(disk=DiskConfig(path=str(path / "s"), budget_bytes=8 << 20), **settings), model)


def serve(engine: CacheEngine, name: str, tokens: np.ndarray, model: ModelGeometry) -> Hit:
    """Prefetch and admit a request, compute the rest and compare it with the true values, commit, and wait for all
    copies."""
    until_ready(engine, engine.prefetch(name, tokens))
    with engine.acquire(CacheRequest(name, tokens)) as lease:
        prefill(engine, lease, tokens, model)
    engine.flush()
    engine.check()
    return lease.hit


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("model", EACH_MODEL)
def test_a_restart_finds_what_was_committed(tmp_path: Path, model: ModelGeometry, policy: str, device: str) -> None:
    """After a restart a prompt hits on disk up to its last checkpoint, and passes read the bytes that were written
    before."""
    asked = [prompt(seed, 61) for seed in range(4)]
    with engine_at(tmp_path, model, write_policy=policy, device=device) as engine:
        for number in range(12):
            serve(engine, f"r{number}", asked[number // 3], model)
        settled(engine)
    found = 0
    with engine_at(tmp_path, model, write_policy=policy, device=device) as engine:
        for seed, tokens in enumerate(asked):
            before = engine.lookup(tokens, disk_wait_s=BOUND_S)
            assert (before.device, before.host) == (0, 0)
            assert serve(engine, f"again.{seed}", tokens, model) == Hit(disk=before.disk)
            found += before.disk
        settled(engine)
    assert found == 4 * 56


class CutOff(MemoryPageStore):
    """A store that takes `num_pages` pages and refuses all later ones."""

    def __init__(self, num_pages: int) -> None:
        super().__init__(1 << 30)
        self._left = num_pages

    def put(
        self, items: Sequence[tuple[bytes, PageBuffer]], *, lag: float = 0.0, deadline_s: float = math.inf
    ) -> list[bool]:
        ok = super().put(items[: self._left], lag=lag, deadline_s=deadline_s)
        self._left -= len(ok)
        return ok + [False] * (len(items) - len(ok))


WAYS = ("whole", "small host", "small store", "cut off")
# Each way with each model and with each policy. The rows of the product that are left out are long.
STOPS = [
    pytest.param(
        model, policy, way, id=f"{kind}-{policy}-{way}", marks=() if (i + j - k) % 4 == 0 else pytest.mark.long
    )
    for i, (kind, model) in enumerate(MODELS.items())
    for j, policy in enumerate((*POLICIES, "own"))
    for k, way in enumerate(WAYS)
]


@pytest.mark.parametrize(("model", "policy", "way"), STOPS)
def test_a_stop_stores_beginnings_before_ends(
    model: ModelGeometry, policy: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a close the store has all pages that the write policy keeps, however small the host is. A store without
    capacity for all of them has the beginnings of prompts."""
    monkeypatch.setitem(POLICIES_BY_NAME, "own", lambda config: PriorityWriteThrough(minimum=1))
    asked = [np.concatenate([prompt(1, 48), prompt(seed, 65)]) for seed in (2, 3)]  # 22 pages
    page_bytes = 8 * 64 * model.layer_num  # bytes of a page, at most
    store = MemoryPageStore(12 * page_bytes) if way == "small store" else CutOff(30 if way == "cut off" else 1 << 30)
    sizes = {"host_bytes": (7 if way == "small host" else 60) * 8 * 256, "host_states": 4, "write_policy": policy}
    sizes["device_tokens"] = 160 if way == "whole" else 512  # pages that are evicted first are also stored first
    with build_engine(config(window_tokens=256, **sizes), model, store=store) as engine:
        for n in range(4):
            tokens = asked[n // 2]
            if way == "whole":
                engine.flush()
            with engine.acquire(CacheRequest(f"r{n}", tokens, priority=1)) as lease:
                prefill(engine, lease, tokens, model)
        keys = [page_keys(engine, tokens[:112]) for tokens in asked]
    stored = [store.contains(of_prompt) for of_prompt in keys]
    if way == "cut off":
        assert stored == [sorted(of_prompt, reverse=True) for of_prompt in stored]
    num_heads = 3 if way == "small store" else 1 if way == "cut off" else 14
    assert all(all(of_prompt[:num_heads]) for of_prompt in stored)


@pytest.mark.parametrize("chunk", [16, 80])
def test_a_store_smaller_than_a_prompt_keeps_its_beginning(chunk: int) -> None:
    """If a store is smaller than a prompt, it evicts the end of the prompt and keeps the beginning, whether the pages
    arrive in small or large chunks."""
    store, tokens = MemoryPageStore(20 * 8 * 192), prompt(1, 481)
    sizes = {"device_tokens": 512, "max_context_len": 512, "host_bytes": 80 * 8 * 192}
    with build_engine(config(**sizes), FULL, store=store) as engine:
        with engine.acquire(CacheRequest("a", tokens)) as lease:
            for end in range(chunk, 481, chunk):
                prefill(engine, lease, tokens[:end], FULL)
                engine.flush()
        keys = page_keys(engine, tokens[:480])
    assert all(store.contains(keys[:8]))


def test_a_store_evicts_the_end_that_came_after_its_request() -> None:
    """The last pages of a prompt are written after its request has ended, but the store still evicts them first."""
    store, tokens = MemoryPageStore(200 * 8 * 192), prompt(1, 161)
    sizes = {"device_tokens": 512, "max_context_len": 512, "host_bytes": 400 * 8 * 192}
    with build_engine(config(**sizes), FULL, store=store) as engine:
        with engine.acquire(CacheRequest("a", tokens)) as lease:
            prefill(engine, lease, tokens[:80], FULL)
            engine.flush()
            prefill(engine, lease, tokens, FULL)
        keys = page_keys(engine, tokens[:160])
    assert all(store.contains(keys))
    store.put([(b"other%d" % n, np.zeros(8 * 192, np.uint8)) for n in range(190)])
    assert store.contains(keys) == [True] * 10 + [False] * 10


@pytest.mark.parametrize("model", WITH_COMPONENTS)
def test_pages_missing_on_disk_are_recomputed(tmp_path: Path, model: ModelGeometry, stores: Stores) -> None:
    """If the disk lost a state or a window page, a prompt hits only as far as all components reach."""
    tokens = prompt(1, 61)
    with engine_at(tmp_path, model) as engine:
        serve(engine, "a", tokens, model)
        engine.flush()
        context = engine.inspect.context
        name = MAMBA if model is STATES else SWA
        keys = context.tree.prompt_keys(context.tree.match(tokens[:56]), tokens[:56])
        assert stores[-1].delete(component_keys(name, keys[-1:])) == 1
    with engine_at(tmp_path, model) as engine:
        assert engine.lookup(tokens, disk_wait_s=BOUND_S).disk < 56
        hit = serve(engine, "b", tokens, model)
        assert hit.disk == hit.tokens < 56
        settled(engine)


@pytest.mark.parametrize("model", WITH_COMPONENTS)
def test_pages_of_another_prompt_in_memory_are_read_too(tmp_path: Path, model: ModelGeometry) -> None:
    """Two prompts branch within a node of the first prompt. After the branch point the second prompt does not use the
    windows and states of the first."""
    common, ends = prompt(1, 37), [prompt(2, 28), prompt(3, 28)]
    asked = [np.concatenate([common, end]) for end in ends]
    with engine_at(tmp_path, model) as engine:
        for name, tokens in zip("ab", asked, strict=True):
            serve(engine, name, tokens, model)
    with engine_at(tmp_path, model) as engine:
        for name, tokens in zip("cd", asked, strict=True):
            assert serve(engine, name, tokens, model).tokens == 64
        settled(engine)


def test_only_the_last_window_is_read(tmp_path: Path) -> None:
    """A read of a prefix of many pages reads only the window pages of its last window."""
    tokens = prompt(1, 121)
    with engine_at(tmp_path, WINDOWS, device_tokens=256, window_tokens=256) as engine:
        for end in range(PAGE, 121, PAGE):  # every page was once the last page of a prompt
            serve(engine, f"a{end}", tokens[: end + 1], WINDOWS)
    with engine_at(tmp_path, WINDOWS, device_tokens=256, window_tokens=256) as engine:
        assert serve(engine, "b", tokens, WINDOWS) == Hit(disk=120)
        assert len(engine.inspect.context.by_name[SWA].pages) == -(-WINDOW // PAGE)
        settled(engine)


@pytest.mark.parametrize("model", WITH_COMPONENTS)
def test_states_and_windows_are_evicted_before_their_pages(
    tmp_path: Path, model: ModelGeometry, stores: Stores
) -> None:
    """In the disk's order of eviction, states and windows of the end of a prefix are before the full pages of the
    prefix."""
    tokens = prompt(1, 61)
    with engine_at(tmp_path, model) as engine:
        for turn in range(2):
            serve(engine, f"r{turn}", tokens, model)
        context = engine.inspect.context
        engine.flush()
        page_keys = context.tree.prompt_keys(context.tree.match(tokens[:56]), tokens[:56])
        others = component_keys(MAMBA if model is STATES else SWA, page_keys)

        def is_ordered() -> bool:
            stores[-1].sync()
            order = [entry.key for entry in list_pages(stores[-1].inner)]
            first_page = min(order.index(key) for key in page_keys)
            held = [order.index(key) for key in others if key in order]
            return bool(held) and max(held) < first_page

        eventually(is_ordered)  # uses are reported to the store without an answer


def test_a_component_on_disk_is_read_for_pages_in_memory(tmp_path: Path) -> None:
    """If memory has the pages of a prefix but not its state, the prefetch reads the state alone."""
    first, rest = prompt(1, 61), prompt(2, 30)
    with engine_at(tmp_path, STATES, device_tokens=512, host_bytes=400 * 8 * 256) as engine:
        for name, tokens in (("a", first), ("b", np.concatenate([first[:56], rest]))):
            serve(engine, name, tokens, STATES)
        context = engine.inspect.context
        match = context.tree.match(first[:56])
        context.free(context.tree.evict(match.rows[-1:], MAMBA))
        context.by_name[MAMBA].pages.evict_all()
        assert match.nodes[-1].children and engine.lookup(first).host == 0
        before = engine.stats()["prefetch.bytes"]
        assert serve(engine, "c", first, STATES).tokens == 56
        assert engine.stats()["prefetch.bytes"] - before == context.by_name[MAMBA].host.page_bytes
        settled(engine)


def test_pages_evicted_from_the_device_are_read(tmp_path: Path) -> None:
    """A prefetch reads nothing for pages that the host has evicted but the device still has. After the device has
    evicted them too, they are read from disk."""
    one, two = prompt(1), prompt(2)
    with engine_at(tmp_path, FULL, host_bytes=9 * PAGE * 192) as engine:
        for name, tokens in (("a", one), ("b", two)):
            serve(engine, name, tokens, FULL)
        handle = engine.prefetch("c", one)
        until_ready(engine, handle)
        assert handle.read_tokens == 0 and engine.lookup(one).device == 56
        engine.cancel("c")
        engine.release(engine.acquire(CacheRequest("d", prompt(3, 100))))  # fills the device and commits nothing
        assert serve(engine, "e", one, FULL).disk > 0
        settled(engine)


@pytest.mark.parametrize("policy", ["write_through", "exclusive"])
def test_windows_leave_the_host_with_their_full_pages(policy: str) -> None:
    """With more prompts than the host has pages for, the host only keeps windows whose full page is also in memory."""
    with build_engine(config(host_bytes=24 * 8 * 256, write_policy=policy), WINDOWS) as engine:
        full, windows = (engine.inspect.context.by_name[name].pages for name in ("full", SWA))
        tree = engine.inspect.context.tree
        for number in range(12):
            tokens = np.arange(100 * number, 100 * number + 41)
            with engine.acquire(CacheRequest(str(number), tokens)) as lease:
                prefill(engine, lease, tokens, WINDOWS)
            engine.flush()
            of_device = [key for node in tree.nodes() for key in tree.keys_of(node)] if policy == "exclusive" else []
            assert {*windows} <= {*component_keys(SWA, [*full, *of_device])}
        assert engine.stats()["evict.host_lost_tokens"] > 0 and len(windows)
        engine.check()

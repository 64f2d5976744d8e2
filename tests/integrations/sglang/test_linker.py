# ruff: noqa: E402
"""The linker under SGLang's own tree, allocators and device pools, without a GPU."""

from __future__ import annotations

import dataclasses
import random
from array import array
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

sglang = pytest.importorskip("sglang")
if sglang.__version__ != "0.5.23":
    pytest.skip("0.5.17 has no linker interface", allow_module_level=True)

import torch
from hypothesis import settings
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.test.kits.unified_radix_cache.config import CONFIGS as SGLANG_CONFIGS

from hicache.errors import ConfigError
from hicache.storage.process.jobs import RemoveJob
from sglang_linker_case import CONFIGS, MAMBA, PAGE, LinkerCase
from waiting import eventually

Make = Callable[..., LinkerCase]
PAGE_BYTES = 2 * 4 * PAGE * 2 * 16 * 2  # k and v, layers, tokens, heads, elements, bytes


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Builds servers on one path; at the end of a test no page may be lost."""
    cases: list[LinkerCase] = []

    def build(name: str, **settings: Any) -> LinkerCase:
        cases.append(LinkerCase(CONFIGS[name], tmp_path / "store", **settings))
        return cases[-1]

    yield build
    for case in cases:
        case.linker.check()
        case.close()
        assert case.linker.stats["faults"] == 0


def restore(case: LinkerCase, prompt: list[int], *, keep: bool = True) -> int:
    """Serve a prompt; the tokens that the linker restored, whose bytes are right in every layer. `keep`: as SGLang's
    tree, which offers them again."""
    admitted = case.admit(prompt)
    wrong, failed = case.forward([admitted])
    assert (wrong, failed) == ([], [])
    case.end(admitted, keep=keep)
    return len(admitted.loaded)


@pytest.mark.parametrize("name", [*CONFIGS, pytest.param("swa_mamba", marks=pytest.mark.store_process)])
def test_a_restart_finds_the_disk(make: Make, name: str) -> None:
    """What one server offloaded, another one on the same path restores after the first has closed."""
    first = make(name)
    prompts = [first._make_seq(1000 * i, 4 + i) for i in range(3)]
    for prompt in prompts:
        first.insert(prompt)
    first.settle()
    first.close()
    second = make(name)
    assert [restore(second, prompt) for prompt in prompts] == [len(prompt) for prompt in prompts]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_draft_model_finds_its_keys_and_values(make: Make, name: str) -> None:
    """They share the slots of the model's, go to host and disk with these and come back with them, in every mix."""
    first = make(name, draft=True)
    prompt = first._make_seq(0, 8)
    first.insert(prompt)
    first.settle()
    first.evict()
    assert restore(first, prompt) == len(prompt)
    first.close()
    assert restore(make(name), prompt) == 0  # of pages without
    assert restore(make(name, draft=True), prompt) == len(prompt)


@pytest.mark.parametrize("cfg", SGLANG_CONFIGS, ids=[cfg.label for cfg in SGLANG_CONFIGS])
def test_every_configuration_of_sglangs_own_kit(cfg: Any, tmp_path: Path) -> None:
    """Pages that left the device, and then the host too, are restored with the bytes that they had, in every layer: of
    each page size, window and mix of components that SGLang's wheel ships fixtures for."""
    case = LinkerCase(cfg, tmp_path / "store", host_bytes="64MiB", budget="256MiB")
    window = -(-(cfg.sliding_window_size or 0) // cfg.page_size)
    prompt = case._make_seq(0, min(window + 2, cfg.kv_size // cfg.page_size // 2))
    case.insert(prompt)
    case.settle()
    case.evict()
    assert restore(case, prompt) == len(prompt)
    assert case.linker.describe()["pages_read"] == 0
    case.settle()
    case.cache.reset()
    assert restore(case, prompt) == len(prompt)
    assert case.linker.describe()["pages_read"] > 0
    case.linker.check()
    case.close()
    assert case.linker.stats["faults"] == 0


@pytest.mark.parametrize(("name", "num_pages"), [("full", 5), ("swa", 5), ("mamba", 0), ("swa_mamba", 0)])
def test_only_lengths_that_every_component_has_are_offered(make: Make, name: str, num_pages: int) -> None:
    """A prompt that leaves another midway gets the pages before, unless a recurrent state would have to be there."""
    case = make(name)
    prompt = case._make_seq(0, 8)
    case.insert(prompt)
    case.settle()
    case.evict()
    assert restore(case, [*prompt[: 5 * PAGE], *case._make_seq(1000, 3)]) == num_pages * PAGE
    assert case.linker.stats["refused_loads"] == 0
    assert restore(case, prompt) == len(prompt) - num_pages * PAGE


@pytest.mark.smoke
def test_one_load_serves_a_batch(make: Make) -> None:
    """Requests of one forward load together, each into slots of its own, behind what the device still has."""
    case = make("full")
    prompts = [[*case._make_seq(0, 2), *case._make_seq(1000 * i, 3)] for i in (1, 2, 3)]
    for prompt in prompts:
        case.insert(prompt)
    case.settle()
    case.evict()
    assert restore(case, prompts[0]) == 5 * PAGE  # the shared beginning is on the device again
    batch = [case.admit(prompt) for prompt in prompts[1:]]
    assert [len(each.device_slots) for each in batch] == [2 * PAGE] * 2
    assert case.forward(batch) == ([], [])
    for each in batch:
        case.end(each)


@pytest.mark.parametrize(
    ("changed", "settings"),
    [
        ({}, {"salt": "another"}),
        ({"dtype": torch.float32}, {}),
        ({"dtype": torch.float8_e5m2}, {}),
        ({"head_dim": 32}, {}),
        ({"page_size": 2 * PAGE}, {}),
        ({"num_layers": 5}, {}),
    ],
    ids=["salt", "dtype", "fp8", "heads", "page size", "layers"],
)
def test_another_identity_sees_nothing(tmp_path: Path, changed: dict[str, Any], settings: Any) -> None:
    """Servers whose bytes mean something else share a path, and never a page; the first still finds its own."""
    is_fp8 = changed.get("dtype") == torch.float8_e5m2  # both kinds lie in buffers of plain bytes
    config = dataclasses.replace(CONFIGS["full"], dtype=torch.float8_e4m3fn) if is_fp8 else CONFIGS["full"]
    first = LinkerCase(config, tmp_path / "store")
    prompt = first._make_seq(0, 8)
    first.insert(prompt)
    first.settle()
    first.close()
    other = LinkerCase(dataclasses.replace(config, **changed), tmp_path / "store", **settings)
    assert restore(other, prompt) == 0
    other.insert(prompt)
    other.settle()
    other.close()
    again = LinkerCase(config, tmp_path / "store")
    assert restore(again, prompt) == len(prompt)
    again.close()


@pytest.mark.parametrize("name", CONFIGS)
def test_a_cancelled_load_writes_nothing(make: Make, name: str) -> None:
    """A request that is aborted before its forward leaves its slots as they were, and its pages on the host."""
    case = make(name)
    prompt = case._make_seq(0, 8)
    case.insert(prompt)
    case.settle()
    case.evict()
    admitted = case.admit(prompt)
    case.fill([-token for token in prompt], admitted.loaded, None)
    case.cache.release_aborted_request(CacheRequestHandle(admitted.request.rid, 0))
    assert case.cache.ready_to_load_host_cache() == -1
    if MAMBA not in CONFIGS[name].components:
        assert case.differences([-token for token in prompt], 0, admitted.loaded, None) == []
    case.end(admitted, keep=False)
    case.linker.check()
    assert restore(case, prompt) == len(prompt)


@pytest.mark.smoke
def test_a_failed_load_aborts_its_requests_alone(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a copy to the device fails, SGLang drops the output of its batch; the next batch loads the same pages."""
    case = make("full")
    prompt = case._make_seq(0, 8)
    case.insert(prompt)
    case.settle()
    case.evict()
    admitted = case.admit(prompt)

    def broken(*_: object) -> None:
        raise RuntimeError("the link is down")

    with monkeypatch.context() as patch:
        patch.setattr(case.linker.tiers["kv"].transfer.mover, "scatter", broken)
        _, failed = case.forward([admitted])
    assert failed == [admitted]
    case.end(admitted, keep=False)
    assert restore(case, prompt) == len(prompt)


def test_a_failed_offload_is_offered_again(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages whose copy to the host failed are no hit; SGLang offers them with the next use, and then they are."""
    case = make("full")
    prompt = case._make_seq(0, 8)

    def broken(*_: object) -> None:
        raise RuntimeError("the link is down")

    with monkeypatch.context() as patch:
        patch.setattr(case.linker.tiers["kv"].transfer.mover, "gather", broken)
        case.insert(prompt)
        case.settle()
    assert case.linker.stats["failed_offloads"] == 1
    case.linker.check()
    case.insert(prompt)
    case.settle()
    case.evict()
    assert restore(case, prompt) == len(prompt)


@pytest.mark.smoke
@pytest.mark.parametrize("on_host", [False, True], ids=["disk", "host"])
@pytest.mark.parametrize("name", CONFIGS)
def test_pages_that_leave_between_look_up_and_load_are_computed(make: Make, name: str, on_host: bool) -> None:
    """Evicted from the disk, or from host and disk: the request computes its prompt, and none is aborted."""
    case = make(name)
    prompt = case._make_seq(0, 8)
    case.insert(prompt)
    case.settle()
    if on_host:
        case.evict()
    else:
        case.cache.reset()
    looked_up, linker = case.linker.lookup, case.linker
    ends: list[int] = []

    def lookup(rid: str, transfers: Any) -> list[int]:
        ends.extend(looked_up(rid, transfers))
        for tier in linker.tiers.values():
            tier.index.clear()
        keys = [linker.tiers[transfer.name.value].keys(transfers[0].keys[3:]) for transfer in transfers]
        stored = tuple(linker.store.keys([*chain.from_iterable(keys)]))
        assert linker.store.tier.writes.submit(RemoveJob(-1, stored))
        eventually(linker.store.tier.writes.poll)
        return ends

    linker.lookup = lookup
    admitted = case.admit(prompt)
    del linker.lookup
    assert ends[-1] == 8 and len(admitted.loaded) == 0
    assert case.forward([admitted]) == ([], [])
    case.end(admitted)
    assert linker.stats["refused_loads"] == 1
    assert restore(case, prompt) == (0 if "mamba" in name else 3 * PAGE)
    case.insert(prompt)
    case.settle()
    case.evict()
    assert restore(case, prompt) == len(prompt)


def test_damaged_files_are_misses(make: Make, tmp_path: Path) -> None:
    """Whatever bytes of the store's files are lost, a server starts, restores right bytes or none, and offloads on."""
    first = make("full")
    prompts = [first._make_seq(1000 * i, 8) for i in range(6)]
    for prompt in prompts:
        first.insert(prompt)
        first.settle()
    first.close()
    chance = random.Random(0)
    for path in [path for name in ("index.mdb", "pages-*.dat") for path in (tmp_path / "store").rglob(name)]:
        data = bytearray(path.read_bytes())
        for start in range(0, len(data), 256):
            if chance.random() < 0.3:
                data[start : start + 256] = chance.randbytes(len(data[start : start + 256]))
        path.write_bytes(data)
    second = make("full")
    for prompt in prompts:
        assert restore(second, prompt) in range(0, len(prompt) + 1, PAGE)
        second.insert(prompt)
        second.settle()
    second.evict()
    assert restore(second, prompts[-1]) == len(prompts[-1])


def test_a_store_in_use_is_left_alone(make: Make) -> None:
    """While the store of its identity belongs to another server, a server serves from its host pages alone."""
    first = make("full")
    prompt, other = first._make_seq(0, 8), first._make_seq(5000, 8)
    first.insert(prompt)
    first.settle()
    second = make("full")
    assert not second.linker.store.tier.is_healthy
    second.insert(other)
    second.settle()
    second.evict()
    assert restore(second, other) == len(other)
    first.cache.reset()
    assert (restore(first, other), restore(first, prompt)) == (0, len(prompt))


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_a_full_host_keeps_beginnings(make: Make, policy: str) -> None:
    """When the host is full, pages leave it from the ends of prompts, and come back from the disk."""
    case = make("full", host_bytes=13 * PAGE_BYTES, policy=policy)
    assert case.linker.tiers["kv"].host.num_pages == 12
    prompts = [case._make_seq(1000 * i, 8) for i in range(4)]
    longer = [*prompts[-1], *case._make_seq(9000, 2)]
    for prompt in [*prompts, longer, prompts[0]]:
        if prompt is longer:
            case.evict()  # its beginning is offered with it, and is on the host already
        case.insert(prompt)
        case.settle()
        for each in [*prompts, longer]:
            held = held_by_host(case, each)
            assert held == sorted(held, reverse=True)
    case.evict()
    for prompt in prompts:
        assert restore(case, prompt) == len(prompt)
        case.settle()
        case.evict()


def held_by_host(case: LinkerCase, prompt: list[int]) -> list[bool]:
    tier = case.linker.tiers["kv"]
    return [key in tier.index for key in tier.keys(get_storage_hash_str(RadixKey(array("q", prompt)), page_size=PAGE))]


def test_a_transfer_tells_what_follows_what(make: Make) -> None:
    """Turns of a chat came to the host apart, and one of them left it: once all were offloaded together, what is to be
    evicted before the last turn is what follows nothing, however seldom the first was used."""
    case = make("full", host_bytes=13 * PAGE_BYTES, policy="lfu")
    chat, *others = (case._make_seq(1000 * i, num_pages) for i, num_pages in enumerate((8, 6, 4, 4)))
    for prompt in (chat[: 4 * PAGE], chat, others[0]):
        case.insert(prompt)
        case.settle()
    assert held_by_host(case, chat) == [True] * 2 + [False] * 2 + [True] * 4
    case.evict()
    for prompt in (chat, *others[1:]):
        case.insert(prompt)
        case.settle()
    assert all(held_by_host(case, chat))


def test_what_stays_on_the_device_is_used_with_what_follows_it(make: Make) -> None:
    """A look-up tells what follows what. Requests that load what follows a shared beginning, which the device has, use
    that on the host too: it is evicted after what fewer requests used."""
    case = make("full", host_bytes=13 * PAGE_BYTES, policy="lfu")
    shared, *others = (case._make_seq(1000 * i, num_pages) for i, num_pages in enumerate((4, 2, 2, 2, 7)))
    first, second, alone = [*shared, *others[0]], [*shared, *others[1]], others[2]
    for prompt in (shared, first, second, alone):
        case.insert(prompt)
        case.settle()
    for batch in ([first], [second, first]):
        case.evict()
        for prompt in batch:
            restore(case, prompt)
            case.settle()
    for _ in range(4):  # the others counted twice
        assert restore(case, alone, keep=False) == len(alone)
    case.insert(others[3])
    case.settle()
    assert (held_by_host(case, shared), held_by_host(case, alone)) == ([True] * 4, [True, False])


def test_a_prompt_larger_than_the_host_is_computed(make: Make) -> None:
    """What the host cannot hold at once is neither offloaded nor loaded, and takes nothing of others."""
    case = make("full", host_bytes=7 * PAGE_BYTES)
    short, long = case._make_seq(0, 4), case._make_seq(1000, 10)
    case.insert(short)
    case.settle()
    case.insert(long)
    case.settle()
    assert case.linker.stats["failed_offloads"] == 1
    case.evict()
    assert restore(case, long) == 0
    assert restore(case, short) == len(short)


class Model:
    """What must be so of one server after any history: which prompts it has offloaded whole."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.prompts: list[list[int]] = [[]]
        self.offloaded: list[list[int]] = []

    def new_prompt(self) -> list[int]:
        """The beginning of an earlier one and something new."""
        before = self.random.choice(self.prompts)
        kept = before[: self.random.randrange(0, len(before) + 1, PAGE)][: 12 * PAGE]
        start = self.random.randrange(1 << 20)
        prompt = [*kept, *range(start, start + self.random.randint(1, 4) * PAGE)]
        self.prompts.append(prompt)
        return prompt


@pytest.mark.smoke
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("seed", range(settings.default.max_examples // 15))  # ten times as many in make test-all
def test_random_histories_lose_no_page(make: Make, name: str, seed: int) -> None:
    """After any mix of requests, aborts, evictions, resets and restarts, bytes are right, no page of the host is lost,
    and while neither tier is full every offloaded prompt comes back whole.
    """
    model, size = Model(seed), {"host_bytes": "8MiB", "budget": "256MiB"}
    case = make(name, **size)
    for step in range(60):
        action = model.random.choice(["insert"] * 3 + ["serve"] * 3 + ["abort", "evict", "reset", "restart", "settle"])
        if action == "insert":
            prompt = model.new_prompt()
            case.insert(prompt)
            model.offloaded.append(prompt)
        elif action in ("serve", "abort") and model.offloaded:
            prompt = model.random.choice(model.offloaded)
            case.settle()
            admitted = case.admit(prompt)
            if action == "abort":
                case.cache.release_aborted_request(CacheRequestHandle(admitted.request.rid, 0))
                case.end(admitted, keep=False)
                continue
            assert case.forward([admitted]) == ([], [])
            assert admitted.covered == prompt, step
            case.end(admitted)
        elif action == "evict":
            case.settle()
            case.evict()
        elif action == "reset":
            case.settle()
            case.cache.reset()
        elif action == "restart":
            case.settle()
            case.close()
            case = make(name, **size)
        else:
            case.settle()
        case.linker.check()
    case.settle()
    assert case.linker.stats["failed_offloads"] == 0


@pytest.mark.parametrize(("name", "policy"), [*zip(CONFIGS, ("lru", "slru", "mru", "lru"), strict=True)])
def test_random_histories_in_small_tiers(make: Make, name: str, policy: str) -> None:
    """When host and disk are too small for what is served, and copies fail now and then, bytes are right or missing,
    and no page of the host is lost.
    """
    model = Model(7)
    case = make(name, host_bytes=70_000, budget="1MiB", policy=policy)
    scatter = case.linker.tiers["kv"].transfer.mover.scatter

    def sometimes_broken(*args: Any) -> None:
        if model.random.random() < 0.05:
            raise RuntimeError("the link is down")
        scatter(*args)

    case.linker.tiers["kv"].transfer.mover.scatter = sometimes_broken
    for _ in range(120):
        prompt = model.new_prompt() if model.random.random() < 0.5 else model.random.choice(model.prompts[1:] or [[]])
        if prompt and model.random.random() < 0.5:
            case.insert(prompt)
        elif prompt:
            admitted = case.admit(prompt)
            wrong, failed = case.forward([admitted])
            assert failed or not wrong
            case.end(admitted, keep=not failed)
        if model.random.random() < 0.2:
            case.settle()
            case.evict()
        case.linker.check()
    case.settle()
    seen = case.linker.describe()
    assert min(seen["failed_loads"], seen["loads"], seen["pages_read"]) > 0


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"path": ""}, "path"),
        ({"host_bytes": None}, "host_bytes"),
        ({"host_bytes": 1000}, "host_bytes"),
        ({"policy": "auto"}, "policy"),
        ({"host_byte": 1}, "host_byte"),
    ],
)
def test_bad_settings_are_one_error_at_the_start(make: Make, given: dict[str, Any], named: str) -> None:
    """The error names the setting; nothing is left open, so that a good start succeeds."""
    with pytest.raises(ConfigError, match=named):
        make("full", **given)
    make("full")

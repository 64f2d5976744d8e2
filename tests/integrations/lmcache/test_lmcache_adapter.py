"""The L2 adapter under LMCache's own types: what goes down comes back, to those it belongs to, whatever happens."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import resource
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lmcache.v1", reason="needs LMCache; make test-servers installs it")

from lmcache.v1.distributed.internal_api import L2AdapterListener

from disk_case import Clock, Gate, TroubledStore
from hicache.errors import ConfigError
from hicache.integrations import server_store
from hicache.integrations.versions import LMCACHE, require_version
from hicache.storage import describe, list_pages, open_existing, open_store, store_folders
from hicache.storage.process import stores as opening
from hicache.storage.process.health import LIMITS
from lmcache_case import (
    SHAPE,
    adapter_spec,
    key_of,
    layout,
    load,
    loaded_seeds,
    look_up,
    memory,
    opened,
    store,
    store_seeds,
)
from store_server import served
from waiting import eventually

RELEASE = require_version("lmcache", importlib.metadata.version("lmcache"), LMCACHE)
NUMBERS = list(range(20))
KEYS = [key_of(n) for n in NUMBERS]
SMALL = torch.Size([1, 2, 64, 128])


class Listener(L2AdapterListener):
    """What LMCache is told."""

    def __init__(self) -> None:
        self.stored: list[tuple[Any, int]] = []
        self.accessed: list[Any] = []
        self.deleted: list[Any] = []

    def on_l2_keys_stored(self, keys: list[Any], sizes: list[int]) -> None:
        self.stored += zip(keys, sizes, strict=True)

    def on_l2_keys_accessed(self, keys: list[Any]) -> None:
        self.accessed += keys

    def on_l2_keys_deleted(self, keys: list[Any]) -> None:
        self.deleted += keys


@pytest.mark.smoke
@pytest.mark.parametrize("how", ["in threads", pytest.param("in processes", marks=pytest.mark.store_process)])
def test_what_is_stored_comes_back_also_after_a_restart(tmp_path: Path, how: str) -> None:
    """Objects of two sizes in one task; each lookup and each load tells key by key. The stores' records name the
    server, the model and the layout."""
    keys = [*KEYS, *(key_of(n, object_group_id=1) for n in NUMBERS)]
    objects = [*(memory(n) for n in NUMBERS), *(memory(100 + n, SMALL, torch.float32) for n in NUMBERS)]
    layouts = (layout(), layout(SMALL, torch.float32))
    adapter = opened(adapter_spec(tmp_path))
    assert look_up(adapter, keys, *layouts) == []
    assert store(adapter, keys, objects).bytes_transferred() == sum(held.get_size() for held in objects)
    for _ in range(2):
        assert look_up(adapter, [key_of(99), *keys], *layouts) == list(range(1, len(keys) + 1))
        into = [memory(None), *(memory(None, held.get_shape(), held.get_dtype()) for held in objects)]
        assert load(adapter, [key_of(99), *keys], into) == list(range(1, len(keys) + 1))
        assert all(torch.equal(a.raw_data, b.raw_data) for a, b in zip(objects, into[1:], strict=True))
        assert adapter.report_status()["is_healthy"]
        adapter.submit_unlock(keys)
        adapter.close()
        adapter = opened(adapter_spec(tmp_path))
    adapter.close()
    identity = {"server": f"lmcache {RELEASE}", "model": "org/model", "dtype": "bfloat16", "layout": str(list(SHAPE))}
    identities = [describe(folder).identity for folder in store_folders(tmp_path)]
    assert {**identity, "object_bytes": memory(None).get_size()} in identities and len(identities) == 2


@pytest.mark.smoke
def test_keys_that_differ_in_one_field_never_meet(tmp_path: Path) -> None:
    """They are stored side by side, each with its own bytes."""
    adapter = opened(adapter_spec(tmp_path))
    assert store_seeds(adapter, [1])
    others = [
        key_of(1, cache_salt="tenant"),
        key_of(1, kv_rank=0x02010201),
        key_of(1, object_group_id=1),
        key_of(1, model_name="org/other"),
        key_of(1, chunk_hash=b"\1" * 32),
    ]
    for n, other in enumerate(others, 2):
        assert look_up(adapter, [other], layout(), layout()) == [] and load(adapter, [other], [memory(None)]) == []
        assert store(adapter, [other], [memory(n)]).is_successful()
        into = memory(None)
        assert load(adapter, [other], [into]) == [0] and torch.equal(into.raw_data, memory(n).raw_data)
        assert loaded_seeds(adapter, [1]) == [1]
    adapter.close()


@pytest.mark.smoke
def test_servers_of_another_salt_or_key_see_nothing(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(bytes(range(32)))
    others = ({}, {"salt": "another"}, {"key_file": str(tmp_path / "key")})
    specs = [adapter_spec(tmp_path / "pages", **other) for other in others]
    for spec in specs:
        adapter = opened(spec)
        assert look_up(adapter, KEYS) == [] and loaded_seeds(adapter, NUMBERS) == []
        assert store_seeds(adapter, NUMBERS)
        adapter.close()
    for spec in specs:
        adapter = opened(spec)
        assert look_up(adapter, KEYS) == NUMBERS and loaded_seeds(adapter, NUMBERS) == NUMBERS
        adapter.close()


@pytest.mark.smoke
def test_another_dtype_or_shape_of_equal_size_is_a_miss(tmp_path: Path) -> None:
    """LMCache's keys do not tell them apart; lookups and loads here do, but for what LMCache has serialized, which it
    looks up by the layout before."""
    adapter = opened(adapter_spec(tmp_path))
    assert store_seeds(adapter, NUMBERS)
    for shape, dtype in [(SHAPE, torch.float16), (torch.Size([2, 4, 128, 64]), torch.bfloat16)]:
        assert look_up(adapter, KEYS, layout(shape, dtype)) == []
        assert load(adapter, KEYS, [memory(None, shape, dtype) for _ in KEYS]) == []
    shape = torch.Size([1000])
    serialized, into = memory(1, shape, torch.uint8), memory(None, shape, torch.uint8)
    assert store(adapter, [key_of(50)], [serialized]).is_successful()
    assert look_up(adapter, [key_of(50), key_of(51)]) == [0]
    assert load(adapter, [key_of(50)], [into]) == [0] and torch.equal(into.raw_data, serialized.raw_data)
    adapter.close()


@pytest.mark.smoke
def test_lmcache_is_told_what_is_stored_used_and_deleted(tmp_path: Path) -> None:
    """Each object once, with its size; the usage follows."""
    adapter, told = opened(adapter_spec(tmp_path)), Listener()
    adapter.register_listener(told)
    num_bytes = memory(0).get_size()
    for _ in range(2):
        assert store_seeds(adapter, NUMBERS)
    assert look_up(adapter, KEYS) == NUMBERS and loaded_seeds(adapter, NUMBERS) == NUMBERS
    adapter.delete([*KEYS[:5], key_of(99)])
    assert look_up(adapter, KEYS) == NUMBERS[5:] and loaded_seeds(adapter, NUMBERS) == NUMBERS[5:]
    usage = adapter.get_usage()
    # Disk space comes in segments of a 64th of the budget, one of which is begun.
    assert (
        0 < usage.total_bytes_used <= 1.1 * 15 * num_bytes + 256_000_000 // 64
        and usage.total_capacity_bytes == 256_000_000
    )
    assert usage.bytes_by_cache_salt == {"": 15 * num_bytes}
    adapter.close()  # listeners are told after the task is answered
    assert told.stored == [(key, num_bytes) for key in KEYS] and told.deleted == KEYS[:5]
    assert told.accessed == [*KEYS, *KEYS[5:]]


def order_of_use(path: Path) -> list[bytes]:
    """The keys of the only store under a path."""
    [folder] = store_folders(path)
    with contextlib.closing(open_existing(folder)) as held:
        return [page.key for page in list_pages(held, newest=False, limit=None)]


@pytest.mark.smoke
def test_what_was_used_in_lmcaches_memory_is_evicted_last(tmp_path: Path) -> None:
    """A touch moves an object to the end of the order of use, and is told; nothing is read."""
    adapter, listener = opened(adapter_spec(tmp_path)), Listener()
    for n in range(3):
        store_seeds(adapter, [n])
    adapter.close()
    first, *others = order_of_use(tmp_path)
    adapter = opened(adapter_spec(tmp_path))
    adapter.register_listener(listener)
    adapter.submit_touch([KEYS[0], key_of(99)])
    adapter.close()
    assert order_of_use(tmp_path) == [*others, first]
    assert listener.accessed == [KEYS[0], key_of(99)]
    if RELEASE != "0.5.6":
        tags = adapter.get_memory_tags()
        assert (tags.segment, tags.residency) == ("storage", "local")


def test_a_damaged_object_is_a_miss_and_is_stored_anew(tmp_path: Path) -> None:
    adapter = opened(adapter_spec(tmp_path))
    assert store_seeds(adapter, NUMBERS)
    adapter.close()
    [folder] = store_folders(tmp_path)
    values = max(folder.iterdir(), key=lambda file: file.stat().st_size)
    with values.open("r+b") as file:
        file.seek(values.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
    adapter = opened(adapter_spec(tmp_path))
    assert len(loaded_seeds(adapter, NUMBERS)) == len(NUMBERS) - 1
    assert [kept["corrupt"] for kept in adapter.report_status()["stores"]] == [1]
    assert store_seeds(adapter, NUMBERS) and loaded_seeds(adapter, NUMBERS) == NUMBERS
    adapter.close()


@pytest.mark.smoke
def test_a_store_that_cannot_be_read_serves_nothing_and_stops_nothing(tmp_path: Path) -> None:
    """Its record is gone: LMCache goes on, with misses."""
    adapter = opened(adapter_spec(tmp_path))
    assert store_seeds(adapter, NUMBERS)
    adapter.close()
    [folder] = store_folders(tmp_path)
    (folder / "store.json").write_bytes(b"not a store")
    adapter = opened(adapter_spec(tmp_path))
    assert look_up(adapter, KEYS) == [] and loaded_seeds(adapter, NUMBERS) == []
    assert not store_seeds(adapter, NUMBERS)
    assert store(adapter, [key_of(1)], [memory(1, SMALL)]).is_successful()
    adapter.close()


@pytest.mark.smoke
def test_a_full_disk_costs_what_it_has_no_room_for(tmp_path: Path) -> None:
    """What was stored before is served meanwhile; once there is room, objects are stored again."""
    adapter = opened(adapter_spec(tmp_path))
    assert store_seeds(adapter, NUMBERS)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, hard))
    try:
        assert not store_seeds(adapter, range(100, 180))
        assert loaded_seeds(adapter, NUMBERS) == NUMBERS
        assert not adapter.report_status()["is_healthy"]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    eventually(lambda: store_seeds(adapter, range(100, 180)), adapter.report_status)
    assert loaded_seeds(adapter, [*NUMBERS, *range(100, 180)]) == [*NUMBERS, *range(100, 180)]
    assert adapter.report_status()["is_healthy"]
    adapter.close()


@pytest.mark.smoke
def test_servers_of_one_socket_share_their_objects(tmp_path: Path) -> None:
    """Each finds, loads and deletes what the other stored, from its start on."""
    with served(tmp_path / "pages", tmp_path / "socket") as socket:
        adapters = [opened(adapter_spec(socket)) for _ in range(2)]
        first, second = adapters
        assert store_seeds(first, NUMBERS) and look_up(second, KEYS) == NUMBERS
        assert loaded_seeds(second, NUMBERS) == NUMBERS and store_seeds(second, [50])
        assert look_up(first, [*KEYS, key_of(50)]) == [*NUMBERS, 20]
        second.delete(KEYS)
        assert loaded_seeds(first, [*NUMBERS, 50]) == [50]
        for adapter in adapters:
            adapter.close()


@pytest.mark.smoke
@pytest.mark.parametrize("verb", ["contains", "get_into", "put"])
def test_a_frozen_disk_freezes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    """Tasks end without it. When it answers at last, no byte reaches the memory of a task that has ended, and none is
    stored from it; then all is as before."""
    clock, gate, stores = Clock(), Gate(verb), list[TroubledStore]()

    def troubled(*args: Any, **kwargs: Any) -> TroubledStore:
        stores.append(TroubledStore(open_store(*args, **kwargs)))
        return stores[-1]

    def freeze(called: str) -> None:
        clock.now_s += 2 * LIMITS.io_timeout_s * (called == verb)
        gate(called)

    monkeypatch.setattr(opening, "open_store", troubled)
    monkeypatch.setattr(server_store, "open_tier", functools.partial(server_store.open_tier, clock=clock))
    adapter = opened(adapter_spec(tmp_path))
    assert store_seeds(adapter, NUMBERS)
    stores[0].trouble = freeze
    objects = [memory(None if verb == "get_into" else 100 + n) for n in NUMBERS]
    if verb == "contains":
        assert look_up(adapter, KEYS) == []
    elif verb == "get_into":
        assert load(adapter, KEYS, objects) == []
    else:
        assert not store(adapter, [key_of(100 + n) for n in NUMBERS], objects).is_successful()
    assert gate.held and not adapter.report_status()["is_healthy"]
    for held in objects:
        held.raw_data.fill_(7)
    gate.open()
    stores[0].trouble = lambda verb: None

    def is_served() -> bool:
        clock.now_s += LIMITS.max_reopen_backoff_s
        return loaded_seeds(adapter, NUMBERS) == NUMBERS and store_seeds(adapter, range(100, 100 + len(NUMBERS)))

    eventually(is_served)
    assert loaded_seeds(adapter, range(100, 100 + len(NUMBERS))) == [100 + n for n in NUMBERS]
    assert all((held.raw_data == 7).all() for held in objects)
    adapter.close()


@pytest.mark.smoke
def test_two_controllers_at_once(tmp_path: Path) -> None:
    """One thread stores, two look up and load; nobody gets bytes of another object."""
    adapter, numbers = opened(adapter_spec(tmp_path)), list(range(200))
    tasks = {adapter.submit_store_task([key_of(n)], [memory(n)]) for n in numbers}
    wrong: list[int] = []

    def prefetch(start: int) -> None:
        into = {n: memory(None) for n in numbers[start::2]}
        task_ids = {n: adapter.submit_load_task([key_of(n)], [target]) for n, target in into.items()}
        for n, task_id in task_ids.items():
            bitmap = eventually(lambda task_id=task_id: adapter.query_load_result(task_id))
            if bitmap.popcount() and not torch.equal(into[n].raw_data, memory(n).raw_data):
                wrong.append(n)

    threads = [threading.Thread(target=prefetch, args=(start,)) for start in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done: dict[int, Any] = {}
    eventually(lambda: done.update(adapter.pop_completed_store_tasks()) or len(done) == len(tasks))
    assert not wrong and done.keys() == tasks and all(result.is_successful() for result in done.values())
    assert loaded_seeds(adapter, numbers) == numbers
    adapter.close()


def test_three_descriptors(tmp_path: Path) -> None:
    """Distinct, as LMCache demands, and closed at the end; closing twice is harmless."""
    adapters = [opened(adapter_spec(tmp_path / name)) for name in "ab"]
    events = ("get_store_event_fd", "get_lookup_and_lock_event_fd", "get_load_event_fd")
    assert len({getattr(adapter, event)() for adapter in adapters for event in events}) == 6
    for adapter in adapters:
        adapter.close()
        adapter.close()


def test_wrong_settings_stop_the_start(tmp_path: Path) -> None:
    """Those that are unknown, and a path that is not ours."""
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="bugdet"):
        opened(adapter_spec(tmp_path / "pages", bugdet="1GB"))
    with pytest.raises(ConfigError, match="path"):
        opened(adapter_spec(tmp_path))


def test_a_budget_too_small_for_an_object_is_no_error_of_the_server(tmp_path: Path) -> None:
    """Sizes are known with the first object only: it is not stored, and the reason is logged once."""
    adapter = opened(adapter_spec(tmp_path, budget="1MiB"))
    assert not store(adapter, [key_of(1)], [memory(1, torch.Size([2, 32, 64, 128]))]).is_successful()
    assert look_up(adapter, [key_of(1)]) == []
    adapter.close()

"""The L2 adapter under LMCache's own types: what goes down comes back, to those it belongs to, whatever happens."""

from __future__ import annotations

import resource
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lmcache.v1", reason="needs LMCache; make test-integrations installs it")

from lmcache.v1.distributed.internal_api import L2AdapterListener
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface

from hicache.errors import ConfigError
from hicache.integrations.lmcache.threads import Workers
from hicache.storage import describe, store_folders
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


def test_what_is_stored_comes_back_also_after_a_restart(tmp_path: Path) -> None:
    """Objects of two sizes in one task; each lookup and each load tells key by key."""
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


@pytest.mark.parametrize(
    "changed",
    [
        {"cache_salt": "tenant"},
        {"kv_rank": 0x02010201},
        {"object_group_id": 1},
        {"model_name": "org/other"},
        {"chunk_hash": b"\1" * 32},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_keys_that_differ_in_one_field_never_meet(tmp_path: Path, changed: dict[str, Any]) -> None:
    """Both are stored side by side, each with its own bytes."""
    adapter = opened(adapter_spec(tmp_path))
    assert store_seeds(adapter, [1])
    other = key_of(1, **changed)
    assert look_up(adapter, [other], layout(), layout()) == [] and load(adapter, [other], [memory(None)]) == []
    assert store(adapter, [other], [memory(2)]).is_successful()
    into = memory(None)
    assert load(adapter, [other], [into]) == [0] and torch.equal(into.raw_data, memory(2).raw_data)
    assert loaded_seeds(adapter, [1]) == [1]
    adapter.close()


@pytest.mark.parametrize("changed", [{"salt": "another"}, {"key_file": "key"}], ids=lambda changed: next(iter(changed)))
def test_servers_of_another_salt_or_key_see_nothing(tmp_path: Path, changed: dict[str, str]) -> None:
    if "key_file" in changed:
        changed = {"key_file": str(tmp_path / "key")}
        (tmp_path / "key").write_bytes(bytes(range(32)))
    specs = [adapter_spec(tmp_path / "pages"), adapter_spec(tmp_path / "pages", **changed)]
    for spec in specs:
        adapter = opened(spec)
        assert look_up(adapter, KEYS) == [] and loaded_seeds(adapter, NUMBERS) == []
        assert store_seeds(adapter, NUMBERS)
        adapter.close()
    for spec in specs:
        adapter = opened(spec)
        assert look_up(adapter, KEYS) == NUMBERS and loaded_seeds(adapter, NUMBERS) == NUMBERS
        adapter.close()


def test_another_dtype_or_shape_of_equal_size_is_a_miss(tmp_path: Path) -> None:
    """LMCache's keys do not tell them apart; lookups and loads here do."""
    adapter = opened(adapter_spec(tmp_path))
    assert store_seeds(adapter, NUMBERS)
    others = [(SHAPE, torch.float16), (torch.Size([2, 4, 128, 64]), torch.bfloat16)]
    for shape, dtype in others:
        assert look_up(adapter, KEYS, layout(shape, dtype)) == []
        assert load(adapter, KEYS, [memory(None, shape, dtype) for _ in KEYS]) == []
    adapter.close()


def test_serialized_objects_are_found_by_the_layout_before(tmp_path: Path) -> None:
    """LMCache looks up by the layout of the KV cache, and stores what its serializer made of it."""
    adapter = opened(adapter_spec(tmp_path))
    shape = torch.Size([1000])
    assert store(adapter, KEYS[:1], [memory(1, shape, torch.uint8)]).is_successful()
    assert look_up(adapter, KEYS[:2]) == [0]
    into = memory(None, shape, torch.uint8)
    assert load(adapter, KEYS[:1], [into]) == [0] and torch.equal(into.raw_data, memory(1, shape, torch.uint8).raw_data)
    adapter.close()


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
    assert 0 < usage.total_bytes_used <= 1.1 * 15 * num_bytes and usage.total_capacity_bytes == 256_000_000
    assert usage.bytes_by_cache_salt == {"": 15 * num_bytes}
    adapter.close()  # listeners are told after the task is answered
    assert told.stored == [(key, num_bytes) for key in KEYS] and told.deleted == KEYS[:5]
    assert told.accessed == [*KEYS, *KEYS[5:]]


def test_the_budget_bounds_what_is_stored(tmp_path: Path) -> None:
    """Far more is stored than fits; what is left is right, and LMCache sees the rest as missing."""
    adapter = opened(adapter_spec(tmp_path, budget="8MB"))
    for start in range(0, 200, 20):
        store_seeds(adapter, range(start, start + 20))
    numbers = list(range(200))
    kept = loaded_seeds(adapter, numbers)
    assert kept and 199 in kept and 0 not in kept
    assert look_up(adapter, [key_of(n) for n in numbers]) == kept
    adapter.close()
    [folder] = store_folders(tmp_path)
    assert sum(file.stat().st_blocks * 512 for file in folder.iterdir()) <= 8_000_000


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
    left = loaded_seeds(adapter, NUMBERS)
    assert len(left) == len(NUMBERS) - 1
    assert [kept["corrupt"] for kept in adapter.report_status()["stores"]] == [1]
    assert store_seeds(adapter, NUMBERS) and loaded_seeds(adapter, NUMBERS) == NUMBERS
    adapter.close()


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
    deadline_s = time.monotonic() + 60
    while not store_seeds(adapter, range(100, 180)) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert loaded_seeds(adapter, [*NUMBERS, *range(100, 180)]) == [*NUMBERS, *range(100, 180)]
    assert adapter.report_status()["is_healthy"]
    adapter.close()


def test_beside_another_process_an_adapter_reads(tmp_path: Path) -> None:
    """It finds and loads what the other one stores, and stores nothing."""
    program = (
        f"import sys; sys.path[:0] = {sys.path!r}\n"
        "from pathlib import Path; from lmcache_case import *\n"
        f"adapter = opened(adapter_spec(Path({str(tmp_path)!r})))\n"
        "assert store_seeds(adapter, range(20)); print('ready', flush=True); sys.stdin.read(); adapter.close()\n"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe, text=True) as other:
        assert other.stdin and other.stdout
        for line in other.stdout:  # LMCache logs on it
            if line == "ready\n":
                break
        adapter = opened(adapter_spec(tmp_path))
        assert look_up(adapter, KEYS) == NUMBERS and loaded_seeds(adapter, NUMBERS) == NUMBERS
        assert not store_seeds(adapter, [50])
        adapter.delete(KEYS)
        assert loaded_seeds(adapter, NUMBERS) == NUMBERS
        assert [kept["can_write"] for kept in adapter.report_status()["stores"]] == [False]
        assert 0 < adapter.get_usage().total_bytes_used <= 1.1 * len(NUMBERS) * memory(0).get_size()
        adapter.close()
        other.stdin.close()
        assert other.wait(60) == 0


def test_two_controllers_at_once(tmp_path: Path) -> None:
    """One thread stores, two look up and load; nobody gets bytes of another object."""
    adapter = opened(adapter_spec(tmp_path))
    tasks = {adapter.submit_store_task([key_of(n)], [memory(n)]) for n in range(200)}
    failures: list[BaseException] = []

    def prefetch(numbers: list[int]) -> None:
        try:
            pending = {}
            for n in numbers:
                into = memory(None)
                pending[adapter.submit_load_task([key_of(n)], [into])] = (n, into)
            while pending:
                for task_id in list(pending):
                    bitmap = adapter.query_load_result(task_id)
                    if bitmap is not None:
                        n, into = pending.pop(task_id)
                        assert not bitmap.popcount() or torch.equal(into.raw_data, memory(n).raw_data)
                time.sleep(0.001)
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=prefetch, args=(list(range(start, 200, 2)),)) for start in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    done: dict[int, Any] = {}
    while len(done) < len(tasks):
        done |= adapter.pop_completed_store_tasks()
        time.sleep(0.001)
    assert done.keys() == tasks and all(result.is_successful() for result in done.values())
    assert loaded_seeds(adapter, list(range(200))) == list(range(200))
    adapter.close()


def test_under_injected_faults_the_rest_comes_back(tmp_path: Path) -> None:
    """LMCache's adapter for faults wraps ours and drops loads; the others are right."""
    spec = {"type": "fault_inject", "inner": adapter_spec(tmp_path), "rate": 0.3, "seed": 7, "gap_indices": [3]}
    adapter = opened(spec)
    assert store_seeds(adapter, NUMBERS) and look_up(adapter, KEYS) == NUMBERS
    left = loaded_seeds(adapter, NUMBERS)
    assert left and 3 not in left and len(left) < len(NUMBERS)
    adapter.close()


def test_three_descriptors(tmp_path: Path) -> None:
    """Distinct, as LMCache demands, and closed at the end; closing twice is harmless."""
    adapters = [opened(adapter_spec(tmp_path / name)) for name in "ab"]
    descriptors = {number for adapter in adapters for number in _descriptors(adapter)}
    assert len(descriptors) == 6
    for adapter in adapters:
        adapter.close()
        adapter.close()


def _descriptors(adapter: L2AdapterInterface) -> list[int]:
    return [adapter.get_store_event_fd(), adapter.get_lookup_and_lock_event_fd(), adapter.get_load_event_fd()]


def test_what_lmcache_stored_says_what_it_is(tmp_path: Path) -> None:
    """The store's record names the server, the model and the layout."""
    adapter = opened(adapter_spec(tmp_path))
    assert store_seeds(adapter, [1])
    adapter.close()
    [folder] = store_folders(tmp_path)
    assert describe(folder).identity == {
        "server": "lmcache 0.5.6",
        "model": "org/model",
        "dtype": "bfloat16",
        "layout": str(list(SHAPE)),
        "object_bytes": memory(None).get_size(),
    }


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"bugdet": "1GB"}, "bugdet"),
        ({"budget": "a lot"}, "budget"),
        ({"path": ""}, "path"),
        ({"level": 99}, "level"),
        ({"key_file": "/nowhere/key"}, "key_file"),
    ],
)
def test_wrong_settings_stop_the_start(tmp_path: Path, params: dict[str, object], says: str) -> None:
    """One error that names the key."""
    with pytest.raises(ConfigError, match=says):
        opened(adapter_spec(tmp_path, **params))


def test_a_path_that_is_not_ours_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for path in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(ConfigError, match="path="):
            opened(adapter_spec(path))


def test_a_budget_too_small_for_an_object_is_no_error_of_the_server(tmp_path: Path) -> None:
    """Sizes are known with the first object only: it is not stored, and the reason is logged once."""
    adapter = opened(adapter_spec(tmp_path, budget="1MiB"))
    assert not store(adapter, [key_of(1)], [memory(1, torch.Size([2, 32, 64, 128]))]).is_successful()
    assert look_up(adapter, [key_of(1)]) == []
    adapter.close()


def test_threads_that_do_not_return_are_stalled() -> None:
    """Until they do; then their work goes on."""
    workers, gate = Workers("test", 2, timeout_s=0.01), threading.Event()
    assert not workers.are_stalled()
    for _ in range(3):
        workers.submit(lambda: gate.wait() and None)
    while not workers.are_stalled():
        time.sleep(0.001)
    assert not workers.close(time.monotonic())
    gate.set()
    assert workers.close(time.monotonic() + 60) and not workers.are_stalled()

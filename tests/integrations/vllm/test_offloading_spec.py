"""The complete CPU and disk tier under vLLM, driven by vLLM's own types and managers, on the CPU backend."""

from __future__ import annotations

import fcntl
import itertools
import logging
import mmap
import os
import random
import re
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
)
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.cpu import shared_offload_region

from hicache.errors import ConfigError, OutOfMemory
from hicache.host.arena import CudaRegistry
from hicache.integrations.vllm import HiCacheOffloadingSpec, offloading_spec
from hicache.integrations.vllm.offloading_worker import ChunkRows
from vllm_offload_case import Cache, Engine, engines_on, offloading_config
from vllm_tier_case import key

PLAIN = Cache()
TWO_GROUPS = Cache(widths=(2048, 2048, 512), groups=((0, 1, 2), (0, 1)))
CHUNKED = Cache(widths=(1024, 512), groups=((0, 1),), blocks_per_chunk=3)


def extra(cache: Cache, rows: int, **more: Any) -> dict[str, Any]:
    return {"spec_name": "HiCacheOffloadingSpec", "cpu_bytes_to_use": rows * cache.chunk_bytes, **more}


def names_of(config: OffloadingConfig) -> list[Path]:
    """The files of the engine's shared memory."""
    return [*Path("/dev/shm").glob(f"vllm_offload_{config.engine_id}*")]


@pytest.fixture
def engines(device: str) -> Iterator[Any]:
    with engines_on(device) as make:
        yield make


@pytest.mark.smoke
@pytest.mark.parametrize("cache", [TWO_GROUPS, CHUNKED], ids=["two-groups", "chunked"])
def test_bytes_that_went_down_come_back_into_other_blocks(engines: Any, cache: Cache) -> None:
    """After the GPU's cache was overwritten, the chunks of each group of layers are loaded into other blocks with the
    same bytes."""
    engine, per_chunk = engines(cache, extra(cache, 16)), cache.blocks_per_chunk
    for group in range(len(cache.groups)):
        blocks = list(range(1, 1 + 4 * per_chunk))
        for block in blocks:
            engine.write(block, 100 * group + block, group)
        keys = [key(i, group=group) for i in range(4)]
        assert engine.store(keys, blocks, group) == keys
        targets = [block + 30 for block in blocks]
        assert engine.load(keys, targets, group)
        assert all(engine.holds(block + 30, 100 * group + block, group) for block in blocks)


@pytest.mark.smoke
def test_parts_of_chunks_go_both_ways_and_nothing_else_changes(engines: Any, device: str) -> None:
    """Parts of chunks are stored and loaded, and no other byte changes. A store copies values that earlier work on the
    current stream writes."""
    engine, rng = engines(CHUNKED, extra(CHUNKED, 4)), random.Random(0)
    keys, context = [key(number) for number in range(4)], engine.request()
    rows = engine.manager.prepare_store(keys, context).store_spec
    contents, jobs = [-1] * 12, itertools.count()
    for first, size in ((0, 12), (1, 1), (2, 5), (4, 8), (0, 4)):
        chunks = slice(first // 3, (first + size - 1) // 3 + 1)
        blocks = rng.sample(range(1, 64), size)
        if device == "cuda":
            torch.cuda._sleep(20_000_000)
        for at, block in enumerate(blocks, first):
            contents[at] = 100 * size + at
            engine.write(block, contents[at])
        part = type(rows)(rows.chunk_ids[chunks].tolist())
        assert engine.worker.submit_store(next(jobs), GPULoadStoreSpec(blocks, [size], [first]), part)
        engine.finish(1)
        for begin, end in ((0, 12), (1, 2), (5, 10)):
            chunks, targets = slice(begin // 3, (end - 1) // 3 + 1), rng.sample(range(1, 64), end - begin)
            for tensor in engine.tensors:
                tensor.fill_(7)
            part = type(rows)(rows.chunk_ids[chunks].tolist())
            assert engine.worker.submit_load(next(jobs), part, GPULoadStoreSpec(targets, [end - begin], [begin]))
            engine.finish(1)
            assert all(engine.holds(block, contents[begin + i]) for i, block in enumerate(targets))
            others = [block for block in range(64) if block not in targets]
            assert all((tensor[others] == 7).all() for tensor in engine.tensors)


@pytest.mark.smoke
def test_transfers_in_flight_together_end_in_their_order_with_their_own_bytes(engines: Any) -> None:
    """Several store jobs, and then loads of all their chunks, are in flight together. The worker reports their ends in
    the order of submission, and each load has the right bytes."""
    engine = engines(PLAIN, extra(PLAIN, 24))
    submitted, contexts = [], {}
    for job in range(8):
        keys, blocks = [key(3 * job + i) for i in range(3)], [1 + 3 * job + i for i in range(3)]
        for i, block in enumerate(blocks):
            engine.write(block, 3 * job + i)
        contexts[job] = engine.request()
        output = engine.manager.prepare_store(keys, contexts[job])
        assert engine.worker.submit_store(job, GPULoadStoreSpec(blocks, [3], [0]), output.store_spec)
        submitted.append((job, keys))
    assert engine.finish(8) == list(range(8))
    for job, keys in submitted:
        engine.manager.complete_store(keys, contexts[job])
    for tensor in engine.tensors:
        tensor.zero_()
    for job, keys in submitted:
        targets = [30 + 3 * job + i for i in range(3)]
        loaded = engine.manager.prepare_load(keys, contexts[job])
        assert engine.worker.submit_load(100 + job, loaded, GPULoadStoreSpec(targets, [3], [0]))
    assert engine.finish(8) == [100 + job for job in range(8)]
    assert all(engine.holds(30 + number, number) for number in range(24))


@pytest.mark.smoke
@pytest.mark.parametrize(("policy", "on_disk"), [("lru", False), ("slru", True), ("arc", True)])
def test_random_programs_keep_every_row_and_every_byte(
    engines: Any, tmp_path: Path, policy: str, on_disk: bool
) -> None:
    """After any sequence of stores, loads, resets and, with a disk, restarts, each chunk that is found has the bytes
    that were stored under its name. With a disk every stored chunk is found. In the end every row of the CPU tier is
    usable."""
    rows, rng = 8, random.Random(len(policy))
    disk = {"path": str(tmp_path), "budget": "64MB", "prefill_tokens_per_s": 0}  # loads, however slow this machine is
    more = {"disk": disk} if on_disk else {}
    engine = engines(PLAIN, extra(PLAIN, rows, eviction_policy=policy, **more))
    stored: set[int] = set()
    for _ in range(60):
        action = rng.choices(["store", "load", "reset"], [10, 10, 1])[0]
        if action == "reset":
            engine.reset()
            if on_disk:
                engine.close()
                engine = engines(PLAIN, extra(PLAIN, rows, eviction_policy=policy, **more))
            continue
        first, count = rng.randrange(20), rng.randrange(1, 5)
        numbers, blocks = list(range(first, first + count)), rng.sample(range(1, 64), count)
        keys = [key(number) for number in numbers]
        if action == "store":
            engine.settle()
            for number, block in zip(numbers, blocks, strict=True):
                engine.write(block, number)
            taken = engine.store(keys, blocks)
            stored |= {number for number, key in zip(numbers, keys, strict=True) if key in taken}
            engine.settle()
        elif engine.load(keys, blocks):
            assert all(engine.holds(block, number) for number, block in zip(numbers, blocks, strict=True))
        else:
            assert not (on_disk and stored.issuperset(numbers))
    engine.settle()
    fresh = [key(1000 + i) for i in range(rows)]
    assert engine.store(fresh, list(range(1, rows + 1))) == fresh


class Failing:
    """A transfer backend whose first `times` copies fail only at their end."""

    def __init__(self, backend: Any, times: int) -> None:
        self._backend, self.times = backend, times

    def store(self, slots: Any, pages: Any) -> Any:
        return self._spoiled(self._backend.store(slots, pages))

    def load(self, pages: Any, slots: Any, load_id: int) -> Any:
        return self._spoiled(self._backend.load(pages, slots, load_id))

    def close(self) -> None:
        self._backend.close()

    def _spoiled(self, op: Any) -> Any:
        op.wait()
        if self.times:
            self.times -= 1
            op.error = RuntimeError("the copy engine is on fire")
        return op


@pytest.mark.smoke
def test_a_failed_copy_is_made_again(engines: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A failed copy is repeated, because vLLM handles no failed transfer: it would use the wrong bytes in the
    blocks."""
    engine = engines(PLAIN, extra(PLAIN, 8))
    (link,) = engine.worker._links
    link.backend = Failing(link.backend, times=2)
    for block in (1, 2):
        engine.write(block, block)
    keys = [key(1), key(2)]
    with caplog.at_level(logging.WARNING, "hicache"):
        engine.store(keys, [1, 2])
        for tensor in engine.tensors:
            tensor.zero_()
        assert engine.load(keys, [3, 4])
    assert engine.holds(3, 1) and engine.holds(4, 2)
    assert engine.worker.num_repeated == 2
    [_] = {record for record in caplog.records if "is made again" in record.message}  # two loggers report each record


def test_a_copy_that_fails_twice_is_reported_as_failed(engines: Any) -> None:
    """If a copy fails twice, its job is reported as failed. The chunk is not found afterwards, and its row is free."""
    engine = engines(PLAIN, extra(PLAIN, 1))
    (link,) = engine.worker._links
    link.backend, tensor = Failing(link.backend, times=1), link.single._pairs[0]
    link.single._pairs[0] = (tensor[0][:, :7], tensor[1])
    engine.store([key(1)], [1])
    assert not engine.load([key(1)], [2])
    link.single._pairs[0] = tensor
    engine.write(1, 2)
    assert engine.store([key(2)], [1])
    assert engine.load([key(2)], [2])
    assert engine.holds(2, 2)


def test_shutdown_gives_the_shared_memory_back(tmp_path: Path, device: str) -> None:
    """After shutdown the shared memory is not mapped, and its file is removed."""
    engine = Engine(PLAIN, extra(PLAIN, 4, disk={"path": str(tmp_path), "budget": "64MB"}), device)
    engine.store([key(1)], [1])
    assert engine.load([key(1)], [2])
    engine.settle()
    name = f"vllm_offload_{engine.spec.config.engine_id}"
    assert name in Path("/proc/self/maps").read_text(encoding="utf-8")
    engine.close()
    assert name not in Path("/proc/self/maps").read_text(encoding="utf-8")
    assert not list(Path("/dev/shm").glob(f"{name}*"))


@pytest.mark.smoke
@pytest.mark.parametrize("order", ["worker 0, worker 1, scheduler", "scheduler, worker 1, worker 0"])
def test_from_when_all_have_mapped_it_the_memory_has_no_name(order: str, device: str) -> None:
    """When all processes have mapped the shared memory, its file name is removed, but not before. So the memory is
    freed with the processes, even if they are killed."""
    config, started = offloading_config(PLAIN, extra(PLAIN, 4)), list[Any]()
    for process in order.split(", "):
        assert len(names_of(config)) == bool(started)
        parallel = replace(config.parallel, world_size=2, rank=int(process[-1]) if process != "scheduler" else 0)
        spec = HiCacheOffloadingSpec(replace(config, parallel=parallel))
        started.append(spec.get_manager() if process == "scheduler" else spec.get_worker(PLAIN.on(device)))
    assert not names_of(config)
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if config.engine_id in line]
    assert len(mapped) == 3 and len({line.split()[4] for line in mapped}) == 1
    for part in started:
        part.shutdown()


@pytest.mark.smoke
@pytest.mark.parametrize("order", ["worker, scheduler", "scheduler, worker"])
def test_workers_allocate_the_memory_and_the_scheduler_only_maps_it(order: str) -> None:
    """When worker 1 of 2 has started, its half of each of 4 rows is resident in its mapping. No page is resident in the
    mapping of the scheduler. Afterwards vLLM's function is the original one."""
    populate, started, resident = shared_offload_region._get_populate_write_fn, list[Any](), list[str]()
    cache = Cache(widths=(4096,), groups=((0,),))
    config = offloading_config(cache, extra(cache, 8))
    for process in order.split(", "):
        spec = HiCacheOffloadingSpec(replace(config, parallel=replace(config.parallel, world_size=2, rank=1)))
        started.append(spec.get_manager() if process == "scheduler" else spec.get_worker(cache.on("cpu")))
        resident.append("0" if process == "scheduler" else "16")
        maps = Path("/proc/self/smaps").read_text(encoding="utf-8")
        found = re.findall(rf"{config.engine_id}.*(?:\n.*)*?\nRss: +(\d+) kB", maps)
        assert sorted(found) == sorted(resident)
    assert shared_offload_region._get_populate_write_fn is populate
    for part in started:
        part.shutdown()


@pytest.mark.smoke
def test_a_server_that_is_killed_in_its_start_leaves_nothing_to_the_next_one(device: str) -> None:
    """A server is killed at any system call that creates its memory. The next start removes the files of the killed one
    before it allocates memory. After a complete start there are no files to remove."""
    was_killed, moments = True, itertools.count()
    while was_killed:
        config, moment = offloading_config(PLAIN, extra(PLAIN, 4)), next(moments)
        child = os.fork()
        if not child:
            start_and_die(config, device, moment)
        was_killed = os.WIFSIGNALED(os.waitpid(child, 0)[1])
        if was_killed:
            HiCacheOffloadingSpec(offloading_config(PLAIN, extra(PLAIN, 4)))
        assert not names_of(config)
    assert moment > 8


def start_and_die(config: OffloadingConfig, device: str, moment: int) -> None:
    """Start the worker and then the scheduler, as vLLM does, in a forked process. Kill the process before the system
    call number `moment`, or end it without a shutdown."""
    calls = itertools.count()

    def look(frame: object, event: str, called: Any) -> None:
        is_meant = event == "c_call" and called in (os.open, os.ftruncate, os.unlink, os.close, fcntl.fcntl)
        if is_meant and next(calls) == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(look)
    try:
        HiCacheOffloadingSpec(config).get_worker(PLAIN.on(device))
        HiCacheOffloadingSpec(config).get_manager()
    finally:
        os._exit(0)


def test_a_worker_that_cannot_be_built_leaves_no_shared_memory(device: str) -> None:
    """A worker whose cache has wider blocks than vLLM announced cannot be built, and leaves no shared memory."""
    config = offloading_config(PLAIN, extra(PLAIN, 4))
    tensor = torch.zeros(8, 2 * PLAIN.chunk_bytes, dtype=torch.int8, device=device)
    wide = CanonicalKVCaches([CanonicalKVCacheTensor(tensor, tensor.shape[1])], [[CanonicalKVCacheRef(0, 1)]])
    with pytest.raises(ConfigError, match="TieringOffloadingSpec"):
        HiCacheOffloadingSpec(config).get_worker(wide)
    assert not names_of(config)


class NoPinning:
    """A stand-in for CUDA under confidential computing. This stand-in allocates page-locked memory, but cannot lock
    existing memory."""

    def __init__(self) -> None:
        self.held: dict[int, mmap.mmap] = {}

    def register(self, address: int, num_bytes: int) -> str:
        return "CUDA error 801, operation not supported"

    def near(self) -> frozenset[int]:
        return frozenset()

    def allocate(self, num_bytes: int) -> int:
        memory = mmap.mmap(-1, num_bytes)
        address = int(np.frombuffer(memory, np.uint8).ctypes.data)
        self.held[address] = memory
        return address

    def free(self, address: int) -> None:
        del self.held[address]


@pytest.fixture
def no_pinning(device: str, monkeypatch: pytest.MonkeyPatch) -> NoPinning:
    """Make page-locking fail. On a GPU only that call of CUDA fails."""
    cuda = NoPinning()
    if device == "cuda":
        monkeypatch.setattr(CudaRegistry, "register", cuda.register)
    else:

        def rows(region: Any, page_bytes: int, registry: None, **arguments: Any) -> ChunkRows:
            return ChunkRows(region, page_bytes, cuda, **arguments)

        monkeypatch.setattr(offloading_spec, "ChunkRows", rows)
    return cuda


@pytest.mark.smoke
@pytest.mark.parametrize("cache", [TWO_GROUPS, CHUNKED], ids=["two-groups", "chunked"])
def test_memory_that_cannot_be_pinned_is_allocated(engines: Any, no_pinning: NoPinning, cache: Cache) -> None:
    """If shared memory cannot be page-locked, the worker allocates other memory. From the first transfer on the shared
    memory takes no space."""
    engine, per_chunk = engines(cache, extra(cache, 16)), cache.blocks_per_chunk
    blocks, keys = list(range(1, 1 + 4 * per_chunk)), [key(i) for i in range(4)]
    for block in blocks:
        engine.write(block, block)
    assert engine.store(keys, blocks) == keys
    assert engine.load(keys, [block + 30 for block in blocks])
    assert all(engine.holds(block + 30, block) for block in blocks)
    rows = engine.worker._rows
    assert rows.host.is_pinned() or len(no_pinning.held) == 1
    assert os.fstat(rows._region.fd).st_blocks == 0
    del rows
    engine.worker.shutdown()
    assert not no_pinning.held


@pytest.mark.smoke
@pytest.mark.parametrize("others", ["disk", "workers"])
def test_memory_that_cannot_be_pinned_and_has_other_users_ends_the_start(
    tmp_path: Path, device: str, no_pinning: NoPinning, others: str
) -> None:
    """If the memory cannot be page-locked and has other users, the start fails. Other users of the memory are a disk,
    or workers that read what one of them stores. The error names a remedy."""
    more = {"disk": {"path": str(tmp_path), "budget": "64MB"}} if others == "disk" else {}
    config = replace(offloading_config(PLAIN, extra(PLAIN, 4, **more)), replicated_layout=others == "workers")
    tensors = [CanonicalKVCacheTensor(torch.zeros(8, n, dtype=torch.int8, device=device), n) for n in PLAIN.widths]
    with pytest.raises(OutOfMemory, match="use TieringOffloadingSpec"):
        HiCacheOffloadingSpec(config).get_worker(CanonicalKVCaches(tensors, [[]]))
    assert not names_of(config)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({}, "cpu_bytes_to_use"),
        ({"cpu_bytes_to_use": "1GB", "bugdet": "1GB"}, "bugdet"),
        ({"cpu_bytes_to_use": "1GB", "disk": {"path": "x", "bugdet": 1}}, "bugdet"),
        ({"cpu_bytes_to_use": "1GB", "eviction_policy": "best"}, "eviction_policy"),
        ({"cpu_bytes_to_use": 4096}, "cpu_bytes_to_use"),
        ({"cpu_bytes_to_use": "1GB", "canonical_layout": True}, "canonical_layout"),
    ],
)
def test_wrong_settings_are_named_at_the_start(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        HiCacheOffloadingSpec(offloading_config(PLAIN, given))


def test_pipeline_stages_are_refused_at_the_start() -> None:
    config = offloading_config(PLAIN, extra(PLAIN, 4))
    staged = replace(config, parallel=replace(config.parallel, pp_size=2))
    with pytest.raises(ConfigError, match="pipeline_parallel_size=2"):
        HiCacheOffloadingSpec(staged)

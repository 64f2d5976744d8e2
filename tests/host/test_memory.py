"""The memory of the host tier: how much it may take, its NUMA node, and that it is resident and pinned."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import resource
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from hicache.errors import OutOfMemory
from hicache.host import arena
from hicache.host.arena import CudaRegistry, PinnedArena, allocate_pinned
from hicache.host.memory import RESERVE_BYTES, available_bytes, free_bytes, require
from hicache.host.numa import cpus_near, pci_address, run_near
from memory_maps import flags_at

GIB = 1 << 30
UNLIMITED_V1 = "9223372036854771712"


def write(root: Path, files: dict[str, str]) -> Path:
    """Write a tree of files that stands for a part of a machine."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def machine(root: Path, membership: str, groups: dict[str, str]) -> int:
    """The `available_bytes` of a machine with 64 GiB of free memory and these control groups."""
    meminfo = f"MemTotal:       131072000 kB\nMemFree:         1000 kB\nMemAvailable:   {64 << 20} kB"
    proc = write(root / "proc", {"meminfo": meminfo, "self/cgroup": membership})
    return available_bytes(proc, write(root / "cgroup", groups))


def group_v2(path: str, limit: int | str, used: int, **more: int | str) -> dict[str, str]:
    files = {"memory.max": limit, "memory.current": used, **{k.replace("_", "."): v for k, v in more.items()}}
    return {f"{path}/{name}": str(value) for name, value in files.items()}


def group_v1(path: str, limit: int | str, used: int) -> dict[str, str]:
    return {f"{path}/memory.limit_in_bytes": str(limit), f"{path}/memory.usage_in_bytes": str(used)}


def test_a_machine_without_groups_gives_what_it_has(tmp_path: Path) -> None:
    """Without control groups, MemAvailable counts; a machine without MemAvailable is an error."""
    assert machine(tmp_path, "0::/", {}) == 64 * GIB
    (tmp_path / "proc/self/cgroup").unlink()
    assert available_bytes(tmp_path / "proc", tmp_path / "nowhere") == 64 * GIB
    write(tmp_path / "proc", {"meminfo": "MemFree: 12 kB"})
    with pytest.raises(OSError, match="has no MemAvailable"):
        available_bytes(tmp_path / "proc", tmp_path / "nowhere")


GROUPS = {
    "own group": ("0::/a/b", group_v2("a/b", 9 * GIB, 2 * GIB) | group_v2("a", "max", 30 * GIB), 7 * GIB),
    "parent": ("0::/a/b", group_v2("a/b", "max", GIB) | group_v2("a", 5 * GIB, 2 * GIB), 3 * GIB),
    "mount point": ("0::/of/the/machine", group_v2(".", 3 * GIB, 2 * GIB), GIB),
    "throttled": ("0::/a", group_v2("a", 9 * GIB, GIB, memory_high=4 * GIB), 3 * GIB),
    "sibling": ("0::/a", group_v2("a", "max", GIB) | group_v2("ab", 2 * GIB, GIB), 64 * GIB),
    "outside": ("0::/../b", group_v2("a", 2 * GIB, GIB) | group_v2("../b", 2 * GIB, GIB), 64 * GIB),
    "over its limit": ("0::/a", group_v2("a", 2 * GIB, 3 * GIB), 0),
    "version 1, own group": ("4:memory:/a/b", group_v1("memory/a/b", 6 * GIB, 2 * GIB), 4 * GIB),
    "version 1, beside another": ("4:cpu,memory:/a", group_v1("memory/a", 6 * GIB, GIB), 5 * GIB),
    "version 1, mount point": ("4:memory:/docker/1234\n0::/", group_v1("memory", 2 * GIB, GIB), GIB),
    "version 1, unlimited": ("4:memory:/a", group_v1("memory/a", UNLIMITED_V1, GIB), 64 * GIB),
    "version 1, of another controller": ("4:cpu:/a\n3:memory:/b", group_v1("memory/a", GIB, 0), 64 * GIB),
}


@pytest.mark.parametrize(("membership", "groups", "expected"), GROUPS.values(), ids=GROUPS)
def test_the_tightest_group_counts(tmp_path: Path, membership: str, groups: dict[str, str], expected: int) -> None:
    """Of our group and all groups above it, up to the mount point, the one with the least free memory counts. The file
    names are those of either version. Groups of other controllers do not count."""
    assert machine(tmp_path, membership, groups) == expected


def test_a_tier_of_what_is_free_leaves_an_eighth(tmp_path: Path) -> None:
    """The size is the memory that the machine or a control group has free, without an eighth of it or the reserve. If
    none is free, an error names the setting."""
    for name, expected in (("sibling", 56 * GIB), ("version 1, own group", 3 * GIB), ("own group", 6 * GIB)):
        membership, groups, _ = GROUPS[name]
        assert free_bytes("host_bytes", machine(tmp_path / name, membership, groups)) == expected
    membership, groups, _ = GROUPS["over its limit"]
    with pytest.raises(OutOfMemory, match=r"cpu_bytes_to_use=free .* set cpu_bytes_to_use"):
        free_bytes("cpu_bytes_to_use", machine(tmp_path, membership, groups))


def test_cached_files_count_as_free(tmp_path: Path) -> None:
    """In both versions, file pages in the cache of a group count as free, and its other usage does not."""
    stat = f"anon {5 * GIB}\ninactive_file {2 * GIB}\nactive_file {GIB}\nfile_mapped {GIB}\nodd line here"
    assert machine(tmp_path / "2", "0::/a", group_v2("a", 8 * GIB, 8 * GIB) | {"a/memory.stat": stat}) == 3 * GIB
    # In version 1 the fields without "total_" do not include child groups.
    stat = f"inactive_file {7 * GIB}\ntotal_inactive_file {GIB}\ntotal_active_file {GIB}"
    groups = group_v1("memory/a", 8 * GIB, 7 * GIB) | {"memory/a/memory.stat": stat}
    assert machine(tmp_path / "1", "4:memory:/a", groups) == 3 * GIB


def test_sizes_fit_up_to_the_last_byte() -> None:
    """Requested bytes are accepted up to the last byte that fits. Beyond that an error names the setting and the
    largest value that fits, in complete MiB."""
    require(5 * GIB, "l2_bytes", 5 * GIB + RESERVE_BYTES)
    with pytest.raises(OutOfMemory, match=r"^host_bytes=5.0 GiB does not fit: .* host_bytes to at most 5119MiB$"):
        require(5 * GIB, "host_bytes", 5 * GIB + RESERVE_BYTES - 1)
    with pytest.raises(OutOfMemory, match="l2_bytes to at most 0MiB"):
        require(1, "l2_bytes", 0)


TWO_NODES = {
    "devices/system/node/node0/cpulist": "0-3,8-11",
    "devices/system/node/node1/cpulist": "4-7,12-15",
    "bus/pci/devices/0000:17:00.0/numa_node": "0",
    "bus/pci/devices/0000:dc:00.0/numa_node": "1",
    "bus/pci/devices/0000:01:00.0/numa_node": "-1",
    "bus/pci/devices/0000:02:00.0/numa_node": "2",
}


def test_the_cpus_of_a_gpu_are_those_of_its_node(tmp_path: Path) -> None:
    """The allowed CPUs on the GPU's node count as near. If the node of the GPU is unknown, or is the only one, no CPU
    is preferred."""
    sys, all_cpus = write(tmp_path, TWO_NODES), range(16)
    assert cpus_near("0000:17:00.0", all_cpus, sys) == {0, 1, 2, 3, 8, 9, 10, 11}
    assert cpus_near("0000:dc:00.0", all_cpus, sys) == {4, 5, 6, 7, 12, 13, 14, 15}
    assert cpus_near("0000:dc:00.0", {0, 1, 5}, sys) == {5}
    assert cpus_near("0000:dc:00.0", {0, 1}, sys) == frozenset(), "a node all of whose CPUs are taken from us"
    for unknown in ("0000:01:00.0", "0000:02:00.0", "0000:99:00.0", None):
        assert cpus_near(unknown, all_cpus, sys) == frozenset()
    write(tmp_path, {"devices/system/node/node1/cpulist": ""})
    assert cpus_near("0000:dc:00.0", all_cpus, sys) == frozenset(), "a node of memory alone"
    one = {name: text for name, text in TWO_NODES.items() if "node1" not in name}
    assert cpus_near("0000:17:00.0", all_cpus, write(tmp_path / "one", one)) == frozenset()
    assert cpus_near("0000:17:00.0", all_cpus, tmp_path / "nowhere") == frozenset()


def test_work_runs_on_the_cpus_given_and_leaves_ours() -> None:
    """Every item is processed once, by bound threads other than the caller, whose affinity does not change. If given
    CPUs do not exist, the work is still done."""
    before = os.sched_getaffinity(0)
    for cpus in (frozenset({min(before)}), frozenset[int](), frozenset({1 << 14})):
        seen: list[tuple[int, set[int], bool]] = []

        def work(item: int, seen: list[tuple[int, set[int], bool]] = seen) -> None:
            seen.append((item, os.sched_getaffinity(0), threading.current_thread() is threading.main_thread()))

        run_near(work, range(40), cpus)
        assert sorted(item for item, _, _ in seen) == list(range(40))
        assert all(on == ((cpus & before) or before) and not ours for _, on, ours in seen)
        assert os.sched_getaffinity(0) == before
    run_near(work, [], cpus)
    with pytest.raises(ZeroDivisionError):
        run_near(lambda item: 1 // item, [1, 0, 1], frozenset())


def resident_pages(address: int, num_bytes: int) -> int:
    """The number of memory pages of an aligned range that are resident."""
    with Path("/proc/self/pagemap").open("rb", buffering=0) as entries:
        entries.seek(address // mmap.PAGESIZE * 8)
        return int((np.frombuffer(entries.read(num_bytes // mmap.PAGESIZE * 8), np.uint64) >> 63).sum())


class Pins:
    """A stand-in for CUDA. The stand-in keeps registered ranges as CUDA does, and fails at a given call."""

    def __init__(self, fail_at: int | None = None, error: Exception | None = None) -> None:
        self.fail_at, self.error = fail_at, error
        self.held: dict[int, int] = {}
        self.most: list[tuple[int, int]] = []

    def near(self) -> frozenset[int]:
        return frozenset({min(os.sched_getaffinity(0))})

    def register(self, address: int, num_bytes: int) -> str | None:
        if len(self.held) == self.fail_at:
            if self.error is not None:
                raise self.error
            return "out of something"
        locked = range(address // mmap.PAGESIZE, -(-(address + num_bytes) // mmap.PAGESIZE))
        for other, length in self.held.items():
            theirs = range(other // mmap.PAGESIZE, -(-(other + length) // mmap.PAGESIZE))
            if locked.start < theirs.stop and theirs.start < locked.stop:
                return "already registered"
        self.held[address] = num_bytes
        self.most = sorted(self.held.items())
        return None

    def unregister(self, address: int) -> str | None:
        return None if self.held.pop(address, None) is not None else "not registered"


@pytest.mark.parametrize(
    ("rows", "row_bytes", "chunk_bytes"),
    [(64, 1 << 16, 1 << 20), (65, 1 << 16, 1 << 20), (3000, 24, 1), (100, 3 * 4096 + 512, 100_000), (1, 7, 1 << 20)],
)
def test_chunks_cover_the_arena_once(rows: int, row_bytes: int, chunk_bytes: int) -> None:
    """The registered chunks cover the arena once and end between rows. No two chunks share a page of memory."""
    pins = Pins()
    arena = PinnedArena(rows, row_bytes, pin=True, registry=pins, chunk_bytes=chunk_bytes)
    start, step = arena.data.data_ptr(), arena.rows_per_chunk * row_bytes
    firsts = range(0, rows * row_bytes, step)
    assert [(start + at, min(step, rows * row_bytes - at)) for at in firsts] == pins.most
    assert not arena.data.any()
    arena.close()
    arena.close()
    assert not pins.held


def test_memory_is_resident_before_it_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the first chunk is registered, every page is resident, huge pages were requested, and a child process will
    not see them. Without pinning, memory is allocated when it is written."""
    monkeypatch.setattr(arena, "TOUCH_BYTES", 3 << 20)
    rows, row_bytes = 16, 1 << 20
    seen: list[tuple[int, set[str]]] = []

    class Watching(Pins):
        def register(self, address: int, num_bytes: int) -> str | None:
            seen.append((resident_pages(address, num_bytes), flags_at(address)))
            return super().register(address, num_bytes)

    pinned = PinnedArena(rows, row_bytes, pin=True, registry=Watching())
    [(resident, flags)] = seen
    assert resident == rows * row_bytes // mmap.PAGESIZE
    assert "dc" in flags and "sh" not in flags
    if Path("/sys/kernel/mm/transparent_hugepage").exists():
        assert "hg" in flags
    pinned.close()
    lazy = PinnedArena(rows, row_bytes, pin=False)
    assert resident_pages(lazy.data.data_ptr(), rows * row_bytes) == 0
    lazy.data[2] = 1
    assert 0 < resident_pages(lazy.data.data_ptr(), rows * row_bytes) <= 4 * row_bytes // mmap.PAGESIZE
    assert "dc" not in flags_at(lazy.data.data_ptr())


@pytest.mark.parametrize("row_bytes", [1 << 20, 5 << 20, 3000])
def test_only_the_touched_part_of_rows_becomes_resident(row_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory pages of the second part of each row of shared memory become resident, and their bytes do not change.
    An error of the system is an OutOfMemory."""
    monkeypatch.setattr(arena, "TOUCH_BYTES", 2 << 20)
    stride = 2 * -(-row_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    rows = np.frombuffer(mmap.mmap(-1, 4 * stride), np.uint8).reshape(4, stride)
    start, pages = rows.ctypes.data, -(-row_bytes // mmap.PAGESIZE)
    rows[:, stride // 2 + row_bytes - 1] = 7
    assert resident_pages(start, 4 * stride) == 4
    arena.touch(rows[:, stride // 2 : stride // 2 + row_bytes], frozenset(), "l2_bytes")
    assert [resident_pages(start + row * stride, stride // 2) for row in range(4)] == [0] * 4
    assert [resident_pages(start + row * stride + stride // 2, pages * mmap.PAGESIZE) for row in range(4)] == [
        pages
    ] * 4
    assert rows.sum() == 28 and (rows[:, stride // 2 + row_bytes - 1] == 7).all()
    beyond = np.ctypeslib.as_array((ctypes.c_uint8 * mmap.PAGESIZE).from_address(1 << 20))[None]  # not mapped
    with pytest.raises(OutOfMemory, match=r"cannot allocate 4096 bytes of CPU memory .*; lower l2_bytes"):
        arena.touch(beyond, frozenset(), "l2_bytes")


@pytest.mark.parametrize("fail_at", [0, 1, 3])
def test_a_failure_halfway_unpins_what_was_pinned(fail_at: int) -> None:
    """If CUDA refuses a chunk or raises, no chunk stays registered. A refusal names the setting."""
    for error, raised, setting in ((None, OutOfMemory, "l2_bytes"), (RuntimeError("no driver"), RuntimeError, "no dr")):
        pins = Pins(fail_at, error)
        with pytest.raises(raised, match=setting):
            PinnedArena(64, 1 << 16, pin=True, setting="l2_bytes", registry=pins, chunk_bytes=1 << 20)
        assert len(pins.most) == fail_at and not pins.held


def test_an_arena_that_is_dropped_is_unpinned(caplog: pytest.LogCaptureFixture) -> None:
    """A dropped arena unregisters its chunks without a close, because its addresses will be used again. If a chunk
    cannot be unregistered, the failure is logged, and the other chunks are unregistered."""
    pins = Pins()
    arena = PinnedArena(64, 1 << 16, pin=True, registry=pins, chunk_bytes=1 << 20)
    del pins.held[arena.data.data_ptr() + (2 << 20)]
    assert pins.held
    del arena
    gc.collect()
    assert not pins.held and len(caplog.records) == 1


def test_memory_that_cannot_be_mapped_names_the_setting() -> None:
    """An address space limit raises OutOfMemory with the setting."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), limits[1]))
    try:
        with pytest.raises(OutOfMemory, match="host_bytes"):
            PinnedArena(128, 1 << 20, pin=False)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.gpu
def test_pinned_memory_is_pinned() -> None:
    """CUDA sees every row of every chunk as page-locked, and copies it completely. After close, no row is
    page-locked."""
    arena = PinnedArena(64, 1 << 20, pin=True, chunk_bytes=24 << 20)
    assert arena.rows_per_chunk == 24
    assert all(row.is_pinned() for row in arena.data)
    source = torch.randint(0, 255, (64, 1 << 20), dtype=torch.uint8)
    arena.data.copy_(source)
    for row in (0, 23, 24, 63):
        assert torch.equal(arena.data[row].cuda(non_blocking=True).cpu(), source[row])
    arena.close()
    assert not any(arena.data[row].is_pinned() for row in (0, 23, 24, 63))


@pytest.mark.gpu
def test_memory_that_cuda_allocates_is_pinned_and_freed_with_its_last_tensor() -> None:
    """Rows are copied to the device and back completely. A size that CUDA cannot allocate is refused, and later kernels
    still run."""
    freed: list[int] = []

    class Counting(CudaRegistry):
        def free(self, address: int) -> None:
            freed.append(address)
            super().free(address)

    registry = Counting()
    rows = allocate_pinned(5, (1 << 20) + 48, setting="host_bytes", registry=registry)
    address, last, source = rows.data_ptr(), rows[4:], torch.randint(0, 255, rows.shape, dtype=torch.uint8)
    rows.copy_(source.cuda(), non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(rows.cuda(non_blocking=True).cpu(), source)
    del rows
    assert last.is_pinned() and torch.equal(last, source[4:]) and not freed
    del last
    assert freed == [address]
    assert registry.allocate(1 << 50) == 0
    assert torch.arange(1000, device="cuda").sum().item() == 499500


@pytest.mark.gpu
def test_a_refused_registration_harms_no_kernel() -> None:
    """A refused registration returns CUDA's message, and the next kernel of this thread runs without an error."""
    arena = PinnedArena(4, 1 << 20, pin=True)
    refused = CudaRegistry().register(arena.data.data_ptr(), 1 << 20)
    assert refused is not None and refused.startswith("CUDA error ")
    assert torch.arange(1000, device="cuda").sum().item() == 499500
    arena.close()
    assert CudaRegistry().unregister(arena.data.data_ptr()) is not None
    assert torch.arange(1000, device="cuda").sum().item() == 499500


@pytest.mark.gpu
def test_the_cpus_near_this_gpu_are_ours() -> None:
    """sysfs knows the GPU's address, and this process may use the CPUs near the GPU."""
    address, known = pci_address(torch.device("cuda", 0)), Path("/sys/bus/pci/devices")
    assert address is None or not known.exists() or (known / address).exists()
    assert CudaRegistry().near() <= os.sched_getaffinity(0)

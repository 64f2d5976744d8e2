"""The adapter where users meet it: under the storage manager of LMCache, with its controllers, and in its benchmark."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lmcache.v1", reason="needs LMCache; make test-servers installs it")

from lmcache.v1.distributed.api import GroupedObjectKeys, PrefetchTaskSpec
from lmcache.v1.distributed.config import EvictionConfig, L1ManagerConfig, L1MemoryManagerConfig, StorageManagerConfig
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
from lmcache.v1.distributed.storage_manager import StorageManager

from hicache.storage import describe, store_folders
from lmcache_case import SHAPE, adapter_spec, key_of, layout
from waiting import eventually

KEYS = [key_of(n) for n in range(12)]


@contextlib.contextmanager
def manager(spec: dict[str, Any]) -> Iterator[StorageManager]:
    """LMCache's own, with 64 MiB of CPU memory above the adapter of `spec`."""
    adapters = parse_args_to_l2_adapters_config(argparse.Namespace(l2_adapter=[json.dumps(spec)]))
    l1 = L1ManagerConfig(L1MemoryManagerConfig(64 << 20, use_lazy=False, shm_name=""))
    opened = StorageManager(StorageManagerConfig(l1, eviction_config=EvictionConfig("LRU"), l2_adapter_config=adapters))
    try:
        yield opened
    finally:
        opened.close()


def chunk(n: int) -> torch.Tensor:
    """Small integers, which every serializer of LMCache keeps."""
    return torch.randint(-8, 8, SHAPE, generator=torch.Generator().manual_seed(n)).to(torch.bfloat16)


def write(storage: StorageManager) -> None:
    """Put all chunks into the memory of LMCache, wait until its controller has stored them, and forget them there."""
    for key, held in storage.reserve_write(KEYS, layout()).items():
        held.tensor.copy_(chunk(KEYS.index(key)))
    storage.finish_write(KEYS)
    [(_, adapter)] = storage.l2_adapters()
    eventually(lambda: sum(kept["entries"] for kept in adapter.report_status()["stores"]) == len(KEYS))
    num_forgotten = 0

    def forget() -> bool:
        nonlocal num_forgotten
        num_forgotten += storage.delete_l1_keys(KEYS)[0]  # what the controller has not let go of is skipped
        return num_forgotten == len(KEYS)

    eventually(forget, lambda: num_forgotten)


def prefetched(storage: StorageManager) -> int:
    """How many chunks come back from the adapter; their values are right."""
    rows = [GroupedObjectKeys(keys=KEYS, object_group_id=0, layout_desc=layout(), sliding_window_size=-1)]
    handle = storage.submit_prefetch_task(PrefetchTaskSpec(rows))
    assert storage.wait_prefetch_status(handle, 60)
    found = storage.query_prefetch_status(handle).l2_hit_cells[0].get_indices_list()
    hits = [KEYS[place] for place in found]
    keys, objects = storage.unsafe_read(hits)
    for key, held in zip(keys, objects, strict=True):
        assert torch.equal(held.tensor, chunk(KEYS.index(key)))
    storage.finish_read_prefetched(hits)
    return len(hits)


@pytest.mark.parametrize(
    "extra", [pytest.param({}, marks=pytest.mark.smoke, id="plain"), pytest.param({"serde": {"type": "fp8"}}, id="fp8")]
)
def test_the_storage_manager_finds_its_chunks_again(tmp_path: Path, extra: dict[str, Any]) -> None:
    """After they left its memory, and after a restart; with LMCache's serializer in between too."""
    spec = {**adapter_spec(tmp_path), **extra}
    with manager(spec) as storage:
        assert prefetched(storage) == 0
        write(storage)
        assert prefetched(storage) == len(KEYS)
    with manager(spec) as storage:
        assert prefetched(storage) == len(KEYS)


def test_lmcache_bench_verifies_the_data(tmp_path: Path) -> None:
    """`lmcache bench l2`: every key is stored, found and loaded, and the bytes are compared; another run loads them."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    flags = ("--num-keys", "16", "--in-flight", "4", "--rounds", "2", "--data-size-kb", "1024")
    spec = json.dumps(adapter_spec(tmp_path))
    for more, successes in ((("--no-skip-verify",), ["128"] * 3), (("--only", "load"), ["128"])):
        command = [str(Path(sys.executable).parent / "lmcache"), "bench", "l2", "--l2-adapter", spec, *flags, *more]
        command += ["--lookup-max-hit-rate", "1.0"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert re.findall(r"Total success: +(\d+)", done.stdout) == successes
        assert "[Verify] All 64 keys data verified OK" in done.stdout or "--only" in more
    assert [describe(folder).entries for folder in store_folders(tmp_path)] == [3 * 64]

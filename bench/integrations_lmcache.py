"""LMCache's L2: its own rounds of `lmcache bench l2`, ours and its adapter for files in turns.

    lmcache.store, .load          as `lmcache bench l2` has it by default: objects of one byte that repeats
    lmcache.kv.store, .kv.load    objects of synthetic KV, which compress to about three quarters; 4 tasks in flight

    .synced                       with the time until the files of LMCache's adapter are on the disk, as ours are; it
                                  leaves them in the page cache

A task is 32 objects of 256 KiB. A helper of the integrations bench.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hicache.bench.common import BenchUnavailable, Report, in_turns
from hicache.bench.disk import CHANNELS, synthetic_kv
from hicache.bench.disk_writes import SyncedFiles
from hicache.bench.integrations_store import WARMUP

TARGET = 2.0
_NUM_KEYS, _OBJECT_BYTES = 32, 256 << 10


@dataclass(frozen=True)
class _Round:
    """Objects to store, as many to load into, and how many tasks of `_NUM_KEYS` objects are in flight."""

    stored: Sequence[Sequence[Any]]
    loaded: Sequence[Sequence[Any]]

    @property
    def in_flight(self) -> int:
        return len(self.stored)

    def require_equal(self) -> None:
        for tasks in zip(self.stored, self.loaded, strict=True):
            for stored, loaded in zip(*tasks, strict=True):
                if not torch.equal(stored.raw_data, loaded.raw_data):
                    raise AssertionError("LMCache got other bytes than it stored")


def measure_lmcache(report: Report, folder: Path, samples: int) -> None:
    from lmcache.cli.commands.bench.l2_adapter_bench.data import make_memory_objects
    from lmcache.v1.distributed.l2_adapters import create_l2_adapter
    from lmcache.v1.distributed.l2_adapters.config import get_l2_adapter_config_class

    def opened(spec: dict[str, Any]) -> Any:
        return create_l2_adapter(get_l2_adapter_config_class(spec["type"]).from_dict(spec))

    def constant(fill: int) -> list[Any]:
        return list(make_memory_objects(memory(1), _NUM_KEYS, _OBJECT_BYTES, 0, fill))

    def memory(tasks: int) -> torch.Tensor:
        return torch.empty(tasks * _NUM_KEYS * _OBJECT_BYTES, dtype=torch.uint8)

    rng = np.random.default_rng(0)
    pages = [torch.from_numpy(synthetic_kv(rng, _OBJECT_BYTES).copy()) for _ in range(_NUM_KEYS)]
    blank = [torch.zeros(_OBJECT_BYTES, dtype=torch.uint8)] * _NUM_KEYS
    rounds = {
        "lmcache": _Round([constant(0)], [constant(1)]),
        "lmcache.kv": _Round([_kv_objects(pages) for _ in range(4)], [_kv_objects(blank) for _ in range(4)]),
    }
    for name, round in rounds.items():
        ours = {
            "type": "plugin",
            "module_path": "hicache.integrations.lmcache.adapter",
            "class_name": "HiCacheL2Adapter",
            "adapter_params": {"path": str(folder / name / "ours"), "budget": "4GB"},
        }
        adapters = {"ours": opened(ours), "fs": opened({"type": "fs", "base_path": str(folder / name / "fs")})}
        try:
            _measure(report, name, adapters, round, SyncedFiles(folder / name / "fs"), samples)
        finally:
            for adapter in adapters.values():
                adapter.close()


def _measure(
    report: Report, name: str, adapters: dict[str, Any], round: _Round, files: SyncedFiles, samples: int
) -> None:
    """One round of stores and one of loads of each adapter, in turns."""
    rounds = {
        "ours": lambda turn: _one_round(adapters["ours"], round, turn + WARMUP),
        "fs": lambda turn: files.timed(_one_round(adapters["fs"], round, turn + WARMUP)),
    }
    seconds = in_turns(rounds, samples=samples, warmup=WARMUP)
    num_bytes = round.in_flight * _NUM_KEYS * _OBJECT_BYTES
    tasks = f"{round.in_flight} x {_NUM_KEYS} objects of {_OBJECT_BYTES >> 10} KiB in flight"
    note, target = f"{tasks}; ceiling: LMCache's fs adapter", TARGET if name == "lmcache" else None
    for case, ours in (("store", "store"), ("synced", "store"), ("load", "load")):
        beside = seconds["fs", case]
        report.rate(f"{name}.{case}", num_bytes, seconds["ours", ours], beside=beside, target=target, note=note)


def _one_round(adapter: Any, round: _Round, turn: int) -> dict[str, float]:
    """Seconds of a store and a load of all objects under keys of this turn, as LMCache's benchmark times them."""
    from lmcache.cli.commands.bench.l2_adapter_bench.data import make_object_keys
    from lmcache.cli.commands.bench.l2_adapter_bench.runner import bench_load, bench_store

    first = turn * round.in_flight * _NUM_KEYS
    keys = [make_object_keys(_NUM_KEYS, key_offset=first + task * _NUM_KEYS) for task in range(round.in_flight)]
    seconds: dict[str, float] = {}
    for to, run, objects in (("store", bench_store, round.stored), ("load", bench_load, round.loaded)):
        lines: list[str] = []
        result = run(
            adapter,
            in_flight=round.in_flight,
            num_keys=_NUM_KEYS,
            data_size=_OBJECT_BYTES,
            rounds=1,
            keys_for_round=lambda _: keys,
            objs_for_round=lambda _, objects=objects: objects,
            log=lines.append,
        )
        if result.success_counts != [round.in_flight * _NUM_KEYS]:
            raise BenchUnavailable(f"LMCache could not {to} all objects: {' '.join(lines)}")
        seconds[to] = result.round_durations[0]
    round.require_equal()
    return seconds


def _kv_objects(pages: Sequence[torch.Tensor]) -> list[Any]:
    """Objects as LMCache has them of a model in bfloat16."""
    from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

    shape = torch.Size([_OBJECT_BYTES // 2 // CHANNELS, CHANNELS])

    def metadata() -> Any:
        size = {"phy_size": _OBJECT_BYTES, "ref_count": 1, "address": 0}
        return MemoryObjMetadata(shape=shape, dtype=torch.bfloat16, fmt=MemoryFormat.KV_2LTD, **size)

    return [TensorMemoryObj(raw_data=page.clone(), metadata=metadata(), parent_allocator=None) for page in pages]

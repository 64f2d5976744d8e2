"""vLLM's secondary tiers through the interface that its scheduler calls: ours, vLLM's files and the bare page store.

    vllm.store, .load                jobs of 16 chunks of 1 MiB, 4 in flight, from and into vLLM's CPU tier; the ceiling
                                     is `put` and `get_into` of a page store, with as many threads
    vllm.store.files, .load.files    the same, beside vLLM's tier of files, which uses O_DIRECT and does not sync
    vllm.store.synced                the same, with the time until these files are on the disk, as ours are

Chunks are synthetic KV. A helper of the integrations bench.
"""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from hicache.bench.common import BenchUnavailable, Report, in_turns
from hicache.bench.disk import synthetic_kv
from hicache.bench.disk_writes import SyncedFiles
from hicache.bench.integrations_store import READERS, WARMUP, BareStore, require_round_trip

STORE_TARGET, FILES_TARGET = 0.9, 1.0
_CHUNK_BYTES, _JOB_CHUNKS, _NUM_JOBS = 1 << 20, 16, 4
_NUM_CHUNKS = _JOB_CHUNKS * _NUM_JOBS


def measure_vllm(report: Report, folder: Path, samples: int) -> None:
    manager = _manager(folder)
    view = np.asarray(manager.primary_tier.get_kv_memoryview()).view(np.uint8)
    rng = np.random.default_rng(0)
    for row in range(_NUM_CHUNKS):
        view[row] = synthetic_kv(rng, _CHUNK_BYTES)
    stored, loaded = list(view[:_NUM_CHUNKS]), list(view[_NUM_CHUNKS:])
    job_ids, synced = itertools.count(), SyncedFiles(folder / "files")
    ours, of_files = manager.secondary_tiers

    def bare(turn: int) -> dict[str, float]:
        view[_NUM_CHUNKS:] = 0
        return store.round(_keys(turn), stored, loaded)

    with closing(BareStore(folder / "store", _CHUNK_BYTES)) as store:
        rounds: dict[str, Callable[[int], dict[str, float]]] = {
            "ours": lambda turn: _tier_round(ours, view, job_ids, turn),
            "files": lambda turn: synced.timed(_tier_round(of_files, view, job_ids, turn)),
            "store": bare,
        }
        try:
            seconds = in_turns(rounds, samples=samples, warmup=WARMUP)
        finally:
            manager.shutdown()
    for name, part, beside, target in (
        ("store", "store", ("store", "store"), STORE_TARGET),
        ("load", "load", ("store", "load"), STORE_TARGET),
        ("store.files", "store", ("files", "store"), FILES_TARGET),
        ("store.synced", "store", ("files", "synced"), FILES_TARGET),
        ("load.files", "load", ("files", "load"), FILES_TARGET),
    ):
        num_bytes = _NUM_CHUNKS * _CHUNK_BYTES
        report.rate(f"vllm.{name}", num_bytes, seconds["ours", part], beside=seconds[beside], target=target)


def _manager(folder: Path) -> Any:
    """vLLM's tiering manager with both tiers behind a CPU tier for all chunks, once to store and once to load."""
    from vllm.v1.kv_offload import config as of_vllm
    from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

    ours = {"type": "HiCacheTier", "module_path": "hicache.integrations.vllm", "readers": READERS}
    tiers = [
        {**ours, "path": str(folder / "ours"), "budget": "8GB"},
        {"type": "fs", "root_dir": str(folder / "files")},
    ]
    alone = dict.fromkeys(("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size", "data_parallel_size"), 1)
    config = of_vllm.OffloadingConfig(
        groups=(of_vllm.OffloadingGroupConfig(tokens_per_block=32, layer_names=("a", "b"), group_id=0),),
        worker_kv_bytes_per_block=_CHUNK_BYTES,
        enable_kv_cache_events=False,
        extra_config={"cpu_bytes_to_use": 2 * _NUM_CHUNKS * _CHUNK_BYTES, "secondary_tiers": tiers},
        engine_id=uuid.uuid4().hex,
        model=of_vllm.OffloadingModelConfig(name="bench", dtype="bfloat16"),
        cache=of_vllm.OffloadingCacheConfig(tokens_per_hash=32, blocks_per_chunk=1),
        parallel=of_vllm.OffloadingParallelConfig(
            **alone, rank=0, data_parallel_index=0, data_parallel_rank_local=None, is_parallelism_agnostic=False
        ),
        kv_cache_layout="LBHNC",
    )
    return TieringOffloadingSpec(config).get_manager()


def _keys(turn: int) -> list[bytes]:
    return [((turn + WARMUP) * _NUM_CHUNKS + n).to_bytes(32, "big") for n in range(_NUM_CHUNKS)]


def _tier_round(tier: Any, view: np.ndarray, job_ids: itertools.count[int], turn: int) -> dict[str, float]:
    """Seconds in which a tier stores the first half of the rows, and loads them into the second."""
    from vllm.v1.kv_offload.base import ReqContext, make_offload_key
    from vllm.v1.kv_offload.tiering.base import TransferJob

    keys = [make_offload_key(key, 0) for key in _keys(turn)]
    view[_NUM_CHUNKS:] = 0

    def run(submit: Callable[[Any], None], first_row: int, *, is_promotion: bool) -> float:
        jobs = [
            TransferJob(
                next(job_ids),
                keys[start : start + _JOB_CHUNKS],
                np.arange(first_row + start, first_row + start + _JOB_CHUNKS),
                is_promotion,
                ReqContext(req_id="bench"),
            )
            for start in range(0, _NUM_CHUNKS, _JOB_CHUNKS)
        ]
        begin_s = time.perf_counter()
        for job in jobs:
            submit(job)
        results: list[Any] = []
        while len(results) < len(jobs):
            results += tier.get_finished_jobs()
            time.sleep(1e-4)
        elapsed_s = time.perf_counter() - begin_s
        if not all(result.success for result in results):
            raise BenchUnavailable(f"{type(tier).__name__} could not transfer all chunks")
        return elapsed_s

    seconds = {"store": run(tier.submit_store, 0, is_promotion=False)}
    seconds["load"] = run(tier.submit_load, _NUM_CHUNKS, is_promotion=True)
    require_round_trip([], list(view[:_NUM_CHUNKS]), list(view[_NUM_CHUNKS:]))
    return seconds

"""A vLLM in this process, its CPU tier and ours: python vllm_server.py, with JSON on its standard input.

`{"model": folder, "tiers": [settings of each], "steps": [...]}`, and "policy", "dtype" and "block_size" where they are
not the defaults. Steps are "run", "reset" and "faults". The last line that it prints is JSON: for each "run" the cached
tokens and the output of every prompt, by vLLM's count; for each tier the chunks that it was to store and those that it
has given, as a dict of their keys to the checksums of their bytes.

The default dtype is float32: in bfloat16 two logits of the test's model are equal, and the last bit of a sum would
decide on a token.
"""

from __future__ import annotations

import errno
import json
import os
import random
import sys
import time
from collections.abc import Iterable
from typing import Any

import torch
import xxhash
from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec, OffloadingWorker, OffloadKey, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from hicache.integrations.vllm import HiCacheTier
from hicache.storage import LmdbPageStore

PROMPT_TOKENS = 1200
CPU_BYTES = 64 << 20
Checksums = dict[str, list[str]]  # of a chunk's bytes, one for each time, by the hexadecimal key of the chunk
stored: list[Checksums] = []  # by tier
given: list[Checksums] = []


class CopyingWorker(OffloadingWorker):
    """Copies blocks between vLLM's cache and its CPU tier on the CPU, where its own worker does not run."""

    def __init__(self, caches: CanonicalKVCaches, region: SharedOffloadRegion) -> None:
        self._blocks = [cache.tensor for cache in caches.tensors]
        self._rows = [region.create_next_worker_view(cache.page_size_bytes) for cache in caches.tensors]
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: Any) -> bool:
        for blocks, rows in zip(self._blocks, self._rows, strict=True):
            for block, row in zip(src_spec.block_ids, dst_spec.chunk_ids, strict=True):
                rows[row] = blocks[block].reshape(-1).view(torch.int8)
        self._finished.append(TransferResult(job_id, True))
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: GPULoadStoreSpec, expedited: bool = False) -> bool:
        for blocks, rows in zip(self._blocks, self._rows, strict=True):
            for row, block in zip(src_spec.chunk_ids, dst_spec.block_ids, strict=True):
                blocks[block] = rows[row].view(blocks.dtype).reshape(blocks[block].shape)
        self._finished.append(TransferResult(job_id, True))
        return True

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is under way."""


class CPUTieringSpec(TieringOffloadingSpec):
    """vLLM's own refuses CPUs."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        region = SharedOffloadRegion(
            engine_id=self.config.engine_id,
            num_chunks=self.num_chunks,
            rank=0,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        return CopyingWorker(kv_caches, region)


class RecordingTier(HiCacheTier):
    """Records the bytes that it is to store and those that it gives."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._stored, self._given = Checksums(), Checksums()
        self._loading: dict[int, TransferJob] = {}
        stored.append(self._stored)
        given.append(self._given)

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._record(self._stored, job_metadata, set(job_metadata.keys))
        super().submit_store(job_metadata)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._loading[job_metadata.job_id] = job_metadata
        super().submit_load(job_metadata)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        results = list(super().get_finished_jobs())
        for result in results:
            job = self._loading.pop(result.job_id, None)
            if job is not None:
                self._record(self._given, job, set(result.successful_keys or ()))
        return results

    def _record(self, checksums: Checksums, job: TransferJob, keys: set[OffloadKey]) -> None:
        for key, row in zip(job.keys, self._pages(job), strict=True):
            if key in keys:
                checksums.setdefault(key.hex(), []).append(xxhash.xxh3_64_hexdigest(row))


def inject_faults(rng: random.Random) -> None:
    """From now on a store fails or waits at random."""

    def faulty(original: Any) -> Any:
        def call(self: LmdbPageStore, items: Any, *args: Any, **kwargs: Any) -> Any:
            kind = rng.random()
            if kind < 0.05:
                raise OSError(errno.EIO, "injected")
            if kind < 0.3:
                time.sleep(rng.random() * 0.05)
            return [ok and rng.random() < 0.98 for ok in original(self, items, *args, **kwargs)]

        return call

    for method in ("contains", "get_into", "put"):
        setattr(LmdbPageStore, method, faulty(getattr(LmdbPageStore, method)))


def main(task: dict[str, Any]) -> None:
    from vllm import LLM, SamplingParams

    extra = {
        "spec_name": "CPUTieringSpec",
        "spec_module_path": "vllm_server",
        "cpu_bytes_to_use": CPU_BYTES,
        "secondary_tiers": [{"type": "RecordingTier", "module_path": "vllm_server", **tier} for tier in task["tiers"]],
    }
    if "policy" in task:
        extra |= {"eviction_policy": task["policy"], "cache_policy_module_path": "hicache.integrations.vllm"}
    llm = LLM(
        task["model"],
        dtype=task.get("dtype", "float32"),
        enforce_eager=True,
        max_model_len=2048,
        block_size=task.get("block_size", 32),
        skip_tokenizer_init=True,
        kv_transfer_config={
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": extra,
        },
    )
    prompts = [
        {"prompt_token_ids": [random.Random(n).randrange(256) for _ in range(PROMPT_TOKENS)]}
        for n in range(task.get("prompts", 2))
    ]
    sampling = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
    runs = []
    for step in task["steps"]:
        if step == "run":
            answers = llm.generate(prompts, sampling, use_tqdm=False)
            runs.append([(answer.num_cached_tokens, list(answer.outputs[0].token_ids)) for answer in answers])
        elif step == "reset":
            assert llm.reset_prefix_cache(reset_connector=True)
        else:
            inject_faults(random.Random(0))
    llm.llm_engine.engine_core.shutdown()
    print(json.dumps({"runs": runs, "stored": stored, "given": given}))


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    sys.modules["vllm_server"] = sys.modules["__main__"]  # vLLM imports our classes by this name
    main(json.load(sys.stdin))

"""vLLM for the benchmark `servers`: the configuration of each mode, and the program that serves both workloads.

`python -m hicache.bench.servers.vllm` reads a task from its standard input, as JSON (`task`, `documents_task`), and
writes the outcome into a file. Only it imports vLLM: `AsyncLLM`, with its engine in another process, and TP workers if
there are several GPUs.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import importlib.util
import itertools
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hicache.bench.servers.model import write_config
from hicache.bench.servers.program import drop_files
from hicache.bench.servers.sessions_program import disk_settings, serve_loads
from hicache.bench.servers.workload import Answer, Served, Workload, device_tokens, workloads

# The workload `documents`: the workloads that each run serves, in order. A run has its own process; a run with
# ".restart" uses the files of the previous run.
RUNS = {
    "none": ("warm", "first"),
    "cpu": ("warm", "first", "one_more", "host"),
    "spec": ("warm", "first", "one_more", "host"),
    "fs": ("warm", "first"),
    "fs.restart": ("warm", "first"),
    "hicache": ("warm", "first", "one_more"),
    "hicache.restart": ("warm", "first"),
}
# Modes of the workload `sessions`.
MODES = (
    "none",
    "cpu",
    "spec",
    "spec-raw",
    "fs",
    "fs-dropped",
    "hicache",
    "hicache-always",
    "hicache-never",
)
_ON_CPUS = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    **_ON_CPUS,
}

_PLUG_IN = "hicache.integrations.vllm"
_WORKER = "hicache.bench.servers.vllm_worker"  # importing it needs vLLM
_ANSWER_TOKENS = 8
_MAX_REQUESTS = 32  # maximum number of running requests, unless there are more clients
_UTILISATION = 0.8  # share of the GPU's memory
_QUIET_S, _PATIENCE_S = 2.0, 120.0


def missing() -> str:
    """The package that must be installed first; "" if none."""
    return (
        "" if importlib.util.find_spec("vllm") else "vLLM is not installed: pip install '.[vllm]' in a clone of hicache"
    )


def documents_task(run: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The task of a run of the workload `documents`, as JSON. Files of models and tiers are in `folder`."""
    chosen = workloads(args.small, args.document_tokens)
    tokens = chosen["first"].tokens
    settings = engine_settings(args, folder, tokens + 256, device_tokens(tokens))
    mode = run.partition(".")[0]
    cpu_bytes = args.cpu_bytes or (64 << 20 if args.small else 36 << 30)
    # A tiny model computes faster than a disk reads; 0: always load.
    disk = {"prefill_tokens_per_s": 0} if args.small else {}
    extra = offloading(mode, args, cpu_bytes, folder / mode, disk)
    return {
        "engine": settings | connector(extra, f"{folder.name}-{run}"),
        "workloads": [dataclasses.asdict(chosen[name]) for name in RUNS[run]],
        "settle": f"{run}.restart" in RUNS,
    }


def task(mode: str, tensor_parallel: int, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The server's part of a task, as JSON. Files are in `folder`."""
    family = mode.partition("-")[0] if mode != "spec-raw" else mode
    settings = engine_settings(args, folder, args.longest + args.answer_tokens + 256, args.gpu_tokens)
    settings |= {"max_num_seqs": max(_MAX_REQUESTS, *args.concurrency), "tensor_parallel_size": tensor_parallel}
    if args.device.type == "cuda":
        settings |= {"gpu_memory_utilization": _UTILISATION, "disable_custom_all_reduce": True, "seed": 0}
    cpu_bytes = int((args.disk_cpu_gib if family in ("fs", "hicache") else args.cpu_gib) * (1 << 30))
    disk = disk_settings(mode, args.small, folder)
    extra = offloading(family, args, cpu_bytes, folder / f"{mode}.tp{tensor_parallel}", disk)
    return {"engine": settings | connector(extra, f"{folder.name}-{mode}")}


def clean_up(run: str, folder: Path) -> None:
    """Clean up after the processes of a run have ended: drop the files of the disk from the kernel's page cache, as a
    restart follows, and remove the file of vLLM's CPU tier, which vLLM leaves behind."""
    drop_files(folder / run.partition(".")[0])
    for file in Path("/dev/shm").glob(f"vllm_offload_{folder.name}-{run}*"):
        file.unlink(missing_ok=True)


def engine_settings(args: argparse.Namespace, folder: Path, max_tokens: int, gpu_tokens: int) -> dict[str, Any]:
    """Settings of the engine: requests of at most `max_tokens`, and a cache of `gpu_tokens` on the device."""
    block_tokens = 16 if args.device.type == "cuda" else 32  # vLLM on CPUs takes multiples of 32
    settings = {
        "model": args.model,
        "skip_tokenizer_init": True,
        "block_size": block_tokens,
        "max_model_len": max_tokens,
        "num_gpu_blocks_override": gpu_tokens // block_tokens,
        "enable_prefix_caching": True,
        "prefix_caching_hash_algo": "sha256",
        "disable_log_stats": False,
    }
    if args.device.type == "cuda":
        compilation = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
        more = {"gpu_memory_utilization": 0.6, "max_num_batched_tokens": 8192, "compilation_config": compilation}
        settings |= {"dtype": "bfloat16", **more}
    else:
        settings |= {"dtype": "float32", "enforce_eager": True}
    if not args.model:
        worker = {"load_format": "hicache_random", "worker_extension_cls": f"{_WORKER}.WorkerExtension"}
        settings |= {"model": str(write_config(folder, args.small)), **worker}
    return settings


def connector(extra: dict[str, Any] | None, engine_id: str) -> dict[str, Any]:
    """The engine's settings for the offloading `extra`; empty for None."""
    if extra is None:
        return {}
    about = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "engine_id": engine_id}
    return {"kv_transfer_config": {**about, "kv_load_failure_policy": "recompute", "kv_connector_extra_config": extra}}


def offloading(
    mode: str, args: argparse.Namespace, cpu_bytes: int, files: Path, disk: dict[str, Any]
) -> dict[str, Any] | None:
    """The connector's extra configuration; None for no offloading. `disk`: additional settings of our disk."""
    extra: dict[str, Any] = {"cpu_bytes_to_use": cpu_bytes, "blocks_per_chunk": args.blocks_per_chunk}
    if mode == "none":
        return None
    disk = {"path": str(files), "budget": "100GB", **disk}
    if mode in ("spec", "spec-raw", "hicache"):
        extra |= {"spec_name": "HiCacheOffloadingSpec", "spec_module_path": _PLUG_IN}
        extra |= {"kv_packing": "off"} if mode == "spec-raw" else {}
        return extra | ({"disk": disk} if mode == "hicache" else {})
    extra["spec_name"] = "TieringOffloadingSpec"
    if args.device.type == "cpu":
        extra |= {"spec_name": "CPUTieringSpec", "spec_module_path": _WORKER}
    return extra | ({"secondary_tiers": [{"type": "fs", "root_dir": str(files)}]} if mode == "fs" else {})


def moved_bytes(metrics: Iterable[Any]) -> dict[str, int]:
    """Bytes that vLLM has moved, by metric."""
    found: dict[str, int] = {}
    for metric in metrics:
        name = metric.name.removeprefix("vllm:kv_offload_").removesuffix("_bytes")
        if name in ("load", "store", "tiering_read", "tiering_write") and metric.name.endswith("_bytes"):
            found[name] = found.get(name, 0) + int(metric.value)
    return found


def gate_rates(metrics: Iterable[Any]) -> dict[str, float]:
    """Number of loads by decision of our disk's gate, and its last measured rates."""
    names = {
        "load_gate_loads": "decision",
        "cost_prefill_tokens_per_second": "",
        "movement_bytes_per_second": "movement",
    }
    found: dict[str, float] = {}
    for metric in metrics:
        name = metric.name.removeprefix("vllm:hicache_")
        if metric.name.startswith("vllm:hicache_") and name in names:
            found[metric.labels.get(names[name], "prefill")] = float(metric.value)
    return found


class Server:
    """vLLM's `AsyncLLM`; must be created in a running event loop."""

    def __init__(self, settings: dict[str, Any]) -> None:
        begin_s = time.perf_counter()
        from vllm import SamplingParams, __version__
        from vllm.config import KVTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self.version = str(__version__)
        self._sampling = SamplingParams
        if "kv_transfer_config" in settings:
            settings = {**settings, "kv_transfer_config": KVTransferConfig(**settings["kv_transfer_config"])}
        self._engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**settings))
        self.start_s = time.perf_counter() - begin_s

    async def answer(self, name: str, prompt: list[int], answer_tokens: int) -> tuple[float, float, int, list[int]]:
        sampling = self._sampling(max_tokens=answer_tokens, temperature=0, ignore_eos=True, detokenize=False)
        begin_s, first_s, last = time.perf_counter(), 0.0, None
        async for output in self._engine.generate({"prompt_token_ids": prompt}, sampling, name):
            first_s, last = first_s or time.perf_counter() - begin_s, output
        if last is None:
            raise RuntimeError(f"vLLM gave no answer to {name}")
        total_s = time.perf_counter() - begin_s
        return first_s, total_s, last.num_cached_tokens or 0, list(last.outputs[0].token_ids)

    async def settle(self) -> None:
        """Send requests, so that the scheduler checks its copies, until no bytes have moved for 2 s, or for two
        minutes; then empty the device's prefix cache."""
        known, number = self.num_bytes(), 0
        deadline_s, quiet_s = time.monotonic() + _PATIENCE_S, time.monotonic() + _QUIET_S
        while time.monotonic() < min(quiet_s, deadline_s):
            await self.answer(f"settle {time.monotonic()}", [20], 1)
            await asyncio.sleep(0.1)
            if (now := self.num_bytes()) != known:
                known, quiet_s = now, time.monotonic() + _QUIET_S
        while not await self._engine.reset_prefix_cache() and time.monotonic() < deadline_s:
            await self.answer(f"reset {number}", [20], 1)  # resetting fails while blocks are copied; a step ends copies
            number += 1

    def num_bytes(self) -> dict[str, int]:
        from vllm.v1.metrics.reader import get_metrics_snapshot

        return moved_bytes(get_metrics_snapshot())

    def rates(self) -> dict[str, float]:
        from vllm.v1.metrics.reader import get_metrics_snapshot

        return gate_rates(get_metrics_snapshot())

    def close(self) -> None:
        self._engine.shutdown()


async def serve_documents(server: Server, given: dict[str, Any]) -> None:
    """Serve the workloads of a task, and write the outcome into the task's result file."""
    served, numbers = Served({}, {}, server.start_s, server.version), itertools.count()
    for values in given["workloads"]:
        workload = Workload(**values)
        if workload.forget:
            await server.settle()
        answers = served.answers[workload.name] = list[Answer]()
        for document in workload.requests():
            prompt, name = workload.prompt(document), f"request {next(numbers)}"
            first_s, total_s, cached, tokens = await server.answer(name, prompt, _ANSWER_TOKENS)
            answers.append(Answer(document, cached, first_s, total_s, tokens))
    if given["settle"]:
        await server.settle()
    served.num_bytes.update(server.num_bytes())
    Path(given["result"]).write_text(json.dumps(dataclasses.asdict(served)), encoding="utf-8")


async def _serve(given: dict[str, Any]) -> None:
    server = Server(given["engine"])
    await (serve_documents if "workloads" in given else serve_loads)(server, given)
    server.close()


def main() -> None:
    asyncio.run(_serve(json.load(sys.stdin)))


if __name__ == "__main__":
    main()

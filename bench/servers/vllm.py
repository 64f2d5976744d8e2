"""vLLM for the benchmark `servers`: the configuration of each mode, and the program that serves.

    none          no connector
    cpu           vLLM's CPU tier, which stores blocks as soon as they are computed
    lazy          vLLM's `SimpleCPUOffloadConnector`, which stores blocks just before the GPU evicts them
    lmcache       LMCache's server (`hicache.bench.servers.lmcache`)
    raw, hicache  `HiCacheConnector`, without and with packing
    fs            vLLM's CPU tier above its own files
    disk          `HiCacheConnector` with a disk; disk-always and disk-never load all found pages, or none

`python -m hicache.bench.servers.vllm` reads a task from its standard input, as JSON, and writes the outcome to a file.
Only this program imports vLLM. It uses `AsyncLLM`, whose engine runs in another process.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hicache.bench.servers.model import write_config
from hicache.bench.servers.program import disk_settings
from hicache.bench.servers.runs import GATE, MISSED, Setting
from hicache.bench.servers.serve import serve

MODES = ("none", "cpu", "lazy", "lmcache", "raw", "hicache", "fs", "disk", "disk-always", "disk-never")
DISK_MODES = ("fs", "disk", "disk-always", "disk-never")
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "PYTHONHASHSEED": "0",  # keys of LMCache depend on it
}

_PLUG_IN = "hicache.integrations.vllm"
_WORKER = "hicache.bench.servers.vllm_worker"  # the name only, because importing it needs vLLM
_MAX_REQUESTS = 32  # maximum number of running requests, unless there are more clients
_UTILISATION = 0.8  # share of the GPU's memory that vLLM may use
_COUNTERS = {
    "vllm:kv_offload_load_bytes": "load",
    "vllm:kv_offload_store_bytes": "store",
    "vllm:kv_offload_tiering_read_bytes": "tiering_read",
    "vllm:kv_offload_tiering_write_bytes": "tiering_write",
    "vllm:external_prefix_cache_hits": "external_tokens",
}


def missing() -> str:
    """Return a text with the package that must be installed first; "" if it is installed."""
    found = importlib.util.find_spec("vllm")
    return "" if found else "vLLM is not installed: pip install '.[vllm]' in a clone of hicache"


def task(
    setting: Setting, args: argparse.Namespace, max_tokens: int, files: Path, lmcache: dict[str, Any]
) -> dict[str, Any]:
    """Return the part of a task that vLLM needs, as values for JSON. `files`: folder of the run. `lmcache`: settings of
    the connector to LMCache's server."""
    settings = _engine_settings(setting, args, max_tokens, files)
    connector = lmcache if setting.mode == "lmcache" else _connector(setting, args, files)
    if connector:
        about = {"kv_role": "kv_both", "engine_id": files.name, "kv_load_failure_policy": "recompute"}
        settings["kv_transfer_config"] = about | connector
    return {"engine": settings}


def clean_up(files: Path) -> None:
    """Remove the file of vLLM's CPU tier, which stays if vLLM was killed."""
    for file in Path("/dev/shm").glob(f"vllm_offload_{files.name}*"):
        file.unlink(missing_ok=True)


def _engine_settings(setting: Setting, args: argparse.Namespace, max_tokens: int, files: Path) -> dict[str, Any]:
    """Return the settings of the engine. `max_tokens`: maximum tokens of a request."""
    on_cuda = args.device.type == "cuda"
    block_tokens = 16 if on_cuda else 32  # vLLM on CPUs takes multiples of 32
    settings = {
        "model": args.model,
        "skip_tokenizer_init": True,
        "block_size": block_tokens,
        "max_model_len": max_tokens,
        "max_num_seqs": max(_MAX_REQUESTS, setting.clients),
        "enable_prefix_caching": True,
        "prefix_caching_hash_algo": "sha256",
        "disable_log_stats": False,
        "dtype": "bfloat16" if on_cuda else "float32",
    }
    if setting.gpu_tokens:
        settings["num_gpu_blocks_override"] = setting.gpu_tokens // block_tokens
    if on_cuda:
        compilation = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
        settings |= {"max_num_batched_tokens": 8192, "compilation_config": compilation, "seed": 0}
        settings |= {"gpu_memory_utilization": _UTILISATION, "disable_custom_all_reduce": True}
    else:
        settings |= {"enforce_eager": True}
    if not args.model:
        worker = {"load_format": "hicache_random", "worker_extension_cls": f"{_WORKER}.WorkerExtension"}
        settings |= {"model": str(write_config(files, args.small, args.layers)), **worker}
    return settings


def _connector(setting: Setting, args: argparse.Namespace, files: Path) -> dict[str, Any]:
    """Return the connector of a mode other than `lmcache`, with its extra configuration; empty for the mode `none`."""
    mode, cpu_bytes = setting.mode, {"cpu_bytes_to_use": int(setting.cpu_gib * (1 << 30))}
    sizes = cpu_bytes | {"blocks_per_chunk": args.blocks_per_chunk}
    if mode == "none":
        return {}
    if mode == "lazy":
        extra: dict[str, Any] = cpu_bytes | {"lazy_offload": True}
        return {"kv_connector": "SimpleCPUOffloadConnector", "kv_connector_extra_config": extra}
    if mode in ("cpu", "fs"):
        tiers = {"secondary_tiers": [{"type": "fs", "root_dir": str(files / "pages")}]} if mode == "fs" else {}
        spec = {"spec_name": "TieringOffloadingSpec" if mode == "fs" else "CPUOffloadingSpec"}
        if args.device.type == "cpu":
            spec = {"spec_name": "CPUTieringSpec", "spec_module_path": _WORKER}
        return {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": sizes | spec | tiers}
    ours: dict[str, Any] = {"kv_packing": "off"} if mode == "raw" else {}
    if mode in DISK_MODES:
        ours = {"disk": {"path": str(files / "pages"), **disk_settings(mode, args.small, files)}}
    return {
        "kv_connector": "HiCacheConnector",
        "kv_connector_module_path": _PLUG_IN,
        "kv_connector_extra_config": sizes | ours,
    }


def counters(metrics: Iterable[Any]) -> dict[str, float]:
    """Return counters from metrics of vLLM: bytes moved, tokens loaded to the GPU from lower tiers, decisions of
    hicache's load gate, and prompt tokens that no tier had, by reason."""
    found: dict[str, float] = {}
    for metric in metrics:
        name = _COUNTERS.get(metric.name.removesuffix("_total"))
        if metric.name == "vllm:hicache_load_gate_loads":
            name = GATE + metric.labels["decision"]
        if metric.name == "vllm:hicache_missed_tokens":
            name = MISSED + metric.labels["reason"]
        if name is not None:
            found[name] = found.get(name, 0.0) + float(metric.value)
    return found


class Server:
    """vLLM's `AsyncLLM`. A running event loop must create this object."""

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

    async def answer(self, name: str, prompt: list[int], answer_tokens: int) -> tuple[list[float], int, list[int]]:
        sampling = self._sampling(max_tokens=answer_tokens, temperature=0, ignore_eos=True, detokenize=False)
        begin_s, outputs_s, last = time.perf_counter(), list[float](), None
        async for output in self._engine.generate({"prompt_token_ids": prompt}, sampling, name):
            outputs_s.append(time.perf_counter() - begin_s)
            last = output
        if last is None:
            raise RuntimeError(f"vLLM gave no answer to {name}")
        return outputs_s, last.num_cached_tokens or 0, list(last.outputs[0].token_ids)

    def counters(self) -> dict[str, float]:
        from vllm.v1.metrics.reader import get_metrics_snapshot

        return counters(get_metrics_snapshot())

    def close(self) -> None:
        self._engine.shutdown()


async def _serve(given: dict[str, Any]) -> None:
    server = Server(given["engine"])
    await serve(server, given)
    server.close()


def main() -> None:
    asyncio.run(_serve(json.load(sys.stdin)))


if __name__ == "__main__":
    main()

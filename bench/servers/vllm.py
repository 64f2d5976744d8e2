"""vLLM for the benchmark `servers`: what each mode configures, and the program that serves workloads.

`python -m hicache.bench.servers.vllm` reads a task from its standard input, as JSON (`task`), and writes a `Served`
into a file. vLLM is imported there alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hicache.bench.servers.model import write_config
from hicache.bench.servers.program import drop_files
from hicache.bench.servers.workload import Answer, Served, Workload, device_tokens, workloads

# What each run serves, in this order. A run has a process of its own; one with ".restart" finds the files of another.
RUNS = {
    "none": ("warm", "first", "cold"),
    "cpu": ("warm", "first", "one_more", "host", "shared", "cold", "throughput"),
    "spec": ("warm", "first", "one_more", "host", "shared", "cold", "throughput"),
    "spec-raw": ("warm", "first", "one_more", "host", "shared"),
    "fs": ("warm", "first"),
    "fs.restart": ("warm", "first"),
    "hicache": ("warm", "first", "one_more"),
    "hicache.restart": ("warm", "first", "shared"),
}
_ON_CPUS = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0", **_ON_CPUS}

_PLUG_IN = "hicache.integrations.vllm"
_WORKER = "hicache.bench.servers.vllm_worker"  # importing it needs vLLM
_QUIET_S, _PATIENCE_S = 3.0, 120.0


def missing() -> str:
    """What has to be installed; "" if nothing."""
    return (
        "" if importlib.util.find_spec("vllm") else "vLLM is not installed: pip install '.[vllm]' in a clone of hicache"
    )


def task(run: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """A run of the program, as JSON. Files of models and tiers are in `folder`."""
    chosen = workloads(args.small, args.document_tokens)
    tokens = chosen["first"].tokens
    settings = engine_settings(args, folder, tokens + 256, device_tokens(tokens))
    mode = run.partition(".")[0]
    cpu_bytes = args.cpu_bytes or (64 << 20 if args.small else 36 << 30)
    # A tiny model computes faster than a disk answers.
    disk = {"prefill_tokens_per_s": 0} if args.small else {}
    extra = offloading(mode, args, cpu_bytes, folder / mode, disk)
    return {
        "llm": settings | connector(extra, f"{folder.name}-{run}"),
        "workloads": [dataclasses.asdict(chosen[name]) for name in RUNS[run]],
        "settle": f"{run}.restart" in RUNS,
    }


def clean_up(run: str, folder: Path) -> None:
    """After the processes of a run have ended. vLLM leaves the file of its CPU tier when it is killed, or just ends;
    and before a restart the files of a disk leave the system's memory."""
    drop_files(folder / run.partition(".")[0])
    for file in Path("/dev/shm").glob(f"vllm_offload_{folder.name}-{run}*"):
        file.unlink(missing_ok=True)


def engine_settings(args: argparse.Namespace, folder: Path, max_tokens: int, gpu_tokens: int) -> dict[str, Any]:
    """Of `LLM`: requests of at most `max_tokens`, and a cache of `gpu_tokens` on the device."""
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
    """The setting of `LLM` for an offloading; none for None."""
    if extra is None:
        return {}
    about = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "engine_id": engine_id}
    return {"kv_transfer_config": {**about, "kv_load_failure_policy": "recompute", "kv_connector_extra_config": extra}}


def offloading(
    mode: str, args: argparse.Namespace, cpu_bytes: int, files: Path, disk: dict[str, Any]
) -> dict[str, Any] | None:
    """The connector's extra configuration; None for no offloading. `disk`: more settings of ours."""
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
    """What vLLM says that it has moved, by metric."""
    found: dict[str, int] = {}
    for metric in metrics:
        name = metric.name.removeprefix("vllm:kv_offload_").removesuffix("_bytes")
        if name in ("load", "store", "tiering_read", "tiering_write") and metric.name.endswith("_bytes"):
            found[name] = found.get(name, 0) + int(metric.value)
    return found


def gate_rates(metrics: Iterable[Any]) -> dict[str, float]:
    """Loads that the gate of our disk decided on, by decision, and the speeds that it knew last."""
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


class _Server:
    """vLLM in this process and its workers."""

    def __init__(self, settings: dict[str, Any]) -> None:
        begin_s = time.perf_counter()
        from vllm import LLM, SamplingParams, __version__

        self.version = str(__version__)
        self._sampling = SamplingParams
        self._llm = LLM(**settings)
        self.start_s = time.perf_counter() - begin_s

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()

    def serve(self, workload: Workload) -> tuple[list[Answer], list[float]]:
        """The answers, and the seconds of each round."""
        if workload.forget:
            give_up_s = time.monotonic() + _PATIENCE_S
            while not self._llm.reset_prefix_cache():  # refused while blocks are copied, which a step notes
                self._step(give_up_s, "the prefix cache is not emptied")
        batches = [(batch, [workload.prompt(*request) for request in batch]) for batch in workload.batches()]
        answers, seconds = list[Answer](), list[float]()
        for number in range(workload.rounds):
            begin_s = time.perf_counter()
            found = [(batch, *self._ask(prompts, workload.answer_tokens)) for batch, prompts in batches]
            seconds.append(time.perf_counter() - begin_s)
            for batch, outputs, total_s in found:
                for request, output in zip(batch, outputs, strict=True):
                    cached, first_s = output.num_cached_tokens or 0, output.metrics.first_token_latency
                    tokens = list(output.outputs[0].token_ids)
                    answers.append(Answer(number, *request, cached, first_s, total_s, tokens))
        return answers, seconds

    def num_bytes(self) -> dict[str, int]:
        return moved_bytes(self._llm.get_metrics())

    def settle(self) -> None:
        """Until no more bytes go to a disk."""
        known = self.num_bytes()
        give_up_s, quiet_s = time.monotonic() + _PATIENCE_S, time.monotonic() + _QUIET_S
        while time.monotonic() < quiet_s:
            self._step(give_up_s, "the disk is not done")
            if (now := self.num_bytes()) != known:
                known, quiet_s = now, time.monotonic() + _QUIET_S

    def _ask(self, prompts: Sequence[list[int]], answer_tokens: int) -> tuple[list[Any], float]:
        sampling = self._sampling(max_tokens=answer_tokens, temperature=0, ignore_eos=True, detokenize=False)
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        begin_s = time.perf_counter()
        return self._llm.generate(requests, sampling, use_tqdm=False), time.perf_counter() - begin_s

    def _step(self, give_up_s: float, what: str) -> None:
        if time.monotonic() > give_up_s:
            raise TimeoutError(f"{what} after {_PATIENCE_S:.0f} s")
        self._ask([[20]], 1)
        time.sleep(0.1)


def main() -> None:
    """Serve the workloads of a task, and write what came of them into its file."""
    given = json.load(sys.stdin)
    server = _Server(given["llm"])
    served = Served({}, {}, {}, server.start_s, server.version)
    for values in given["workloads"]:
        workload = Workload(**values)
        served.answers[workload.name], served.seconds[workload.name] = server.serve(workload)
    if given["settle"]:
        server.settle()
    served.num_bytes.update(server.num_bytes())
    server.close()
    Path(given["result"]).write_text(json.dumps(dataclasses.asdict(served)), encoding="utf-8")


if __name__ == "__main__":
    main()

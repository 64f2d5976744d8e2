"""vLLM for the workload `sessions`: `AsyncLLM`, its engine in a process of its own, over TP workers or not.

`python -m hicache.bench.servers.sessions_vllm` reads a task from its standard input, as JSON (`task`). vLLM is imported
there alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from hicache.bench.servers import vllm
from hicache.bench.servers.sessions_program import disk_settings, serve_loads
from hicache.bench.servers.vllm import connector, engine_settings, gate_rates, moved_bytes, offloading

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
ENVIRONMENT = {**vllm.ENVIRONMENT, "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
missing, clean_up = vllm.missing, vllm.clean_up

_MAX_REQUESTS = 32  # that run at once, unless there are more clients
_UTILISATION = 0.8  # of the GPU's memory
_QUIET_S, _PATIENCE_S = 2.0, 60.0


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


class _Server:
    """Made where an event loop runs."""

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
        """Requests have the scheduler look at what was copied. Where bytes still go to the disk after a minute, that is
        left to go on."""
        known, number = self.num_bytes(), 0
        give_up_s, quiet_s = time.monotonic() + _PATIENCE_S, time.monotonic() + _QUIET_S
        while time.monotonic() < min(quiet_s, give_up_s):
            await self.answer(f"settle {time.monotonic()}", [20], 1)
            await asyncio.sleep(0.1)
            if (now := self.num_bytes()) != known:
                known, quiet_s = now, time.monotonic() + _QUIET_S
        while not await self._engine.reset_prefix_cache() and time.monotonic() < give_up_s:
            await self.answer(f"reset {number}", [20], 1)  # refused while blocks are copied, which a step notes
            number += 1

    def num_bytes(self) -> dict[str, int]:
        from vllm.v1.metrics.reader import get_metrics_snapshot

        return moved_bytes(get_metrics_snapshot())

    def rates(self) -> dict[str, float]:
        from vllm.v1.metrics.reader import get_metrics_snapshot

        return gate_rates(get_metrics_snapshot())

    def close(self) -> None:
        self._engine.shutdown()


async def _serve(given: dict[str, Any]) -> None:
    server = _Server(given["engine"])
    await serve_loads(server, given)
    server.close()


def main() -> None:
    asyncio.run(_serve(json.load(sys.stdin)))


if __name__ == "__main__":
    main()

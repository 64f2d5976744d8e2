"""SGLang for the benchmark `servers`: what each mode configures, and the program that serves workloads.

`python -m hicache.bench.servers.sglang` reads a task from its standard input, as JSON (`task`), and writes a `Served`
into a file. SGLang is imported there alone. `file` is HiCache with SGLang's own backend of files, `hicache` is HiCache
with ours; all else is the same. After a restart neither finds its files in the system's memory.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import importlib.util
import json
import stat
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hicache.bench.servers.model import write_config
from hicache.bench.servers.program import drop_files
from hicache.bench.servers.workload import Answer, Workload, device_tokens, serve, workloads

# What each run serves, in this order. A run has a process of its own; one with ".restart" finds the files of another.
RUNS = {
    "none": ("warm", "first"),
    "file": ("warm", "first"),
    "file.restart": ("warm", "first"),
    "hicache": ("warm", "first"),
    "hicache.restart": ("warm", "first"),
}
OWN_DISK = "file"
ENVIRONMENT: dict[str, str] = {}

FOLDER_OF_FILES = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"
_PAGE_TOKENS = 64
_QUIET_S, _PATIENCE_S = 3.0, 240.0


def missing() -> str:
    """What has to be installed; "" if nothing."""
    found = importlib.util.find_spec("sglang")
    return "" if found else "SGLang is not installed: pip install '.[sglang]' in a clone of hicache"


def task(run: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """A run of the program, as JSON. Files of models and tiers are in `folder`."""
    chosen = workloads(args.small, args.document_tokens)
    mode = run.partition(".")[0]
    files = folder / mode
    files.mkdir(exist_ok=True)
    tokens = chosen["first"].tokens
    settings = engine_settings(args, folder, tokens + 256, device_tokens(tokens))
    cpu_bytes = args.cpu_bytes or (1 << 30 if args.small else 36 << 30)
    # A tiny model computes faster than a disk answers.
    disk = {"prefill_tokens_per_s": 0} if args.small else {}
    return {
        "engine": settings | hierarchy(mode, cpu_bytes, files, disk),
        "random_weights": not args.model,
        "files": str(files),
        "workloads": [dataclasses.asdict(chosen[name]) for name in RUNS[run]],
        "settle": f"{run}.restart" in RUNS,
        "environment": {FOLDER_OF_FILES: str(files)},
    }


def clean_up(run: str, folder: Path) -> None:
    """After the processes of a run have ended: before a restart its files leave the system's memory, where SGLang's
    would be found whole, and read at its speed."""
    drop_files(folder / run.partition(".")[0])


def engine_settings(args: argparse.Namespace, folder: Path, max_tokens: int, gpu_tokens: int) -> dict[str, Any]:
    """Of `Engine`: requests of at most `max_tokens`, and a cache of `gpu_tokens` on the device. Kernels that need no
    package beside SGLang's own are chosen, so that modes compare wherever it starts."""
    on_cuda = args.device.type == "cuda"
    return {
        "model_path": args.model or str(write_config(folder, args.small)),
        "device": args.device.type,
        "dtype": "bfloat16" if on_cuda else "float32",
        "skip_tokenizer_init": True,
        "page_size": _PAGE_TOKENS,
        "context_length": max_tokens,
        "max_total_tokens": gpu_tokens,
        "chunked_prefill_size": 8192,
        "attention_backend": "triton" if on_cuda else "torch_native",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "disable_cuda_graph": True,
        "random_seed": 0,
        "log_level": "info",
    }


def hierarchy(mode: str, cpu_bytes: int, files: Path, disk: dict[str, Any]) -> dict[str, Any]:
    """HiCache, alone (`cpu`) or with a backend; nothing for `none`. `disk`: more settings of ours."""
    if mode == "none":
        return {}
    settings = {
        "enable_hierarchical_cache": True,
        "hicache_size": max(1, cpu_bytes // 10**9),
        "hicache_mem_layout": "page_first",
        "hicache_write_policy": "write_through",
        "hicache_storage_prefetch_policy": "wait_complete",  # the time to load all, however long
    }
    if mode == "cpu":
        return settings
    if mode == "file":
        return {**settings, "hicache_storage_backend": "file"}
    ours = {
        "backend_name": "hicache",
        "module_path": "hicache.integrations.sglang.storage",
        "class_name": "HiCacheDisk",
        "interface_v1": 1,
        "path": str(files),
        "budget": "100GB",
        **disk,
    }
    extra = json.dumps(ours)
    return {**settings, "hicache_storage_backend": "dynamic", "hicache_storage_backend_extra_config": extra}


class Server:
    """SGLang: its front in this process, its scheduler in another."""

    def __init__(self, settings: dict[str, Any], random_weights: bool, folder: Path) -> None:
        begin_s = time.perf_counter()
        from sglang import Engine, __version__

        if random_weights:
            from hicache.bench.servers.sglang_loader import RandomLoader

            settings = {**settings, "load_format": RandomLoader}
        self.version = str(__version__)
        self._folder = folder
        self.engine = Engine(**settings)
        self.start_s = time.perf_counter() - begin_s

    def close(self) -> None:
        self.engine.shutdown()

    def serve(self, workload: Workload) -> tuple[list[Answer], list[float]]:
        """The answers, and the seconds of each round."""
        batches = [(batch, [workload.prompt(*request) for request in batch]) for batch in workload.batches()]
        answers, seconds = list[Answer](), list[float]()
        for number in range(workload.rounds):
            begin_s = time.perf_counter()
            found = [(batch, *self._ask(prompts, workload.answer_tokens)) for batch, prompts in batches]
            seconds.append(time.perf_counter() - begin_s)
            for batch, outputs, total_s in found:
                for request, (first_s, cached, tokens) in zip(batch, outputs, strict=True):
                    answers.append(Answer(number, *request, cached, first_s, total_s, tokens))
        return answers, seconds

    def num_bytes(self) -> dict[str, int]:
        """What the files of the run take."""
        files = _files(self._folder)
        return {"files": sum(num_bytes for _, num_bytes in files.values())} if files else {}

    def settle(self) -> None:
        """Until no file changes any more. Requests have the scheduler look at what was copied."""
        known = _files(self._folder)
        give_up_s, quiet_s = time.monotonic() + _PATIENCE_S, time.monotonic() + _QUIET_S
        while time.monotonic() < quiet_s:
            if time.monotonic() > give_up_s:
                raise TimeoutError(f"the disk is not done after {_PATIENCE_S:.0f} s")
            self._ask([[20]], 1)
            time.sleep(0.1)
            if (now := _files(self._folder)) != known:
                known, quiet_s = now, time.monotonic() + _QUIET_S

    async def answer(self, prompt: list[int], answer_tokens: int) -> tuple[float, int, list[int]]:
        """Seconds to the first token, cached tokens and the answer."""
        sampling = {"max_new_tokens": answer_tokens, "temperature": 0, "ignore_eos": True}
        begin_s, first_s, last = time.perf_counter(), 0.0, dict[str, Any]()
        stream = await self.engine.async_generate(input_ids=prompt, sampling_params=sampling, stream=True)
        async for output in stream:
            first_s, last = first_s or time.perf_counter() - begin_s, output
        return first_s, int(last["meta_info"]["cached_tokens"]), list(last["output_ids"])

    def _ask(
        self, prompts: Sequence[list[int]], answer_tokens: int
    ) -> tuple[list[tuple[float, int, list[int]]], float]:
        """Of each prompt what `answer` gives; and the seconds of all."""
        begin_s = time.perf_counter()

        async def answers() -> list[tuple[float, int, list[int]]]:
            return await asyncio.gather(*(self.answer(prompt, answer_tokens) for prompt in prompts))

        return self.engine.loop.run_until_complete(answers()), time.perf_counter() - begin_s


def _files(folder: Path) -> dict[Path, tuple[int, int]]:
    """When each was written last, and the bytes that it takes."""
    found: dict[Path, tuple[int, int]] = {}
    for file in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # renamed meanwhile
            about = file.stat()
            if stat.S_ISREG(about.st_mode):
                found[file] = about.st_mtime_ns, about.st_blocks * 512
    return found


def main() -> None:
    given = json.load(sys.stdin)
    serve(Server(given["engine"], given["random_weights"], Path(given["files"])), given)


if __name__ == "__main__":
    main()

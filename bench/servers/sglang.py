"""SGLang for the benchmark `servers`: the configuration of each mode, and the program that serves.

    none     without HiCache
    files    HiCache with SGLang's own file backend
    hicache  HiCache with hicache's backend; hicache-always and hicache-never load all found pages, or none

By default HiCache uses write-back: it stores a page when the device evicts this page. All modes have equal CPU memory,
because SGLang does not accept less CPU memory than its cache on the device. Decode steps are CUDA graphs.

`python -m hicache.bench.servers.sglang` reads a task from its standard input, as JSON. Only this program imports
SGLang, whose schedulers run in other processes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import math
import stat
import sys
import time
from pathlib import Path
from typing import Any

from hicache.bench.servers.model import write_config
from hicache.bench.servers.program import disk_settings
from hicache.bench.servers.runs import Setting
from hicache.bench.servers.serve import serve

MODES = ("none", "files", "hicache", "hicache-always", "hicache-never")
DISK_MODES = MODES[1:]
ENVIRONMENT: dict[str, str] = {}

_FOLDER_OF_FILES = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"
_PAGE_TOKENS = 64
_QUIET_S, _PATIENCE_S = 2.0, 60.0


def missing() -> str:
    """Return a text with the package that must be installed first; "" if it is installed."""
    found = importlib.util.find_spec("sglang")
    return "" if found else "SGLang is not installed: pip install '.[sglang]' in a clone of hicache"


def task(
    setting: Setting, args: argparse.Namespace, max_tokens: int, files: Path, lmcache: dict[str, Any]
) -> dict[str, Any]:
    """Return the part of a task that SGLang needs, as values for JSON. `files`: folder of the run."""
    settings = _engine_settings(setting, args, max_tokens, files)
    pages = files / "pages"
    pages.mkdir(exist_ok=True)
    settings |= _hierarchy(setting, args.write_policy, pages, disk_settings(setting.mode, args.small, pages))
    return {
        "engine": settings,
        "random_weights": not args.model,
        "files": str(pages),
        "environment": {_FOLDER_OF_FILES: str(pages)},
    }


def clean_up(files: Path) -> None:
    """Do nothing, because SGLang leaves no files."""


def _engine_settings(setting: Setting, args: argparse.Namespace, max_tokens: int, files: Path) -> dict[str, Any]:
    """Return the settings of SGLang's `Engine`. They choose kernels that need only packages of SGLang, so that modes
    can be compared on any machine."""
    on_cuda = args.device.type == "cuda"
    return {
        "model_path": args.model or str(write_config(files, args.small, args.layers)),
        "device": args.device.type,
        "dtype": "bfloat16" if on_cuda else "float32",
        "skip_tokenizer_init": True,
        "page_size": _PAGE_TOKENS,
        "context_length": max_tokens,
        "max_total_tokens": setting.gpu_tokens,
        "chunked_prefill_size": 8192,
        "attention_backend": "triton" if on_cuda else "torch_native",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "random_seed": 0,
        "log_level": "info",
        "disable_prefill_cuda_graph": True,
        **({"cuda_graph_max_bs_decode": setting.clients} if on_cuda else {"disable_decode_cuda_graph": True}),
    }


def _hierarchy(setting: Setting, write_policy: str, files: Path, disk: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of HiCache; empty for the mode `none`. `disk`: settings of hicache's backend."""
    if setting.mode == "none":
        return {}
    settings = {
        "enable_hierarchical_cache": True,
        "hicache_size": max(1, math.ceil(setting.cpu_gib * (1 << 30) / 1e9)),  # in units of 1e9 bytes
        "hicache_mem_layout": "page_first",
        "hicache_write_policy": write_policy,
        "hicache_storage_prefetch_policy": "wait_complete",  # waits for prefetches without a time limit
    }
    if setting.mode == "files":
        return {**settings, "hicache_storage_backend": "file"}
    config = {
        "backend_name": "hicache",
        "module_path": "hicache.integrations.sglang.storage",
        "class_name": "HiCacheDisk",
        "interface_v1": 1,
        "path": str(files),
        **disk,
    }
    extra = json.dumps(config)
    return {**settings, "hicache_storage_backend": "dynamic", "hicache_storage_backend_extra_config": extra}


class Server:
    """SGLang, with its front end in this process and its scheduler in another process. `given`: a task."""

    def __init__(self, given: dict[str, Any]) -> None:
        begin_s = time.perf_counter()
        from sglang import Engine, __version__

        settings = given["engine"]
        if given["random_weights"]:
            from hicache.bench.servers.sglang_loader import RandomLoader

            settings = {**settings, "load_format": RandomLoader}
        self.version = str(__version__)
        self._folder = Path(given["files"])
        self.engine = Engine(**settings)
        self.start_s = time.perf_counter() - begin_s

    async def answer(self, name: str, prompt: list[int], answer_tokens: int) -> tuple[list[float], int, list[int]]:
        sampling = {"max_new_tokens": answer_tokens, "temperature": 0, "ignore_eos": True}
        begin_s, outputs_s, last = time.perf_counter(), list[float](), dict[str, Any]()
        stream = await self.engine.async_generate(input_ids=prompt, sampling_params=sampling, stream=True)
        async for output in stream:
            outputs_s.append(time.perf_counter() - begin_s)
            last = output
        return outputs_s, int(last["meta_info"]["cached_tokens"]), list(last["output_ids"])

    async def settle(self) -> None:
        """Send requests, which make the scheduler check its copies, until the files have not changed for 2 s, but at
        most for a minute."""
        known, deadline_s, quiet_s = self._files(), time.monotonic() + _PATIENCE_S, time.monotonic() + _QUIET_S
        while time.monotonic() < min(quiet_s, deadline_s):
            await self.answer("", [20], 1)
            await asyncio.sleep(0.1)
            if (now := self._files()) != known:
                known, quiet_s = now, time.monotonic() + _QUIET_S

    def counters(self) -> dict[str, float]:
        """Return the disk space of the server's files, which stands for the bytes that SGLang does not count."""
        return {"files": float(sum(num_bytes for _, num_bytes in self._files().values()))}

    def _files(self) -> dict[Path, tuple[int, int]]:
        """Return the time of the last write and the disk space in bytes of each file."""
        found: dict[Path, tuple[int, int]] = {}
        for file in self._folder.rglob("*"):
            with contextlib.suppress(FileNotFoundError):  # the file was renamed since
                about = file.stat()
                if stat.S_ISREG(about.st_mode):
                    found[file] = about.st_mtime_ns, about.st_blocks * 512
        return found


def main() -> None:
    given = json.load(sys.stdin)
    server = Server(given)
    server.engine.loop.run_until_complete(serve(server, given))
    server.engine.shutdown()


if __name__ == "__main__":
    main()

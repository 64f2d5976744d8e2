"""Runs LMCache's server for vLLM's `LMCacheMPConnector` in a separate process."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hicache.bench.common import BenchUnavailable
from hicache.bench.remote_servers import end, free_port, started

_SLOW = "torch baseline"  # in LMCache's log if it copies in Python, without compiled kernels
_PROGRAM = "from lmcache.cli.main import main; main()"
_CHUNK_TOKENS = 256
_FULL = 0.97  # share of its memory at which LMCache evicts (by default 0.8), so that all systems use as much memory


@contextlib.contextmanager
def lmcache_server(cpu_gib: float, environment: Mapping[str, str], log: Path) -> Iterator[dict[str, Any]]:
    """Run LMCache's server within the block. Yields the settings of vLLM's connector. Raises BenchUnavailable if the
    server is not installed, does not start, or copies without its compiled kernels."""
    if importlib.util.find_spec("lmcache") is None:
        raise BenchUnavailable("LMCache is not installed: docs/benchmarks.md says how to compile it")
    port, http_port = free_port(), free_port()
    sizes = {
        "--host": "127.0.0.1",
        "--port": port,
        "--http-port": http_port,
        "--l1-size-gb": f"{cpu_gib:g}",
        "--l1-init-size-gb": f"{cpu_gib:g}",
        "--eviction-policy": "LRU",
        "--eviction-trigger-watermark": _FULL,
        "--eviction-ratio": round(1 - _FULL, 2),
        "--chunk-size": _CHUNK_TOKENS,
        "--max-gpu-workers": 1,
        "--max-cpu-workers": 8,
    }
    words = [str(word) for pair in sizes.items() for word in pair]
    command = [sys.executable, "-c", _PROGRAM, "server", *words, "--no-l1-use-lazy"]
    with log.open("wb") as out:
        process = started(
            command,
            lambda _: _answers(f"http://127.0.0.1:{http_port}/"),
            timeout_s=300.0,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
        )
    try:
        _refuse_slow(log)
        yield {
            "kv_connector": "LMCacheMPConnector",
            "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
            "kv_connector_extra_config": {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port},
        }
        _refuse_slow(log)
    finally:
        end(process)


def _answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=5).close()
    except urllib.error.HTTPError:  # an error status is an answer
        return True
    except OSError:
        return False
    return True


def _refuse_slow(log: Path) -> None:
    if _SLOW in log.read_text(errors="replace"):
        raise BenchUnavailable(f"LMCache copies without its compiled kernels: its log has {_SLOW!r}; compile them")

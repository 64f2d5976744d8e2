"""SGLang for the workload `sessions`: its front in this process, its schedulers in others.

`python -m hicache.bench.servers.sessions_sglang` reads a task from its standard input, as JSON (`task`). SGLang is
imported there alone. `cpu` is HiCache without a backend, and all modes have as much CPU memory, since SGLang takes none
that is smaller than its cache on the device.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from hicache.bench.servers import sglang
from hicache.bench.servers.sessions_program import disk_settings, serve_loads
from hicache.bench.servers.sglang import FOLDER_OF_FILES, engine_settings, hierarchy

MODES = (
    "none",
    "cpu",
    "file",
    "hicache",
    "hicache-always",
    "hicache-never",
)
ENVIRONMENT = sglang.ENVIRONMENT
missing = sglang.missing

_QUIET_S, _PATIENCE_S = 2.0, 60.0


def task(mode: str, tensor_parallel: int, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The server's part of a task, as JSON. Files are in `folder`."""
    files = folder / f"{mode}.tp{tensor_parallel}"
    settings = engine_settings(args, folder, args.longest + args.answer_tokens + 256, args.gpu_tokens)
    cpu_bytes = int(args.cpu_gib * (1 << 30))
    settings |= hierarchy(mode.partition("-")[0], cpu_bytes, files, disk_settings(mode, args.small, folder))
    return {
        "engine": settings | {"tp_size": tensor_parallel},
        "random_weights": not args.model,
        "files": str(files),
        "environment": {FOLDER_OF_FILES: str(files)},
    }


def clean_up(mode: str, folder: Path) -> None:
    """SGLang leaves nothing."""


class _Server:
    def __init__(self, given: dict[str, Any]) -> None:
        self.server = sglang.Server(given["engine"], given["random_weights"], Path(given["files"]))
        self.version = self.server.version
        self.start_s = self.server.start_s

    async def answer(self, name: str, prompt: list[int], answer_tokens: int) -> tuple[float, float, int, list[int]]:
        begin_s = time.perf_counter()
        first_s, cached, tokens = await self.server.answer(prompt, answer_tokens)
        return first_s, time.perf_counter() - begin_s, cached, tokens

    async def settle(self) -> None:
        """Requests have the scheduler look at what was copied. What still changes after a minute is left to go on."""
        known, give_up_s, quiet_s = self.num_bytes(), time.monotonic() + _PATIENCE_S, time.monotonic() + _QUIET_S
        while time.monotonic() < min(quiet_s, give_up_s):
            await self.server.answer([20], 1)
            await asyncio.sleep(0.1)
            if (now := self.num_bytes()) != known:
                known, quiet_s = now, time.monotonic() + _QUIET_S

    def num_bytes(self) -> dict[str, int]:
        """What its files take; SGLang counts no bytes."""
        return self.server.num_bytes()

    def rates(self) -> dict[str, float]:
        return {}


def main() -> None:
    given = json.load(sys.stdin)
    server = _Server(given)
    server.server.engine.loop.run_until_complete(serve_loads(server, given))
    server.server.close()


if __name__ == "__main__":
    main()

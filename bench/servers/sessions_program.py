"""The program of the workload `sessions`, the same for every server: it serves loads in sequence in one process."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from hicache.bench.servers.clients import Answer, LoadRun, name_of, send
from hicache.bench.sessions import Prompts, Turn
from hicache.console import write_atomically

_WARM_TOKENS = 3000
_USED = 0.7  # share of the disk's free space


def disk_settings(mode: str, small: bool, folder: Path) -> dict[str, Any]:
    """Settings of our disk: `hicache-always` loads all pages found, `hicache-never` none once it has measured the disk.
    With a tiny model, which computes faster than a disk reads, `hicache` also loads all."""
    speeds = {"hicache-always": 0.0, "hicache-never": 1e12, **({"hicache": 0.0} if small else {})}
    gate: dict[str, Any] = {"prefill_tokens_per_s": speeds[mode]} if mode in speeds else {}
    return {"budget": f"{max(1, min(100, int(shutil.disk_usage(folder).free * _USED / 1e9)))}GB", **gate}


class AsyncServer(Protocol):
    """A server with its front end in this process, and the processes that it started."""

    version: str
    start_s: float

    async def answer(self, name: str, prompt: list[int], answer_tokens: int) -> tuple[float, float, int, list[int]]:
        """Serve a prompt; returns seconds to the first and last token, cached tokens, and the answer's tokens."""
        ...

    async def settle(self) -> None:
        """Wait until no more bytes are written to a disk, and empty the device's own cache, if possible."""
        ...

    def num_bytes(self) -> dict[str, int]:
        """Bytes moved since the start, by name."""
        ...

    def rates(self) -> dict[str, float]:
        """Decisions of our gate since the start, and the rates that they are based on; empty without a gate."""
        ...


async def serve_loads(server: AsyncServer, given: Mapping[str, Any]) -> None:
    """Serve the loads of a task; after each load, write the outcomes so far into the task's result file.

    Prompts of different loads share no tokens, so the caches hold no useful page when a load begins, though they may be
    full. Two other prompts are served first, to warm up.
    """
    turns = [Turn(session, tuple(blocks)) for session, blocks in json.loads(Path(given["turns"]).read_text())]
    runs: dict[str, LoadRun] = {}
    for number in range(2):
        await server.answer(f"warm {number}", [5] * min(_WARM_TOKENS, given["longest"]), given["answer_tokens"])
    for salt, num_clients in enumerate(given["loads"]):
        prompts = Prompts(given["block_tokens"], salt)
        await server.settle()
        runs[name_of(num_clients)] = await _serve(server, turns, prompts, num_clients, given)
        found = {name: dataclasses.asdict(run) for name, run in runs.items()}
        about = {"start_s": server.start_s, "version": server.version}
        write_atomically(Path(given["result"]), json.dumps({"runs": found, **about}))


async def _serve(
    server: AsyncServer, turns: Sequence[Turn], prompts: Prompts, num_clients: int, given: Mapping[str, Any]
) -> LoadRun:
    tokens = [prompts.of(turn) for turn in turns]

    async def ask(number: int) -> Answer:
        first_s, total_s, cached, answer = await server.answer(
            f"{name_of(num_clients)} {number}", tokens[number], given["answer_tokens"]
        )
        return Answer(number, first_s, total_s, len(tokens[number]), cached, answer)

    before = server.num_bytes()
    run = await send(ask, turns, num_clients, given["limit_s"])
    moved = {name: count - before.get(name, 0) for name, count in server.num_bytes().items()}
    return dataclasses.replace(run, num_bytes=moved, rates=server.rates())

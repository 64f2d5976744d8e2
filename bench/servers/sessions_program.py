"""The program of the workload `sessions`, the same for every server: loads one behind the other in one process."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from hicache.bench.servers.clients import Asked, LoadRun, name_of, send
from hicache.bench.sessions import Prompts, Turn
from hicache.console import write_whole

_WARM_TOKENS = 3000
_USED = 0.7  # of the disk


def disk_settings(mode: str, small: bool, folder: Path) -> dict[str, Any]:
    """Of our disk: `hicache-always` loads what is there, `hicache-never` nothing once it has measured the disk. A tiny
    model computes faster than a disk answers, so with one `hicache` loads too."""
    speeds = {"hicache-always": 0.0, "hicache-never": 1e12, **({"hicache": 0.0} if small else {})}
    gate: dict[str, Any] = {"prefill_tokens_per_s": speeds[mode]} if mode in speeds else {}
    return {"budget": f"{max(1, min(100, int(shutil.disk_usage(folder).free * _USED / 1e9)))}GB", **gate}


class AsyncServer(Protocol):
    """A server in this process and others, which it has started."""

    version: str
    start_s: float

    async def answer(self, name: str, prompt: list[int], answer_tokens: int) -> tuple[float, float, int, list[int]]:
        """Seconds to the first token and to the last, cached tokens, and the answer."""
        ...

    async def settle(self) -> None:
        """Return when nothing more goes to a disk, with the device's own cache emptied, where it can be."""
        ...

    def num_bytes(self) -> dict[str, int]:
        """What it has moved since it started, by name."""
        ...

    def rates(self) -> dict[str, float]:
        """What our gate has decided since the start, and the speeds that it decides by; empty without one."""
        ...


async def serve_loads(server: AsyncServer, given: Mapping[str, Any]) -> None:
    """Serve the loads of a task; after each, what came of all until then is written into its file.

    Prompts of one load have nothing in common with those of another, so each begins with caches that hold nothing of
    use, though they may be full. Two prompts of other tokens go before all.
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
        write_whole(Path(given["result"]), json.dumps({"runs": found, **about}))


async def _serve(
    server: AsyncServer, turns: Sequence[Turn], prompts: Prompts, num_clients: int, given: Mapping[str, Any]
) -> LoadRun:
    tokens = [prompts.of(turn) for turn in turns]

    async def ask(number: int) -> Asked:
        first_s, total_s, cached, answer = await server.answer(
            f"{name_of(num_clients)} {number}", tokens[number], given["answer_tokens"]
        )
        return Asked(number, first_s, total_s, len(tokens[number]), cached, answer)

    before = server.num_bytes()
    run = await send(ask, turns, num_clients, given["limit_s"])
    moved = {name: count - before.get(name, 0) for name, count in server.num_bytes().items()}
    return dataclasses.replace(run, num_bytes=moved, rates=server.rates())

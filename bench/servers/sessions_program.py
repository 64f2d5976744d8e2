"""The program of the workload `sessions`, the same for every server: loads one behind the other in one process."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from hicache.bench.servers.clients import Asked, Load, LoadRun, send
from hicache.bench.sessions import Prompts, Turn
from hicache.console import write_whole

_WARM_TOKENS = 3000
_USED = 0.7  # of the disk
_UTILISATION = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-lms", "200"]


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
    for salt, load in enumerate(Load(**values) for values in given["loads"]):
        prompts = Prompts(given["block_tokens"], salt)
        await server.settle()
        run = await _serve(server, turns, prompts, _settled(load, runs), given)
        runs[load.name] = run
        found = {name: dataclasses.asdict(run) for name, run in runs.items()}
        about = {"start_s": server.start_s, "version": server.version}
        write_whole(Path(given["result"]), json.dumps({"runs": found, **about}))
    if given["settle"]:
        await server.settle()


def _settled(load: Load, runs: Mapping[str, LoadRun]) -> Load:
    """With the requests a second of a load by the clock."""
    if load.clients or load.requests_per_s:
        return load
    capacity = max(run.requests_per_s for run in runs.values())
    return dataclasses.replace(load, requests_per_s=load.share * capacity)


async def _serve(
    server: AsyncServer, turns: Sequence[Turn], prompts: Prompts, load: Load, given: Mapping[str, Any]
) -> LoadRun:
    tokens = [prompts.of(turn) for turn in turns]

    async def ask(number: int) -> Asked:
        first_s, total_s, cached, answer = await server.answer(
            f"{load.name} {number}", tokens[number], given["answer_tokens"]
        )
        return Asked(number, first_s, total_s, len(tokens[number]), cached, answer)

    before = server.num_bytes()
    with _gpu_share() as busy:
        run = await send(ask, turns, load, given["limit_s"])
    moved = {name: count - before.get(name, 0) for name, count in server.num_bytes().items()}
    gpu_s = busy[0] * run.makespan_s if busy else None
    return dataclasses.replace(run, num_bytes=moved, rates=server.rates(), gpu_s=gpu_s)


@contextlib.contextmanager
def _gpu_share() -> Iterator[list[float]]:
    """Afterwards holds the share of time in which a kernel ran, of all GPUs; nothing where the driver does not say."""
    share: list[float] = []
    if shutil.which(_UTILISATION[0]) is None:
        yield share
        return
    with tempfile.TemporaryFile("w+") as out, subprocess.Popen(_UTILISATION, stdout=out, stderr=out) as process:
        try:
            yield share
        finally:
            process.kill()
        out.seek(0)
        lines = [line.strip() for line in out]
        samples = [int(line) for line in lines if line.isdigit()]
        if samples:
            share.append(sum(samples) / len(samples) / 100)

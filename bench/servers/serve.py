"""The part that the programs of all servers share. It sends the prompts of a task and writes the outcome."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from hicache.bench.servers.clients import Answer, send
from hicache.bench.servers.workload import Workload
from hicache.console import write_atomically

_WARM_TOKENS = 3000


class AsyncServer(Protocol):
    """A server with its front end in this process, and the processes that it started."""

    version: str
    start_s: float

    async def answer(self, name: str, prompt: list[int], answer_tokens: int) -> tuple[list[float], int, list[int]]:
        """Serve a prompt. Returns the seconds from sending the prompt to each output, the number of cached tokens, and
        the tokens of the answer."""
        ...

    def counters(self) -> dict[str, float]:
        """Return counters since the start, by name: bytes moved, tokens loaded from lower tiers, decisions of hicache's
        load gate, and prompt tokens that no tier had, by reason."""
        ...


async def serve(server: AsyncServer, given: Mapping[str, Any]) -> None:
    """Serve the prompts of a task, and write the outcome to the task's result file. To warm up, two other prompts are
    served first."""
    requests = Workload(**given["workload"]).prompts()
    for number in range(2):
        prompt = [5 + number] * min(_WARM_TOKENS, given["workload"]["longest"])
        await server.answer(f"warm {number}", prompt, given["answer_tokens"])

    async def ask(number: int) -> Answer:
        prompt = requests[number].tokens
        outputs_s, cached, answer = await server.answer(f"request {number}", prompt, given["answer_tokens"])
        between_s = [later - earlier for earlier, later in pairwise(outputs_s)]
        return Answer(number, outputs_s[0], between_s, len(prompt), cached, answer)

    before = server.counters()
    makespan_s, answers = await send(ask, requests, given["clients"], given["limit_s"])
    outcome = {
        "version": server.version,
        "start_s": server.start_s,
        "makespan_s": makespan_s,
        "num_requests": len(requests),
        "answers": [dataclasses.asdict(answer) for answer in answers],
        "counters": {name: number - before.get(name, 0) for name, number in server.counters().items()},
    }
    write_atomically(Path(given["result"]), json.dumps(outcome))

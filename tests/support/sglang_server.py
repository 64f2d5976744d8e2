"""A program that runs a real SGLang on the CPU. The program answers each prompt of its task twice, and prints cached
tokens and answers.

SGLang's Triton kernels are interpreted, and torch replaces its compiled kernels. The task is one of the benchmark
`servers`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import sglang_on_cpu
from hicache.bench.servers.sglang import Server


async def answers(server: Server, prompts: list[list[int]]) -> list[tuple[int, list[int]]]:
    found = [await server.answer("", prompt, 8) for prompt in prompts for _ in range(2)]
    await server.settle()
    return [(cached, answer) for _, cached, answer in found]


def main() -> None:
    sglang_on_cpu.prepare()
    sglang_on_cpu.copy_with_torch()
    given: dict[str, Any] = json.load(sys.stdin)
    server = Server(given)
    print(json.dumps(server.engine.loop.run_until_complete(answers(server, given["prompts"]))), flush=True)
    server.engine.shutdown()


if __name__ == "__main__":
    main()

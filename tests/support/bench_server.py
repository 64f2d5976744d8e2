"""A server for the tests of the benchmark `servers`. The cache of this server is a set of prompts in pieces of 16
tokens; an answer is a sum of the prompt, and arrives in three outputs. In mode `slow` the server answers no prompt
within the time limit."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from hicache.bench.servers.runs import Setting
from hicache.bench.servers.serve import serve

MODES = ("none", "hicache", "slow")
DISK_MODES: tuple[str, ...] = ()
ENVIRONMENT: dict[str, str] = {}


def missing() -> str:
    return ""


def task(
    setting: Setting, args: argparse.Namespace, max_tokens: int, files: Path, lmcache: dict[str, Any]
) -> dict[str, Any]:
    return {"mode": setting.mode, "max_tokens": max_tokens}


def clean_up(files: Path) -> None:
    assert files.is_dir()


class Server:
    version, start_s = "1.0", 0.5

    def __init__(self, given: dict[str, Any]) -> None:
        self._given = given
        self._known: set[tuple[int, ...]] = set()

    async def answer(self, name: str, prompt: list[int], answer_tokens: int) -> tuple[list[float], int, list[int]]:
        assert len(prompt) + answer_tokens < self._given["max_tokens"]
        if self._given["mode"] == "slow":
            await asyncio.sleep(0.0 if name.startswith("warm") else 60.0)
        pieces = [tuple(prompt[: end + 16]) for end in range(0, len(prompt) - 15, 16)]
        cached = 16 * sum(piece in self._known for piece in pieces)
        self._known.update(pieces)
        return [0.001, 0.003, 0.009], cached, [sum(prompt)] * answer_tokens

    def counters(self) -> dict[str, float]:
        """A GB loaded, and a token of each piece missed, so that the counters grow with the answers."""
        pieces = float(len(self._known))
        return {"external_tokens": 0.0, "load": 1e9 * pieces, "gate.declined": pieces, "missed.gate": pieces}


def main() -> None:
    given = json.load(sys.stdin)
    asyncio.run(serve(Server(given), given))


if __name__ == "__main__":
    main()

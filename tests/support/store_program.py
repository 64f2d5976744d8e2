"""Another process that has a store open: it obeys one command a line, and answers in one."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

from programs import PIPE, Program, program
from storage_pages import PAGE_BYTES, found_numbers, open_store, put_numbers


class StoreProgram:
    """The process, as its test sees it. `settings`: of `storage_pages.open_store`."""

    def __init__(self, path: object, settings: dict[str, Any]) -> None:
        self.process: Program = program(__file__, path, json.dumps(settings), stdin=PIPE)
        assert self.answer() == "ready"

    def send(self, verb: str, *numbers: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([verb, *numbers]) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def do(self, verb: str, *numbers: int) -> Any:
        self.send(verb, *numbers)
        return self.answer()

    def __enter__(self) -> StoreProgram:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.__exit__(*error)


class Commands:
    """What the process can be told: the methods, and their arguments."""

    def __init__(self, path: str, settings: dict[str, Any]) -> None:
        self.page_bytes = settings.get("page_bytes", PAGE_BYTES)
        self.store = open_store(path, **settings)

    def put(self, start: int, stop: int) -> int:
        return sum(put_numbers(self.store, range(start, stop), self.page_bytes))

    def found(self, start: int, stop: int) -> list[int]:
        return sorted(found_numbers(self.store, range(start, stop), self.page_bytes))

    def close(self) -> None:
        self.store.close()

    def stats(self) -> dict[str, Any]:
        return dataclasses.asdict(self.store.stats())


if __name__ == "__main__":
    commands = Commands(sys.argv[1], json.loads(sys.argv[2]))
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        verb, *numbers = json.loads(line)
        print(json.dumps(getattr(commands, verb)(*numbers)), flush=True)

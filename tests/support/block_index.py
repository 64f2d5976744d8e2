"""An index of the blocks that each medium holds, built from KV events as a router builds one. The index raises if a
block is stored twice, if a removed block is not held, or if no medium holds the parent of a stored block. The program
subscribes over ZeroMQ:

    python tests/support/block_index.py ADDRESS REPLAY_ADDRESS [MODULE]

The program decodes events with the classes of MODULE, which are vLLM's or SGLang's; the default are the twins below.
The program requests the batches that it missed, and prints `ready` as soon as batches arrive live. When the stream
ends, it prints as JSON the blocks that each medium held before the end.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec


class BlockStored(msgspec.Struct, tag=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class BlockRemoved(msgspec.Struct, tag=True):
    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, tag=True):
    pass


class KVEventBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class BlockIndex:
    """`held`: the hashes of the blocks that each medium holds. `blocks`: parent and tokens of every block of an event
    so far."""

    def __init__(self) -> None:
        self.held: dict[str, set[int]] = {"GPU": set(), "CPU": set(), "DISK": set()}
        self.blocks: dict[int, tuple[int | None, tuple[int, ...]]] = {}

    def apply(self, events: Iterable[Any]) -> None:
        for event in events:
            kind = type(event).__name__
            if kind == "BlockStored":
                self._store(event)
            elif kind == "BlockRemoved":
                gone, held = set(event.block_hashes), self.held[event.medium]
                assert len(gone) == len(event.block_hashes) > 0 and gone <= held, "removed what is not held"
                held -= gone
            else:
                assert kind == "AllBlocksCleared"
                self.held = {medium: set() for medium in self.held}

    def _store(self, event: Any) -> None:
        size, parent = event.block_size, event.parent_block_hash
        assert len(event.token_ids) == size * len(event.block_hashes) > 0
        assert not self.held[event.medium].intersection(event.block_hashes), f"told twice on {event.medium}"
        assert parent is None or self.knows(parent), f"a block of {event.medium} whose parent nothing holds"
        for index, name in enumerate(event.block_hashes):
            block = (parent, tuple(event.token_ids[index * size : (index + 1) * size]))
            assert self.blocks.setdefault(name, block) == block, "one hash names two blocks"
            parent = name
        self.held[event.medium].update(event.block_hashes)

    def knows(self, name: int) -> bool:
        """Whether a medium holds the block."""
        return any(name in held for held in self.held.values())


def read_lines(path: Path) -> list[KVEventBatch]:
    """Read the batches of one or several streams from a file. Check that each stream counts from 0 without a gap and
    ends once."""
    batches, expected = [], 0
    for line in path.read_text().splitlines():
        said = json.loads(line)
        expected = 0 if said["sequence"] == 0 else expected
        assert said["sequence"] == expected
        expected += 1
        batches.append(msgspec.convert([said["time_s"], said["events"]], KVEventBatch))
        if expected == 1:
            assert batches[-1].events[0] == AllBlocksCleared()
    return batches


class Subscriber:
    """A SUB socket for the live batches, and a DEALER socket that requests the batches that SUB has missed."""

    def __init__(self, address: str, replay: str, batch_class: type) -> None:
        zmq = importlib.import_module("zmq")
        context = zmq.Context()
        self._live, self._asked = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        self._live.subscribe(b"kv")
        self._live.connect(address)
        self._asked.connect(replay)
        self._decode = msgspec.msgpack.Decoder(batch_class).decode
        self.next = 0

    def batches(self) -> Iterable[Any]:
        """Yield the batches without a gap until the stream ends."""
        while True:
            topic, number, payload = self._live.recv_multipart()
            assert topic == b"kv"
            if int.from_bytes(number, "big") > self.next:
                yield from self._missed()
            if int.from_bytes(number, "big") == self.next:
                self.next += 1
                yield self._decode(payload)

    def _missed(self) -> Iterable[Any]:
        self._asked.send_multipart((b"", self.next.to_bytes(8, "big")))
        while True:
            _, _, number, payload = self._asked.recv_multipart()
            if not payload:
                assert number == b"\xff" * 8
                return
            assert int.from_bytes(number, "big") == self.next
            self.next += 1
            yield self._decode(payload)


def main() -> int:
    address, replay, *module = sys.argv[1:]
    classes = importlib.import_module(module[0]) if module else sys.modules[__name__]
    index, subscriber = BlockIndex(), Subscriber(address, replay, classes.KVEventBatch)
    for count, batch in enumerate(subscriber.batches()):
        if count and any(type(event).__name__ == "AllBlocksCleared" for event in batch.events):
            break
        index.apply(batch.events)
        if not count:
            print("ready", flush=True)
    print(json.dumps({medium: sorted(held) for medium, held in index.held.items()}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

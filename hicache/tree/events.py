"""What a router needs to know about who has which block: events of blocks that came and went.

A block is a page. Its hash is the first 64 bits of its page key, so it depends on every token before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hicache.tree.key import key_of
from hicache.tree.node import TreeNode

Medium = Literal["GPU", "CPU", "DISK"]


@dataclass(frozen=True)
class BlockStored:
    """`block_hashes` follow `parent_block_hash` (None at the start of a prompt) and hold `token_ids`."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    medium: Medium = "GPU"


@dataclass(frozen=True)
class BlockRemoved:
    block_hashes: list[int]
    medium: Medium = "GPU"


@dataclass(frozen=True)
class AllBlocksCleared:
    """Nothing is held any more, on any medium."""


KVCacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventLog:
    """Events since they were last taken, oldest first. Scheduler thread only."""

    def __init__(self) -> None:
        self._events: list[KVCacheEvent] = []

    def stored(self, node: TreeNode, keys: Sequence[bytes], before: bytes | None, medium: Medium) -> None:
        """The pages of `node`, whose keys are `keys`, are held by `medium`; `before` is the key of the page before."""
        assert node.run is not None
        size = node.num_tokens // len(keys)
        tokens = key_of(node.run.tokens, node.namespace).token_ids
        parent = None if before is None else block_hash(before)
        for index, key in enumerate(keys):
            block = list(tokens[index * size : (index + 1) * size])
            self._events.append(BlockStored([block_hash(key)], parent, block, size, medium))
            parent = block_hash(key)

    def removed(self, keys: Sequence[bytes], medium: Medium) -> None:
        self._events.extend(BlockRemoved([block_hash(key)], medium) for key in keys)

    def cleared(self) -> None:
        self._events.append(AllBlocksCleared())

    def take(self) -> list[KVCacheEvent]:
        """All events so far; they are not told twice."""
        events, self._events = self._events, []
        return events


def block_hash(key: bytes) -> int:
    """The first 64 bits of a page key, as a signed number."""
    return int.from_bytes(key[:8], "big", signed=True)

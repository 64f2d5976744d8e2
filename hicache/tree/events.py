"""What a router needs to know about who has which block: events of blocks that came and went.

A block is a page. Its hash is the first 64 bits of its page key, so it depends on every token before it, on the
namespace and on the identity of the engine (model, dtype, layout, salt): all media and restarts name it alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from hicache.tree.key import Tokens
from hicache.tree.names import PromptPages

Medium = Literal["GPU", "CPU", "DISK"]

# So many removals from the disk are remembered: more than a store makes during one read.
_REMEMBERED = 1 << 16


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


@dataclass(frozen=True)
class PagesStored:
    """Consecutive pages of one prompt, with `tokens` and `keys`, which follow `before`, are held by `medium`."""

    keys: Sequence[bytes]
    before: bytes | None
    tokens: Tokens
    namespace: str
    medium: Medium

    def blocks(self, max_blocks: int) -> Iterator[BlockStored]:
        """The same as events of at most `max_blocks` blocks each."""
        size, before = len(self.tokens) // len(self.keys), self.before
        for start in range(0, len(self.keys), max_blocks):
            keys = self.keys[start : start + max_blocks]
            tokens = self.tokens[start * size : (start + len(keys)) * size]
            ids = tokens.tolist()
            parent = None if before is None else block_hash(before)
            yield BlockStored([block_hash(key) for key in keys], parent, ids, size, self.medium)
            before = keys[-1]


@dataclass(frozen=True)
class PagesRemoved:
    """`medium` holds these pages no more; it may not have held them."""

    keys: Sequence[bytes]
    medium: Medium

    def blocks(self, max_blocks: int) -> Iterator[BlockRemoved]:
        for start in range(0, len(self.keys), max_blocks):
            yield BlockRemoved([block_hash(key) for key in self.keys[start : start + max_blocks]], self.medium)


@dataclass(frozen=True)
class AllRemoved:
    """No medium holds anything."""

    keys: Sequence[bytes] = ()

    def blocks(self, max_blocks: int) -> Iterator[AllBlocksCleared]:
        yield AllBlocksCleared()


PageChange: TypeAlias = PagesStored | PagesRemoved | AllRemoved


class EventLog:
    """Changes since they were last taken, oldest first. Scheduler thread only."""

    def __init__(self) -> None:
        self._changes: list[PageChange] = []
        self._gone: dict[bytes, None] = {}  # what the disk removed lately, oldest first

    def stored(self, pages: PromptPages, medium: Medium, which: Sequence[bool] | None = None) -> None:
        """`pages` are held by `medium`: all of them, or those for which `which` is true."""
        for start, end in [(0, len(pages.keys))] if which is None else _runs(which):
            keys, before, tokens, namespace = pages.part(start, end)
            self._changes.append(PagesStored(keys, before, tokens, namespace, medium))
            if medium == "DISK" and self._gone:
                for key in keys:
                    self._gone.pop(key, None)

    def found_on_disk(self, pages: PromptPages) -> None:
        """A read found the pages on disk. Those that the disk removed lately may have gone since."""
        self.stored(pages, "DISK", [key not in self._gone for key in pages.keys])

    def removed(self, keys: Sequence[bytes], medium: Medium) -> None:
        self._changes.append(PagesRemoved(keys, medium))
        if medium == "DISK":
            self._gone.update(dict.fromkeys(keys))
            while len(self._gone) > _REMEMBERED:
                del self._gone[next(iter(self._gone))]

    def cleared(self) -> None:
        self._changes.append(AllRemoved())

    def take_changes(self) -> list[PageChange]:
        """All changes so far; they are not told twice."""
        changes, self._changes = self._changes, []
        return changes


def block_hash(key: bytes) -> int:
    """The first 64 bits of a page key, as a signed number."""
    return int.from_bytes(key[:8], "big", signed=True)


def _runs(which: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """[start, end) of every run of true values."""
    start = 0
    while start < len(which):
        end = start
        while end < len(which) and which[end]:
            end += 1
        if end > start:
            yield start, end
        start = end + 1

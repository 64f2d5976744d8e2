"""Events for a router: the blocks that each medium (GPU, CPU, disk) stores or removes.

A block is a page. Its hash is the first 64 bits of its page key. So the hash depends on every token up to the end of
the block, on the namespace and on the identity of the engine (model, dtype, layout, salt). The hash of a block is the
same on all media and after restarts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from hicache.pages.key import PromptPages, Tokens

Medium = Literal["GPU", "CPU", "DISK"]

# The number of remembered removals from the disk: more pages than a store removes during one read.
_REMEMBERED = 1 << 16


@dataclass(frozen=True)
class BlockStored:
    """A medium has stored the blocks `block_hashes`, which have the tokens `token_ids` and follow the block
    `parent_block_hash` (None at the start of a prompt)."""

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
    """All media have lost all blocks."""


KVCacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(frozen=True)
class PagesStored:
    """`medium` has stored consecutive pages of one prompt, with `tokens` and `keys`, after the page `previous_key`."""

    keys: Sequence[bytes]
    previous_key: bytes | None
    tokens: Tokens
    namespace: str
    medium: Medium

    def blocks(self, max_blocks: int) -> Iterator[BlockStored]:
        """Yield the pages as events of at most `max_blocks` blocks each."""
        size, previous_key = len(self.tokens) // len(self.keys), self.previous_key
        for start in range(0, len(self.keys), max_blocks):
            keys = self.keys[start : start + max_blocks]
            tokens = self.tokens[start * size : (start + len(keys)) * size]
            ids = tokens.tolist()
            parent = None if previous_key is None else block_hash(previous_key)
            yield BlockStored([block_hash(key) for key in keys], parent, ids, size, self.medium)
            previous_key = keys[-1]


@dataclass(frozen=True)
class PagesRemoved:
    """`medium` no longer has these pages."""

    keys: Sequence[bytes]
    medium: Medium

    def blocks(self, max_blocks: int) -> Iterator[BlockRemoved]:
        for start in range(0, len(self.keys), max_blocks):
            yield BlockRemoved([block_hash(key) for key in self.keys[start : start + max_blocks]], self.medium)


@dataclass(frozen=True)
class AllRemoved:
    """All media have lost all pages."""

    keys: Sequence[bytes] = ()

    def blocks(self, max_blocks: int) -> Iterator[AllBlocksCleared]:
        yield AllBlocksCleared()


PageChange: TypeAlias = PagesStored | PagesRemoved | AllRemoved


class EventLog:
    """The changes of all media since the last `take_changes`, oldest first. Scheduler thread only.

    A block of a medium is reported as stored once, before it is reported as removed. Only reported blocks are reported
    as removed. A block is reported after its parent. If no medium has the parent, for example because its read failed,
    the block is reported when a medium gets the parent. The log keeps the key of each reported block, about 200 bytes.
    """

    def __init__(self) -> None:
        self._changes: list[PageChange] = []
        self._announced: dict[Medium, set[bytes]] = {"GPU": set(), "CPU": set(), "DISK": set()}
        self._orphans: dict[bytes, dict[tuple[bytes, Medium], PagesStored]] = {}  # by the key of the parent page
        self._parents: dict[bytes, bytes] = {}  # by orphan: the key of the parent page
        self._removed: dict[bytes, None] = {}  # pages that the disk has recently removed, oldest first

    def stored(self, pages: PromptPages, medium: Medium, which: Sequence[bool] | None = None) -> None:
        """Record that `medium` has stored `pages`: all pages, or the pages for which `which` is true."""
        announced, keys, start = self._announced[medium], pages.keys, 0
        while start < len(keys):
            end = start
            while end < len(keys) and keys[end] not in announced and (which is None or which[end]):
                end += 1
            if end > start:
                self._enter(pages.part(start, end), medium)
            start = end + 1

    def loaded(self, pages: PromptPages, *, from_disk: bool) -> None:
        """Record pages that were read to the host. The disk may have removed some of these pages since the read."""
        self.stored(pages, "CPU")
        if from_disk:
            self.stored(pages, "DISK", [key not in self._removed for key in pages.keys])

    def removed(self, keys: Sequence[bytes], medium: Medium) -> None:
        """Record that `medium` does not have the pages with these keys. It need not have had them before."""
        self._drop(keys, medium)
        if medium == "DISK":
            self._removed.update(dict.fromkeys(keys))
            while len(self._removed) > _REMEMBERED:
                del self._removed[next(iter(self._removed))]

    def missed_on_disk(self, keys: Sequence[bytes]) -> None:
        """Record that a lookup did not find these pages on the disk, which does not report all removals."""
        self._drop(keys, "DISK")

    def disk_lost(self) -> None:
        """Report all blocks of the disk as removed, because the last removals of the store process are unknown. Pages
        that are found on the disk later are reported again."""
        orphans = [key for siblings in self._orphans.values() for key, medium in siblings if medium == "DISK"]
        self._drop([*self._announced["DISK"], *orphans], "DISK")

    def cleared(self) -> None:
        self._changes.append(AllRemoved())
        for announced in self._announced.values():
            announced.clear()
        self._orphans.clear()
        self._parents.clear()

    def take_changes(self) -> list[PageChange]:
        """Return all changes so far, and clear them."""
        changes, self._changes = self._changes, []
        return changes

    def _enter(self, pages: PromptPages, medium: Medium) -> None:
        """Record new pages of a medium. The first page whose parent was reported, and all pages after it, are
        reported."""
        for key in pages.keys if medium == "DISK" and self._removed else ():
            self._removed.pop(key, None)
        for at in range(len(pages.keys)):
            later = pages.part(at, len(pages.keys))
            if later.previous_key is None or any(
                later.previous_key in announced for announced in self._announced.values()
            ):
                self._announce(PagesStored(*later, medium))
                return
            key = later.keys[0]
            self._orphans.setdefault(later.previous_key, {})[key, medium] = PagesStored(*later.part(0, 1), medium)
            self._parents[key] = later.previous_key

    def _announce(self, stored: PagesStored) -> None:
        """Report pages, and then the pages that waited for these pages as their parents."""
        to_announce = [stored]
        for change in to_announce:
            self._changes.append(change)
            self._announced[change.medium].update(change.keys)
            for key in change.keys if self._orphans else ():
                for (orphan, medium), kept in self._orphans.pop(key, {}).items():
                    self._parents.pop(orphan, None)
                    to_announce += [] if orphan in self._announced[medium] else [kept]

    def _drop(self, keys: Sequence[bytes], medium: Medium) -> None:
        announced = self._announced[medium]
        removed_keys = [key for key in keys if key in announced]
        if removed_keys:
            self._changes.append(PagesRemoved(removed_keys, medium))
            announced.difference_update(removed_keys)
        for key in self._parents.keys() & keys if self._parents else ():
            self._forget(key, medium)

    def _forget(self, key: bytes, medium: Medium) -> None:
        siblings = self._orphans[self._parents[key]]
        siblings.pop((key, medium), None)
        if not any(of == key for of, _ in siblings):
            parent = self._parents.pop(key)
            if not siblings:
                del self._orphans[parent]


def block_hash(key: bytes) -> int:
    """Return the first 64 bits of a page key as a signed number."""
    return int.from_bytes(key[:8], "big", signed=True)

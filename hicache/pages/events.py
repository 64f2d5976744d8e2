"""Events for a router: the blocks that each medium stores or removes.

A block is a page. Its hash is the first 64 bits of its page key, so it depends on every token before it, on the
namespace and on the identity of the engine (model, dtype, layout, salt): all media and restarts name it alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from hicache.pages.key import Tokens
from hicache.pages.names import PromptPages

Medium = Literal["GPU", "CPU", "DISK"]

# Remembered removals from the disk: more than a store makes during one read.
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
    """Consecutive pages of one prompt, with `tokens` and `keys`, which follow `previous_key`, are held by `medium`."""

    keys: Sequence[bytes]
    previous_key: bytes | None
    tokens: Tokens
    namespace: str
    medium: Medium

    def blocks(self, max_blocks: int) -> Iterator[BlockStored]:
        """The same as events of at most `max_blocks` blocks each."""
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
    """`medium` holds these pages no more."""

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
    """Changes since they were last taken, oldest first, for readers that count. Scheduler thread only.

    A block of a medium is told once, until it is told as removed; no other is told as removed. It is told behind its
    parent: where no medium holds that, as behind a page that a read did not bring, when one does. Keeps the key of each
    block that it told, some 200 bytes.
    """

    def __init__(self) -> None:
        self._changes: list[PageChange] = []
        self._announced: dict[Medium, set[bytes]] = {"GPU": set(), "CPU": set(), "DISK": set()}
        self._orphans: dict[bytes, dict[tuple[bytes, Medium], PagesStored]] = {}  # by parent
        self._parents: dict[bytes, bytes] = {}  # of orphans
        self._removed: dict[bytes, None] = {}  # what the disk removed lately, oldest first

    def stored(self, pages: PromptPages, medium: Medium, which: Sequence[bool] | None = None) -> None:
        """`pages` are held by `medium`: all of them, or those for which `which` is true."""
        announced, keys, start = self._announced[medium], pages.keys, 0
        while start < len(keys):
            end = start
            while end < len(keys) and keys[end] not in announced and (which is None or which[end]):
                end += 1
            if end > start:
                self._enter(pages.part(start, end), medium)
            start = end + 1

    def loaded(self, pages: PromptPages, *, from_disk: bool) -> None:
        """Record pages that a read brought to the host. The disk may have removed some of them since."""
        self.stored(pages, "CPU")
        if from_disk:
            self.stored(pages, "DISK", [key not in self._removed for key in pages.keys])

    def removed(self, keys: Sequence[bytes], medium: Medium) -> None:
        """`medium` holds these no more; it may not have held them."""
        self._drop(keys, medium)
        if medium == "DISK":
            self._removed.update(dict.fromkeys(keys))
            while len(self._removed) > _REMEMBERED:
                del self._removed[next(iter(self._removed))]

    def missed_on_disk(self, keys: Sequence[bytes]) -> None:
        """The disk, which does not tell all that it removes, was asked for these and has them not."""
        self._drop(keys, "DISK")

    def disk_lost(self) -> None:
        """Forget the content of the disk, whose last removals will not be reported, until pages are found again."""
        orphans = [key for siblings in self._orphans.values() for key, medium in siblings if medium == "DISK"]
        self._drop([*self._announced["DISK"], *orphans], "DISK")

    def cleared(self) -> None:
        self._changes.append(AllRemoved())
        for announced in self._announced.values():
            announced.clear()
        self._orphans.clear()
        self._parents.clear()

    def take_changes(self) -> list[PageChange]:
        """All changes so far; they are not told twice."""
        changes, self._changes = self._changes, []
        return changes

    def _enter(self, pages: PromptPages, medium: Medium) -> None:
        """They are new there. Told are those behind the first whose parent is known."""
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
        """Report pages, and then those that waited for them as their parents."""
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
    """The first 64 bits of a page key, as a signed number."""
    return int.from_bytes(key[:8], "big", signed=True)

"""An engine's log of KV events, compared with a reader that counts blocks."""

from __future__ import annotations

import random
from typing import get_args

import numpy as np
import pytest

from block_index import BlockIndex
from hicache.pages.events import EventLog, Medium, block_hash
from hicache.pages.key import PromptPages

SIZE, MEDIA = 2, get_args(Medium)
# Prompts that share beginnings. A key names a block and all blocks before it.
TEXTS = ("abcdefgh", "abcdxyz", "abq", "0123456789", "012abc")


def _pages(text: str, start: int, end: int) -> PromptPages:
    keys = [bytes([ord(text[at]), at, *map(ord, text[: at + 1])]).ljust(32, b"\0") for at in range(len(text))]
    tokens = np.repeat(np.frombuffer(text.encode(), np.uint8).astype(np.int64), SIZE)
    return PromptPages(keys, None, tokens, "").part(start, end)


class History:
    """A log, a reader of it, and the expected blocks of each medium with their parents."""

    def __init__(self, seed: int) -> None:
        self.dice, self.log, self.reader = random.Random(seed), EventLog(), BlockIndex()
        self.held: dict[str, set[bytes]] = {medium: set() for medium in MEDIA}
        self.parents: dict[bytes, bytes | None] = {}
        self.deleted = set[bytes]()  # keys whose removal the disk has reported
        self.num_untold = 0

    def step(self) -> None:
        text, medium = self.dice.choice(TEXTS), self.dice.choice(MEDIA)
        start = self.dice.randrange(len(text))
        pages = _pages(text, start, self.dice.randrange(start, len(text)) + 1)
        self.parents.update(zip(pages.keys, [pages.previous_key, *pages.keys], strict=False))
        draw = self.dice.random()
        if draw < 0.4:
            which = None if self.dice.random() < 0.5 else [self.dice.random() < 0.5 for _ in pages.keys]
            self.log.stored(pages, medium, which)
            arrived = {key for at, key in enumerate(pages.keys) if which is None or which[at]}
            self.held[medium] |= arrived
            self.deleted -= arrived if medium == "DISK" else set()
        elif draw < 0.55:
            self.log.loaded(pages, from_disk=(from_disk := self.dice.random() < 0.7))
            self.held["CPU"].update(pages.keys)
            self.held["DISK"] |= {*pages.keys} - self.deleted if from_disk else set()
        elif draw < 0.9:
            self.log.removed(pages.keys, medium)
            self.held[medium].difference_update(pages.keys)
            self.deleted |= {*pages.keys} if medium == "DISK" else set()
        elif draw < 0.97:
            self.log.missed_on_disk(pages.keys[:1])
            self.held["DISK"].discard(pages.keys[0])
        elif draw < 0.99:
            self.log.disk_lost()
            self.held["DISK"].clear()
        else:
            self.log.cleared()
            self.held = {medium: set() for medium in MEDIA}

    def read(self) -> None:
        for change in self.log.take_changes():
            self.reader.apply(change.blocks(3))
        for medium, held in self.held.items():
            reported = {key for key in held if block_hash(key) in self.reader.held[medium]}
            assert len(reported) == len(self.reader.held[medium])
            for key in held - reported:
                parent = self.parents[key]
                assert parent is not None and not self.reader.knows(block_hash(parent))
            self.num_untold += len(held - reported)


@pytest.mark.parametrize("seed", range(4))
def test_a_counting_reader_has_the_blocks_of_the_media(seed: int) -> None:
    """Blocks are stored twice, after gaps, and removed silently: each block of a medium is reported once until it is
    removed, and after its parent. A stored block is unreported only if no medium has its parent."""
    history = History(seed)
    for _ in range(400):
        history.step()
        history.read()
    assert history.num_untold

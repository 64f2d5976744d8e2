"""Damaged files never crash the process that opens them: a named error, or right pages and misses.

Run as a script, this file is the process that may crash: it damages copies and opens each in a process of its own.
"""

from __future__ import annotations

import os
import random
import shutil
import struct
import subprocess
import sys
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from hicache.storage import LmdbPageReader, StoreCorrupt, StoreError, StoreMismatch, describe
from slot_case import MEMORY
from storage_pages import PAGE_BYTES, found_numbers, open_store, put_numbers

NUM_PAGES = 40
META_BYTES = 152


TABLES, SLOTS = 1 << 40, 1  # pages of so many bytes and more are in slots
SLOTS_NAME = f"pages-{PAGE_BYTES}.dat"


def make(path: Path, slots_from_bytes: int = TABLES) -> None:
    store = open_store(path, slots_from_bytes=slots_from_bytes)
    for first in range(0, NUM_PAGES, 4):
        put_numbers(store, range(first, first + 4))
    store.delete([])
    store.close()


def outcome_of(path: Path) -> str:
    """Open, read, write and check in a process of its own: what became of it."""
    child = os.fork()
    if child == 0:
        code = 3
        try:
            os.close(2)
            code = 0 if use(path) else 1
        except StoreError:
            code = 2
        finally:
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        return f"signal {os.WTERMSIG(status)}"
    return ("opened", "lost pages", "refused", "other error")[os.WEXITSTATUS(status)]


def use(path: Path) -> bool:
    """Whether the store, if it opens, serves all its pages, and rightly, and takes more."""
    store = open_store(path)
    found = found_numbers(store, range(NUM_PAGES))
    put_numbers(store, range(1000, 1010))
    found_numbers(store, range(1000, 1010))
    store.close()
    return found == set(range(NUM_PAGES))


def damage(path: str, kind: str, name: str, seed: int, count: int) -> None:
    """Print how often each outcome came about, over `count` copies with damage to one file."""
    source, copy = Path(path) / "source", Path(path) / "copy"
    make(source, TABLES if name == "data.mdb" else SLOTS)
    name = name.removeprefix("slots ")
    contents = {file.name: file.read_bytes() for file in source.iterdir() if file.suffix in (".mdb", ".dat")}
    del contents["lock.mdb"]
    content = contents[name]
    generator = random.Random(seed)
    outcomes: Counter[str] = Counter()
    places = [page + at for page in (0, 4096) for at in range(META_BYTES)]
    generator.shuffle(places)
    for turn in range(count):
        shutil.rmtree(copy, ignore_errors=True)
        copy.mkdir()
        changed = bytearray(content)
        if kind == "head":
            changed[places[turn % len(places)]] ^= 1 << generator.randrange(8)
        elif kind == "noise":
            at = generator.randrange(0, len(changed))
            changed[at : at + 64] = generator.randbytes(min(64, len(changed) - at))
        else:
            del changed[generator.randrange(len(changed)) :]
        for file, whole in contents.items():
            (copy / file).write_bytes(changed if file == name else whole)
        outcomes[outcome_of(copy)] += 1
    for outcome, number in sorted(outcomes.items()):
        print(f"{number} {outcome}")


def outcomes_of(kind: str, name: str, count: int) -> dict[str, int]:
    with TemporaryDirectory(dir=MEMORY) as path:
        return outcomes_in(path, kind, name, count)


def outcomes_in(path: str, kind: str, name: str, count: int) -> dict[str, int]:
    command = [sys.executable, __file__, path, kind, name, "7", str(count)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent)
    return {outcome: int(number) for number, outcome in (line.split(" ", 1) for line in done.stdout.splitlines())}


HARMLESS = {"opened", "lost pages", "refused"}


DAMAGE = [
    ("head", "data.mdb", 0.1, 0),
    ("noise", "data.mdb", 0, 0.5),
    ("cut", "data.mdb", 0.1, 0),
    ("head", "slots data.mdb", 0.1, 0),
    ("cut", "slots data.mdb", 0.1, 0),
    ("noise", SLOTS_NAME, 0, 0.9),
    ("cut", SLOTS_NAME, 0, 0.9),
]


@pytest.mark.parametrize(("kind", "name", "refused", "lost"), DAMAGE)
@pytest.mark.parametrize("count", [38, pytest.param(1216, marks=pytest.mark.long)])
def test_damage_is_an_error_or_a_miss(kind: str, name: str, refused: float, lost: float, count: int) -> None:
    """A flipped bit in lmdb's head, noise anywhere in a file, a file cut at any place: no crash, no wrong page. 1216
    times is each bit of both heads once, on average."""
    outcomes = outcomes_of(kind, name, count)
    assert set(outcomes) <= HARMLESS and sum(outcomes.values()) == count, outcomes
    assert outcomes.get("refused", 0) >= refused * count, outcomes
    assert outcomes.get("lost pages", 0) >= lost * count, outcomes


@pytest.mark.parametrize("bit", [3, 20, 40, 62])
def test_damaged_length(tmp_path: Path, bit: int) -> None:
    """A head that names more pages than fit the map is refused; the file is not lengthened to have them."""
    make(tmp_path)
    data = tmp_path / "data.mdb"
    content = data.read_bytes()
    transactions = [struct.unpack_from("<Q", content, page + 144)[0] for page in (0, 4096)]
    at = 136 + 4096 * transactions.index(max(transactions))
    last_page = struct.unpack_from("<Q", content, at)[0]
    damaged = bytearray(content)
    struct.pack_into("<Q", damaged, at, last_page | 1 << bit | 64 << 20 >> 12 << 1)
    data.write_bytes(damaged)
    for opening in (open_store, LmdbPageReader, describe):
        with pytest.raises(StoreCorrupt, match=r"the meta pages of .* are damaged"):
            opening(tmp_path)
    assert data.read_bytes() == damaged


@pytest.mark.parametrize("slots_from_bytes", [TABLES, SLOTS])
def test_newer_formats_are_named(tmp_path: Path, slots_from_bytes: int) -> None:
    """A store of a newer format, of its record or of lmdb's file, is refused by name, for writing and for reading, and
    not changed.
    """
    make(tmp_path, slots_from_bytes)
    data = tmp_path / "data.mdb"
    content = data.read_bytes()
    newer_lmdb = content[:20] + struct.pack("<I", 2) + content[24:]
    newer_record = content.replace(b'"format":1', b'"format":9')
    for changed, message in (
        (newer_record, "format 9, this version reads 1"),
        (newer_lmdb, "lmdb's file format 2, this version reads 1"),
    ):
        assert changed != content
        data.write_bytes(changed)
        for opening in (open_store, LmdbPageReader, describe):
            with pytest.raises((StoreMismatch, StoreCorrupt), match=message):
                opening(tmp_path)
        assert data.read_bytes() == changed


if __name__ == "__main__":
    damage(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))

"""`hicache store` on a store with slots, and pages carried by it from and to one without."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from hicache.cli import main
from hicache.storage import LmdbPageStore, PageFilter, describe
from slot_case import closed_slots, slots_file
from storage_pages import found_numbers, key_of, open_store, put_numbers, slots_path

PAGE_BYTES = 256 << 10  # the shortest that gets a slot
SETTINGS: dict[str, Any] = {"page_bytes": PAGE_BYTES, "budget_bytes": 64 << 20, "filter": PageFilter("byte_shuffle", 2)}
TABLES: dict[str, Any] = {**SETTINGS, "slots_from_bytes": 1 << 40}
NUM_RANDOM, NUM_PAGES = 12, 18


def fill(path: Path, settings: dict[str, Any]) -> Path:
    """12 pages that do not compress and 6 that do; the oldest two were used again."""
    with contextlib.closing(open_store(path, **settings)) as store:
        for number in range(NUM_RANDOM):
            put_numbers(store, [number], PAGE_BYTES)
        put_numbers(store, range(NUM_RANDOM, NUM_PAGES), PAGE_BYTES, "normal")
        assert found_of(store) == set(range(NUM_PAGES))
        store.touch([key_of(1), key_of(0)])
    return path


def found_of(store: LmdbPageStore) -> set[int]:
    compressed = found_numbers(store, range(NUM_RANDOM, NUM_PAGES), PAGE_BYTES, "normal")
    return compressed | found_numbers(store, range(NUM_RANDOM), PAGE_BYTES)


def held(path: Path) -> set[int]:
    with contextlib.closing(open_store(path, **SETTINGS)) as store:
        store.check()
        return found_of(store)


def here(capsys: pytest.CaptureFixture[str], *arguments: object, status: int = 0) -> dict[str, Any]:
    """The stats of the command, run in this process."""
    assert main(["store", *map(str, arguments), "--json"]) == status, capsys.readouterr().err
    stats: dict[str, Any] = json.loads(capsys.readouterr().out)
    return stats


def taken_bytes(path: Path) -> int:
    return (path / "data.mdb").stat().st_size + os.stat(slots_path(path)).st_blocks * 512


def test_each_verb_on_slots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """stat, ls, verify, compact, export, evict and import do their work, and give the stats of both files."""
    path = fill(tmp_path / "store", SETTINGS)
    stat = here(capsys, "stat", path)
    assert (stat["has_slots"], stat["formats"][0]["page_bytes"], stat["entries"]) == (True, PAGE_BYTES, NUM_PAGES)
    assert stat["file_bytes"] == taken_bytes(path) > NUM_RANDOM * PAGE_BYTES
    listed = here(capsys, "ls", path)["entries"]
    assert [entry["key"] for entry in listed[-2:]] == [key_of(0).hex(), key_of(1).hex()]
    compressed = {key_of(number).hex() for number in range(NUM_RANDOM, NUM_PAGES)}
    assert {entry["key"] for entry in listed if entry["codec"] == "zstd"} == compressed
    assert {entry["codec"] for entry in listed if entry["key"] not in compressed} == {"raw"}
    assert sum(entry["stored_bytes"] for entry in listed) == stat["live_bytes"]
    verified = here(capsys, "verify", path)
    assert (verified["pages"], verified["bytes"], verified["faults"]) == (NUM_PAGES, stat["live_bytes"], [])
    with contextlib.closing(open_store(path, **SETTINGS)) as store:
        store.delete([key_of(number) for number in range(2, 6)])
    before_bytes = taken_bytes(path)
    compact = here(capsys, "compact", path)
    assert compact["before_bytes"] == before_bytes and compact["after_bytes"] == taken_bytes(path)
    assert compact["saved_bytes"] == before_bytes - taken_bytes(path) >= 4 * PAGE_BYTES
    assert here(capsys, "export", path, tmp_path / "archive")["pages"] == NUM_PAGES - 4
    evicted = here(capsys, "evict", path, "--to", "2MB")
    assert evicted["evicted"] == NUM_PAGES - 4 - evicted["entries"] > 0
    assert evicted["file_bytes"] == taken_bytes(path) <= 2_000_000 and evicted["entries"] >= 4
    imported = here(capsys, "import", path, tmp_path / "archive")
    assert (imported["stored"], imported["present"]) == (evicted["evicted"], evicted["entries"])
    assert held(path) == set(range(NUM_PAGES)) - {2, 3, 4, 5}


def test_a_fault_in_a_slot_is_named_and_repaired(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A changed payload is named with status 1, left out of an archive, and dropped by --repair; a lost file of slots
    is one line and status 2."""
    path = fill(tmp_path / "store", SETTINGS)
    record = closed_slots(path).used[key_of(4)]
    with slots_file(path) as descriptor:
        at = record.slot * PAGE_BYTES + 5000
        os.pwrite(descriptor, bytes([os.pread(descriptor, 1, at)[0] ^ 4]), at)
    fault = {"key": key_of(4).hex(), "reason": "checksum differs", "action": ""}
    assert here(capsys, "verify", path, status=1)["faults"] == [fault]
    exported = here(capsys, "export", path, tmp_path / "archive")
    assert (exported["pages"], exported["left_out"]) == (NUM_PAGES - 1, 1)
    assert here(capsys, "verify", path, "--repair")["faults"] == [{**fault, "action": "dropped"}]
    assert here(capsys, "verify", path)["faults"] == [] and held(path) == set(range(NUM_PAGES)) - {4}
    slots = slots_path(path)
    slots.unlink()
    for verb in ("stat", "ls", "verify", "compact"):
        assert main(["store", verb, str(path)]) == 2
        out, err = capsys.readouterr()
        assert not out and len(err.splitlines()) == 1 and slots.name in err


@pytest.mark.parametrize("first", ["tables", "slots"])
def test_archives_carry_pages_from_and_to_slots(tmp_path: Path, first: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An archive of a store in either form goes into a new store, which has slots, and into one without, and back: the
    same values in the same order, byte for byte in the archives too."""
    path = fill(tmp_path / "store", SETTINGS if first == "slots" else TABLES)
    assert describe(path).has_slots == (first == "slots")
    entries = here(capsys, "ls", path)["entries"]
    here(capsys, "export", path, tmp_path / "archive")
    open_store(tmp_path / "in_tables", **TABLES).close()
    for name in ("new", "in_tables"):
        stats = here(capsys, "import", tmp_path / name, tmp_path / "archive")
        assert (stats["stored"], stats["refused"], stats["created"]) == (NUM_PAGES, 0, name == "new")
        assert describe(tmp_path / name).has_slots == (name == "new")
        assert here(capsys, "ls", tmp_path / name)["entries"] == entries
        here(capsys, "export", tmp_path / name, tmp_path / f"archive of {name}")
        assert (tmp_path / f"archive of {name}").read_bytes() == (tmp_path / "archive").read_bytes()
        assert held(tmp_path / name) == set(range(NUM_PAGES))

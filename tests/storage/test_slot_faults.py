"""Faults planted in a store with slots: a miss, a counter and a deletion, or a named error; no crash, no wrong bytes.

Run as a script, this file is the process that may crash: it plants each fault in a store of its own, and has a child
use that store.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from child_case import in_child
from hicache.storage import LmdbPageReader, LmdbPageStore, StoreCorrupt, StoreError, describe, verify
from slot_case import MEMORY, SLOT_BYTES, closed_slots, open_slots
from slot_faults import ALL, FAULTS, NUM_PAGES, NUM_RANDOM, SETTINGS, behind, make
from storage_pages import PAGE_BYTES, found_numbers, key_of, put_numbers, slots_path

MODES = ("read", "verify")


def found_of(store: LmdbPageStore | LmdbPageReader) -> set[int]:
    """The pages that are served; AssertionError for a wrong byte."""
    compressed = found_numbers(store, range(NUM_RANDOM, NUM_PAGES), kind="normal")
    return compressed | found_numbers(store, range(NUM_RANDOM))


def use(path: Path, mode: str) -> dict[str, Any]:
    """What becomes of a store with a fault: read it and put a page, perhaps; verify and repair it; put back what
    went."""
    try:
        store = open_slots(path, **SETTINGS)
    except StoreError as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    said: dict[str, Any] = {}
    if mode == "read":
        said["lost"] = sorted(ALL - found_of(store))
        stats = store.stats()
        said["counted"] = stats.corrupt + stats.read_errors
        said["put"] = put_numbers(store, [1000]) == [True] and found_numbers(store, [1000]) == {1000}
        held = store.contains([key_of(number) for number in said["lost"]])
        said["kept"] = [number for number, has in zip(said["lost"], held, strict=True) if has]
        if store.stats().read_only:  # what cannot be written to is opened again
            store.close()
            store = open_slots(path, **SETTINGS)
    numbers = {key_of(number): number for number in range(NUM_PAGES)}
    faults = verify(store, repair=True).faults
    said["bad"] = sorted(numbers[fault.key] for fault in faults if fault.key in numbers)
    said["named"] = "\n".join(fault.reason for fault in faults if fault.key is None)
    said["second"] = [fault.reason for fault in verify(store).faults]
    said["gone"] = sorted(ALL - found_of(store))
    repair(store, said["gone"])
    store.close()
    with contextlib.closing(open_slots(path, **SETTINGS)) as store:
        store.check()
        assert found_of(store) == ALL
    return said


def repair(store: LmdbPageStore, gone: list[int]) -> None:
    """Put what is gone and a little more: the store takes it, and is valid."""
    assert all(put_numbers(store, [n for n in gone if n < NUM_RANDOM]))
    assert all(put_numbers(store, [n for n in gone if n >= NUM_RANDOM], kind="normal"))
    for number in range(1001, 1006):
        assert put_numbers(store, [number]) == [True]
    store.check()
    assert found_of(store) == ALL


def print_outcomes(path: Path) -> None:
    """What becomes of each fault, and which pages it is to cost."""
    source, copy = path / "source", path / "copy"
    make(source)
    slots = closed_slots(source)
    for name, fault in FAULTS.items():
        lost = sorted(fault.lost(slots) if callable(fault.lost) else fault.lost)
        for mode in MODES:
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(source, copy)
            fault.plant(copy)
            outcome = in_child(partial(use, copy, mode), path / "result")
            print(json.dumps([name, mode, lost, outcome]), flush=True)


@pytest.fixture(scope="module")
def outcomes() -> Iterator[dict[tuple[str, str], tuple[list[int], dict[str, Any]]]]:
    with TemporaryDirectory(dir=MEMORY) as path:
        command = [sys.executable, __file__, path]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    assert done.returncode == 0, done.stderr
    found = (json.loads(line) for line in done.stdout.splitlines())
    yield {(name, mode): (lost, said) for name, mode, lost, said in found}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_costs_what_it_hit(
    name: str, mode: str, outcomes: dict[tuple[str, str], tuple[list[int], dict[str, Any]]]
) -> None:
    """Whether it is read first or verified: no crash, no wrong byte; what was hit is missed, counted once and deleted,
    all else is served; verification names and repairs it, a second one finds nothing, and the store takes pages
    again."""
    fault, (lost, said) = FAULTS[name], outcomes[name, mode]
    assert not {"failed", "error"} & said.keys(), said
    if fault.refused:
        assert said.get("refused", "").startswith("StoreCorrupt: ") and fault.refused in said["refused"], said
        return
    assert "refused" not in said, said
    assert said["second"] == []
    if mode == "verify":
        assert (said["bad"], said["gone"]) == (lost, lost)
        assert fault.named in said["named"] and bool(said["named"]) >= bool(fault.named)
        return
    assert (said["lost"], said["counted"], said["kept"]) == (lost, len(lost), [])
    assert said["put"] != fault.stops_writing
    assert set(lost) <= set(said["gone"]) and len(said["gone"]) <= len(lost) + fault.costs_later


@pytest.mark.parametrize("left_bytes", [0, 1, 4096, 20 * SLOT_BYTES, 55 * SLOT_BYTES + 9000])
def test_a_file_that_is_cut_while_it_is_open(tmp_path: Path, left_bytes: int) -> None:
    """What is behind the cut is missed, by readers too, and deleted by the next call; the rest is served, and the store
    takes all again."""
    make(tmp_path / "store")
    shutil.copytree(tmp_path / "store", tmp_path / "read")
    lost = behind(left_bytes)(closed_slots(tmp_path / "store"))
    with contextlib.closing(LmdbPageReader(tmp_path / "read")) as reader:
        assert found_of(reader) == ALL
        os.truncate(slots_path(tmp_path / "read"), left_bytes)
        assert found_of(reader) == ALL - lost and reader.stats().corrupt == len(lost)
    with contextlib.closing(open_slots(tmp_path / "store", **SETTINGS)) as store:
        assert found_of(store) == ALL
        os.truncate(slots_path(tmp_path / "store"), left_bytes)
        assert found_of(store) == ALL - lost and store.stats().corrupt == len(lost)
        assert put_numbers(store, [1000]) == [True] and store.stats().entries == NUM_PAGES - len(lost) + 1
        store.check()
        repair(store, sorted(lost))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    """Without its slots a store is refused by name, for writing, reading and description, and nothing is changed; with
    them again it is what it was."""
    make(tmp_path / "store")
    data = (tmp_path / "store" / "data.mdb").read_bytes()
    slots = slots_path(tmp_path / "store")
    slots.rename(tmp_path / "kept")
    for _ in range(2):
        with pytest.raises(StoreCorrupt, match=slots.name):
            open_slots(tmp_path / "store", **SETTINGS)
        for opening in (LmdbPageReader, describe):
            with pytest.raises(StoreError, match=slots.name):
                opening(tmp_path / "store")
    assert (tmp_path / "store" / "data.mdb").read_bytes() == data
    assert not slots.exists()
    (tmp_path / "kept").rename(slots)
    with contextlib.closing(open_slots(tmp_path / "store", **SETTINGS)) as store:
        assert found_of(store) == ALL
        store.check()


@pytest.mark.parametrize("content", [b"somebody's", bytes(4096) + b"\1", bytes(4097)])
def test_slots_without_their_tables(tmp_path: Path, content: bytes) -> None:
    """What has the name of the slots' file where no store is, is not overwritten; what a store left that was killed
    while it was made is."""
    file = tmp_path / f"pages-{PAGE_BYTES}.dat"
    file.write_bytes(content)
    for _ in range(2):
        with pytest.raises(StoreError, match=r"pages-16320\.dat is there, but no store; move it away"):
            open_slots(tmp_path, **SETTINGS)
        assert file.read_bytes() == content
    file.write_bytes(bytes(4096))
    make(tmp_path)
    with contextlib.closing(open_slots(tmp_path, **SETTINGS)) as store:
        assert found_of(store) == ALL


if __name__ == "__main__":
    print_outcomes(Path(sys.argv[1]))

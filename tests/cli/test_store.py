"""`hicache store` as an operator meets it: real commands on real stores, beside a writer, encrypted, damaged, cut off.

Run as a script, this file is a process that writes: it opens a store, says so, and waits until its input ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hicache.cli import main
from hicache.storage import LmdbPageStore, PageCipher, PageFilter, describe
from storage_pages import (
    IDENTITY,
    PAGE_BYTES,
    change_index,
    found_numbers,
    key_of,
    open_store,
    page_of,
    put_numbers,
    slots_path,
)
from store_cli_case import child, spawn

KEY = bytes(range(32))


def here(capsys: pytest.CaptureFixture[str], *arguments: object, status: int = 0) -> dict[str, Any]:
    """The stats of the command, run in this process."""
    assert main(["store", *map(str, arguments), "--json"]) == status, capsys.readouterr().err
    out, err = capsys.readouterr()
    assert not err
    stats: dict[str, Any] = json.loads(out)
    return stats


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line with which the command refuses, nothing on its output, status 2."""
    capsys.readouterr()
    try:
        status = main(["store", *map(str, arguments)])
    except SystemExit as exit:
        status = int(str(exit.code))
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1 and err.startswith("hicache: error: "), err
    return err


@pytest.fixture(name="path")
def a_store(tmp_path: Path) -> Path:
    """20 pages that do not compress and 4 that do; the oldest three were used again, so that order is not that of
    keys."""
    store = open_store(tmp_path / "store", filter=PageFilter("byte_shuffle", 2), level=3, durability="commit")
    for number in range(20):
        put_numbers(store, [number])
    put_numbers(store, range(20, 24), kind="normal")
    put_numbers(store, range(3))
    store.close()
    return tmp_path / "store"


def held(path: Path, numbers: range, kind: str = "random", **changes: Any) -> set[int]:
    store = open_store(path, **changes)
    try:
        return found_numbers(store, numbers, kind=kind)
    finally:
        store.close()


@contextlib.contextmanager
def writer_of(path: Path) -> Iterator[int]:
    """Another process that has the store open for writing; its number."""
    process = subprocess.Popen(
        [sys.executable, __file__, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parent,
    )
    assert process.stdin and process.stdout
    assert process.stdout.readline() == b"ready\n"
    yield process.pid
    process.communicate(timeout=60)


def flip(path: Path, number: int) -> None:
    """Change a bit of one page, behind the store's back."""
    file = slots_path(path)
    content = bytearray(file.read_bytes())
    content[content.index(page_of(number).tobytes()) + 5000] ^= 4
    file.write_bytes(content)


def forget(number: int) -> Callable[[Any, dict[str, Any]], None]:
    """Take a page out of the use order alone."""

    def change(txn: Any, tables: dict[str, Any]) -> None:
        tick = int.from_bytes(txn.get(key_of(number), db=tables["pages"])[:8], "little")
        assert txn.delete(tick.to_bytes(8, "big"), db=tables["recency"])

    return change


GOLDEN = {
    "stat": "path format identity formats level durability budget_bytes key_id entries live_bytes raw_bytes "
    "file_bytes writer_pid encrypted ratio",
    "ls": "path order entries",
    "verify": "path pages bytes encrypted decrypted repair rebuilt faults left",
    "compact": "path before_bytes after_bytes saved_bytes",
    "evict": "path to_bytes evicted entries live_bytes file_bytes",
    "export": "path file pages left_out archive_bytes",
    "import": "path file created pages stored present evicted refused reasons",
}


def test_each_verb_prints_one_json_object(path: Path, tmp_path: Path) -> None:
    """As processes, in a place without transformers: each verb does its work and prints its stats, nothing else."""
    more: dict[str, list[object]] = {"export": [tmp_path / "a"], "evict": ["--to", "100KB"], "import": [tmp_path / "a"]}
    stats = {}
    for verb in ("stat", "ls", "verify", "compact", "export", "evict", "import"):
        stats[verb] = json.loads(child(verb, path, *more.get(verb, []), "--json"))
        assert " ".join(stats[verb]) == GOLDEN[verb]
    stat = stats["stat"]
    assert (stat["format"], stat["identity"], stat["entries"]) == (1, IDENTITY, 24)
    assert (stat["level"], stat["durability"], stat["budget_bytes"]) == (3, "commit", 64 << 20)
    filter = {"kind": "byte_shuffle", "element_bytes": 2, "tokens": 0, "channels": 0}
    assert stat["formats"] == [{"page_bytes": PAGE_BYTES, "filter": filter}]
    assert (stat["encrypted"], stat["key_id"], stat["writer_pid"]) == (False, "", None)
    assert stat["ratio"] == 24 * PAGE_BYTES / stat["live_bytes"] > 1
    assert sum(entry["stored_bytes"] for entry in stats["ls"]["entries"]) == stat["live_bytes"]
    assert (stats["verify"]["pages"], stats["verify"]["bytes"]) == (24, stat["live_bytes"])
    compact = stats["compact"]
    assert compact["saved_bytes"] == compact["before_bytes"] - compact["after_bytes"] >= 0
    assert stats["evict"]["evicted"] == 24 - stats["evict"]["entries"] > 0
    assert stats["evict"]["file_bytes"] <= 100_000
    assert (stats["import"]["stored"], stats["import"]["present"]) == (
        stats["evict"]["evicted"],
        stats["evict"]["entries"],
    )
    assert held(path, range(20)) == set(range(20))


def test_ls_gives_the_use_order(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Least recently used first, or the other way round; sizes as stored; compressed pages are told from raw ones."""
    order = [*range(3, 20), 23, 22, 21, 20, 2, 1, 0]  # within a call the earlier key counts as the more recently used
    listed = here(capsys, "ls", path)["entries"]
    assert [entry["key"] for entry in listed] == [key_of(number).hex() for number in order]
    assert [entry["codec"] for entry in listed] == ["zstd" if number >= 20 else "raw" for number in order]
    assert {entry["page_bytes"] for entry in listed} == {PAGE_BYTES}
    assert all((entry["stored_bytes"] == PAGE_BYTES + 52) == (entry["codec"] == "raw") for entry in listed)
    assert here(capsys, "ls", path, "--newest")["entries"] == listed[::-1]
    assert here(capsys, "ls", path, "--newest", "--limit", "5")["entries"] == listed[:-6:-1]
    assert main(["store", "ls", str(path), "--limit", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines] == [[*map(str, e.values())] for e in listed[:2]]


def test_beside_a_writer(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """stat, ls and export work while another process writes, and see its pages; what changes something is refused with
    that process's number, and changes nothing."""
    with writer_of(path) as number:
        found = here(capsys, "stat", path)
        assert (found["writer_pid"], found["entries"]) == (number, 27)
        assert here(capsys, "ls", path, "--newest", "--limit", "1")["entries"][0]["key"] == key_of(100).hex()
        assert here(capsys, "export", path, tmp_path / "a")["pages"] == 27
        for verb, *more in (["verify"], ["verify", "--repair"], ["compact"], ["evict", "--to", "0"]):
            assert f"is in use by process {number}" in refused(capsys, verb, path, *more)
        assert f"is in use by process {number}" in refused(capsys, "import", path, tmp_path / "a")
    assert here(capsys, "stat", path)["writer_pid"] is None
    assert here(capsys, "import", tmp_path / "copy", tmp_path / "a")["stored"] == 27
    assert held(tmp_path / "copy", range(100, 103)) == {100, 101, 102}


def test_planted_faults_are_named_and_repaired(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A changed page and a lost index record are named with status 1 and left as they are; --repair drops the one,
    builds the index anew, and the store is clean and keeps all other pages."""
    flip(path, 4)
    change_index(path, forget(7))
    for _ in range(2):
        found = here(capsys, "verify", path, status=1)
        assert found["left"] == len(found["faults"]) == 2
        assert {"key": key_of(4).hex(), "reason": "checksum differs", "action": ""} in found["faults"]
        assert any("use order" in fault["reason"] and fault["key"] is None for fault in found["faults"])
    assert main(["store", "verify", str(path)]) == 1
    assert "left as it is" in capsys.readouterr().out
    repaired = here(capsys, "verify", path, "--repair")
    assert [fault["reason"] for fault in repaired["faults"]] == [fault["reason"] for fault in found["faults"]]
    assert {fault["action"] for fault in repaired["faults"]} == {"dropped", "index rebuilt"} and repaired["left"] == 0
    clean = here(capsys, "verify", path)
    assert (clean["pages"], clean["faults"]) == (23, [])
    assert held(path, range(20)) == set(range(20)) - {4}


def test_export_leaves_damaged_pages_out(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A page that does not verify is not exported, and the stats say that one is missing."""
    flip(path, 4)
    stats = here(capsys, "export", path, tmp_path / "a")
    assert (stats["pages"], stats["left_out"]) == (23, 1)
    assert here(capsys, "import", tmp_path / "copy", tmp_path / "a")["stored"] == 23


def test_a_store_that_was_not_closed(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without its seal a store cannot be read, by name and with the remedy; opening it for writing builds its index
    anew from the slots, and verify says so."""
    before = {entry["key"] for entry in here(capsys, "ls", path)["entries"]}
    (path / "index.mdb").write_text("something else")
    for verb, *more in (["stat"], ["ls"], ["export", tmp_path / "a"]):
        said = refused(capsys, verb, path, *more)
        assert "has no sealed index" in said and "hicache store verify --repair" in said
    assert not (tmp_path / "a").exists()
    copy = tmp_path / "copy"
    shutil.copytree(path, copy)
    found = here(capsys, "verify", path)
    assert (found["rebuilt"], found["pages"], found["faults"]) == (24, 24, [])
    assert {entry["key"] for entry in here(capsys, "ls", path)["entries"]} == before
    assert main(["store", "verify", str(copy), "--repair"]) == 0
    assert "its index was built anew, with 24 pages" in capsys.readouterr().out


@pytest.mark.parametrize("num_left", [0, 10])
def test_pages_that_went_with_their_file(path: Path, num_left: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Verify names each page of a closed store whose bytes are gone, with status 1, however often it is called; a
    repair drops them. Whoever else opens the store goes on with the rest and hears how many are gone."""
    os.truncate(slots_path(path), num_left * 5 * 4096)
    if not num_left:
        slots_path(path).unlink()
        assert "hicache store verify --repair" in refused(capsys, "stat", path)
    opened = shutil.copytree(path, path.parent / "opened")
    for _ in range(2):
        found = here(capsys, "verify", path, status=1)
        lost = {fault["key"] for fault in found["faults"] if fault["key"]}
        assert (len(lost), found["left"], found["rebuilt"]) == (24 - num_left, 25 - num_left, None)
        assert any(fault["reason"].startswith(f"{len(lost)} of 24 pages have no slot") for fault in found["faults"])
    repaired = here(capsys, "verify", path, "--repair")
    assert {fault["key"] for fault in repaired["faults"] if fault["action"] == "dropped"} == lost
    assert (here(capsys, "verify", path)["pages"], here(capsys, "stat", path)["entries"]) == (num_left, num_left)
    assert main(["store", "compact", str(opened)]) == 0
    assert f"{len(lost)} of 24 pages of the store {opened} are lost" in capsys.readouterr().err
    assert here(capsys, "verify", opened)["pages"] == num_left


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
def test_round_trip(key: bytes | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Through an archive and through pipes, to a new store: the same pages, use order, settings; no key is needed."""
    settings = {
        "cipher": PageCipher(key) if key else None,
        "filter": PageFilter("byte_shuffle", 2),
        "durability": "commit",
    }
    store = open_store(tmp_path / "a", **settings)
    put_numbers(store, range(30), kind="normal")
    put_numbers(store, range(5, 9), kind="normal")
    store.close()
    stat, order = here(capsys, "stat", tmp_path / "a"), here(capsys, "ls", tmp_path / "a")["entries"]
    exporting = spawn("export", tmp_path / "a", "-")
    imported = json.loads(child("import", tmp_path / "b", "-", "--json", stdin=exporting.stdout))
    assert exporting.stdout and exporting.stderr
    exporting.stdout.close()
    assert exporting.wait(60) == 0 and b"30 pages" in exporting.stderr.read()
    exporting.stderr.close()
    assert (imported["created"], imported["stored"], imported["refused"]) == (True, 30, 0)
    again, changing = here(capsys, "stat", tmp_path / "b"), ("path", "file_bytes")
    assert {k: v for k, v in again.items() if k not in changing} == {k: v for k, v in stat.items() if k not in changing}
    assert here(capsys, "ls", tmp_path / "b")["entries"] == order
    assert held(tmp_path / "b", range(31), "normal", **settings) == set(range(30))
    assert here(capsys, "verify", tmp_path / "b")["faults"] == []
    here(capsys, "export", tmp_path / "b", tmp_path / "archive")
    here(capsys, "evict", tmp_path / "b", "--to", "200KB")
    assert here(capsys, "import", tmp_path / "b", tmp_path / "archive")["pages"] == 30
    assert here(capsys, "import", tmp_path / "c", tmp_path / "archive", "--budget", "8MB")["stored"] == 30
    assert here(capsys, "stat", tmp_path / "c")["budget_bytes"] == 8_000_000


def test_the_key_of_an_encrypted_store(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its key, from a file or the environment, pages are decrypted too; another key, a key for a plain store, two
    keys or an unreadable one are refused, and no message shows any of it."""
    store = open_store(tmp_path / "s", cipher=PageCipher(KEY))
    put_numbers(store, range(6))
    (tmp_path / "key").write_text(KEY.hex() + "\n")
    (tmp_path / "other").write_text("ff" * 32)
    store.close()
    plain = open_store(tmp_path / "plain")
    plain.close()
    with_key, other = ["--key-file", tmp_path / "key"], ["--key-file", tmp_path / "other"]
    key_id = PageCipher(KEY).key_id
    assert here(capsys, "stat", tmp_path / "s")["key_id"] == key_id
    assert here(capsys, "verify", tmp_path / "s")["decrypted"] is False
    assert here(capsys, "verify", tmp_path / "s", *with_key)["decrypted"] is True
    assert here(capsys, "export", tmp_path / "s", tmp_path / "a", *with_key)["pages"] == 6
    assert here(capsys, "import", tmp_path / "t", tmp_path / "a", *with_key)["stored"] == 6
    for verb, *more in (["ls"], ["verify"], ["compact"], ["evict", "--to", "0"], ["export", tmp_path / "b"]):
        err = refused(capsys, verb, tmp_path / "s", *more, *other)
        assert f"cipher_key: stored '{key_id}', now '" in err and "ff" * 8 not in err
        assert "cipher_key: stored None, now '" in refused(capsys, verb, tmp_path / "plain", *more, *with_key)
    assert f"cipher_key: stored '{key_id}'" in refused(capsys, "import", tmp_path / "new", tmp_path / "a", *other)
    assert not (tmp_path / "new").exists() and not (tmp_path / "b").exists()
    monkeypatch.setenv("HICACHE_DISK_KEY", KEY.hex())
    assert here(capsys, "verify", tmp_path / "s")["decrypted"] is True
    assert "both set" in refused(capsys, "ls", tmp_path / "s", *with_key)
    monkeypatch.setenv("HICACHE_DISK_KEY", "no key")
    assert "HICACHE_DISK_KEY holds no key" in refused(capsys, "ls", tmp_path / "s")


def test_import_into_another_identity_is_refused(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A store of another model, or of other pages, takes nothing; the message names both sides."""
    here(capsys, "export", path, tmp_path / "a")
    for name, changes in (("model", {"identity": {**IDENTITY, "model": "huge"}}), ("page", {"page_bytes": 4096})):
        store = open_store(tmp_path / name, **changes)
        store.close()
        err = refused(capsys, "import", tmp_path / name, tmp_path / "a")
        assert "was made for something else" in err
        assert ("model: stored 'huge', now 'tiny'" if name == "model" else "page_bytes: stored [4096]") in err
        assert describe(tmp_path / name).entries == 0
    assert "--budget is for a new store" in refused(capsys, "import", path, tmp_path / "a", "--budget", "1GB")
    assert "is too small for pages" in refused(capsys, "import", tmp_path / "new", tmp_path / "a", "--budget", "9kB")
    assert not (tmp_path / "new").exists()


def test_import_keeps_to_the_budget(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A budget too small for all keeps the most recently used pages, and the stats say how many were evicted."""
    store = open_store(tmp_path / "a")
    put_numbers(store, range(80))
    put_numbers(store, range(30, 40))
    store.close()
    order = [entry["key"] for entry in here(capsys, "ls", tmp_path / "a")["entries"]]
    here(capsys, "export", tmp_path / "a", tmp_path / "archive")
    stats = here(capsys, "import", tmp_path / "b", tmp_path / "archive", "--budget", "600kB")
    left = [entry["key"] for entry in here(capsys, "ls", tmp_path / "b")["entries"]]
    assert stats["stored"] == 80 and stats["evicted"] == 80 - len(left) > 0
    assert left == order[-len(left) :]
    assert here(capsys, "stat", tmp_path / "b")["file_bytes"] <= 600_000


WRONG = {
    "no subcommand": ([], "COMMAND"),
    "unknown verb": (["polish", "{path}"], "polish"),
    "no directory": (["stat"], "DIR"),
    "no such store": (["stat", "{tmp}/none"], "there is no store at"),
    "an empty directory": (["verify", "{tmp}/empty"], "there is no store at"),
    "a file for a directory": (["ls", "{tmp}/file"], "is no directory"),
    "an empty name": (["compact", ""], "disk path='' is not a path"),
    "something else": (["verify", "{tmp}/other"], "is damaged: its record cannot be read"),
    "no limit": (
        ["ls", "{path}", "--limit", "0"],
        "--limit: 0 is below 1: list at most so many pages; without it, all",
    ),
    "a word for a number": (["ls", "{path}", "--limit", "few"], "--limit"),
    "no size": (["evict", "{path}"], "--to"),
    "a wrong size": (["evict", "{path}", "--to", "12Q"], "12Q"),
    "less than nothing": (["evict", "{path}", "--to", "-1"], "--to: -1 is below 0"),
    "an abbreviation": (["verify", "{path}", "--rep"], "--rep"),
    "an archive that exists": (["export", "{path}", "{tmp}/file"], "give --force"),
    "a directory for an archive": (["export", "{path}", "{tmp}/empty", "--force"], "is no regular file"),
    "an archive nowhere": (["export", "{path}", "{tmp}/no/where"], "cannot write the archive"),
    "json beside an archive": (["export", "{path}", "-", "--json"], "--json"),
    "no archive": (["import", "{path}", "{tmp}/none"], "cannot read the archive"),
    "a foreign archive": (["import", "{tmp}/new", "{tmp}/file"], "is no archive of a store"),
    "a directory to import": (["import", "{tmp}/new", "{tmp}/empty"], "cannot read the archive"),
    "no key file": (["verify", "{path}", "--key-file", "{tmp}/none"], "key_file"),
    "a file without a key": (["verify", "{path}", "--key-file", "{tmp}/file"], "holds no key"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_one_line(case: str, path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Status 2 and one line that names the culprit; no file appears, goes or changes."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "store.json").write_bytes(b"something else" * 1000)
    (tmp_path / "file").write_text("not an archive, not a key")
    arguments, culprit = WRONG[case]
    data = (path / "index.mdb").read_bytes()
    before = sorted(tmp_path.iterdir())
    assert culprit in refused(capsys, *(text.format(tmp=tmp_path, path=path) for text in arguments))
    assert sorted(tmp_path.iterdir()) == before
    assert (path / "index.mdb").read_bytes() == data
    assert (tmp_path / "file").read_text() == "not an archive, not a key"


if __name__ == "__main__":
    writing: LmdbPageStore = open_store(sys.argv[1], filter=PageFilter("byte_shuffle", 2), level=3, durability="commit")
    put_numbers(writing, range(100, 103))
    print("ready", flush=True)
    sys.stdin.read()
    writing.close()

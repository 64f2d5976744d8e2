"""`hicache store` on real stores: with a concurrent writer, encrypted, damaged and truncated."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import storage_pages
from cli_case import output, refused, stats
from hicache.errors import ConfigError
from hicache.storage import PageCipher, PageFilter, StoreMismatch
from hicache.store_command.smaller_budget import confirm_smaller_budget
from programs import PIPE, Program
from storage_pages import (
    IDENTITY,
    PAGE_BYTES,
    found_numbers,
    key_of,
    open_store,
    page_of,
    put_numbers,
    slots_path,
)

KEY = bytes(range(32))


def here(capsys: pytest.CaptureFixture[str], *arguments: object, status: int = 0) -> dict[str, Any]:
    """The stats of `hicache store ARGUMENTS`."""
    return stats(capsys, "store", *arguments, status=status)


@pytest.fixture(name="path")
def a_store(tmp_path: Path) -> Path:
    """A store with 20 pages that do not compress and 4 that do. The oldest three were used again, so that the order of
    use is not that of the keys."""
    store = open_store(tmp_path / "store", filter=PageFilter("byte_shuffle", 2), level=3, durability="commit")
    for number in range(20):
        put_numbers(store, [number])
    put_numbers(store, range(20, 24), kind="normal")
    put_numbers(store, range(3))
    store.close()
    return tmp_path / "store"


def held(path: Path, numbers: range) -> set[int]:
    store = open_store(path)
    try:
        return found_numbers(store, numbers)
    finally:
        store.close()


WRITER = """
import sys
from storage_pages import *
store = open_store(sys.argv[1], filter=PageFilter("byte_shuffle", 2), level=3, durability="commit")
put_numbers(store, range(100, 103))
print("ready", flush=True)
sys.stdin.read()
store.close()
"""


@contextlib.contextmanager
def writer_of(path: Path) -> Iterator[int]:
    """Run another process that has the store open for writing; yields its process id."""
    with Program(WRITER, path, stdin=PIPE, cwd=Path(storage_pages.__file__).parent) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield process.pid
        process.communicate()


def flip(path: Path, number: int) -> None:
    """Change a bit of one page without the store."""
    file = slots_path(path)
    content = bytearray(file.read_bytes())
    content[content.index(page_of(number).tobytes()) + 5000] ^= 4
    file.write_bytes(content)


GOLDEN = {
    "stat": "path format identity formats level durability budget_bytes key_id entries live_bytes raw_bytes "
    "file_bytes writer_pid last_use_s encrypted ratio",
    "ls": "path order entries",
    "verify": "path pages bytes encrypted decrypted repair rebuilt faults left",
    "compact": "path before_bytes after_bytes saved_bytes",
    "evict": "path to_bytes evicted entries live_bytes file_bytes",
}


def test_each_verb_prints_one_json_object(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each verb does its work and prints its stats, nothing else."""
    found = {}
    for verb, names in GOLDEN.items():
        found[verb] = here(capsys, verb, path, *(["--to", "100KB"] if verb == "evict" else []))
        assert " ".join(found[verb]) == names
    stat = found["stat"]
    assert (stat["format"], stat["identity"], stat["entries"]) == (1, IDENTITY, 24)
    assert (stat["level"], stat["durability"], stat["budget_bytes"]) == (3, "commit", 64 << 20)
    filter = {"kind": "byte_shuffle", "element_bytes": 2}
    assert stat["formats"] == [{"page_bytes": PAGE_BYTES, "filter": filter}]
    assert (stat["encrypted"], stat["key_id"], stat["writer_pid"]) == (False, "", None)
    assert stat["ratio"] == 24 * PAGE_BYTES / stat["live_bytes"] > 1
    assert sum(entry["stored_bytes"] for entry in found["ls"]["entries"]) == stat["live_bytes"]
    assert (found["verify"]["pages"], found["verify"]["bytes"]) == (24, stat["live_bytes"])
    compact = found["compact"]
    assert compact["saved_bytes"] == compact["before_bytes"] - compact["after_bytes"] >= 0
    assert found["evict"]["evicted"] == 24 - found["evict"]["entries"] > 0
    assert found["evict"]["file_bytes"] <= 100_000


def test_an_open_store_is_copied(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The copy has every page, in a store that an engine finds, while another process has the source open. A target
    that already has the store is refused. A page that does not verify is left out."""
    with writer_of(path):
        assert here(capsys, "stat", path)["writer_pid"]
        (copied,) = here(capsys, "copy", path, tmp_path / "backup")["stores"]
        assert (copied["pages"], copied["dropped"]) == (27, 0)
        (copy,) = (tmp_path / "backup").iterdir()
        assert held(copy, range(20)) == {*range(20)}  # compares the bytes
        assert named_in(copy) == {*range(24), *range(100, 103)}
        assert here(capsys, "verify", tmp_path / "backup")["faults"] == []
        assert f"{copy} exists" in refused(capsys, "store", "copy", path, tmp_path / "backup")
    flip(path, 7)
    (copied,) = here(capsys, "copy", path, tmp_path / "other")["stores"]
    assert (copied["pages"], copied["dropped"]) == (26, 1)
    assert 7 in named_in(path) and 7 not in named_in(tmp_path / "other" / copy.name)


def named_in(path: Path) -> set[int]:
    """Numbers of the pages that the index names, whether they verify or not."""
    store = open_store(path)
    try:
        return {number for number in range(103) if store.contains([key_of(number)]) == [True]}
    finally:
        store.close()


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_a_store_gets_another_key(is_encrypted: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All pages are read with the new key, in the old order of use, and none with the old key. A change to the same
    key, and a store that a process has open, are refused, and nothing changes."""
    pytest.importorskip("cryptography")
    path, old, new = tmp_path / "store", tmp_path / "old", tmp_path / "new"
    old.write_bytes(KEY)
    new.write_bytes(KEY[::-1])
    given = ["--key-file", old] if is_encrypted else []
    store = open_store(path, cipher=PageCipher(KEY) if is_encrypted else None)
    put_numbers(store, range(20))
    put_numbers(store, range(3))
    with_open = refused(capsys, "store", "rekey", path, *given, "--new-key-file", new)
    store.close()
    assert "is in use" in with_open
    order = [entry["key"] for entry in here(capsys, "ls", path)["entries"]]
    done = here(capsys, "rekey", path, *given, "--new-key-file", new)
    assert (done["path"], done["pages"], done["lost"]) == (str(path), 20, 0)
    assert [entry["key"] for entry in here(capsys, "ls", path)["entries"]] == order
    assert [one.name for one in sorted(tmp_path.iterdir())] == ["new", "old", "store"]
    again = open_store(path, cipher=PageCipher(KEY[::-1]))
    assert found_numbers(again, range(20)) == {*range(20)}
    again.close()
    with pytest.raises(StoreMismatch):
        open_store(path, cipher=PageCipher(KEY))
    assert "has this key already" in refused(capsys, "store", "rekey", path, "--key-file", new, "--new-key-file", new)


def test_a_much_smaller_budget_is_confirmed(path: Path) -> None:
    """A budget asks for confirmation only if it is less than half of the last one and would evict pages. Without a
    terminal it waits a minute after a warning."""
    folder = path.parent / "pages"
    folder.mkdir()
    path.rename(folder / f"hicache-{16 * '0'}")
    asked, waited = list[str](), list[float]()

    def confirm(budget_bytes: int, answer: str | None) -> None:
        ask = None if answer is None else lambda text: str(asked.append(text) or answer)
        confirm_smaller_budget(folder, budget_bytes, ask=ask, wait=waited.append)

    for budget_bytes in (32 << 20, 64 << 20, 16 << 20):  # half of the last budget; the same; all pages fit
        confirm(budget_bytes, "no")
    assert asked == []
    confirm(100_000, "yes")
    confirm(100_000, None)
    assert len(asked) == 1 and "are evicted" in asked[0] and waited == [60.0]
    for answer in ("", "no"):
        with pytest.raises(ConfigError, match="--yes"):
            confirm(100_000, answer)


def test_the_name_of_a_model_is_shown_and_decides_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A store that is opened with another name of the model has the same pages, and shows the new name."""
    for name, held in (("first", set[int]()), ("second", {1, 2})):
        store = open_store(tmp_path / "store", identity={**IDENTITY, "model_name": name})
        assert found_numbers(store, range(4)) == held
        put_numbers(store, [1, 2])
        store.close()
        assert here(capsys, "stat", tmp_path / "store")["identity"]["model_name"] == name


def test_ls_gives_the_use_order(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Pages are listed least recently used first, or most recently used first, with their stored sizes. Compressed
    pages are marked."""
    order = [*range(3, 20), 23, 22, 21, 20, 2, 1, 0]  # in a call an earlier key counts as more recently used
    listed = here(capsys, "ls", path)["entries"]
    assert [entry["key"] for entry in listed] == [key_of(number).hex() for number in order]
    assert [entry["codec"] for entry in listed] == ["zstd" if number >= 20 else "raw" for number in order]
    assert {entry["page_bytes"] for entry in listed} == {PAGE_BYTES}
    assert all((entry["stored_bytes"] == PAGE_BYTES + 52) == (entry["codec"] == "raw") for entry in listed)
    assert here(capsys, "ls", path, "--newest")["entries"] == listed[::-1]
    assert here(capsys, "ls", path, "--newest", "--limit", "5")["entries"] == listed[:-6:-1]
    lines = output(capsys, "store", "ls", path, "--limit", "2").splitlines()
    assert [line.split() for line in lines] == [[*map(str, e.values())] for e in listed[:2]]


def test_with_a_concurrent_writer(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """While another process has the store open, stat prints the data that can be read from outside. All other commands
    are refused with the id of that process, and change nothing."""
    known = ("identity", "formats", "level", "durability", "budget_bytes", "key_id", "encrypted")
    sizes = ("entries", "live_bytes", "raw_bytes", "ratio")
    before = here(capsys, "stat", path)
    with writer_of(path) as number:
        found = here(capsys, "stat", path)
        assert found["writer_pid"] == number and [found[name] for name in sizes] == [None] * 4
        assert [found[name] for name in known] == [before[name] for name in known]
        assert found["file_bytes"] == slots_path(path).stat().st_blocks * 512
        text = output(capsys, "store", "stat", path)
        assert all(re.search(rf"^{name} +-$", text, re.M) for name in ("entries", "live", "ratio"))
        assert re.search(rf"^written by +process {number}$", text, re.M)
        for verb, *more in (["ls"], ["verify"], ["verify", "--repair"], ["compact"], ["evict", "--to", "0"]):
            assert f"is in use by process {number}; close it there" in refused(capsys, "store", verb, path, *more)
    after = here(capsys, "stat", path)
    assert (after["writer_pid"], after["entries"]) == (None, before["entries"] + 3)


def test_planted_faults_are_named_and_repaired(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A changed page is reported with status 1 and is not changed. --repair drops it; then the store has no fault and
    keeps all other pages. storage/test_maintenance.py plants every kind of fault."""
    flip(path, 4)
    fault = {"key": key_of(4).hex(), "reason": "checksum differs", "action": ""}
    for _ in range(2):
        assert here(capsys, "verify", path, status=1)["faults"] == [fault]
    assert key_of(4).hex() in output(capsys, "store", "verify", path, status=1)
    repaired = here(capsys, "verify", path, "--repair")
    assert (repaired["faults"], repaired["left"]) == ([{**fault, "action": "dropped"}], 0)
    assert here(capsys, "verify", path)["faults"] == []
    assert held(path, range(20)) == set(range(20)) - {4}


def test_a_copy_of_a_closed_store_is_the_store(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A store that was copied with its holes has no faults, the same pages in the same order, and takes no more disk
    space."""
    here(capsys, "evict", path, "--to", "300KB")
    copy = tmp_path / "copy"
    subprocess.run(["cp", "--sparse=always", "-r", path, copy], check=True)
    blocks, most = (slots_path(each).stat().st_blocks for each in (copy, path))
    assert blocks <= most < slots_path(path).stat().st_size // 512
    assert here(capsys, "verify", copy)["faults"] == []
    assert output(capsys, "store", "ls", copy) == output(capsys, "store", "ls", path)
    assert 0 < len(held(path, range(20))) < 20 and held(copy, range(20)) == held(path, range(20))


def test_the_key_of_an_encrypted_store(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the key of the store, from a file or the environment, verify also decrypts pages. Another key, a key for a
    plain store, two keys and an unreadable key are refused, and no message contains a part of a key."""
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
    for verb, *more in (["ls"], ["verify"], ["compact"], ["evict", "--to", "0"]):
        err = refused(capsys, "store", verb, tmp_path / "s", *more, *other)
        assert f"cipher_key: stored '{key_id}', now '" in err and "ff" * 8 not in err
        assert "cipher_key: stored None, now '" in refused(capsys, "store", verb, tmp_path / "plain", *more, *with_key)
    monkeypatch.setenv("HICACHE_DISK_KEY", KEY.hex())
    assert here(capsys, "verify", tmp_path / "s")["decrypted"] is True
    assert "both set" in refused(capsys, "store", "ls", tmp_path / "s", *with_key)
    monkeypatch.setenv("HICACHE_DISK_KEY", "no key")
    assert "HICACHE_DISK_KEY has no valid key" in refused(capsys, "store", "ls", tmp_path / "s")


def test_a_store_of_another_user_is_not_called_absent(path: Path) -> None:
    """The error names the store that the user may not read. A store with a custom name is found only by its path."""
    folder = path.parent / "stores"
    folder.mkdir(mode=0o755)
    store = path.rename(folder / "hicache-0123456789abcdef")
    store.chmod(0o700 if os.getuid() == 0 else 0)
    code = (  # imports all modules first, because another user may not be able to read this checkout
        "import os, sys, hicache.store_command; from hicache.cli import main\n"
        "if os.getuid() == 0:\n    os.setuid(65534)\n"
        "sys.exit(main(['store', *sys.argv[1:]]))"
    )
    for verb in ("stat", "ls"):
        with Program(code, verb, ".", cwd=folder) as stranger:
            out, err = stranger.communicate()
        assert (stranger.returncode, out) == (2, "") and f"in {store.name}: permission denied" in err, err
    store.chmod(0o700)

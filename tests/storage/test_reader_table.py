"""The table of readers: in memory, one for all who have a store open, and gone with the last of them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hicache.storage import LmdbPageReader, StoreLocked, reader_table
from hicache.storage.reader_table import MEMORY
from storage_pages import Layout, both_layouts, found_numbers, key_of, open_store, put_numbers

WRITER = """
import sys
from storage_pages import open_store, put_numbers
store = open_store(sys.argv[1])
put_numbers(store, range(9))
print("up", flush=True)
input()
"""
READER = """
import sys
from hicache.storage import LmdbPageReader
LmdbPageReader(sys.argv[1])
"""


def python(*command: object, prefix: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    words = [*prefix, sys.executable, "-c", *map(str, command)]
    return subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, text=True, cwd=Path(__file__).parent)


def writing(path: Path) -> subprocess.Popen[str]:
    """Another process that has the store open."""
    writer = python(WRITER, path)
    assert writer.stdout is not None and writer.stdout.readline() == "up\n"
    return writer


@both_layouts
def test_no_file_of_the_store_is_mapped_writable(tmp_path: Path, layout: Layout) -> None:
    """With reads and writes behind it, the process maps no file below the store's directory for writing: a note of a
    read is in memory, and a disk that hangs holds up nobody who makes one."""
    store = open_store(tmp_path, **layout)
    put_numbers(store, range(20))
    assert found_numbers(store, range(20)) == set(range(20))
    maps = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    files = {row[5]: row[1] for row in maps if len(row) == 6}
    assert files[str(tmp_path / "data.mdb")] == "r--s"
    assert not [file for file, rights in files.items() if file.startswith(f"{tmp_path}/") and rights[1] == "w"]
    table = (tmp_path / "lock.mdb").resolve()
    assert table.is_relative_to(MEMORY) and files[str(table)] == "rw-s"
    store.close()


def test_a_table_of_a_process_that_died_is_taken_over(tmp_path: Path) -> None:
    """The next opening after a kill uses the table that was left, and takes it along when it closes."""
    writer = writing(tmp_path)
    table = (tmp_path / "lock.mdb").readlink()
    writer.kill()
    writer.communicate()
    store = open_store(tmp_path)
    assert (tmp_path / "lock.mdb").readlink() == table and table.exists()
    assert found_numbers(store, range(9)) == set(range(9))
    store.close()
    assert not table.exists() and not (tmp_path / "lock.mdb").is_symlink()


def test_who_does_not_see_the_table_is_refused(tmp_path: Path) -> None:
    """While a process has the store open, a reader that cannot find its table is refused, for its reads would be
    unprotected; when that process is gone, there is a new table."""
    writer = writing(tmp_path)
    (tmp_path / "lock.mdb").readlink().unlink()  # as where /dev/shm was emptied, or is another one
    with pytest.raises(StoreLocked, match="table of readers is not visible here"):
        LmdbPageReader(tmp_path)
    writer.communicate("\n")
    reader = LmdbPageReader(tmp_path)
    assert found_numbers(reader, range(9)) == set(range(9))
    reader.close()


def test_a_container_with_its_own_memory_is_refused(tmp_path: Path) -> None:
    """A reader whose /dev/shm is another one does not get beside a writer, and gets in when that is gone."""
    prefix = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh")
    if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode:
        pytest.skip("a mount namespace needs root")
    writer = writing(tmp_path)
    inside = python(READER, tmp_path, prefix=prefix)
    assert "StoreLocked" in inside.communicate()[1] and inside.returncode
    writer.communicate("\n")
    inside = python(READER, tmp_path, prefix=prefix)
    assert inside.communicate()[1] == "" and not inside.returncode


def test_a_copy_has_a_table_of_its_own(tmp_path: Path) -> None:
    """A copied directory, link included, does not share the table of the original that is open."""
    store = open_store(tmp_path / "a")
    put_numbers(store, range(5))
    shutil.copytree(tmp_path / "a", tmp_path / "b", symlinks=True)
    other = open_store(tmp_path / "b")
    assert (tmp_path / "a" / "lock.mdb").readlink() != (tmp_path / "b" / "lock.mdb").readlink()
    put_numbers(other, range(5, 9))
    other.close()
    assert found_numbers(store, range(9)) == set(range(5)) and (tmp_path / "a" / "lock.mdb").exists()
    store.close()


def test_without_memory_the_table_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where there is no memory file system, the table is a file beside the data, with a warning, and all works."""
    monkeypatch.setattr(reader_table, "MEMORY", tmp_path / "none")
    store = open_store(tmp_path / "s")
    assert put_numbers(store, range(5)) == [True] * 5 and store.contains([key_of(1)]) == [True]
    assert "the table of readers stays on the disk" in caplog.text
    assert (tmp_path / "s" / "lock.mdb").is_file() and not (tmp_path / "s" / "lock.mdb").is_symlink()
    store.close()
    monkeypatch.undo()
    store = open_store(tmp_path / "s")
    assert (tmp_path / "s" / "lock.mdb").is_symlink() and found_numbers(store, range(5)) == set(range(5))
    store.close()

"""How `hicache store` meets terminals and pipes, and how it ends when it is interrupted."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import time
from pathlib import Path

import pytest

from hicache.cli import main
from hicache.storage import describe
from storage_pages import found_numbers, open_store, put_numbers
from store_cli_case import LEAN, child, spawn

LARGE_PAGE_BYTES, LARGE_PAGES = 256 << 10, 300


@pytest.fixture(name="path")
def a_store(tmp_path: Path) -> Path:
    store = open_store(tmp_path / "store")
    put_numbers(store, range(20))
    store.close()
    return tmp_path / "store"


def on_a_terminal(*arguments: object, code: str = LEAN) -> tuple[int, str, str]:
    """Status, output, and what a terminal on the standard error shows."""
    ours, theirs = pty.openpty()
    process = spawn(*arguments, code=code, stderr=theirs, env={**os.environ, "TERM": "xterm-256color"})
    os.close(theirs)
    shown = bytearray()
    while True:
        try:
            some = os.read(ours, 4096)
        except OSError:  # the other side is closed
            break
        if not some:
            break
        shown += some
    os.close(ours)
    out, _ = process.communicate(timeout=60)
    return process.returncode, out.decode(), shown.decode()


def test_a_terminal_sees_a_bar(path: Path) -> None:
    """A bar is drawn on a terminal at the standard error, and the report is the same; with --json none is."""
    status, out, shown = on_a_terminal("verify", path)
    assert (status, out) == (0, child("verify", path))
    assert "verifying" in shown and "100%" in shown
    status, out, shown = on_a_terminal("verify", path, "--json")
    assert (status, json.loads(out)["pages"], shown) == (0, 20, "")


def test_an_archive_is_not_for_a_terminal(path: Path, tmp_path: Path) -> None:
    """Neither is one written to a terminal nor read from one."""
    ours, theirs = pty.openpty()
    for arguments, stream in ((("export", path, "-"), "stdout"), (("import", tmp_path / "new", "-"), "stdin")):
        process = spawn(*arguments, **{stream: theirs})
        _, err = process.communicate(timeout=60)
        assert process.returncode == 2 and b"terminal; redirect" in err, err
    os.close(ours)
    os.close(theirs)
    assert not (tmp_path / "new").exists()


def test_a_closed_pipe(path: Path) -> None:
    """As under `| head`: a listing that nobody reads, and an archive that nobody takes, end silently, with a status of
    their own."""
    for arguments in ("ls", path), ("export", path, "-"):
        ours, theirs = os.pipe()
        os.close(ours)
        process = spawn(*arguments, stdout=theirs)
        os.close(theirs)
        _, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (141, b"")


def test_an_existing_file_stays_until_the_new_one_is_whole(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--force replaces a file by an archive, which its owner alone may read; one that fails half-way leaves it as it
    was, and nothing beside it."""
    target = tmp_path / "a"
    target.write_text("old")
    assert main(["store", "export", str(path), str(target), "--force"]) == 0
    whole = target.read_bytes()
    assert whole.startswith(b"manifest.json") and target.stat().st_mode & 0o777 == 0o600
    assert b"cannot write the archive" in without_space("export", path, target, "--force", max_bytes=64 << 10)
    assert target.read_bytes() == whole
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "store"]
    capsys.readouterr()


def without_space(*arguments: object, max_bytes: int) -> bytes:
    """The line with which the command fails where no file may pass `max_bytes`."""
    code = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
    code += f"resource.setrlimit(resource.RLIMIT_FSIZE, ({max_bytes}, {max_bytes})); {LEAN}"
    process = spawn(*arguments, code=code)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, len(err.splitlines())) == (2, b"", 1), err
    return err


def test_a_full_disk_is_an_error(path: Path, tmp_path: Path) -> None:
    """Where there is no space, an import says so in one line; the store stays whole, and has what came before."""
    assert main(["store", "export", str(path), str(tmp_path / "a")]) == 0
    assert b"the store refused " in without_space("import", tmp_path / "b", tmp_path / "a", max_bytes=250_000)
    assert main(["store", "verify", str(tmp_path / "b")]) == 0
    assert 0 < describe(tmp_path / "b").entries < 20


def _interrupted(process: subprocess.Popen[bytes]) -> None:
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert len(err.splitlines()) == 1 and b"interrupted" in err


def test_an_interrupted_export_leaves_nothing(tmp_path: Path) -> None:
    """Ctrl-C in the middle of an export: status 130, one line, no archive, nothing beside it, the store is whole."""
    store = open_store(tmp_path / "store", page_bytes=LARGE_PAGE_BYTES, budget_bytes=256 << 20)
    put_numbers(store, range(LARGE_PAGES), LARGE_PAGE_BYTES)
    store.close()
    process = spawn("export", tmp_path / "store", tmp_path / "a")
    while not list(tmp_path.glob(".a.*")):
        assert process.poll() is None and not (tmp_path / "a").exists()
        time.sleep(0.0005)
    process.send_signal(signal.SIGINT)
    _interrupted(process)
    assert [p.name for p in tmp_path.iterdir()] == ["store"]
    assert main(["store", "verify", str(tmp_path / "store")]) == 0


def test_an_interrupted_import_keeps_what_it_took(path: Path, tmp_path: Path) -> None:
    """Ctrl-C in the middle of an import: status 130, the pages that came before are in the store, which is whole."""
    assert main(["store", "export", str(path), str(tmp_path / "a")]) == 0
    data = (tmp_path / "a").read_bytes()
    process = spawn("import", tmp_path / "new", "-", stdin=subprocess.PIPE)
    assert process.stdin
    half = len(data) // 2
    process.stdin.write(data[:half])
    process.stdin.flush()
    while not (tmp_path / "new" / "store.json").exists():
        assert process.poll() is None
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(BrokenPipeError):  # unless it has ended, it waits for the rest
        process.stdin.write(data[half : half + 40_000])
        process.stdin.flush()
    _interrupted(process)
    num_pages = describe(tmp_path / "new").entries
    assert 0 < num_pages < 20
    assert main(["store", "verify", str(tmp_path / "new")]) == 0
    again = open_store(tmp_path / "new")
    assert len(found_numbers(again, range(20))) == num_pages
    again.close()

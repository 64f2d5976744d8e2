"""The command line under abuse: whatever comes in, however it ends, one line and the documented status."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import xxhash

from hicache.cli import main
from hicache.storage import describe
from storage_pages import open_store, put_numbers
from store_cli_case import LEAN, spawn

SETTINGS: dict[str, Any] = {
    "budget_bytes": 8 << 20,
    "durability": "relaxed",
    "level": 1,
}
HUGE = "9999999999999999999999"
ESCAPES = "\x1b[2J\x1b]0;mine\x07 \x9b31m \u202e \r\n\ud800 end"


def sealed(record: bytes) -> bytes:
    """An archive without pages around a manifest."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name, content in (("manifest.json", record), ("end.json", b'{"pages": 0}')):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return file.getvalue()


def archive(identity: object = None, page_bytes: object = 4096, **settings: object) -> bytes:
    formats = [{"page_bytes": page_bytes, "filter": {"kind": "none"}}]
    record = {"format": 1, "identity": identity or {"model": "m"}}
    record["settings"] = {**SETTINGS, "formats": formats, **settings}
    canonical = json.dumps(record, sort_keys=True, separators=(",", ":")).encode()
    return sealed(json.dumps({**record, "xxh3_64": xxhash.xxh3_64_hexdigest(canonical)}).encode())


def outcome(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Status, output and error of the command, run in this process."""
    capsys.readouterr()
    try:
        status = main([*map(str, arguments)])
    except SystemExit as exit:
        status = int(str(exit.code))
    return status, *capsys.readouterr()


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line with which the command refuses, nothing on its output, status 2."""
    status, out, err = outcome(capsys, *arguments)
    assert (status, out) == (2, "") and err.startswith("hicache: error: "), (status, out, err)
    assert len(err.splitlines()) == 1 and err.isascii() and err.rstrip("\n").isprintable(), err
    return err


@pytest.fixture(name="path")
def a_store(tmp_path: Path) -> Path:
    store = open_store(tmp_path / "store")
    put_numbers(store, range(3))
    store.close()
    return tmp_path / "store"


ARCHIVES = {
    "deep": (sealed(b"[" * 100_000), "manifest cannot be read"),
    "a truth value for a size": (archive(page_bytes=True), "manifest cannot be read"),
    "a truth value in the identity": (archive({"model": True}), "manifest cannot be read"),
    "a budget beyond int64": (archive(budget_bytes=10**30), "manifest cannot be read"),
    "a budget below nothing": (archive(budget_bytes=-1), "manifest cannot be read"),
    "a level beyond int64": (archive(level=10**30), "manifest cannot be read"),
    "a level that is none": (archive(level=99), "level=99"),
    "a filter beyond int64": (
        archive(formats=[{"page_bytes": 4096, "filter": {"kind": "byte_shuffle", "element_bytes": 10**30}}]),
        "manifest cannot be read",
    ),
    "an unknown durability": (archive(durability="\x1b[2J"), "choose relaxed or commit"),
    "too large a budget": (archive(budget_bytes=1 << 40), "give --budget, or raise --max-budget"),
    "too large a page": (archive(page_bytes=1 << 30), "raise --max-page"),
}


@pytest.mark.parametrize("case", ARCHIVES)
def test_what_an_archive_may_not_ask_for(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An archive whose record is nonsense, or asks for more than the flags allow, is refused and makes no store."""
    data, words = ARCHIVES[case]
    (tmp_path / "archive").write_bytes(data)
    assert words in refused(capsys, "store", "import", tmp_path / "new", tmp_path / "archive")
    assert not (tmp_path / "new" / "store.json").exists()


@pytest.mark.parametrize(
    ("data", "flags", "budget_bytes"),
    [
        (archive(budget_bytes=1 << 40), ("--budget", "16MiB"), 16 << 20),
        (archive(budget_bytes=100 << 20), ("--max-budget", "100MiB"), 100 << 20),
        (archive(page_bytes=300 << 20, budget_bytes=8 << 30), ("--max-page", "300MiB"), 8 << 30),
    ],
)
def test_flags_allow_what_an_archive_asks_for(
    data: bytes, flags: tuple[str, str], budget_bytes: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--max-budget and --max-page allow as much and no more; with --budget it does not matter what the archive asks."""
    (tmp_path / "archive").write_bytes(data)
    assert outcome(capsys, "store", "import", tmp_path / "new", tmp_path / "archive", *flags)[0] == 0
    assert describe(tmp_path / "new").budget_bytes == budget_bytes


def test_texts_of_a_store_do_not_reach_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Control characters, line breaks and lone surrogates in names and values of an identity are printed as escapes, in
    the report and in errors, and add no line."""
    (tmp_path / "plain").write_bytes(archive())
    (tmp_path / "evil").write_bytes(archive({"model": "m", ESCAPES: ESCAPES}))
    for name in ("plain", "evil"):
        assert outcome(capsys, "store", "import", tmp_path / f"{name}.store", tmp_path / name)[0] == 0
    status, plain, _ = outcome(capsys, "store", "stat", tmp_path / "plain.store")
    assert status == 0
    status, evil, _ = outcome(capsys, "store", "stat", tmp_path / "evil.store")
    assert status == 0 and len(evil.splitlines()) == len(plain.splitlines()) + 1
    assert all(line.isprintable() for line in evil.splitlines()) and "\\x1b[2J" in evil and "\\ud800" in evil
    line = refused(capsys, "store", "import", tmp_path / "plain.store", tmp_path / "evil")
    assert "made for something else" in line and "\\x1b[2J" in line
    process = spawn("stat", tmp_path / "evil.store", env={**os.environ, "PYTHONIOENCODING": "ascii"})
    out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, b"") and out.isascii()


STORE = {
    "a limit beyond int64": (["ls", "{path}", "--limit", HUGE], "--limit"),
    "a size beyond int64": (["evict", "{path}", "--to", "999999999TB"], "--to"),
    "a budget beyond int64": (["import", "{tmp}/new", "{tmp}/archive", "--budget", "999999999TB"], "--budget"),
    "a budget beyond all addresses": (["import", "{tmp}/new", "{tmp}/archive", "--budget", "1000TB"], "--budget"),
    "a size cut silently": (["evict", "{path}", "--to", "64.9"], "not a size in bytes"),
    "too long a path": (["stat", "a" * 5000], "File name too long"),
    "too long an archive": (["export", "{path}", "a" * 5000], "File name too long"),
    "too long an archive to read": (["import", "{tmp}/new", "a" * 5000], "File name too long"),
    "bytes in a path": (["stat", "{tmp}/\udcff\x1b[2J"], "there is no store at"),
}


@pytest.mark.parametrize("case", STORE)
def test_wrong_input_of_store_is_one_line(
    case: str, path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Numbers beyond their range and paths beyond the file system's are named in one line that a terminal can show."""
    (tmp_path / "archive").write_bytes(archive())
    arguments, culprit = STORE[case]
    line = refused(capsys, "store", *(text.format(tmp=tmp_path, path=path) for text in arguments))
    assert culprit in line
    assert not (tmp_path / "new").exists()


DEMO = {
    "a lone surrogate": (["--session", "{tmp}/surrogate.jsonl"], "surrogate.jsonl:1"),
    "deep nesting": (["--session", "{tmp}/deep.jsonl"], "deep.jsonl:1"),
    "a broken configuration": (["--config", "{tmp}/broken.yaml"], "broken.yaml"),
    "a configuration in bytes": (["--config", "{tmp}/bytes.yaml"], "bytes.yaml"),
    "a fraction of a byte": (["--config", "{tmp}/float.yaml"], "host_bytes=1500000000.0"),
    "a key in bytes": (["--disk", "{tmp}/new", "--disk-key-file", "{tmp}/\udcff"], "key_file"),
    "an infinite temperature": (["--temperature", "inf"], "--temperature"),
    "no temperature": (["--temperature", "nan"], "--temperature"),
    "no share": (["--top-p", "nan"], "--top-p"),
    "too long a document": (["--input", "a" * 5000], "File name too long"),
    "too long a path": (["--json", "a" * 5000], "File name too long"),
    **{
        f"{flag} beyond its range": ([flag, HUGE], flag.removeprefix("--").replace("-", "_") if ours else flag)
        for ours, flags in (
            (False, ("--documents", "--turns", "--document-tokens", "--max-prompt-tokens", "--max-new-tokens")),
            (False, ("--seed", "--top-k", "--concurrency", "--chunk")),
            (True, ("--device-tokens", "--host-bytes", "--page-size", "--max-requests", "--host-states")),
        )
        for flag in flags
    },
}


@pytest.mark.parametrize("case", DEMO)
def test_wrong_input_of_the_demo_is_one_line(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Numbers, texts and files that no demo can use are refused in one line, before anything is served."""
    (tmp_path / "surrogate.jsonl").write_text('{"input": "\\ud800"}\n')
    (tmp_path / "deep.jsonl").write_text("[" * 100_000)
    (tmp_path / "broken.yaml").write_text("{a: [\n")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "float.yaml").write_text("host_bytes: 1.5e+9\n")
    small = ["--documents", "1", "--turns", "1", "--document-tokens", "256", "--max-new-tokens", "1", "--no-baseline"]
    arguments, culprit = DEMO[case]
    assert culprit in refused(capsys, "demo", *small, *(text.format(tmp=tmp_path) for text in arguments))


def test_a_key_of_bytes_in_the_environment(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """HICACHE_DISK_KEY that is no text is no key, as any other that is none, and no part of it is shown."""
    process = spawn("verify", path, env={**os.environb, b"HICACHE_DISK_KEY": b"\xff\xfe"})
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (2, b"") and len(err.splitlines()) == 1
    assert err.startswith(b"hicache: error: HICACHE_DISK_KEY holds no key") and b"\xff" not in err and b"fe" not in err


@pytest.mark.parametrize("arguments", [["stat", "{path}"], ["stat", "{path}", "--json"], ["ls", "{path}"]])
def test_an_output_that_takes_nothing(arguments: list[str], path: Path) -> None:
    """On a full device a report is one line and status 2; on a closed pipe silence and status 141."""
    arguments = [text.format(path=path) for text in arguments]
    with open("/dev/full", "wb") as full:
        process = spawn(*arguments, stdout=full)
        _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (2, b"hicache: error: No space left on device\n")
    reading, writing = os.pipe()
    os.close(reading)
    process = spawn(*arguments, stdout=writing)
    os.close(writing)
    _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (141, b"")


def test_a_demo_that_nobody_reads() -> None:
    """Under `| head` the demo ends silently with status 141, not with that of an outcome that differs."""
    reading, writing = os.pipe()
    os.close(reading)
    code = "import sys; from hicache.cli import main; sys.exit(main(sys.argv[1:]))"
    small = ["--documents", "1", "--turns", "1", "--document-tokens", "256", "--max-new-tokens", "1", "--no-baseline"]
    process = spawn("demo", *small, code=code, stdout=writing)
    os.close(writing)
    _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (141, b"")


@pytest.mark.parametrize("arguments", [["stat", "{path}"], ["polish"]])
def test_no_output_at_all(arguments: list[str], path: Path) -> None:
    """With its output and its errors closed, the command ends with the status that it would have."""
    arguments = [text.format(path=path) for text in arguments]
    line = 'exec "$@" >&- 2>&-'
    done = subprocess.run(["sh", "-c", line, "sh", sys.executable, "-c", LEAN, *arguments], timeout=120, check=False)
    assert done.returncode == (0 if arguments[0] == "stat" else 2)


# Ctrl-C at the moment when a module is being loaded: the worst ones to be raised in.
INTERRUPTED_IMPORT = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGINT)

# As a shell leaves it for a command in the foreground, or in the background.
signal.signal(signal.SIGINT, signal.default_int_handler if sys.argv.pop(1) == "heard" else signal.SIG_IGN)
sys.meta_path.insert(0, Interrupt())
from hicache.cli import main
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        *(
            (module, ["store", "stat", "{tmp}"])
            for module in ("numpy", "torch", "yaml", "hicache.store_command.commands")
        ),
        *((module, ["demo"]) for module in ("torch.nn", "transformers", "hicache.serving.runner", "tokenizers")),
    ],
)
def test_an_interrupt_while_modules_load(module: str, arguments: list[str], tmp_path: Path) -> None:
    """Ctrl-C while the command still loads what it needs: status 130 and one line, as at any other time."""
    arguments = [text.format(tmp=tmp_path) for text in arguments]
    command = [sys.executable, "-c", INTERRUPTED_IMPORT, "heard", module, *arguments]
    done = subprocess.run(command, capture_output=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (130, b"")
    assert done.stderr == b"hicache: interrupted; what was stored stays\n"


def test_an_ignored_interrupt_stays_ignored(tmp_path: Path) -> None:
    """Started in the background of a shell, which ignores Ctrl-C for it, the command is not ended by one."""
    command = [sys.executable, "-c", INTERRUPTED_IMPORT, "ignored", "torch", "store", "stat", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, timeout=120, check=False)
    assert done.returncode == 2 and b"there is no store at" in done.stderr

"""Commands whose output is a terminal, a pipe or a full disk, and commands that are interrupted or killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cases import long
from demo_case import SMALL, demo
from hicache.cli import main
from hicache.console import write_atomically
from hicache.monitoring.loopback import opener_for
from programs import PIPE, Program, command
from storage_pages import open_store, put_numbers
from waiting import BOUND_S, eventually


@pytest.fixture(name="path")
def a_store(tmp_path: Path) -> Path:
    store = open_store(tmp_path / "store")
    put_numbers(store, range(20))
    store.close()
    return tmp_path / "store"


def ended(program: Program) -> tuple[int | None, str, str]:
    """Wait for the end; returns status, output and errors."""
    with program:
        out, err = program.communicate()
    return program.returncode, out, err


def interrupted(program: Program) -> None:
    status, _, err = ended(program)
    assert status == 130 and len(err.splitlines()) == 1 and "interrupted" in err, err


@pytest.mark.parametrize("arguments", ["store stat {}", "store ls {} --json", "plan --gpu 80GiB --model qwen3-8b"])
def test_an_output_that_takes_nothing(arguments: str, path: Path) -> None:
    """If the output is a closed pipe, as with `| head`, a command prints nothing and has status 141. If the output is a
    full device, a command prints one line and has status 2."""
    words = arguments.format(path).split()
    reading, writing = os.pipe()
    os.close(reading)
    program = command(*words, stdout=writing)
    os.close(writing)
    assert ended(program) == (141, "", "")
    if "stat" in words:
        with open("/dev/full", "wb") as full:
            assert ended(command(*words, stdout=full)) == (2, "", "hicache: error: No space left on device\n")


@pytest.mark.parametrize("stdout", ["full", "broken"])
def test_a_server_needs_no_output(stdout: str, tmp_path: Path) -> None:
    """A server whose stdout is on a full disk, or is a closed pipe, serves and ends with status 0. The log has its
    address."""
    reading, broken = os.pipe()
    os.close(reading)
    flags = ("--model", "random", "--port", "0", "--device-tokens", "1024", "--host-bytes", "16MiB")
    with open("/dev/full", "wb") as full, (tmp_path / "log").open("w") as log:
        server = command("serve", *flags, stdout=full if stdout == "full" else broken, stderr=log)
    os.close(broken)

    def listening() -> list[dict[str, Any]]:
        logged = (tmp_path / "log").read_text().splitlines(keepends=True)
        return [json.loads(line) for line in logged if line.endswith("\n") and '"listening"' in line]

    with server:
        url = eventually(listening)[0]["url"]
        with opener_for(url).open(url.removesuffix("v1") + "health", timeout=BOUND_S) as answer:
            assert answer.status == 200
        server.send_signal(signal.SIGTERM)
        assert server.wait(BOUND_S) == 0


def test_a_result_is_written_to_what_stands_at_its_path(tmp_path: Path) -> None:
    """A file replaces an earlier one when it is complete, also behind a link. If writing fails, the earlier file stays
    and no other file is left. A pipe or device gets the text and is not replaced, also for `replay --json`."""
    real, link, fifo = tmp_path / "real", tmp_path / "link", tmp_path / "fifo"
    link.symlink_to("real")
    os.mkfifo(fifo)
    for path, text in ((real, "first"), (link, "second"), (real, "third")):
        write_atomically(path, text)
        assert real.read_text("utf-8") == text
    with pytest.raises(UnicodeError):
        write_atomically(link, "half\ud800")  # this text cannot be encoded
    assert real.read_text("utf-8") == "third" and link.is_symlink()
    trace = tmp_path / "trace"
    trace.write_text('{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1]}\n')
    reading = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    flags = ["--device-blocks", "1", "--policies", "lru", "--processes", "1"]
    assert main(["replay", str(trace), *flags, "--json", str(fifo)]) == 0
    assert json.loads(os.read(reading, 1 << 16))["rows"] and fifo.is_fifo()
    os.close(reading)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fifo", "link", "real", "trace"]


# Raise Ctrl-C at the moment when a module is loaded. The test uses the modules that react worst to Ctrl-C.
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
        ("yaml", ["config", "--show"]),
        ("lmdb", ["store", "stat", "x"]),
        *long(("transformers", ["demo"])),
    ],
)
def test_an_interrupt_while_modules_load(module: str, arguments: list[str]) -> None:
    """Ctrl-C while the command still loads modules gives status 130 and one line, as at any other time. A shell makes
    its background commands ignore Ctrl-C; then the command is not ended."""
    line = [sys.executable, "-c", INTERRUPTED_IMPORT, "heard", module, *arguments]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "hicache: interrupted\n")
    if module == "yaml":
        line[3] = "ignored"
        assert subprocess.run(line, capture_output=True, check=False).returncode == 0


def test_an_interrupted_demo_leaves_a_store_that_serves(tmp_path: Path) -> None:
    """Ctrl-C during a demo gives status 130 and one line. The next run over the same directory opens the store, hits
    its pages, and yields the tokens of a run without a cache."""
    flags = ("--model", "random", "--disk-path", str(tmp_path / "store"))
    with command("demo", *SMALL, *flags, "--turns", "40", stdout=PIPE) as program:
        assert program.stdout is not None
        while "  2.1 " not in program.stdout.readline():
            assert program.poll() is None
        program.send_signal(signal.SIGINT)
        _, err = program.communicate()
    assert program.returncode == 130 and "Traceback" not in err and "interrupted" in err
    outcome = demo(*flags)
    assert outcome.identical and any(turn.cached.hit.disk for turn in outcome.turns if not turn.number)


def test_each_command_leaves_process_1(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    called: list[int] = []
    monkeypatch.setattr("hicache.process.init.supervise", lambda: called.append(1))
    assert main(["store", "stat", str(path)]) == 0 and not called
    monkeypatch.setattr("os.getpid", lambda: 1)
    assert main(["store", "stat", str(path)]) == 0 and called


# The kernel makes a subreaper the parent of orphans, like process 1 of a container.
AS_PROCESS_1 = """
import ctypes, os, signal, sys, time
from hicache.process.init import supervise
ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
supervise()
assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
child = os.fork()
if not child:
    orphan = os.fork()
    if not orphan:
        signal.pause()
    print(orphan, os.getppid(), flush=True)
    os._exit(0)
os.waitpid(child, 0)
if sys.argv[1] == "exits":
    sys.exit(7)
signal.pause()
"""


@pytest.mark.parametrize(("mode", "status"), [("signalled", 128 + signal.SIGTERM), ("exits", 7)])
def test_a_command_as_process_1(mode: str, status: int) -> None:
    """A command as process 1 waits for orphans. A signal to process 1 reaches the command, with its default action. The
    status is that of the command, or 128 plus its signal."""
    with Program(AS_PROCESS_1, mode) as first:
        assert first.stdout is not None
        orphan, child = map(int, first.stdout.readline().split())
        if mode == "signalled":
            assert Path(f"/proc/{child}/status").read_text().split("PPid:")[1].split()[0] == str(first.pid)
            os.kill(orphan, signal.SIGKILL)
            eventually(lambda: not Path(f"/proc/{orphan}").exists())
            first.send_signal(signal.SIGTERM)
        assert first.wait(60) == status
        with contextlib.suppress(ProcessLookupError):
            os.kill(orphan, signal.SIGKILL)

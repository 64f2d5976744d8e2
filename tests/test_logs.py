"""The logs of servers: lines of JSON, or of text on a terminal, from every logger. The process never waits for a
reader."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
import warnings
from collections.abc import Iterator

import pytest

from hicache.process.logs import JsonLines, LineWriter, server_lines
from waiting import BOUND_S

SECRET = "Xylophon"


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    os.close(reader)
    with contextlib.suppress(OSError):
        os.close(writer)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a flush and a close wait until all lines are written, however busy the machine is."""
    monkeypatch.setattr("hicache.process.logs._FLUSH_TIMEOUT_S", BOUND_S)


def record(text: str, *arguments: object) -> logging.LogRecord:
    return logging.LogRecord("hicache", logging.INFO, __file__, 1, text, arguments, None)


@pytest.mark.usefixtures("patient")
def test_an_unread_log_blocks_no_thread(pipe: tuple[int, int]) -> None:
    """Lines are dropped while no process reads them. The next line that is read has the number of dropped lines."""
    reader, fd = pipe
    writer, num_lines, printed = LineWriter(fd, max_lines=8), 2000, bytearray()
    writer.setFormatter(JsonLines())
    for _ in range(num_lines):
        writer.emit(record("line"))
    closing = threading.Thread(target=lambda: (writer.close(), os.close(fd)))
    closing.start()
    while some := os.read(reader, 1 << 16):
        printed += some
    closing.join()
    events = [json.loads(line)["event"] for line in printed.splitlines()]
    dropped = [int(event.split()[0]) for event in events if event != "line"]
    assert dropped and events.count("line") + sum(dropped) == num_lines


def test_the_end_waits_for_no_reader(pipe: tuple[int, int]) -> None:
    """The end of a process does not wait for a reader. A forked process and a closed reader do no harm either."""
    writer = LineWriter(pipe[1], max_lines=4)
    child = os.fork()
    if not child:
        writer.emit(record("of a child"))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    for _ in range(2000):
        writer.emit(record("a" * 100))
    writer.close()
    assert b"child" not in os.read(pipe[0], 1 << 20)


@pytest.mark.usefixtures("patient")
def test_logged_lines_are_written_by_a_flush(pipe: tuple[int, int]) -> None:
    """A flush writes all logged lines, so the log of a server has its reasons before the line that it listens. After
    the close a flush does nothing."""
    reader, fd = pipe
    os.set_blocking(reader, False)
    writer = LineWriter(fd)
    for number in range(100):
        writer.emit(record(f"line {number}"))
        writer.flush()
        assert f"line {number}\n" in os.read(reader, 1 << 16).decode()
    writer.close()
    writer.flush()


@pytest.mark.usefixtures("patient")
def test_all_that_is_logged_is_json(capfd: pytest.CaptureFixture[str]) -> None:
    """Every logged line is JSON: from libraries with their own handler, warnings, threads that raise, fields that are
    no JSON, and messages that do not fit their arguments. No line quotes an exception. Afterwards the loggers are as
    before."""
    other = logging.getLogger("other.library")
    other.propagate, own = False, logging.StreamHandler(sys.stderr)
    other.addHandler(own)

    def fail() -> None:
        raise ValueError(SECRET)

    with server_lines(logging.WARNING):
        other.warning("from a library")
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("careful", stacklevel=1)
        thread = threading.Thread(target=fail)
        thread.start()
        thread.join()
        logging.getLogger("hicache").info("unwanted")
        logging.getLogger("hicache").error("%d", SECRET, extra={"fields": {"a": b"b"}})
        logging.getLogger("hicache").error("fields", extra={"fields": {"a": b"b"}})
    assert other.handlers == [own] and not other.propagate
    other.removeHandler(own)
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert [line["logger"] for line in lines] == ["other.library", "py.warnings", *["hicache.process.logs"] * 3]
    assert lines[2]["error"] == "ValueError" and SECRET not in json.dumps(lines)


@pytest.mark.usefixtures("patient")
def test_a_terminal_gets_text() -> None:
    """A terminal gets one line of text for each event, with its fields and without control characters."""
    ours, theirs = os.openpty()
    stderr = os.dup(2)
    os.dup2(theirs, 2)
    try:
        with server_lines():
            logging.getLogger("hicache").info("a \x1b[2J b", extra={"fields": {"url": "http://a", "of": "x \x1b"}})
            logging.getLogger("hicache").error("two", exc_info=ValueError(SECRET))
    finally:
        os.dup2(stderr, 2)
    printed = b""
    while printed.count(b"\n") < 2:
        printed += os.read(ours, 1 << 16)
    for descriptor in (ours, theirs, stderr):
        os.close(descriptor)
    first, second = printed.decode().splitlines()
    assert first.split(" ", 1)[1] == r'INFO a \u001b[2J b url=http://a of="x \u001b"'
    assert " ERROR two error=ValueError frames=[" in second and SECRET not in second

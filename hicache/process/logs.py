"""Logs of servers and their store processes. Lines are written to stderr, as text if stderr is a terminal, otherwise as
JSON.

No line contains text of a prompt or an answer, even if a call fails. A separate thread writes the lines. If nothing
reads stderr, lines are dropped and counted, and the process continues.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import os
import queue
import re
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any

LEVELS = ("debug", "info", "warning", "error")
_OWN = "hicache"
_MAX_LINES = 4096  # maximum queued lines, about a megabyte
_FLUSH_TIMEOUT_S = 1.0  # maximum time for log lines that are still queued at exit
_STDERR = 2
_PLAIN = re.compile(r'"[^\s"\\]+"')  # matches JSON strings that are unambiguous without quotes


class JsonLines(logging.Formatter):
    """Formats a record as one JSON object in a line. `extra={"fields": {...}}` adds fields.

    The message of an exception may quote text that a client sent, and so may every line after the first of any message.
    So an exception is logged as its class and its stack frames, and each message is cut to its first line.
    """

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat("T", "milliseconds")
        return json.dumps({"time": time, "level": record.levelname.lower(), "logger": record.name, **_fields(record)})


class TextLines(logging.Formatter):
    """Formats a record as a readable line: `10:30:00 INFO request route=/health status=200`. Escapes control
    characters."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
        texts = {name: json.dumps(value) for name, value in _fields(record).items()}
        event = texts.pop("event")[1:-1]
        fields = [f"{name}={text[1:-1] if _PLAIN.fullmatch(text) else text}" for name, text in texts.items()]
        return " ".join((time, record.levelname, event, *fields))


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """Return the event of a record and its other fields, by name."""
    line: dict[str, Any] = {"event": record.getMessage().split("\n", 1)[0], **record.__dict__.get("fields", {})}
    if record.exc_info and record.exc_info[1] is not None:
        line.update(described(record.exc_info[1]))
    return line


def described(error: BaseException) -> dict[str, Any]:
    """Return the fields of an exception: its class and its stack frames."""
    frames = traceback.extract_tb(error.__traceback__)
    return {
        "error": type(error).__name__,
        "frames": [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames],
    }


class LineWriter(logging.Handler):
    """Writes lines to a file descriptor in a separate thread. `emit` never waits for this thread.

    If the queue is full, lines are dropped. When the queue has capacity again, a line reports the number of dropped
    lines. A forked process does not have the thread, so it writes nothing.
    """

    def __init__(self, descriptor: int = _STDERR, max_lines: int = _MAX_LINES) -> None:
        super().__init__()
        is_closed = descriptor == _STDERR and sys.__stderr__ is None  # descriptor 2 may be another file
        self._descriptor = -1 if is_closed else descriptor
        self._process = os.getpid()
        # `flush` queues an event, which the thread sets after it has written all earlier lines
        self._lines = queue.Queue[bytes | threading.Event | None](max_lines)
        self._num_dropped = 0
        self._thread = threading.Thread(target=self._write_all, name="hicache-logs", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        if os.getpid() != self._process:
            return
        try:
            self._report_dropped(0.0)
            self._lines.put_nowait(self._line(record))
        except queue.Full:
            self._num_dropped += 1

    def flush(self) -> None:
        """Wait at most `_FLUSH_TIMEOUT_S` seconds until the lines logged so far are written."""
        if os.getpid() != self._process or not self._thread.is_alive():
            return
        written = threading.Event()
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(written)
            written.wait(_FLUSH_TIMEOUT_S)

    def close(self) -> None:
        """Write the queued lines and stop the thread. `close` takes at most a few seconds, even if nothing reads the
        lines."""
        super().close()
        with contextlib.suppress(queue.Full):
            self._report_dropped(_FLUSH_TIMEOUT_S)
            self._lines.put(None, timeout=_FLUSH_TIMEOUT_S)
            self._thread.join(_FLUSH_TIMEOUT_S)

    def _report_dropped(self, wait_s: float) -> None:
        if self._num_dropped:
            warning = _warning(f"{self._num_dropped} lines were dropped, because stderr was not read")
            self._lines.put(self._line(warning), block=bool(wait_s), timeout=wait_s or None)
            self._num_dropped = 0

    def _line(self, record: logging.LogRecord) -> bytes:
        try:
            text = self.format(record)
        except (TypeError, ValueError, LookupError):  # arguments of the log call do not fit its format
            text = self.format(_warning(f"{record.pathname}:{record.lineno} logs a message that cannot be formatted"))
        return f"{text}\n".encode(errors="backslashreplace")

    def _write_all(self) -> None:
        while (line := self._lines.get()) is not None:
            if isinstance(line, threading.Event):
                line.set()
            else:
                self._write(line)

    def _write(self, line: bytes) -> None:
        while line:
            try:
                line = line[os.write(self._descriptor, line) :]
            except BlockingIOError:  # another process made this terminal or socket non-blocking
                time.sleep(_FLUSH_TIMEOUT_S / 10)
            except OSError:  # the reader of stderr has ended, so this error cannot be reported
                return


@contextlib.contextmanager
def server_lines(level: int = logging.INFO) -> Iterator[None]:
    """Within the `with` block, write all log records of this process to stderr, as text if stderr is a terminal,
    otherwise as JSON.

    Records of hicache are written from `level` on. Records of other libraries are written from WARNING on, also if a
    library has its own handlers. Python warnings, and errors that end a thread, are written too.
    """
    with contextlib.ExitStack() as stack:
        writer = stack.enter_context(contextlib.closing(LineWriter()))
        writer.setFormatter(TextLines() if os.isatty(_STDERR) else JsonLines())
        for logger in [each for each in logging.root.manager.loggerDict.values() if isinstance(each, logging.Logger)]:
            kept = [handler for handler in logger.handlers if not _is_of_a_terminal(handler)]
            if len(kept) < len(logger.handlers):
                stack.callback(_set, logger, logger.handlers[:], logger.level, logger.propagate)
                _set(logger, kept, logger.level, True)
        root, own = logging.getLogger(), logging.getLogger(_OWN)
        for logger in (root, own):
            stack.callback(_set, logger, logger.handlers[:], logger.level, logger.propagate)
        _set(root, [writer], max(level, logging.WARNING), True)
        _set(own, own.handlers[:], level, True)
        stack.callback(setattr, threading, "excepthook", threading.excepthook)
        threading.excepthook = _log_end_of_thread
        logging.captureWarnings(True)
        stack.callback(logging.captureWarnings, False)
        yield


@contextlib.contextmanager
def text_lines(format: str, level: int) -> Iterator[None]:
    """Within the `with` block, write all log records to stderr as text in the given format. The process must end after
    the block."""
    with contextlib.closing(LineWriter()) as writer:
        writer.setFormatter(logging.Formatter(format))
        logging.basicConfig(handlers=[writer], level=level)
        yield


def is_json() -> bool:
    """Return whether this process logs JSON lines."""
    return any(isinstance(handler.formatter, JsonLines) for handler in logging.getLogger().handlers)


def _warning(text: str) -> logging.LogRecord:
    return logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, None, None)


def _is_of_a_terminal(handler: logging.Handler) -> bool:
    return isinstance(handler, logging.StreamHandler) and handler.stream in (sys.stderr, sys.stdout)


def _set(logger: logging.Logger, handlers: list[logging.Handler], level: int, propagate: bool) -> None:
    logger.handlers[:], logger.propagate = handlers, propagate
    logger.setLevel(level)


def _log_end_of_thread(end: threading.ExceptHookArgs) -> None:
    if end.exc_value is not None and not isinstance(end.exc_value, SystemExit):
        name = end.thread.name if end.thread is not None else "unknown"
        logging.getLogger(__name__).error("a thread ended: %s", name, exc_info=end.exc_value)

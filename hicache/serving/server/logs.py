"""Logs as JSON lines on stderr. No line holds text of a prompt or an answer, whatever fails."""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import sys
import traceback
from collections.abc import Iterator
from typing import Any

_OWN = "hicache"


class JsonLines(logging.Formatter):
    """One JSON object a line. `extra={"fields": {...}}` adds fields.

    An exception's message and the lines of a message after the first may quote what a client sent, so an exception is
    its class and where it was raised. Other libraries' messages keep their first line.
    """

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.datetime.fromtimestamp(record.created, datetime.timezone.utc).isoformat(
                "T", "milliseconds"
            ),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage().split("\n", 1)[0],
        }
        line.update(record.__dict__.get("fields", {}))
        if record.exc_info and record.exc_info[1] is not None:
            line["error"], line["frames"] = _described(record.exc_info[1])
        return json.dumps(line)


@contextlib.contextmanager
def json_lines(level: int = logging.INFO) -> Iterator[None]:
    """Inside, all logging of this process goes to stderr as JSON lines: hicache's from `level` on, that of others and
    warnings from WARNING on."""
    root, own = logging.getLogger(), logging.getLogger(_OWN)
    before = (root.handlers[:], root.level, own.level)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logging.captureWarnings(True)
    try:
        root.handlers[:] = [handler]
        root.setLevel(logging.WARNING)
        own.setLevel(level)
        yield
    finally:
        root.handlers[:], root_level, own_level = before
        root.setLevel(root_level)
        own.setLevel(own_level)
        logging.captureWarnings(False)


def _described(error: BaseException) -> tuple[str, list[str]]:
    frames = traceback.extract_tb(error.__traceback__)
    return type(error).__name__, [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]

"""The files that commands write for their users, like the FILE of `--json`."""

from __future__ import annotations

import os
from pathlib import Path

from hicache.errors import ConfigError


def require_writable(flag: str, path: Path) -> None:
    """Tell before the work what would fail after it: ConfigError, which names the flag."""
    found = path if _is_special(path) else Path(os.path.realpath(path)).parent
    if path.is_dir() or not found.exists() or not os.access(found, os.W_OK):
        raise ConfigError(f"{flag} {path} cannot be written; give a file in a folder that can be written to")


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all: beside it, then renamed. OSError where that fails.

    A link is followed. What is no regular file, like a device or a pipe, is written to: a file of that name would take
    its place for everybody.
    """
    if _is_special(path):
        path.write_text(text, encoding="utf-8")
        return
    real = Path(os.path.realpath(path))
    beside = real.with_name(f".{real.name}.{os.getpid()}.tmp")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(real)
    finally:
        beside.unlink(missing_ok=True)


def _is_special(path: Path) -> bool:
    return path.exists() and not path.is_file()

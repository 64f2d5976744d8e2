"""Run `hicache` commands in this process, and return their status, output and errors."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hicache.cli import main


def outcome(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Run `hicache ARGUMENTS`; returns its status, output and errors."""
    capsys.readouterr()
    try:
        status = main([*map(str, arguments)])
    except SystemExit as exit:
        status = int(str(exit.code or 0))
    return status, *capsys.readouterr()


def output(capsys: pytest.CaptureFixture[str], *arguments: object, status: int = 0) -> str:
    """Run a command, which must end with `status` and without errors; returns its output."""
    ended, out, err = outcome(capsys, *arguments)
    assert (ended, err) == (status, ""), err
    return out


def stats(capsys: pytest.CaptureFixture[str], *arguments: object, status: int = 0) -> dict[str, Any]:
    """Run the command with --json; returns the JSON object that it prints."""
    out = output(capsys, *arguments, "--json", status=status)
    assert len(out.splitlines()) == 1
    found: dict[str, Any] = json.loads(out)
    return found


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Run a command that must be refused with status 2, no output and no control characters; returns its one line of
    error."""
    status, out, err = outcome(capsys, *arguments)
    assert (status, out) == (2, ""), (status, out, err)
    (line,) = err.splitlines()
    assert line.startswith("hicache: error: ") and line.isascii() and line.isprintable(), line
    return line

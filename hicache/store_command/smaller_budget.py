"""Protects stored pages from a mistyped budget. If a start would evict many pages, the command first asks, or waits."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from hicache.console import say, sized
from hicache.errors import ConfigError
from hicache.storage import bytes_to_evict

_WAIT_S = 60.0


def confirm_smaller_budget(
    path: str | Path,
    budget_bytes: int,
    *,
    ask: Callable[[str], str] | None = None,
    wait: Callable[[float], object] = time.sleep,
) -> None:
    """Confirm a budget that is less than half of the last budget and would evict pages; return immediately for any
    other budget. With a terminal, ask the operator. Without a terminal, print a warning and wait a minute, so that the
    operator can end the process. `ask`: prints a question and returns the answer; None without a terminal. Raises
    ConfigError if the answer is not yes."""
    num_bytes = bytes_to_evict(path, budget_bytes)
    if not num_bytes:
        return
    effect = f"the budget of {path} is less than half of the last one: {sized(num_bytes)} of pages are evicted"
    if ask is None:
        say(f"hicache: warning: {effect} in {_WAIT_S:.0f} s, unless this process ends before; --yes skips the wait")
        wait(_WAIT_S)
    elif ask(f"hicache: {effect}. Continue? [y/N] ").strip().lower() not in ("y", "yes"):
        raise ConfigError(f"the budget {budget_bytes} was not confirmed; give a larger one, or --yes")


def asks_on_terminal() -> Callable[[str], str] | None:
    """Return the function that asks a question on the terminal; None without a terminal."""
    is_terminal = sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()
    return input if is_terminal else None

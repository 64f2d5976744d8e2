"""Protects the pages of a path from a mistyped budget: a start that would evict many of them asks, or waits."""

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
    """Return at once unless the budget is less than half of the last one and pages would be evicted. Then ask on a
    terminal, or print a warning and wait a minute, in which the process can be ended. `ask`: reads a line; None: there
    is no terminal. Raises ConfigError if the answer is not yes."""
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
    """The function that asks a person; None without a terminal."""
    is_terminal = sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()
    return input if is_terminal else None

"""Processor time of the tests by file: printed by a run of all, and held to `tests/budget.toml` by `make check`.

    python tests/support/budget.py      fails where the last run took half as much again as a folder may

What a file's tests start counts as theirs: children that have ended, and programs of the fork server.
"""

from __future__ import annotations

import json
import resource
import sys
import time
import tomllib
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMITS, SPENT = ROOT / "tests" / "budget.toml", ROOT / "build" / "test-seconds.json"
_TOLERANCE, _DEAREST = 1.5, 10


class Budget:
    """Of a run in forked workers. A plugin of the process that collects the tests."""

    def __init__(self, config: pytest.Config) -> None:
        self._by_file, self._config = Counter[str](), config

    @classmethod
    def of(cls, config: pytest.Config) -> Budget:
        budget = cls(config)
        config.pluginmanager.register(budget)
        return budget

    def add(self, file: str, seconds: float) -> None:
        """Processor time of a test of `file`, a path from the root."""
        self._by_file[file] += seconds

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        write = terminalreporter.write_line
        of_all = time.process_time() + sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
        terminalreporter.section(f"processor time of tests: {self._by_file.total():.0f} s, of workers {of_all:.0f} s")
        for file, seconds in self._by_file.most_common(_DEAREST):
            write(f"{seconds:6.1f} s  {file}")
        if not self._config.getoption("keyword") and self._config.args == [str(ROOT / "tests")]:
            SPENT.parent.mkdir(exist_ok=True)
            SPENT.write_text(json.dumps(self._by_file, indent=1))


def folder_of(file: str) -> str:
    """`flow` of tests/flow/test_engine.py, `.` of what is in tests/ itself."""
    return "/".join(Path(file).parts[1:-1]) or "."


def over_budget() -> list[str]:
    """A line for each folder that took more than it may in the last run of all tests on this machine."""
    if not SPENT.exists():
        return []
    limits, spent = tomllib.loads(LIMITS.read_text())["seconds"], Counter[str]()
    for file, seconds in json.loads(SPENT.read_text()).items():
        spent[folder_of(file)] += seconds
    return [
        f"tests/{folder}: {seconds:.0f} s of processor time, {limits.get(folder, 0)} in {LIMITS.relative_to(ROOT)}"
        for folder, seconds in spent.items()
        if seconds > _TOLERANCE * limits.get(folder, 0)
    ]


if __name__ == "__main__":
    found = over_budget()
    print(*found, sep="\n", file=sys.stderr)
    sys.exit(bool(found))

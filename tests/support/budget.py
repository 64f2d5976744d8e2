"""Processor time of the tests by file. A run of all tests prints it, and `make check` compares it with
`tests/budget.toml`.

    python tests/support/budget.py        fails if the last run took more than 1.5 times of a folder's budget, or if the
                                          machine is slow, of the budget times the median ratio of all folders
    python tests/support/budget.py new    prints a budget, a fifth above what the last run took

The time of a file includes child processes that have ended, and programs of the fork server.
"""

from __future__ import annotations

import json
import math
import os
import resource
import statistics
import sys
import time
import tomllib
from collections import Counter
from pathlib import Path

import pytest

LIMITS, SPENT = "tests/budget.toml", "build/test-seconds.json"  # paths from the root of the repository
_TOLERANCE, _ROOM, _DEAREST = 1.5, 1.2, 10
_LEAST_S = 8  # folders with a smaller budget are not checked, because their times vary too much


class Budget:
    """Processor time by test file of a run in forked workers: a plugin of the process that collects the tests."""

    def __init__(self, config: pytest.Config) -> None:
        self._by_file, self._config = Counter[str](), config

    @classmethod
    def of(cls, config: pytest.Config) -> Budget:
        budget = cls(config)
        config.pluginmanager.register(budget)
        return budget

    def add(self, file: str, seconds: float) -> None:
        """Add the processor time of a test of `file`, a path from the root of the repository."""
        self._by_file[file] += seconds

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        write = terminalreporter.write_line
        of_all = time.process_time() + sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
        terminalreporter.section(f"processor time of tests: {self._by_file.total():.0f} s, of workers {of_all:.0f} s")
        for file, seconds in self._by_file.most_common(_DEAREST):
            write(f"{seconds:6.1f} s  {file}")
        if is_default(self._config):
            spent = self._config.rootpath / SPENT
            spent.parent.mkdir(exist_ok=True)
            spent.write_text(json.dumps(self._by_file, indent=1))


def is_default(config: pytest.Config) -> bool:
    """Whether the run has all default tests, with the default number of random examples."""
    chosen = config.args_source is not pytest.Config.ArgsSource.TESTPATHS
    is_long = "not long" not in config.option.markexpr or "HICACHE_TEST_PROFILE" in os.environ
    less = ("keyword", "deselect", "ignore", "ignore_glob", "maxfail", "collectonly", "lf", "stepwise")
    return not (chosen or is_long or any(config.getoption(name, None) for name in less))


def folder_of(file: str) -> str:
    """The folder of a test file: `flow` for tests/flow/test_engine.py, `.` for files directly in tests/."""
    return "/".join(Path(file).parts[1:-1]) or "."


def by_folder(root: Path) -> Counter[str]:
    """Seconds by folder of the last run of all default tests on this machine; empty if no run was recorded."""
    spent, last = Counter[str](), root / SPENT
    for file, seconds in json.loads(last.read_text()).items() if last.exists() else ():
        spent[folder_of(file)] += seconds
    return spent


def over_budget(root: Path) -> list[str]:
    """One line for each folder whose tests took more time than its limit."""
    limits, spent = tomllib.loads((root / LIMITS).read_text())["seconds"], by_folder(root)
    slowness = slowness_of(spent, limits)
    return [
        f"tests/{folder}: {seconds:.0f} s of processor time, {limits.get(folder, 0)} in {LIMITS}"
        + (f", times {slowness:.1f} for a slow machine" if slowness > 1 else "")
        for folder, seconds in spent.items()
        if seconds > _TOLERANCE * slowness * limits.get(folder, 0)
    ]


def slowness_of(spent: Counter[str], limits: dict[str, float]) -> float:
    """The factor, at least 1, by which this machine is slower than the budget: the median over the larger folders."""
    ratios = [seconds / limits[folder] for folder, seconds in spent.items() if limits.get(folder, 0) > _LEAST_S]
    return max(1.0, statistics.median(ratios or [1.0]))


def new_budget(root: Path) -> list[str]:
    """The lines of a budget that fits the times of the last run."""
    spent = sorted(by_folder(root).items())
    return ["[seconds]", *(f'"{folder}" = {max(_LEAST_S, math.ceil(_ROOM * seconds))}' for folder, seconds in spent)]


if __name__ == "__main__":
    is_new, at = sys.argv[1:] == ["new"], Path(__file__).resolve().parents[2]
    found = new_budget(at) if is_new else over_budget(at)
    print(*found, sep="\n", file=sys.stdout if is_new else sys.stderr)
    sys.exit(bool(found) and not is_new)

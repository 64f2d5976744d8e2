"""Tests of kernels are left out of a run of all default tests where what they run is as when they last passed here.

Kernels import little else, which `tests/test_layering.py` holds. All are run where `CI` is set, and in other runs.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from budget import is_default

_TESTS = "tests/kernels"
_SOURCES = ("kernels", "hicache/process", "hicache/errors.py", "hicache/console.py", "pyproject.toml")
_PACKAGES = ("torch", "triton", "numpy", "pytest", "hypothesis")
_OF_TESTS = (_TESTS, "tests/support", "tests/conftest.py")


def digest(root: Path) -> str:
    """Of the files that the tests run, and of what they run on."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    found = hashlib.sha256(" ".join([device, sys.version, *map(version, _PACKAGES)]).encode())
    for file in _files(root):
        found.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes())
    return found.hexdigest()[:16]


def _files(root: Path) -> Iterator[Path]:
    for path in (root / name for name in (*_SOURCES, *_OF_TESTS)):
        yield from sorted(path.rglob("*.py")) if path.is_dir() else [path]


class Unchanged:
    """A plugin of the process that collects the tests. It leaves a file in the user's cache folder for what passed."""

    def __init__(self, config: pytest.Config) -> None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "hicache", "passed")
        self._passed = cache / f"kernels-{digest(config.rootpath)}"
        self._left_out: list[pytest.Item] = []

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if self._passed.exists() and not os.environ.get("CI"):
            folder = config.rootpath / _TESTS
            self._left_out = [item for item in items if folder in item.path.parents]
            config.hook.pytest_deselected(items=self._left_out)
            items[:] = [item for item in items if folder not in item.path.parents]

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if exitstatus == 0:
            self._passed.parent.mkdir(parents=True, exist_ok=True)
            self._passed.touch()

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._left_out:
            number, why = len(self._left_out), "all is as when they passed here; CI=1 runs them"
            terminalreporter.write_line(f"{_TESTS}: {number} tests not run, {why}")


def pytest_configure(config: pytest.Config) -> None:
    if is_default(config) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Unchanged(config))

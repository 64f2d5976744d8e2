"""Run the tests in several processes, which are forked after the tests are collected: `--workers N`.

Libraries are imported, and tests collected, once for all workers. A worker without tests takes the next few tests of a
file. Each worker sends its reports over a pipe.
"""

from __future__ import annotations

import json
import mmap
import os
import selectors
import signal
import struct
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import IO, Any

import pytest

_CHUNK = 24  # tests of a file that a worker takes at once; few, so that all workers end at about the same time


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--workers", type=int, default=1, help="run tests in so many forked processes")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    config = session.config
    if config.option.workers < 2 or config.option.collectonly or session.testsfailed or len(session.items) < 2:
        return None
    _Run(session, _chunks(session.items)).run(config.option.workers)
    return True


def _chunks(items: list[pytest.Item]) -> list[list[pytest.Item]]:
    """Groups of tests that a worker takes at once. Tests that use the same session fixture, such as a server, form one
    group, so that only one worker starts it."""
    shared: dict[frozenset[str], list[pytest.Item]] = {}
    for item in items:
        shared.setdefault(_of_the_session(item), []).append(item)
    alone = shared.pop(frozenset(), [])
    by_file = [list(group) for _, group in groupby(alone, key=lambda item: item.path)]
    return [
        *shared.values(),
        *(tests[start : start + _CHUNK] for tests in by_file for start in range(0, len(tests), _CHUNK)),
    ]


def _of_the_session(item: pytest.Item) -> frozenset[str]:
    """Names of the session fixtures that a test uses, except fixtures of plugins."""
    found = getattr(item, "_fixtureinfo").name2fixturedefs.items()  # noqa: B009
    return frozenset(name for name, made in found if made[-1].scope == "session" and made[-1].baseid)


class _Run:
    """State of the parent process: the queue that its workers share, and the results that they send."""

    def __init__(self, session: pytest.Session, chunks: list[list[pytest.Item]]) -> None:
        self._session, self._chunks, self._running = session, chunks, dict[int, str]()
        self._stop = mmap.mmap(-1, 1)  # 1: workers take no more tests
        self._turns, turns = os.pipe()
        os.set_blocking(turns, False)  # a full pipe, which holds 16 384 numbers, raises instead of blocking
        os.write(turns, struct.pack(f"{len(chunks)}i", *range(len(chunks))))
        os.close(turns)

    def run(self, num_workers: int) -> None:
        base, selector = _folders(self._session.config).getbasetemp(), selectors.DefaultSelector()
        pids: dict[int, int] = {}
        for number in range(num_workers):
            reader, writer = os.pipe()
            pid = os.fork()
            if not pid:
                with open(writer, "w", buffering=1) as out:
                    _Worker(self._session.config, base / f"worker{number}", out).run(self._items(), self._stop)
                os._exit(0)
            os.close(writer)
            pids[number] = pid
            selector.register(reader, selectors.EVENT_READ, (number, bytearray()))
        try:
            while selector.get_map():
                for key, _ in selector.select():
                    number, lines = key.data
                    if read := os.read(key.fd, 1 << 16):
                        lines += read
                        self._take(number, lines)
                        continue
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    os.waitpid(pids.pop(number), 0)
                    if number in self._running:
                        raise pytest.UsageError(f"a worker died in {self._running[number]}")
        finally:
            self._stop[0] = 1
            for pid in pids.values():
                os.kill(pid, signal.SIGTERM)
                os.waitpid(pid, 0)
            os.close(self._turns)

    def _items(self) -> Iterator[pytest.Item]:
        """Yield the tests that this worker takes from the queue."""
        while turn := os.read(self._turns, 4):
            yield from self._chunks[struct.unpack("i", turn)[0]]

    def _take(self, worker: int, lines: bytearray) -> None:
        """Process the complete lines of a worker, and remove them from `lines`."""
        config = self._session.config
        while (end := lines.find(b"\n")) >= 0:
            message = json.loads(bytes(lines[:end]))
            del lines[: end + 1]
            if "report" in message:
                report = config.hook.pytest_report_from_serializable(config=config, data=message["report"])
                config.hook.pytest_runtest_logreport(report=report)
                if self._session.shouldfail or self._session.shouldstop:
                    self._stop[0] = 1
            elif "begins" in message:
                self._running[worker] = message["begins"]
            else:
                self._running.pop(worker, None)


class _Worker:
    """State of a forked child, which runs tests."""

    def __init__(self, config: pytest.Config, folder: Path, out: IO[str]) -> None:
        self._config, self._out = config, out
        plugins = config.pluginmanager
        plugins.unregister(name="terminalreporter")
        plugins.register(self)
        capture: Any = plugins.getplugin("capturemanager")
        capture.stop_global_capturing()  # the child inherited the capture files of the parent
        capture.start_global_capturing()
        folder.mkdir()
        _folders(config)._basetemp = folder

    def run(self, items: Iterator[pytest.Item], stop: mmap.mmap) -> None:
        """Run `items`. pytest gets the next item with each item, so that it keeps the fixtures that both use. All
        fixtures end with the last item."""
        item = next(items, None)
        while item is not None:
            following = None if stop[0] else next(items, None)
            self._send(begins=item.nodeid)
            self._config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            self._send(ended=item.nodeid)
            item = following

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._send(report=data)

    def _send(self, **message: Any) -> None:
        self._out.write(json.dumps(message) + "\n")


def _folders(config: pytest.Config) -> Any:
    """The factory of temporary folders for tests."""
    return config._tmp_path_factory  # type: ignore[attr-defined]

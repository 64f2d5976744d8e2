"""Measures nodes over a shared store. As under the plug-ins, each node has a disk and a store process, but there is no
server.

    nodes.hit.<store>     time of reads of another node's pages, over direct calls of the shared store for these pages
    nodes.stopped         time of a request (look-up and computing) of a node whose shared store is stopped, over
                          computing alone, before and after the circuit breaker has opened
    nodes.slow            as nodes.stopped, but with a shared store behind a link of 1 MB/s
    nodes.single_flight   total seconds of prefill if eight nodes get the same cold prompt, over those of one prefill
    nodes.sessions        share of cached tokens if each turn of a session goes to a random one of two nodes, over the
                          share with one node

Computing is simulated by waiting: no GPU is used.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import TracebackType
from unittest import mock

import numpy as np

from hicache.bench.common import Report, interleave
from hicache.bench.remote_servers import CREDENTIALS, MooncakeServer, S3Server, Server
from hicache.bench.slow_link import SlowLink
from hicache.config.stores import Copies, SharedStoreConfig
from hicache.flow.cost import CostModel
from hicache.integrations.server_store import ServerStore, ServerStoreConfig
from hicache.integrations.vllm.prefill_leases import PrefillLeases
from hicache.metrics import Counter, Metrics
from hicache.storage import PageFormat, open_store
from hicache.storage.process.jobs import FindDone, FindJob, LeaseDone, ReadDone, ReadJob, WriteDone, WriteJob
from hicache.storage.process.shared_memory import new_memory
from hicache.stores.disk_and_remote import answer_limit_s
from hicache.tiers import REMOTE

_IDENTITY: dict[str, str | int] = {"server": "bench", "weights": "none", "layout": "bytes"}
_JOB_PAGES = 8
_LONG_S = 60.0


class Node:
    """A node with a disk in `folder` and pages of `page_bytes` in shared memory. Only one thread may use a node."""

    def __init__(self, folder: Path, url: str, page_bytes: int, num_pages: int, backup: Copies = "all") -> None:
        remote = SharedStoreConfig(url=url, backup=backup) if url else None
        config = ServerStoreConfig(path=str(folder), budget=4 << 30, level=0, remote=remote)
        self.store = ServerStore.open(config, _IDENTITY, [PageFormat(page_bytes)])
        self.stores = self.store.stores
        self._descriptor, memory = new_memory("hicache-bench", page_bytes * num_pages)
        self.stores.share(self._descriptor, memory)
        self.memory = memory.reshape(num_pages, page_bytes)
        self.num_computed = 0
        self._tickets = itertools.count(1)

    def __enter__(self) -> Node:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stores.close()
        os.close(self._descriptor)

    def look_up(self, keys: Sequence[bytes], answer_s: float = _LONG_S) -> tuple[bool, ...]:
        """Return, for each page, whether a store has it. Asks the stores as a plug-in does."""
        job = FindJob(next(self._tickets), (), others=tuple(keys))
        if not self.stores.find(job, answer_s):
            return (False,) * len(keys)
        while True:
            for _, done in self.stores.poll():
                if isinstance(done, FindDone) and done.ticket == job.ticket:
                    return done.others or (False,) * len(keys)
            self.stores.wait(0.01)

    def read(self, keys: Sequence[bytes]) -> None:
        """Read pages to the first rows of the node's memory. The stores must have these pages."""
        ticket, left, start = next(self._tickets), len(keys), 0
        while start < len(keys):
            end = self.stores.end_of_part(keys, start, _JOB_PAGES)
            job = ReadJob(ticket, start, tuple(keys[start:end]), [*self.memory[start:end]], threading.Event())
            if not self.stores.read(job):
                raise AssertionError("a read was refused")
            start = end
        while left:
            for _, done in self.stores.poll():
                if isinstance(done, ReadDone):
                    left -= len(done.ok)
                    if not all(done.ok):
                        raise AssertionError("a page was not read")
            self.stores.wait(0.01)

    def write(self, keys: Sequence[bytes], *, is_costly: bool = False) -> None:
        """Write the first rows of the node's memory as pages with these keys."""
        left = len(keys)
        job = WriteJob(next(self._tickets), tuple(keys), [*self.memory[: len(keys)]], is_costly=is_costly)
        if not self.stores.tier.writes.submit(job):
            raise AssertionError("a write was refused")
        while left:
            for done in self.stores.tier.writes.poll():
                if isinstance(done, WriteDone):
                    left -= len(done.ok)
            self.stores.tier.wait(0.01)

    def until_copied(self) -> None:
        """Wait until no page waits for its copy to the shared store."""
        time.sleep(0.3)  # so that the store process has recorded the last writes
        while self.stores.tier.status.backup[0]:
            self.stores.tier.poll()
            time.sleep(0.02)

    def keys(self, names: Sequence[str]) -> list[bytes]:
        return self.store.keys([name.encode() for name in names])


@contextmanager
def shared_store(name: str, folder: Path) -> Iterator[tuple[str, Server | None]]:
    """Yield the URL of a shared store, and the store's server, or None for a directory."""
    with ExitStack() as held:
        held.enter_context(mock.patch.dict(os.environ, CREDENTIALS))
        if name == "dir":
            shared = folder / "shared"
            shared.mkdir()
            yield f"dir://{shared}?level=0", None
        else:
            server: Server = held.enter_context(S3Server() if name == "s3" else MooncakeServer(1 << 30))
            level = "&level=0" if name == "s3" else ""
            yield server.url + level, server


def is_missing(name: str) -> str:
    """Return a text with the packages that a store needs and that are not installed; "" if all are installed."""
    return {"dir": lambda: "", "s3": S3Server.missing, "mooncake": MooncakeServer.missing}[name]()


def hit(args: argparse.Namespace, report: Report) -> None:
    page_bytes, num_pages = 2 << 20, args.pages
    for name in ("mooncake", "s3", "dir"):
        if is_missing(name):
            continue
        with tempfile.TemporaryDirectory(dir=args.dir) as folder, shared_store(name, Path(folder)) as (url, _):
            node = Node(Path(folder) / "b", url, page_bytes, num_pages)
            keys = node.keys([f"page {n}" for n in range(num_pages)])
            store = open_store(url, identity=_IDENTITY, formats=[PageFormat(page_bytes)])
            with node, closing(store), ThreadPoolExecutor(4) as threads:
                source = np.random.default_rng(0).integers(0, 256, (num_pages, page_bytes), dtype=np.uint8)
                if not all(store.put(list(zip(keys, source, strict=True)))):
                    raise AssertionError("a page was not stored")
                buffers = np.zeros_like(source)
                if not all(node.look_up(keys)):
                    raise AssertionError("a page was not found")
                parts = [slice(start, start + _JOB_PAGES) for start in range(0, num_pages, _JOB_PAGES)]

                def direct(part: slice) -> list[bool]:
                    return list(store.get_into(keys[part], [*buffers[part]]))  # noqa: B023 - called in this turn

                variants: Mapping[str, Callable[[], object]] = {
                    "direct": lambda: list(threads.map(direct, parts)),  # noqa: B023
                    "node": lambda: node.read(keys),  # noqa: B023
                }
                seconds = interleave(variants, samples=args.samples)
                if not np.array_equal(node.memory, source) or not np.array_equal(buffers, source):
                    raise AssertionError("a page came back changed")
        report.time(
            f"nodes.hit.{name}",
            seconds["node"],
            "ms",
            ceiling_seconds=seconds["direct"],
            target=1.1,
            note=f"{num_pages} pages of 2 MiB; the store process also writes them to the node's disk",
        )


def _first_token(report: Report, name: str, node: Node, compute_s: float, what: str) -> None:
    """Measure requests with prompts that the node does not have, before and after the circuit breaker of its shared
    store opens."""
    remote = node.stores.tiers[REMOTE]
    before, after = list[float](), list[float]()
    deadline_s = time.monotonic() + _LONG_S
    while len(after) < 5 and time.monotonic() < deadline_s:
        is_open = remote.reads.refuses()
        begin_s = time.perf_counter()
        node.look_up(node.keys([f"{len(before)} {len(after)} {n}" for n in range(64)]), answer_limit_s(compute_s))
        (after if is_open else before).append(time.perf_counter() - begin_s + compute_s)
        if len(before) > 5 and not after:  # the store answers, so its breaker does not open
            time.sleep(0.2)
    for when, seconds, target in (("before", before, 1.25), ("after", after, 1.03)):
        if seconds:
            note = f"{what}; {when} its breaker has opened; computing takes {compute_s:g} s"
            report.time(f"{name}.{when}", seconds, "ms", ceiling_seconds=[compute_s], target=target, note=note)


def stopped(args: argparse.Namespace, report: Report) -> None:
    with tempfile.TemporaryDirectory(dir=args.dir) as folder, shared_store("s3", Path(folder)) as (url, server):
        assert server is not None
        with Node(Path(folder) / "a", url, 64 << 10, 64) as node:
            node.look_up(node.keys(["first"]))
            server.freeze()
            _first_token(report, "nodes.stopped", node, 2.0, "SeaweedFS stopped by SIGSTOP")
            server.thaw()


def slow(args: argparse.Namespace, report: Report) -> None:
    with tempfile.TemporaryDirectory(dir=args.dir) as folder, shared_store("s3", Path(folder)) as (url, server):
        assert isinstance(server, S3Server)
        port = int(server.endpoint.rpartition(":")[2])
        with SlowLink(port, 1e6) as link:
            slow_url = url.replace(server.endpoint, f"http://127.0.0.1:{link.port}")
            with Node(Path(folder) / "a", slow_url, 64 << 10, 64) as node:
                node.look_up(node.keys(["first"]))
                _first_token(report, "nodes.slow", node, 2.0, "SeaweedFS behind a link of 1 MB/s")


def single_flight(args: argparse.Namespace, report: Report) -> None:
    """Measure several nodes that get one prompt. Each node runs in steps, like a scheduler: it looks the prompt up, and
    then waits for its pages, loads them or computes the prompt."""
    num_nodes, num_tokens, chunk_tokens, tokens_per_s = 8, 100_000, 1000, 10_000
    num_chunks = num_tokens // chunk_tokens
    begin = threading.Barrier(num_nodes)

    def serve(node: Node) -> None:
        keys = node.keys([f"chunk {n}" for n in range(num_chunks)])
        cost = CostModel(tokens_per_s, dict.fromkeys(node.stores.tiers, 1), Metrics(), node.stores.clock)
        leases = PrefillLeases(node.stores, cost, lambda request: 0, Counter())
        begin.wait()
        while True:
            held = node.look_up(keys)
            num_held = held.index(False) if False in held else num_chunks
            ends = [n for n in range(num_held, num_chunks) if n % 16 == 15 or n == num_chunks - 1]
            steps = [((n + 1) * chunk_tokens, keys[n]) for n in ends]
            if num_held == num_chunks or not leases.begin("r", steps, num_held * chunk_tokens, num_tokens):
                break
            while leases.is_waiting("r"):
                for _, done in node.stores.poll():
                    if isinstance(done, LeaseDone):
                        leases.answered(done)
                    elif isinstance(done, FindDone):
                        leases.found(done)
                node.stores.wait(0.01)
        for start in range(num_held, num_chunks, 4):
            time.sleep(4 * chunk_tokens / tokens_per_s)
            node.num_computed += 4
            node.write(keys[start : start + 4], is_costly=True)
        if num_held:
            node.read(keys[:num_held])

    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(dir=args.dir)))
        url, _ = held.enter_context(shared_store("dir", folder))
        sizes = 256 << 10, num_chunks
        nodes = [held.enter_context(Node(folder / str(n), url, *sizes, "used")) for n in range(num_nodes)]
        list(held.enter_context(ThreadPoolExecutor(num_nodes)).map(serve, nodes))
        seconds = sum(node.num_computed for node in nodes) * chunk_tokens / tokens_per_s
    report.time(
        "nodes.single_flight",
        [seconds],
        "s",
        ceiling_seconds=[num_tokens / tokens_per_s],
        target=1.2,
        note=f"{num_nodes} nodes, {num_tokens} tokens at {tokens_per_s} tokens a second, over a directory",
    )


def sessions(args: argparse.Namespace, report: Report) -> None:
    num_sessions, num_turns, turn_pages = 20, 8, 4

    def cached_share(nodes: Sequence[Node]) -> float:
        rng, num_cached, num_asked = random.Random(0), 0, 0
        for turn in range(num_turns):
            for session in range(num_sessions):
                node = rng.choice(nodes)
                names = [f"{session} {n}" for n in range((turn + 1) * turn_pages)]
                keys = node.keys(names)
                held = node.look_up(keys[:-turn_pages]) if turn else ()
                num_held = held.index(False) if False in held else len(held)
                if num_held:
                    node.read(keys[:num_held])
                num_cached, num_asked = num_cached + num_held, num_asked + len(held)
                node.write(keys[num_held:])
            for node in nodes:
                if REMOTE in node.stores.tiers:
                    node.until_copied()
        return num_cached / num_asked

    with tempfile.TemporaryDirectory(dir=args.dir) as folder, shared_store("dir", Path(folder)) as (url, _):
        sizes = 64 << 10, num_turns * turn_pages
        with Node(Path(folder) / "one", "", *sizes) as one:
            alone = cached_share([one])
        with Node(Path(folder) / "a", url, *sizes) as first, Node(Path(folder) / "b", url, *sizes) as second:
            moved = cached_share([first, second])
    note = f"{num_sessions} sessions of {num_turns} turns; backup=all; copies end between turns"
    report.case("nodes.sessions", [moved], "share", ceiling=alone, target=0.95, note=note)


PARTS: Mapping[str, Callable[[argparse.Namespace, Report], None]] = {
    "hit": hit,
    "stopped": stopped,
    "slow": slow,
    "single_flight": single_flight,
    "sessions": sessions,
}

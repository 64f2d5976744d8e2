"""Pages on their way device -> host -> disk -> host -> device, all four legs at once, in a mix of the caller's choice.

    load, backup    between host and device by the engine's transfer backend; the ceiling is a plain copy in the same
                    direction (pinned on CUDA, a memcpy on the CPU)
    write, read     between host and disk by the page store, one writer and 8 readers; the ceiling is the same pages
                    written to a file by O_DIRECT and synced, or read from it by as many threads
    total           bytes of all legs over the time until the last has ended

`--mix load:backup:write:read` says how many pages each leg moves for each that another moves; 0 leaves a leg out. All
legs start at once, and a leg's GB/s end with its own last page. Ceilings are measured alone, in turns with the mix.
First some pages make the whole journey; after every round, outside the timing, each byte that a leg moved is compared.
Pages are random bytes, which no store can compress.
"""

from __future__ import annotations

import argparse
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from hicache.bench.common import BenchUnavailable, Case, Report, gb_per_s, interleave, percentile, raw_copies
from hicache.bench.disk_pipeline import drop_caches, in_threads
from hicache.bench.stage import Step, step_timer
from hicache.bench.transfer import GEOMETRIES, Layout, Rig
from hicache.storage import LmdbPageStore, PageBuffer, PageFormat
from hicache.transfer import TransferOp

NAME = "migrate"
DESCRIPTION = "pages on all ways between device, host and disk at once, each beside a plain copy or raw I/O"

LEGS = ("load", "backup", "write", "read")
READERS = 8
_PAGE_TOKENS = 64
_JOURNEY_PAGES = 8
_POLL_S = 0.0002


class Mix(NamedTuple):
    """Pages that each leg moves for each that another moves."""

    load: int
    backup: int
    write: int
    read: int

    @classmethod
    def of(cls, text: str) -> Mix:
        parts = text.split(":")
        if (
            len(parts) != len(LEGS)
            or not all(part.isascii() and part.isdigit() for part in parts)
            or not any(map(int, parts))
        ):
            raise argparse.ArgumentTypeError(f"{text!r} is no mix; give pages of {':'.join(LEGS)}, such as 2:2:1:1")
        return cls(*map(int, parts))

    def __str__(self) -> str:
        return ":".join(map(str, self))


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of at least 1")
    return int(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    mix = f"pages of {':'.join(LEGS)} (default: %(default)s)"
    parser.add_argument("--mix", type=Mix.of, default=Mix(1, 1, 1, 1), metavar="L:B:W:R", help=mix)
    parser.add_argument(
        "--pages", type=_positive, help="a round, of a leg whose part is 1 (default: 64 on CUDA, else 8)"
    )
    parser.add_argument("--samples", type=_positive, default=7, help="timed rounds (default: %(default)s)")
    parser.add_argument("--geometry", choices=list(GEOMETRIES), default="gqa8b", help="default: %(default)s")
    parser.add_argument("--dir", type=Path, help="folder on the disk to be measured (default: the working directory)")


def run(args: argparse.Namespace, report: Report) -> None:
    device: torch.device = args.device
    pages = args.pages or (64 if device.type == "cuda" else 8)
    folder = Path(tempfile.mkdtemp(prefix="bench-migrate-", dir=args.dir or Path.cwd()))
    try:
        rig = Rig(
            GEOMETRIES[args.geometry],
            Layout("", _PAGE_TOKENS, _PAGE_TOKENS, False),
            sum(args.mix) * pages * _PAGE_TOKENS,
            device,
        )
        try:
            _measure(report, Tiers(rig, args.mix, pages, folder), args.samples, device)
        finally:
            rig.close()
    finally:
        shutil.rmtree(folder)


class RawFile:
    """Pages in a plain file, past the kernel's memory where the file system can: `is_direct`."""

    def __init__(self, path: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT
        try:
            self._file, self.is_direct = os.open(path, flags | os.O_DIRECT, 0o600), True
        except OSError:  # a file system in memory
            self._file, self.is_direct = os.open(path, flags, 0o600), False

    def write(self, pages: Sequence[PageBuffer]) -> None:
        for at, page in enumerate(pages):
            if os.pwrite(self._file, page.data, at * len(page)) != len(page):
                raise BenchUnavailable("the disk has no room for the pages; name another with --dir or lower --pages")
        os.fdatasync(self._file)

    def read(self, at: int, page: PageBuffer) -> None:
        if os.preadv(self._file, [page.data], at * len(page)) != len(page):
            raise AssertionError(f"block {at} is cut short")

    def close(self) -> None:
        os.close(self._file)


class Tiers:
    """Device, host and disk, and the pages of each leg.

    Of the rig's pages, device slots and host pages alike, each leg owns a run: [load | backup | write | read).
    Transfers are submitted by the calling thread; one thread writes the store, `READERS` read it. `ended_s` holds, for
    each leg, the seconds from the start of every round so far to the end of the leg.
    """

    def __init__(self, rig: Rig, mix: Mix, pages: int, folder: Path) -> None:
        self.rig, self.mix, self.folder = rig, mix, folder
        ends = np.cumsum([0, *(part * pages for part in mix)]).tolist()
        self.ranges = {leg: range(ends[i], ends[i + 1]) for i, leg in enumerate(LEGS) if ends[i + 1] > ends[i]}
        self.page_bytes = rig.host.page_bytes
        self.views: list[PageBuffer] = rig.host.views(rig.pages)
        self.ended_s: dict[str, list[float]] = {leg: [] for leg in self.ranges}
        self.store = LmdbPageStore(
            folder / "store",
            identity={"model": "bench"},
            formats=[PageFormat(self.page_bytes)],
            budget_bytes=3 * len(self.views) * self.page_bytes + (256 << 20),
        )
        self.raw = RawFile(folder / "raw")
        self._writer, self._readers = ThreadPoolExecutor(1), ThreadPoolExecutor(READERS)

    def num_bytes(self, leg: str) -> int:
        return len(self.ranges[leg]) * self.page_bytes

    def journey(self) -> None:
        """AssertionError unless some pages come back from device, host, disk and host as they were."""
        some = range(min(_JOURNEY_PAGES, len(self.views)))
        self._fill_device(some)
        truth = [self.device_bytes(at) for at in some]
        self.rig.backend.store(self._slots(some), self.rig.pages[: len(some)]).wait()
        self._put(some)
        self._poison_host(some)
        self._get(some)
        self._poison_device(some)
        self.rig.up(self.rig.pages[: len(some)], self._slots(some)).wait()
        for at in some:
            _require(np.array_equal(self.device_bytes(at), truth[at]), f"page {at} of the journey")
        self._writer.submit(self.store.delete, [_key(at) for at in some]).result()

    def fill(self) -> None:
        """What each leg moves: random bytes where it begins."""
        for leg in ("load", "write", "read"):
            for at in self.ranges.get(leg, ()):
                self.views[at][:] = _content(at, self.page_bytes)
        if "read" in self.ranges:
            self._put(self.ranges["read"])
            self.raw.write([self.views[at] for at in self.ranges["read"]])
        self._fill_device(self.ranges.get("backup", range(0)))

    def poison(self) -> None:
        """Other bytes where each leg ends, and nothing of the store in the kernel's memory."""
        self._poison_device(self.ranges.get("load", range(0)))
        for leg in ("backup", "read"):
            self._poison_host(self.ranges.get(leg, range(0)))
        drop_caches(self.folder / "store")

    def move(self) -> None:
        """All legs at once, until the last has ended."""
        start = time.perf_counter()
        ends: dict[str, list[Future[float]]] = {}
        if "write" in self.ranges:
            ends["write"] = [self._writer.submit(_timed, partial(self._put_now, self.ranges["write"]))]
        if "read" in self.ranges:
            works = [partial(self._get_now, self.ranges["read"][t::READERS]) for t in range(READERS)]
            ends["read"] = [self._readers.submit(_timed, work) for work in works]
        ops = self._transfers()
        while ops:
            for leg in [leg for leg, op in ops.items() if op.done()]:
                self.ended_s[leg].append(time.perf_counter() - start)
                error = ops.pop(leg).error
                if error is not None:
                    raise error
            time.sleep(_POLL_S)
        for leg, futures in ends.items():
            self.ended_s[leg].append(max(future.result() for future in futures) - start)

    def verify(self) -> None:
        """AssertionError unless every byte that a leg moved is where it belongs. Takes what was written away again."""
        for leg in ("load", "backup"):
            for at in self.ranges.get(leg, ()):
                _require(np.array_equal(self.device_bytes(at), self.views[at]), f"page {at} of {leg}")
        for at in self.ranges.get("read", ()):
            _require(np.array_equal(self.views[at], _content(at, self.page_bytes)), f"page {at} of read")
        if "write" not in self.ranges:
            return
        back = np.frombuffer(mmap.mmap(-1, self.page_bytes), dtype=np.uint8)
        for at in self.ranges["write"]:
            _require(self.store.get_into([_key(at)], [back]) == [True], f"page {at} of write")
            _require(np.array_equal(self.views[at], back), f"page {at} of write")
        self._writer.submit(self.store.delete, [_key(at) for at in self.ranges["write"]]).result()

    def raw_write(self) -> None:
        self.raw.write([self.views[at] for at in self.ranges["write"]])

    def raw_read(self) -> None:
        start = self.ranges["read"].start

        def work(part: range) -> None:
            for at in part:
                self.raw.read(at - start, self.views[at])

        in_threads([partial(work, self.ranges["read"][t::READERS]) for t in range(READERS)])

    def device_bytes(self, at: int) -> PageBuffer:
        """A page of the device as its host page has it: `[layer][buffer][token][row]`."""
        slots = self.rig.slots[at * _PAGE_TOKENS : (at + 1) * _PAGE_TOKENS]
        pool = self.rig.pool
        buffers = [buffer[slots] for layer in pool.layout.layers for buffer in pool.layer_buffers(layer)]
        return torch.cat([rows.contiguous().view(torch.uint8).flatten() for rows in buffers]).cpu().numpy()

    def close(self) -> None:
        self._writer.shutdown()
        self._readers.shutdown()
        self.store.close()
        self.raw.close()

    def _transfers(self) -> dict[str, TransferOp]:
        ops: dict[str, TransferOp] = {}
        if "backup" in self.ranges:
            some = self.ranges["backup"]
            ops["backup"] = self.rig.backend.store(self._slots(some), self.rig.pages[some.start : some.stop])
        if "load" in self.ranges:
            some = self.ranges["load"]
            ops["load"] = self.rig.up(self.rig.pages[some.start : some.stop], self._slots(some))
        return ops

    def _slots(self, some: range) -> torch.Tensor:
        return self.rig.chosen[some.start * _PAGE_TOKENS : some.stop * _PAGE_TOKENS]

    def _put(self, some: range) -> None:
        self._writer.submit(self._put_now, some).result()

    def _put_now(self, some: range) -> None:
        if not all(self.store.put([(_key(at), self.views[at]) for at in some])):
            raise BenchUnavailable("the disk has no room for the pages; name another with --dir or lower --pages")

    def _get(self, some: range) -> None:
        self._readers.submit(self._get_now, some).result()

    def _get_now(self, some: range) -> None:
        for at in some:
            _require(self.store.get_into([_key(at)], [self.views[at]]) == [True], f"page {at} of read")

    def _fill_device(self, some: range) -> None:
        slots = self.rig.slots[some.start * _PAGE_TOKENS : some.stop * _PAGE_TOKENS]
        for layer in self.rig.pool.layout.layers:
            for buffer in self.rig.pool.layer_buffers(layer):
                buffer[slots] = torch.randn_like(buffer[slots])

    def _poison_device(self, some: range) -> None:
        slots = self.rig.slots[some.start * _PAGE_TOKENS : some.stop * _PAGE_TOKENS]
        for layer in self.rig.pool.layout.layers:
            for buffer in self.rig.pool.layer_buffers(layer):
                buffer.index_fill_(0, slots, -7)

    def _poison_host(self, some: range) -> None:
        for at in some:
            self.views[at].fill(0xA5)


def _measure(report: Report, tiers: Tiers, samples: int, device: torch.device) -> None:
    on_cuda = device.type == "cuda"
    raw = raw_copies(device, 1 << 30 if on_cuda else 128 << 20)
    copies = {"load": "up" if on_cuda else "memcpy", "backup": "down" if on_cuda else "memcpy"}
    try:
        tiers.journey()
        tiers.fill()
        runs: dict[str, Callable[[], object]] = {"mix": Step(tiers.move, tiers.poison, tiers.verify)}
        num_bytes = {leg: tiers.num_bytes(leg) for leg in tiers.ranges}
        for leg in tiers.ranges:
            if leg in copies:
                runs[leg], num_bytes[leg] = raw[copies[leg]].run, raw[copies[leg]].num_bytes
        if "write" in tiers.ranges:
            runs["write"] = tiers.raw_write
        if "read" in tiers.ranges:
            runs["read"] = Step(tiers.raw_read, partial(drop_caches, tiers.folder / "raw"))
        sync = (lambda: torch.cuda.synchronize(device)) if on_cuda else None
        seconds = interleave(runs, samples=samples, timer=step_timer(sync))
        direct = tiers.raw.is_direct
    finally:
        tiers.close()
    note = f"mix {tiers.mix}, {{}} pages of {tiers.page_bytes >> 10} KiB"
    for leg, pages in tiers.ranges.items():
        ceiling = percentile(gb_per_s(num_bytes[leg], seconds[leg]), 50)
        values = gb_per_s(tiers.num_bytes(leg), tiers.ended_s[leg][-samples:])
        buffered = "" if direct or leg in copies else "; the ceiling goes through the page cache: no O_DIRECT here"
        report.add(Case.of(f"migrate.{leg}", values, "GB/s", ceiling=ceiling, note=note.format(len(pages)) + buffered))
    total = gb_per_s(len(tiers.views) * tiers.page_bytes, seconds["mix"])
    report.add(Case.of("migrate.total", total, "GB/s", note=note.format(len(tiers.views))))


def _timed(work: Callable[[], None]) -> float:
    """When it ended, by the clock of `time.perf_counter`."""
    work()
    return time.perf_counter()


def _require(same: bool, what: str) -> None:
    if not same:
        raise AssertionError(f"{what} is not what was moved")


def _key(at: int) -> bytes:
    return at.to_bytes(32, "big")


def _content(at: int, num_bytes: int) -> PageBuffer:
    return np.frombuffer(np.random.default_rng(at).bytes(num_bytes), dtype=np.uint8)

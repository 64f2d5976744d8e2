"""Random histories of engines on one store: their store process is killed and stopped at any moment, they are killed
themselves and start again, and between two of them bytes of the files are flipped.

Each request compares every byte that it reuses with the truth. After each engine the store is whole and holds what the
engine was told is stored, but for the pages of flipped bytes. In the end descriptors, memory and /dev/shm are as they
were. Where pages are packed some do not fit, and are not stored. As a program, of all kinds and packings that are not
chosen:

    python tests/support/store_fuzz.py --seconds 600 [--kind full] [--packing 4] [--seed 0]
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import itertools
import json
import logging
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from component_case import MODELS, PACKABLE, WIDER, config, prefill
from hicache import AdvancedConfig, CacheRequest, DiskConfig, Lease, build_engine
from hicache.errors import ResourceExhausted
from hicache.storage import LmdbPageStore, StoreCorrupt, StoreError, StoreLocked, open_existing, store_at
from hicache.tiers import DISK
from toy_model import flush_error, prompt, settled
from waiting import eventually

NUM_PROMPTS, NUM_STEPS, NUM_SETTLED = 60, 80, 10
CHUNK = 24  # tokens of a forward
MAX_GROWTH_BYTES = 48 << 20  # of an engine, after its first steps
PACKINGS = ("off", "4", "3")
_KEY = re.compile("page ([0-9a-f]{64})")


class EngineHistory:
    """One engine, in a process of its own; tells on the standard output what was acknowledged."""

    def __init__(self, folder: Path, kind: str, packing: str, seed: int) -> None:
        self.rng, self.num_kills = np.random.default_rng(seed), 0
        self.model = (MODELS if packing == "off" else WIDER)[kind]
        advanced = AdvancedConfig(
            disk_reader_threads=2,
            disk_io_timeout_s=1.0,
            disk_reopen_backoff_s=0.01,
            disk_max_reopen_backoff_s=0.1,
            transfer_chunk_tokens=16,
        )
        disk = DiskConfig(path=str(folder), budget_bytes=64 << 20)
        changes = {} if packing == "off" else PACKABLE
        settings = config(disk=disk, advanced=advanced, kv_packing=packing, **changes)
        self.engine = build_engine(settings, self.model)
        self.engine.start()
        self.context = self.engine.inspect.context
        assert self.context.disk is not None
        self.client = self.context.disk
        self.told, self.stopped = set[bytes](), 0

    def run(self, num_steps: int) -> None:
        actions = {self.request: 12, self.poll: 4, self.flush: 2, self.kill: 2, self.stop: 1, self.go_on: 3}
        choices = [action for action, weight in actions.items() for _ in range(weight)]
        self.tell(0)
        held_bytes = 0
        for step in range(num_steps):
            choices[self.rng.integers(len(choices))]()
            self.tell(step + 1)
            if step == NUM_SETTLED:
                held_bytes = resident_bytes()
        self.go_on()
        eventually(lambda: self.engine.poll() or self.client.find((b"key",), 0.01))
        eventually(lambda: flush_error(self.engine) is None)
        settled(self.engine)
        self.tell(num_steps)
        self.engine.close()
        assert num_steps <= NUM_SETTLED or resident_bytes() - held_bytes < MAX_GROWTH_BYTES

    def request(self) -> None:
        name, length = str(self.rng.integers(1 << 60)), int(self.rng.integers(9, 110))
        tokens = prompt(int(self.rng.integers(NUM_PROMPTS)), 110)[:length]
        mode = str(self.rng.choice(["auto", "best_effort", "wait_complete", "timeout"]))
        handle = self.engine.prefetch(name, tokens, mode=mode)  # type: ignore[arg-type]
        if self.rng.random() < 0.5:
            eventually(lambda: self.engine.poll() or handle.ready)
        for _ in range(int(self.rng.integers(4))):
            self.engine.poll()
        with eventually(lambda: self._admitted(CacheRequest(name, tokens, reserve_tokens=CHUNK))) as lease:
            prefill(self.engine, lease, tokens, self.model, chunk=CHUNK)  # compares
        self.engine.check()

    def _admitted(self, request: CacheRequest) -> Lease | None:
        try:
            return self.engine.acquire(request)
        except ResourceExhausted:
            self.engine.poll()
            return None

    def poll(self) -> None:
        self.engine.poll()

    def flush(self) -> None:
        flush_error(self.engine)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.client.pid, signal.SIGKILL)
        self.num_kills += 1

    def stop(self) -> None:
        self.stopped = self.client.pid
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.stopped, signal.SIGSTOP)

    def go_on(self) -> None:
        if self.stopped and self.stopped == self.client.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.stopped, signal.SIGCONT)

    def tell(self, step: int) -> None:
        index = self.context.full.index
        runs = [run for run in index.runs_of([*index]) if run.stored & DISK.bit]
        stored = {key for run in runs for key in run.keys if key not in run.second_pages}
        about = {
            "step": step,
            "kills": self.num_kills,
            "process": self.client.pid,
            "page_bytes": self.context.full.host.page_bytes,
            "keys": [key.hex() for key in stored - self.told],
            "raw": self.engine.stats().get("packing.misfit_pages", 0),
        }
        self.told |= stored
        print(json.dumps(about), flush=True)


class StoreFuzz:
    """The engines of one folder, one after the other."""

    def __init__(self, folder: Path, kind: str, packing: str, seed: int) -> None:
        self.folder, self.kind, self.packing = folder, kind, packing
        self.rng = np.random.default_rng([seed, len(kind)])
        self.acknowledged, self.page_bytes = set[bytes](), 0
        self.counts = collections.Counter[str]()

    def round(self, num_steps: int) -> None:
        """An engine and its end; then what is damaged."""
        command = [sys.executable, __file__, "--engine", str(self.folder), "--kind", self.kind]
        command += ["--packing", self.packing, "--seed", str(self.rng.integers(1 << 30)), "--steps", str(num_steps)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
            assert child.stdout and child.stderr
            lines: list[str] = []
            reader = threading.Thread(target=lambda: lines.extend(child.stdout or ()))
            errors: list[str] = []
            listener = threading.Thread(target=lambda: errors.extend(child.stderr or ()))
            reader.start()
            listener.start()
            eventually(lambda: lines or child.poll() is not None)
            is_killed = bool(lines) and self.rng.random() < 0.7
            if is_killed:
                time.sleep(self.rng.exponential(1.5))
                self._kill(child, json.loads(lines[-1])["process"])
            for thread in (reader, listener):  # until the store process ends, which has these files as well
                thread.join()
            child.wait()
        self._take([json.loads(line) for line in lines if line.endswith("\n")])
        if child.returncode not in ((0, -signal.SIGKILL) if is_killed else (0,)):
            raise AssertionError("".join(errors[-30:]))
        self._verify(num_flips=0)
        if self.rng.random() < 0.6:
            self._damage()

    def _kill(self, child: subprocess.Popen[str], process: int) -> None:
        """The engine, its store process before it or behind it, or the engine alone."""
        killed = [child.pid]
        if self.rng.random() < 0.5:
            killed.insert(int(self.rng.integers(2)), process)
        for pid in killed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):  # one that stands still sees nothing
            os.kill(process, signal.SIGCONT)
        self.counts["killed engines"] += 1

    def _take(self, told: list[dict[str, object]]) -> None:
        for about in told:
            self.acknowledged.update(bytes.fromhex(key) for key in about["keys"])  # type: ignore[attr-defined]
            self.page_bytes = int(about["page_bytes"])  # type: ignore[call-overload]
        if told:
            self.counts["raw pages"] += int(told[-1]["raw"])  # type: ignore[call-overload]
            self.counts["steps"] += int(told[-1]["step"])  # type: ignore[call-overload]
            self.counts["killed processes"] += int(told[-1]["kills"])  # type: ignore[call-overload]

    def _verify(self, num_flips: int) -> None:
        """The store opens, and holds every page but those of so many flipped bytes."""
        store = eventually(lambda: opened(self.folder), lambda: list(self.folder.iterdir()))
        with contextlib.closing(store):
            violations = violations_of(store)
            assert len(violations) <= num_flips, violations
            keys = sorted(self.acknowledged)
            buffers = [np.empty(self.page_bytes, np.uint8) for _ in keys]
            lost = {key for key, ok in zip(keys, store.get_into(keys, buffers), strict=True) if not ok}
            assert len(lost) <= num_flips, f"{len(lost)} of {len(keys)} pages are lost, after {num_flips} flips"
            self.counts["lost pages"] += len(lost)
            self.acknowledged -= lost
            damaged = {bytes.fromhex(key) for violation in violations for key in _KEY.findall(violation)}
            store.delete(sorted(damaged | lost))  # also those that nobody reads here
            assert not violations_of(store)

    def _damage(self) -> None:
        """Flip bits; those of the record, which says what the store is, are put right where it is refused."""
        flips = [self._flip() for _ in range(int(self.rng.integers(1, 20)))]
        self.counts["flips"] += len(flips)
        try:
            opened(self.folder).close()
        except StoreError:
            record = [flip for flip in flips if flip[0].name == "store.json"]
            assert record, "a store with its own record is refused"
            for flip in record:
                flipped(*flip)
        self._verify(len(flips))

    def _flip(self) -> tuple[Path, int, int]:
        """Of a byte that says something, where a few draws find one."""
        files = [file for file in sorted(store_at(self.folder).iterdir()) if file.is_file() and file.stat().st_size]
        file = files[self.rng.integers(len(files))]
        content = file.read_bytes()
        at = next((at for at in self.rng.integers(len(content), size=50).tolist() if content[at]), 0)
        flip = file, at, 1 << int(self.rng.integers(8))
        flipped(*flip)
        return flip


def flipped(file: Path, at: int, bits: int) -> None:
    with file.open("r+b") as bytes_of:
        bytes_of.seek(at)
        byte = bytes_of.read(1)[0]
        bytes_of.seek(at)
        bytes_of.write(bytes([byte ^ bits]))


def opened(folder: Path) -> LmdbPageStore | None:
    """None while the process of an engine that has ended has it."""
    try:
        return open_existing(folder)
    except StoreLocked:
        return None


def violations_of(store: LmdbPageStore) -> tuple[str, ...]:
    try:
        store.check()
    except StoreCorrupt as corrupt:
        return corrupt.violations
    return ()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def held() -> tuple[int, int]:
    """Descriptors and children of this process. Our shared memory has no names: descriptors keep it."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return len(os.listdir("/proc/self/fd")), len(children)


def run(
    kind: str, packing: str, seed: int, num_rounds: int, num_steps: int = NUM_STEPS, end_s: float = math.inf
) -> collections.Counter[str]:
    """So many engines on one folder, until `end_s` of the monotonic clock; what came of them."""
    before = held()
    with tempfile.TemporaryDirectory() as folder:
        fuzz = StoreFuzz(Path(folder, "store"), kind, packing, seed)
        for _ in range(num_rounds):
            if time.monotonic() < end_s:
                fuzz.round(num_steps)
                fuzz.counts["engines"] += 1
    assert held() == before, (held(), before)
    fuzz.counts["pages"] += len(fuzz.acknowledged)
    return fuzz.counts


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--kind", choices=list(MODELS))
    parser.add_argument("--packing", choices=PACKINGS, help="kv_packing of the engines")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=20, help="engines on one folder")
    parser.add_argument("--steps", type=int, default=NUM_STEPS, help="of an engine")
    parser.add_argument("--engine", type=Path, help="be the engine of this folder")
    flags = parser.parse_args()
    logging.disable(logging.WARNING)
    if flags.engine:
        EngineHistory(flags.engine, flags.kind, flags.packing, flags.seed).run(flags.steps)
        return 0
    total, found, seed, end_s = collections.Counter[str](), 0, flags.seed, time.monotonic() + flags.seconds
    while time.monotonic() < end_s:
        kinds, packings = [flags.kind] if flags.kind else MODELS, [flags.packing] if flags.packing else PACKINGS
        for kind, packing in itertools.product(kinds, packings):
            try:
                total += run(kind, packing, seed, flags.rounds, flags.steps, end_s)
            except Exception as error:  # noqa: BLE001 - printed and counted; the next history may find another
                found += 1
                chosen = f"--kind {kind} --packing {packing} --seed {seed}"
                print(f"{chosen}: {type(error).__name__}: {error}", flush=True)
        seed += 1
        print(dict(total), f"{found} findings", flush=True)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())

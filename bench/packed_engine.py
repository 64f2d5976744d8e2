"""Packed pages in complete engines: first tokens from the host and from the disk, with the processor time.

    ttft.<length>     time to first token of a request with its prefix on the host, over the same without packing
    capacity.disk     bytes of the store, over those of raw pages without compression
    disk.processor    processor time of engine and store process per GiB of raw KV, from empty caches to the first token
                      of each document, over that of raw pages with zstd

Engines with and without packing alternate; loaded bytes are compared with the stored ones, outside the timing. A helper
of the bench of packed pages.
"""

from __future__ import annotations

import gc
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch

from hicache import CacheEngine, CacheRequest, EngineConfig, Lease, build_engine
from hicache.bench.common import Report, in_turns, interleave, percentile
from hicache.bench.forward8b import Forward, ForwardShape
from hicache.bench.packed_sample import KvSample
from hicache.bench.raw_io import drop_caches
from hicache.build.sizing import host_page_bytes
from hicache.config import DiskConfig
from hicache.config.engine import KvPacking
from hicache.tiers import FULL

PAGE = 64
TTFT_TARGET, DISK_TARGET, PROCESSOR_TARGET = 0.82, 1 / 1.28, 0.25
Tokens: TypeAlias = npt.NDArray[np.int64]
_PACKINGS: tuple[KvPacking, KvPacking] = ("4", "off")
_SPARE_PAGES = 8
_MISFITS_SHARE = 0.03  # additional host pages, for pages that do not fit
_POLL_S, _STEP_S = 2e-4, 1e-3  # intervals of polling: for a token; while pages are read


@dataclass(frozen=True)
class Setup:
    """The settings that all engines of a case share. `new`: tokens that each request computes."""

    shape: ForwardShape
    sample: KvSample
    device: torch.device
    new: int

    @property
    def token_bytes(self) -> int:
        """Bytes of raw KV per token."""
        return 2 * self.shape.layers * self.shape.kv_heads * self.shape.head_dim * torch.bfloat16.itemsize

    def config(self, tokens: int, kv_packing: KvPacking, disk: DiskConfig | None = None) -> EngineConfig:
        """Configuration of an engine whose device and host each hold `tokens`."""
        config = EngineConfig(
            device_tokens=tokens,
            page_size=PAGE,
            host_page_size=PAGE,
            max_requests=64,
            max_context_len=tokens,
            device=str(self.device),
            dtype="bfloat16",
            kv_packing=kv_packing,
            model_id="bench",
            write_policy="write_through",  # so that the host has all pages that are evicted from the device
            prefill_tokens_per_s=0,
            prefetch_mode="wait_complete",
            prefetch_host_share=1.0,
            disk=disk,
        )
        pages = int(tokens // PAGE * (1 + _MISFITS_SHARE)) + _SPARE_PAGES
        return replace(config, host_bytes=pages * host_page_bytes(config, self.shape.geometry)[FULL])

    def document(self, number: int, tokens: int) -> Tokens:
        return np.random.default_rng(number).integers(0, 1 << 17, tokens)

    def prompt(self, document: Tokens) -> Tokens:
        """A document, followed by `new` tokens."""
        return np.concatenate([document, np.arange(1 << 17, (1 << 17) + self.new)])


class Server:
    """An engine, and a forward that computes first tokens over its KV."""

    def __init__(self, setup: Setup, engine: CacheEngine) -> None:
        self.setup = setup
        self.engine = engine
        none = torch.empty(0, dtype=torch.int64, device=setup.device)
        self._forward = Forward(setup.shape, engine.pool, none, none)
        self._x = torch.randn(setup.new, setup.shape.hidden, device=setup.device, dtype=engine.pool.dtype)
        host = engine.inspect.context.full.host
        if host is not None and setup.device.type != "cuda":
            host.bytes_of.zero_()  # touches its memory before the timing, as pinning would

    def store(self, document: Tokens) -> None:
        """Commit a document with the sample's keys and values; the engine copies them to the lower tiers."""
        lease = self.engine.acquire(CacheRequest("store", self.setup.prompt(document)))
        self.setup.sample.fill(self.engine.pool, lease.slots_of(0, len(document)))
        self.engine.commit(lease, document)
        self.engine.release(lease)

    def first_token(self, name: str, document: Tokens) -> Lease:
        """Admit a document's prompt and wait for its first token, without processor time while waiting."""
        lease = self.engine.acquire(CacheRequest(name, self.setup.prompt(document)))
        self.engine.begin_forward([lease])
        suffix = self._forward.suffix_at(lease.held_slots(0, lease.length), self._x)
        token = self._forward(suffix)[-1].argmax()
        if token.is_cuda:
            end = torch.cuda.Event()
            end.record()
            while not end.query():
                time.sleep(_POLL_S)
        token.item()
        return lease

    def finish(self, lease: Lease, document: Tokens, held: int) -> None:
        """Compare the lease's KV with the stored KV, and release it. `held`: tokens that the measured tier had."""
        if held != len(document):
            raise AssertionError(f"{lease.hit}, where a tier had all {len(document)} tokens")
        self.setup.sample.require(self.engine.pool, lease.slots_of(0, len(document)))
        self.engine.release(lease)

    def from_host(self, document: Tokens) -> float:
        """Seconds to the first token, with an empty device tier."""
        self.engine.flush()
        if not self.engine.reset(("device",)):
            raise AssertionError("the device could not be emptied")
        return self._timed(document, is_on_host=True)

    def from_device(self, document: Tokens) -> float:
        self.engine.flush()
        return self._timed(document, is_on_host=False)

    def _timed(self, document: Tokens, *, is_on_host: bool) -> float:
        sync(self.setup.device)
        start = time.perf_counter()
        lease = self.first_token("first", document)
        seconds = time.perf_counter() - start
        self.finish(lease, document, lease.hit.host if is_on_host else lease.hit.device)
        return seconds


@contextmanager
def _serving(setup: Setup, config: EngineConfig) -> Iterator[Server]:
    gc.collect()  # frees a closed engine, which is in reference cycles: memory may not suffice for two engines
    with build_engine(config, setup.shape.geometry) as engine:
        yield Server(setup, engine)


def measure_ttft(report: Report, setup: Setup, lengths: Sequence[int], samples: int) -> None:
    """Measure times to first token. `lengths`: tokens of prefixes on the host, multiples of the page."""
    longest, on_cuda = max(lengths), setup.device.type == "cuda"
    document = setup.document(0, longest)
    with ExitStack() as opened:
        packed, raw = (
            opened.enter_context(_serving(setup, setup.config(_room(setup, longest), kv_packing)))
            for kv_packing in _PACKINGS
        )
        for server in (packed, raw):
            server.store(document)
            server.engine.flush()
        for length in lengths:
            prefix = document[:length]
            variants = {
                "packed": partial(packed.from_host, prefix),
                "raw": partial(raw.from_host, prefix),
                "resident": partial(packed.from_device, prefix),
            }
            seconds = interleave(variants, samples=samples, warmup=1, timer=lambda run: cast(float, run()))
            resident, misfits = percentile(seconds["resident"], 50), packed.engine.stats()["packing.misfit_pages"]
            note = f"{setup.new} new tokens; {resident * 1e3:.1f} ms with the prefix on the device; the ceiling is "
            note += f"without packing; {misfits:.0f} pages did not fit"
            name, target = f"{length >> 10}k" if length >= 1024 else str(length), TTFT_TARGET if on_cuda else None
            beside = seconds["raw"]
            report.time(f"packed.ttft.{name}", seconds["packed"], "ms", beside=beside, target=target, note=note)


def _room(setup: Setup, tokens: int) -> int:
    """Slots for a prefix of `tokens` and the tokens computed after it, a multiple of the page."""
    return (tokens + setup.new + 2 * PAGE) // PAGE * PAGE


# The disk


def measure_disk(
    report: Report, setup: Setup, folder: Path | None, num_documents: int, tokens: int, samples: int
) -> None:
    """Measure documents from disk. `folder`: on the disk to measure; None: a temporary one. `tokens` of each document:
    a multiple of the page."""
    documents = [setup.document(1 + number, tokens) for number in range(num_documents)]
    raw_bytes = num_documents * tokens * setup.token_bytes
    with tempfile.TemporaryDirectory(prefix="bench-packed-", dir=folder) as name:
        configs = {
            kind: setup.config(
                num_documents * _room(setup, tokens),
                kv_packing,
                DiskConfig(path=str(Path(name, kind)), budget_bytes=max(256 << 20, 2 * raw_bytes)),
            )
            for kind, kv_packing in zip(("packed", "zstd"), _PACKINGS, strict=True)
        }
        stored = {kind: _fill(setup, config, documents) for kind, config in configs.items()}
        rounds = {kind: partial(_round, setup, config, documents) for kind, config in configs.items()}
        seconds = in_turns(rounds, samples=samples, warmup=1)
    _report_capacity(report, setup, stored, raw_bytes)
    on_cuda, per_gib = setup.device.type == "cuda", raw_bytes / (1 << 30)
    packed, zstd = ([s / per_gib for s in seconds[kind, "processor"]] for kind in configs)
    took = {kind: percentile(seconds[kind, "first_tokens"], 50) for kind in configs}
    note = (
        f"of raw KV, {num_documents} documents of {tokens} tokens; the ceiling is raw pages with zstd at level 1; all "
    )
    note += (
        f"first tokens after {took['packed']:.2f} s, with zstd {took['zstd']:.2f}; of the processor the engine took "
    )
    note += " and ".join(f"{percentile(seconds[kind, 'engine'], 50) / per_gib:.2f}" for kind in configs)
    about = {"better": "lower", "ceiling": zstd, "target": PROCESSOR_TARGET if on_cuda else None, "note": note}
    report.case("packed.disk.processor", packed, "s/GiB", **about)


def _report_capacity(report: Report, setup: Setup, stored: Mapping[str, Mapping[str, float]], raw_bytes: int) -> None:
    live, files = ({kind: stats[f"disk.{name}_bytes"] for kind, stats in stored.items()} for name in ("live", "file"))
    note = f"pages with their headers; files {files['packed'] / 1e6:.1f} MB; the ceiling is raw KV; zstd at level 1: "
    note += f"{live['zstd'] / 1e6:.1f} MB, {live['zstd'] / raw_bytes:.3f} of it"
    target = DISK_TARGET if setup.device.type == "cuda" else None
    about = {"better": "lower", "ceiling": raw_bytes / 1e6, "target": target, "note": note}
    report.case("packed.capacity.disk", [live["packed"] / 1e6], "MB", **about)


def _fill(setup: Setup, config: EngineConfig, documents: Sequence[Tokens]) -> dict[str, float]:
    """Store the documents; returns the engine's statistics."""
    with _serving(setup, config) as server:
        for document in documents:
            server.store(document)
        server.engine.flush()
        return {name: float(value) for name, value in server.engine.stats().items()}


def _round(setup: Setup, config: EngineConfig, documents: Sequence[Tokens], turn: int) -> dict[str, float]:
    """Measure from empty caches until each document has its first token: elapsed seconds, and processor seconds."""
    assert config.disk is not None
    drop_caches(Path(config.disk.path))
    with _serving(setup, config) as server:
        engine, leases = server.engine, list[tuple[Lease, Tokens]]()
        sync(setup.device)
        disk = engine.inspect.context.disk
        assert disk is not None
        start, engine_s, store_s = time.perf_counter(), time.process_time(), _processor_s(disk.pid)
        waiting = [
            (f"{turn} {number}", document, engine.prefetch(f"{turn} {number}", setup.prompt(document)))
            for number, document in enumerate(documents)
        ]
        while waiting:
            engine.poll()
            ready = next((entry for entry in waiting if entry[2].ready and engine.counter.can_begin()), None)
            if ready is None:
                time.sleep(_STEP_S)
                continue
            waiting.remove(ready)
            leases.append((server.first_token(*ready[:2]), ready[1]))
        found = {"first_tokens": time.perf_counter() - start, "engine": time.process_time() - engine_s}
        found["processor"] = found["engine"] + _processor_s(disk.pid) - store_s
        for lease, document in leases:
            server.finish(lease, document, lease.hit.disk)
    return found


def _processor_s(pid: int) -> float:
    """Processor seconds of a process so far. A store process is not a child of this one, so `getrusage` lacks it."""
    if not pid:  # the store runs in threads of this one
        return 0.0
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

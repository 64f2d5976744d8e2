"""Measures what packed pages gain on the link and in host memory.

    load.*, store, both   raw bytes per second through the transfer backend, over a plain copy
    load.1, load.8        loads of an eighth of the tokens: one alone, eight concurrently;
    capacity.host, .disk  tokens in a host tier of one size, bytes of a store, over those of raw pages;
    overlap               a forward over a prefix that is loaded layer by layer, as in the overlap bench
    decode                steps of a batch over KV on the device, repeated during a load; on CUDA each step is a
                          captured graph, as in servers, so that launches do not count
    disk.processor        processor time of a GiB from disk to first tokens, over zstd's (bench.packed_engine)
    ttft.*                time to the first token of a prompt on the host, over the same without packing

Uses the geometry of an 8B model, pages of 64 tokens, and 4 bits for each code, or 3 bits in `load.3bit`. Keys and
values have the exponents of a real model (bench.packed_sample). The variants of a case are measured in one process, in
turns. The timed part does not include comparisons of bytes. On a CPU sizes are tiny, and there are no targets.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial

import torch

from hicache.bench.common import BenchUnavailable, RawCopy, Report, gb_per_s, interleave, percentile, raw_copies
from hicache.bench.forward8b import FULL, TINY
from hicache.bench.overlap import CONTIGUOUS, PAGE, RANDOM
from hicache.bench.packed_sample import FORMATS, KvSample, drawn_sample
from hicache.bench.transfer import TransferSetup
from hicache.config.engine import KvPacking
from hicache.device import KVCache
from hicache.host.pool import HostPagePool
from hicache.transfer import TransferOp

NAME = "packed"
DESCRIPTION = "packed pages: loads, stores and capacity, against plain copies and raw pages"

CONCURRENT = 8
TARGETS = {
    "load.contiguous": 1.30,
    "load.random": 1.28,
    "load.3bit": 1.37,
    "store": 1.25,
    "both": 1.22,
    "load.1": 1.28,
    "load.8": 1.28,
    "capacity.host": 1.28,
    "unfit.load": 0.97,
    "unfit.store": 0.95,
    "unfit.first_layer": 0.10,
}
_CAPACITY_BYTES = 1 << 30
_BITS: tuple[KvPacking, KvPacking] = ("4", "3")

Run = Callable[[], object]
Seconds = Mapping[str, Sequence[float]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--samples", type=int, help="timed rounds (default: 15 on CUDA, 2 else)")
    parser.add_argument("--tokens", type=int, help="of a load (default: 32768 on CUDA, 512 else)")


def run(args: argparse.Namespace, report: Report) -> None:
    device, on_cuda = args.device, args.device.type == "cuda"
    geometry = (FULL if on_cuda else TINY).geometry
    samples = args.samples or (15 if on_cuda else 2)
    tokens = args.tokens or (32768 if on_cuda else 512)
    if tokens % (CONCURRENT * PAGE):
        raise BenchUnavailable(f"--tokens {tokens}: give a multiple of {CONCURRENT * PAGE}")
    sample = drawn_sample().to(device)
    make = partial(TransferSetup, geometry, tokens=tokens, device=device, sample=sample)
    with closing(make(CONTIGUOUS)) as raw:
        with ExitStack() as rigs:
            packed, three = (
                rigs.enter_context(closing(make(CONTIGUOUS, kv_packing=bits, pool=raw.pool))) for bits in _BITS
            )
            _contiguous(report, raw, packed, three, samples)
            _concurrent(report, raw, packed, samples)
            _unfit(report, packed, samples)
            _capacity(report, raw.pool, packed.host.page_bytes, sample)
        _random(report, raw.pool, make, samples)


def _copies(device: torch.device, num_bytes: int) -> dict[str, RawCopy]:
    """Return plain copies by direction. They use pinned memory on CUDA and ordinary memory on other devices."""
    found = raw_copies(device, num_bytes)
    return found if device.type == "cuda" else dict.fromkeys(("up", "down", "both"), found["memcpy"])


def _timed(variants: Mapping[str, Run], device: torch.device, samples: int) -> Seconds:
    sync = (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else None
    return interleave(variants, samples=samples, sync=sync)


def _report(
    report: Report, case: str, setup: TransferSetup, seconds: Seconds, names: Sequence[str], copy: RawCopy
) -> None:
    """Report a case. `names`: names of the packed variant, of the variant without packing, and of the plain copy."""
    packed, raw, plain = names
    unpacked = percentile(gb_per_s(setup.num_bytes, seconds[raw]), 50)
    note = f"raw bytes a second; without packing {unpacked:.1f} GB/s; the ceiling is a plain copy of raw bytes"
    target = TARGETS[case] if setup.pool.device.type == "cuda" else None
    moved, ceiling_seconds = setup.num_bytes, seconds[plain]
    name = f"packed.{case}"
    report.rate(
        name,
        moved,
        seconds[packed],
        ceiling_seconds=ceiling_seconds,
        ceiling_bytes=copy.num_bytes,
        target=target,
        note=note,
    )


def _contiguous(report: Report, raw: TransferSetup, packed: TransferSetup, three: TransferSetup, samples: int) -> None:
    device = raw.pool.device
    copies, rigs = _copies(device, _copy_bytes(device)), {"raw": raw, "4": packed, "3": three}
    variants: dict[str, Run] = {f"plain.{name}": copies[name].run for name in ("up", "down", "both")}
    for name, setup in rigs.items():
        setup.verify()
        variants |= {f"{name}.load": setup.load_all, f"{name}.store": setup.store_all, f"{name}.both": setup.both}
    seconds = _timed(variants, device, samples)
    for setup in rigs.values():
        setup.verify()
    _report(report, "load.contiguous", packed, seconds, ("4.load", "raw.load", "plain.up"), copies["up"])
    _report(report, "load.3bit", three, seconds, ("3.load", "raw.load", "plain.up"), copies["up"])
    _report(report, "store", packed, seconds, ("4.store", "raw.store", "plain.down"), copies["down"])
    _report(report, "both", packed, seconds, ("4.both", "raw.both", "plain.both"), copies["both"])


def _random(report: Report, pool: KVCache, make: Callable[..., TransferSetup], samples: int) -> None:
    device = pool.device
    copy = _copies(device, _copy_bytes(device))["up"]
    with closing(make(RANDOM, pool=pool)) as raw, closing(make(RANDOM, kv_packing="4", pool=pool)) as packed:
        for setup in (raw, packed):
            setup.verify()
        seconds = _timed({"plain": copy.run, "4": packed.load_all, "raw": raw.load_all}, device, samples)
        packed.verify()
    _report(report, "load.random", packed, seconds, ("4", "raw", "plain"), copy)


def _concurrent(report: Report, raw: TransferSetup, packed: TransferSetup, samples: int) -> None:
    """Measure loads of an eighth of the tokens: one alone, and eight submitted concurrently."""
    device, num_bytes = raw.pool.device, raw.num_bytes // CONCURRENT
    copy = _copies(device, num_bytes)["up"]
    for count in (1, CONCURRENT):
        variants: dict[str, Run] = {
            "plain": partial(_repeat, copy.run, count),
            "4": partial(_loads, packed, count),
            "raw": partial(_loads, raw, count),
        }
        seconds = _timed(variants, device, samples)
        rates = {name: gb_per_s(count * num_bytes, found) for name, found in seconds.items()}
        note = (
            f"{count} of {packed.tokens // CONCURRENT} tokens; without packing {percentile(rates['raw'], 50):.1f} GB/s"
        )
        case, target = f"load.{count}", TARGETS[f"load.{count}"] if device.type == "cuda" else None
        report.case(f"packed.{case}", rates["4"], "GB/s", ceiling=rates["plain"], target=target, note=note)
    packed.verify()


def _unfit(report: Report, packed: TransferSetup, samples: int) -> None:
    """Measure loads and stores of half of the tokens, with values that do not fit the size of a packed page. So each
    page is stored without packing in two host pages."""
    half, device, on_cuda = len(packed.pages) // 2, packed.pool.device, packed.pool.device.type == "cuda"
    pages, rest, slots = packed.pages[:half], packed.pages[half : 2 * half], packed.chosen[: half * PAGE]
    copies, num_bytes = _copies(device, _copy_bytes(device)), half * packed.pool.layout.page_bytes(PAGE)

    def load(wait_layer: int | None = None) -> None:
        start, load_id = time.perf_counter(), packed.counter.begin()
        op = packed.backend.load(pages, slots, load_id, rest)
        if wait_layer is not None:
            packed.counter.set_consumer(load_id)
            packed.counter.wait_until(wait_layer)
            if on_cuda:
                torch.cuda.current_stream(device).synchronize()
            first_s.append(time.perf_counter() - start)
        op.wait()

    first_s: list[float] = []
    buffers = [buffer for layer in packed.pool.layout.layers for buffer in packed.pool.layer_buffers(layer)]
    for buffer in buffers:
        buffer.normal_()
    kept = [buffer[packed.slots[: len(slots)]].clone() for buffer in buffers]
    packed.backend.store(slots, pages, rest).wait()
    variants: dict[str, Run] = {
        "load": load,
        "first_layer": partial(load, 0),
        "store": lambda: packed.backend.store(slots, pages, rest).wait(),
        **{f"plain.{direction}": copies[direction].run for direction in ("up", "down")},
    }
    seconds = _timed(variants, device, samples)
    for buffer in buffers:
        buffer.fill_(-7)
    load()
    if not all(torch.equal(b[packed.slots[: len(slots)]], k) for b, k in zip(buffers, kept, strict=True)):
        raise AssertionError("loaded bytes are not the stored bytes")
    for case, direction in (("load", "up"), ("store", "down")):
        target, ceiling_seconds = TARGETS[f"unfit.{case}"] if on_cuda else None, seconds[f"plain.{direction}"]
        note = f"{half * PAGE} tokens in two places a page"
        name, copied = f"packed.unfit.{case}", copies[direction].num_bytes
        report.rate(
            name,
            num_bytes,
            seconds[case],
            ceiling_seconds=ceiling_seconds,
            ceiling_bytes=copied,
            target=target,
            note=note,
        )
    target = TARGETS["unfit.first_layer"] if on_cuda else None
    first_ms, load_ms = ([1e3 * each for each in found] for found in (first_s[-samples:], seconds["load"]))
    about = {"ceiling": load_ms, "better": "lower", "target": target, "note": "until a forward has it; of the load"}
    report.case("packed.unfit.first_layer", first_ms, "ms", **about)


def _repeat(run: Run, count: int) -> None:
    for _ in range(count):
        run()


def _loads(setup: TransferSetup, count: int) -> None:
    """Submit `count` loads, each when a producer is free, as an engine does. Then wait for all of them."""
    pages, slots = setup.pages.chunk(CONCURRENT), setup.chosen.chunk(CONCURRENT)
    ops: list[TransferOp] = []
    for part in range(count):
        while not setup.counter.can_begin():
            for op in ops:
                op.done()
            time.sleep(0)
        ops.append(setup.up(pages[part], slots[part]))
    for op in ops:
        op.wait()


def _capacity(report: Report, pool: KVCache, page_bytes: int, sample: KvSample) -> None:
    """Report how many tokens fit in a host tier of one size. A page that does not fit the size of a packed page takes
    two host pages."""
    packed, raw = (
        HostPagePool(pool.layout, PAGE, _CAPACITY_BYTES, pin=False, page_bytes=size) for size in (page_bytes, None)
    )
    channels = pool.layer_buffers(pool.layout.layers[0])[0][0].numel()
    _, misfits = sample.escapes(FORMATS["4"], len(pool.layout.layers), channels)
    tokens, target = int(packed.num_pages / (1 + misfits)) * PAGE, TARGETS["capacity.host"]
    note = f"in {_CAPACITY_BYTES >> 20} MiB; {misfits:.4f} of the pages do not fit and take two places"
    about = {"ceiling": float(raw.num_pages * PAGE), "target": target if pool.device.type == "cuda" else None}
    report.case("packed.capacity.host", [float(tokens)], "tokens", note=note, **about)
    for host in (packed, raw):
        host.close()


def _copy_bytes(device: torch.device) -> int:
    return 1 << 30 if device.type == "cuda" else 16 << 20

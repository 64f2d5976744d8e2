"""The gain of packed pages on the link, in host memory, on disk, and in time to first token.

    load.*, store, both   raw bytes per second through the transfer backend, over a plain copy
    load.1, load.8        loads of an eighth of the tokens: one alone, eight concurrently
    capacity.host, .disk  tokens in a host tier of one size, bytes of a store, over those of raw pages
    overlap               a forward over a prefix that is loaded layer by layer, as in the overlap bench
    decode                steps of a batch over KV on the device, repeated during a load; on CUDA each step is a
                          captured graph, as in servers, so that launches do not count
    disk.processor        processor time of a GiB from disk to first tokens, over zstd's (bench.packed_engine)
    ttft.*                time to the first token of a prompt on the host, over the same without packing

8B geometry, pages of 64 tokens, 4 bits a code, and 3 in `load.3bit`. Keys and values have the exponents of a real model
(bench.packed_sample). Sides of a case are measured in one process, in turns; bytes are compared outside the timing. On
a CPU sizes are tiny, and there are no targets.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from hicache.bench.common import BenchUnavailable, RawCopy, Report, gb_per_s, interleave, percentile, raw_copies
from hicache.bench.forward8b import FULL, TINY, Forward, ForwardShape
from hicache.bench.overlap import CONTIGUOUS, RANDOM, Order, beside_load, measure_overlap
from hicache.bench.packed_engine import PAGE, Setup, measure_disk, measure_ttft
from hicache.bench.packed_sample import FORMATS, KvSample, drawn_sample
from hicache.bench.stage import Stage
from hicache.bench.transfer import Rig
from hicache.config.engine import KvPacking
from hicache.device import KVCache
from hicache.host.pool import HostPagePool
from hicache.transfer import TransferOp

NAME = "packed"
DESCRIPTION = "packed pages: loads, stores, capacity, disk and first tokens, against plain copies and raw pages"

PARTS = ("transfer", "forward", "disk", "ttft")
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
OVERLAP_TARGET, DECODE_TARGET = 0.93, 1.02
_BATCH = 64

Run = Callable[[], object]
Seconds = Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Sizes:
    """Sizes in tokens, except `documents` and the numbers of rounds (`samples`, `disk_samples`, `ttft_samples`)."""

    samples: int
    disk_samples: int
    ttft_samples: int
    load: int
    overlap: int
    new: int
    documents: int
    document: int
    ttft: tuple[int, ...]


REAL = Sizes(15, 3, 5, 32768, 1024, 256, 8, 2048, (32768, 130048))
SMALL = Sizes(2, 1, 1, 512, 8, 8, 2, 128, (128, 256))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--samples", type=int, help=f"timed rounds (default: {REAL.samples} on CUDA, {SMALL.samples} else)"
    )
    parser.add_argument("--tokens", type=int, help=f"of a load (default: {REAL.load} on CUDA, {SMALL.load} else)")
    parser.add_argument("--dir", type=Path, help="folder on the disk to be measured (default: a temporary folder)")
    parser.add_argument("--only", nargs="+", choices=PARTS, help="parts; their results get a file of their own")


def run(args: argparse.Namespace, report: Report) -> None:
    device, on_cuda = args.device, args.device.type == "cuda"
    shape, sizes = (FULL, REAL) if on_cuda else (TINY, SMALL)
    sizes = replace(sizes, load=args.tokens or sizes.load, samples=args.samples or sizes.samples)
    if sizes.load % (CONCURRENT * PAGE):
        raise BenchUnavailable(f"--tokens {sizes.load}: give a multiple of {CONCURRENT * PAGE}")
    sample = drawn_sample().to(device)
    setup = Setup(shape, sample, device, sizes.new)
    parts: dict[str, Callable[[], None]] = {
        "transfer": lambda: measure_transfers(report, shape, sample, device, sizes.load, sizes.samples),
        "forward": lambda: measure_forwards(report, shape, sample, device, sizes.load, sizes.samples, sizes.overlap),
        "disk": lambda: measure_disk(report, setup, args.dir, sizes.documents, sizes.document, sizes.disk_samples),
        "ttft": lambda: measure_ttft(report, setup, sizes.ttft, sizes.ttft_samples),
    }
    if args.only:
        report.bench = "-".join([NAME, *args.only])  # a part does not replace the results of all
    # Forwards run on a separate stream, as in servers.
    with torch.cuda.stream(torch.cuda.Stream(device)) if on_cuda else nullcontext():
        for name in args.only or PARTS:
            start = time.perf_counter()
            parts[name]()
            gc.collect()
            if on_cuda:
                torch.cuda.empty_cache()
            print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)


def measure_transfers(
    report: Report, shape: ForwardShape, sample: KvSample, device: torch.device, tokens: int, samples: int
) -> None:
    """Measure transfers. `tokens` of a load: a multiple of eight pages."""
    make = partial(Rig, shape.geometry, tokens=tokens, device=device, sample=sample)
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
    """Plain copies by direction: of pinned memory on CUDA, of ordinary memory elsewhere."""
    found = raw_copies(device, num_bytes)
    return found if device.type == "cuda" else dict.fromkeys(("up", "down", "both"), found["memcpy"])


def _timed(variants: Mapping[str, Run], device: torch.device, samples: int) -> Seconds:
    sync = (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else None
    return interleave(variants, samples=samples, sync=sync)


def _report(report: Report, case: str, rig: Rig, seconds: Seconds, names: Sequence[str], copy: RawCopy) -> None:
    """Report a case. `names`: of the packed variant, the variant without packing, and the plain copy."""
    packed, raw, plain = names
    unpacked = percentile(gb_per_s(rig.num_bytes, seconds[raw]), 50)
    note = f"raw bytes a second; without packing {unpacked:.1f} GB/s; the ceiling is a plain copy of raw bytes"
    target = TARGETS[case] if rig.pool.device.type == "cuda" else None
    moved, beside = rig.num_bytes, seconds[plain]
    name = f"packed.{case}"
    report.rate(name, moved, seconds[packed], beside=beside, beside_bytes=copy.num_bytes, target=target, note=note)


def _contiguous(report: Report, raw: Rig, packed: Rig, three: Rig, samples: int) -> None:
    device = raw.pool.device
    copies, rigs = _copies(device, _copy_bytes(device)), {"raw": raw, "4": packed, "3": three}
    variants: dict[str, Run] = {f"plain.{name}": copies[name].run for name in ("up", "down", "both")}
    for name, rig in rigs.items():
        rig.verify()
        variants |= {f"{name}.load": rig.whole_up, f"{name}.store": rig.whole_down, f"{name}.both": rig.both}
    seconds = _timed(variants, device, samples)
    for rig in rigs.values():
        rig.verify()
    _report(report, "load.contiguous", packed, seconds, ("4.load", "raw.load", "plain.up"), copies["up"])
    _report(report, "load.3bit", three, seconds, ("3.load", "raw.load", "plain.up"), copies["up"])
    _report(report, "store", packed, seconds, ("4.store", "raw.store", "plain.down"), copies["down"])
    _report(report, "both", packed, seconds, ("4.both", "raw.both", "plain.both"), copies["both"])


def _random(report: Report, pool: KVCache, make: Callable[..., Rig], samples: int) -> None:
    device = pool.device
    copy = _copies(device, _copy_bytes(device))["up"]
    with closing(make(RANDOM, pool=pool)) as raw, closing(make(RANDOM, kv_packing="4", pool=pool)) as packed:
        for rig in (raw, packed):
            rig.verify()
        seconds = _timed({"plain": copy.run, "4": packed.whole_up, "raw": raw.whole_up}, device, samples)
        packed.verify()
    _report(report, "load.random", packed, seconds, ("4", "raw", "plain"), copy)


def _concurrent(report: Report, raw: Rig, packed: Rig, samples: int) -> None:
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


def _unfit(report: Report, packed: Rig, samples: int) -> None:
    """Measure loads and stores of half of the tokens, of which no page fits when packed: each is raw in two places."""
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
        **{f"plain.{way}": copies[way].run for way in ("up", "down")},
    }
    seconds = _timed(variants, device, samples)
    for buffer in buffers:
        buffer.fill_(-7)
    load()
    if not all(torch.equal(b[packed.slots[: len(slots)]], k) for b, k in zip(buffers, kept, strict=True)):
        raise AssertionError("loaded bytes are not the stored bytes")
    for case, way in (("load", "up"), ("store", "down")):
        target, beside = TARGETS[f"unfit.{case}"] if on_cuda else None, seconds[f"plain.{way}"]
        note = f"{half * PAGE} tokens in two places a page"
        name, copied = f"packed.unfit.{case}", copies[way].num_bytes
        report.rate(name, num_bytes, seconds[case], beside=beside, beside_bytes=copied, target=target, note=note)
    target = TARGETS["unfit.first_layer"] if on_cuda else None
    first_ms, load_ms = ([1e3 * each for each in found] for found in (first_s[-samples:], seconds["load"]))
    about = {"ceiling": load_ms, "better": "lower", "target": target, "note": "until a forward has it; of the load"}
    report.case("packed.unfit.first_layer", first_ms, "ms", **about)


def _repeat(run: Run, count: int) -> None:
    for _ in range(count):
        run()


def _loads(rig: Rig, count: int) -> None:
    """Submit loads when producers are free, as an engine does, and wait for all."""
    pages, slots = rig.pages.chunk(CONCURRENT), rig.chosen.chunk(CONCURRENT)
    ops: list[TransferOp] = []
    for part in range(count):
        while not rig.counter.can_begin():
            for op in ops:
                op.done()
            time.sleep(0)
        ops.append(rig.up(pages[part], slots[part]))
    for op in ops:
        op.wait()


def _capacity(report: Report, pool: KVCache, page_bytes: int, sample: KvSample) -> None:
    """Report the tokens that a host tier of one size holds; pages that do not fit need two places."""
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


def measure_forwards(
    report: Report, shape: ForwardShape, sample: KvSample, device: torch.device, tokens: int, samples: int, new: int
) -> None:
    """Measure forwards. `tokens` of the prefix; `new`: tokens of the forward that overlaps its load."""
    with closing(Stage(shape, CONTIGUOUS, tokens, device, kv_packing="4", sample=sample)) as stage:
        measure_overlap(report, stage, samples, Order(CONTIGUOUS, "packed.overlap.", target=OVERLAP_TARGET), new)
        _decode(report, stage, samples)
        stage.rig.verify()


def _decode(report: Report, stage: Stage, samples: int) -> None:
    slots, device = stage.new_slots, stage.device
    batch = min(_BATCH, len(slots) // 2)
    forward = Forward(stage.shape, stage.rig.pool, slots[:-batch], slots[-batch:])
    stage.rig.counter.set_consumer(-1)
    step: Callable[[], object] = partial(forward, forward.suffix(batch))
    if device.type == "cuda":
        step = _captured(step, device)
    what = f"steps of {batch} rows, which read {len(slots)} tokens of KV"
    beside_load(report, stage, samples, "packed.decode", what, step, DECODE_TARGET)


def _captured(step: Callable[[], object], device: torch.device) -> Callable[[], object]:
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    return graph.replay

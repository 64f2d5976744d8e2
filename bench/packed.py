"""Packed pages: what they gain on the link, in host memory and on disk, and until the first token.

    load.*, store, both   raw bytes a second through the transfer backend, over a plain copy (bench.packed_transfer)
    load.1, load.8        loads of an eighth of that: one alone, eight at a time
    capacity.host, .disk  tokens in a host tier of one size, bytes of a store, over those of raw pages
    overlap, decode       forwards beside a load (bench.packed_forward)
    disk.processor        processor time of a GiB from disk to first tokens, over zstd's (bench.packed_engine)
    ttft.*                time to the first token of a prompt on the host, over the same without packing

8B geometry, pages of 64 tokens, 4 bits a code, and 3 in `load.3bit`. Keys and values are those of a real model where
`--sample` gives them (bench.packed_sample). What a case compares is measured in one process, in turns; bytes are
compared outside the timing. On a CPU sizes are tiny, and there are no targets.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from hicache.bench.common import BenchUnavailable, Report
from hicache.bench.forward8b import FULL, TINY
from hicache.bench.packed_engine import Setup, measure_disk, measure_ttft
from hicache.bench.packed_forward import measure_forwards
from hicache.bench.packed_sample import load_sample, make_sample
from hicache.bench.packed_transfer import CONCURRENT, PAGE, measure_transfers

NAME = "packed"
DESCRIPTION = "packed pages: loads, stores, capacity, disk and first tokens, against plain copies and raw pages"

PARTS = ("transfer", "forward", "disk", "ttft")


@dataclass(frozen=True)
class Sizes:
    """In tokens, but for the numbers of rounds and `documents`."""

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
    parser.add_argument("--sample", type=Path, metavar="FILE", help="keys and values of a real model (default: drawn)")
    parser.add_argument("--make-sample", type=Path, metavar="FILE", help="make such a file, and measure nothing else")
    parser.add_argument(
        "--samples", type=int, help=f"timed rounds (default: {REAL.samples} on CUDA, {SMALL.samples} else)"
    )
    parser.add_argument("--tokens", type=int, help=f"of a load (default: {REAL.load} on CUDA, {SMALL.load} else)")
    parser.add_argument("--dir", type=Path, help="folder on the disk to be measured (default: a temporary folder)")
    parser.add_argument("--only", nargs="+", choices=PARTS, help="parts; their results get a file of their own")


def run(args: argparse.Namespace, report: Report) -> None:
    if args.make_sample is not None:
        make_sample(args.make_sample, report)
        return
    device, on_cuda = args.device, args.device.type == "cuda"
    shape, sizes = (FULL, REAL) if on_cuda else (TINY, SMALL)
    sizes = replace(sizes, load=args.tokens or sizes.load, samples=args.samples or sizes.samples)
    if sizes.load % (CONCURRENT * PAGE):
        raise BenchUnavailable(f"--tokens {sizes.load}: give a multiple of {CONCURRENT * PAGE}")
    sample = load_sample(args.sample).to(device)
    setup = Setup(shape, sample, device, sizes.new)
    parts: dict[str, Callable[[], None]] = {
        "transfer": lambda: measure_transfers(report, shape, sample, device, sizes.load, sizes.samples),
        "forward": lambda: measure_forwards(report, shape, sample, device, sizes.load, sizes.samples, sizes.overlap),
        "disk": lambda: measure_disk(report, setup, args.dir, sizes.documents, sizes.document, sizes.disk_samples),
        "ttft": lambda: measure_ttft(report, setup, sizes.ttft, sizes.ttft_samples),
    }
    if args.only:
        report.bench = "-".join([NAME, *args.only])  # a part does not replace the results of all
    # Forwards run on a stream of their own, as those of servers do.
    with torch.cuda.stream(torch.cuda.Stream(device)) if on_cuda else nullcontext():
        for name in args.only or PARTS:
            start = time.perf_counter()
            parts[name]()
            gc.collect()
            if on_cuda:
                torch.cuda.empty_cache()
            print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)

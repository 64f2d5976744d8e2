"""Packed pages: what they gain on the link, in host memory and on disk, and until the first token.

    load.*, store, both   raw bytes a second through the transfer backend, over a plain copy (bench.packed_transfer)
    load.1, load.8        loads of an eighth of that: one alone, eight at a time
    capacity.host         tokens in a host tier of one size, over those of raw pages

8B geometry, pages of 64 tokens, 4 bits a code, and 3 in `load.3bit`. Keys and values are those of a real model where
`--sample` gives them (bench.packed_sample). What a case compares is measured in one process, in turns; bytes are
compared outside the timing. On a CPU sizes are tiny, and there are no targets.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from hicache.bench.common import BenchUnavailable, Report
from hicache.bench.forward8b import FULL, TINY
from hicache.bench.packed_sample import load_sample, make_sample
from hicache.bench.packed_transfer import CONCURRENT, PAGE, measure_transfers

NAME = "packed"
DESCRIPTION = "packed pages: loads, stores, capacity, disk and first tokens, against plain copies and raw pages"

PARTS = ("transfer",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sample", type=Path, metavar="FILE", help="keys and values of a real model (default: drawn)")
    parser.add_argument("--make-sample", type=Path, metavar="FILE", help="make such a file, and measure nothing else")
    parser.add_argument("--samples", type=int, help="timed rounds (default: 15 on CUDA, 2 else)")
    parser.add_argument("--tokens", type=int, help="of a load (default: 32768 on CUDA, 512 else)")
    parser.add_argument("--only", nargs="+", choices=PARTS, help="parts; their results get a file of their own")


def run(args: argparse.Namespace, report: Report) -> None:
    if args.make_sample is not None:
        make_sample(args.make_sample, report)
        return
    device, on_cuda = args.device, args.device.type == "cuda"
    tokens, samples = args.tokens or (32768 if on_cuda else 512), args.samples or (15 if on_cuda else 2)
    if tokens % (CONCURRENT * PAGE):
        raise BenchUnavailable(f"--tokens {tokens}: give a multiple of {CONCURRENT * PAGE}")
    parts = args.only or PARTS
    if args.only:
        report.bench = "-".join([NAME, *parts])
    shape, sample = FULL if on_cuda else TINY, load_sample(args.sample).to(device)
    if "transfer" in parts:
        measure_transfers(report, shape, sample, device, tokens, samples)

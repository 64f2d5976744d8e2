"""Rate of replaying traces: requests per second through three tiers, for prompts of about 100 000 tokens.

    <policy>.<write policy>   requests per second of processor time of the thread
    optimal, curve            seconds for the optimum of the same sizes, and for the miss-ratio curve of `lru`

Sessions are generated to resemble coding agents, or read from a trace. The device holds an eighth of the different
blocks, the host a twelfth, the disk half. Everything runs on the CPU, in one thread.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from hicache.bench.common import BenchUnavailable, Report
from hicache.bench.sessions import Scale, generated_turns, trace_of
from hicache.replay.optimal import lru_hits_by_size
from hicache.replay.simulation import ReplaySettings, optimal, replay
from hicache.replay.trace import Trace, read_trace

NAME = "replay"
DESCRIPTION = "requests a second of `hicache replay` through three tiers"

T = TypeVar("T")
_BLOCK_TOKENS, _LONGEST = 64, 500_000
_CASES = (("auto", "exclusive"), ("auto", "write_through"), ("auto", "write_back"), ("lru", "write_through"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", type=Path, metavar="PATH", help="a trace of requests (default: generated sessions)")
    parser.add_argument("--requests", type=int, default=1000, help="the first of the trace (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=3, help="replays of each case (default: %(default)s)")


def run(args: argparse.Namespace, report: Report) -> None:
    if args.device.type != "cpu":
        raise BenchUnavailable("a replay computes on the CPU; use --device cpu")
    torch.set_num_threads(1)
    trace = _generated(args.requests) if args.trace is None else read_trace(args.trace)
    trace = replace(trace, requests=trace.requests[: args.requests])
    num_different = 1 + int(max(ids.max(initial=0) for ids in trace.prefixes))
    sizes = max(1, num_different // 8), max(1, num_different // 12), max(1, num_different // 2)
    tokens = trace.num_blocks * trace.block_tokens // len(trace.requests)
    note = f"{len(trace.requests)} requests of {tokens} tokens on average, blocks of {trace.block_tokens}"
    for policy, write_policy in _CASES:
        settings, rates, hit_rate = ReplaySettings(*sizes, policy, write_policy), list[float](), 0.0
        for _ in range(args.samples):
            seconds, result = _timed(partial(replay, trace, settings))
            rates.append(len(trace.requests) / seconds)
            hit_rate = result.hit_rate
        report.case(f"{policy}.{write_policy}", rates, "requests/s", note=f"{note}; hit rate {hit_rate:.4f}")
    for name, compute in (
        ("optimal", lambda: optimal(trace, ReplaySettings(*sizes)).hit_rate),
        ("curve", lambda: lru_hits_by_size(trace.prefixes)[-1] / trace.num_blocks),
    ):
        timed = [_timed(compute) for _ in range(args.samples)]
        report.time(name, [seconds for seconds, _ in timed], "s", note=f"{note}; hit rate {timed[0][1]:.4f}")


def _timed(compute: Callable[[], T]) -> tuple[float, T]:
    start = time.thread_time()
    result = compute()
    return time.thread_time() - start, result


def _generated(num_requests: int) -> Trace:
    turns = generated_turns(Scale(requests=num_requests, block_tokens=_BLOCK_TOKENS, longest=_LONGEST))
    return trace_of(turns, _BLOCK_TOKENS)

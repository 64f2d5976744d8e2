"""Hit rates of the eviction policies: a trace of prompts replayed through the real prefix tree, on the CPU.

The replay is that of `hicache replay` with a device tier alone; `docs/replay.md` states its rules, and those of
`optimal`, the ceiling of every case: a ratio is a share of what is possible at that capacity.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hicache.bench.common import BenchUnavailable, Case, Report
from hicache.errors import TraceError
from hicache.replay import trace as traces
from hicache.replay.cache import CacheSimulation, ReplaySettings
from hicache.replay.optimal import optimal_hits
from hicache.tree.key import Tokens
from hicache.tree.policy import ORDERS

NAME = "policy"
DESCRIPTION = "hit rates of the eviction policies over a trace, per capacity, against the optimal ones"

CAPACITIES = (1_000, 3_000, 10_000, 30_000)
UNLIMITED = 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", type=Path, help="any that hicache replay reads (default: a small synthetic one)")
    parser.add_argument(
        "--capacities",
        type=int,
        nargs="+",
        default=[*CAPACITIES, UNLIMITED],
        help=f"in blocks, {UNLIMITED} for no limit (default: %(default)s)",
    )
    parser.add_argument("--policies", nargs="+", choices=sorted(ORDERS), default=list(ORDERS), help="default: all")


def run(args: argparse.Namespace, report: Report) -> None:
    if args.trace is None:
        requests, source = synthetic_trace(), "synthetic trace"
    else:
        requests, source = read_trace(args.trace), args.trace.name
        hide_folder(report, args.trace)
    if min(args.capacities) < 0:
        raise BenchUnavailable(f"--capacities {min(args.capacities)}: blocks, or {UNLIMITED} for no limit")
    num_blocks = sum(map(len, requests))
    title = f"{source}: {len(requests)} requests, {num_blocks} blocks"
    report.add(Case.of("trace", [num_blocks], "blocks", note=title))
    best = {capacity: int(optimal_hits(requests, capacity or None).sum()) / num_blocks for capacity in args.capacities}
    rates = {
        policy: [replay(requests, policy, capacity) / num_blocks for capacity in args.capacities]
        for policy in args.policies
    }
    rates["optimal"] = list(best.values())
    print_table(title, args.capacities, rates)
    for policy, row in rates.items():
        for capacity, rate in zip(args.capacities, row, strict=True):
            report.add(Case.of(f"{policy}.{_name(capacity)}", [rate], "hit rate", ceiling=best[capacity] or None))


def hide_folder(report: Report, path: Path) -> None:
    """Name a file in the report's command without its folder, which is this machine's own business."""
    report.command = shlex.join([path.name if word == str(path) else word for word in shlex.split(report.command)])


def read_trace(path: Path) -> list[Tokens]:
    """The block ids of every request that has any, in the order of the file. Raises BenchUnavailable."""
    try:
        requests = [request.blocks for request in traces.read_trace(path).requests]
    except (OSError, TraceError) as error:
        raise BenchUnavailable(f"--trace {path} cannot be read: {error}") from error
    return [blocks for blocks in requests if len(blocks)]


def synthetic_trace(num_requests: int = 2_000, seed: int = 0) -> list[Tokens]:
    """Chats over a few system prompts. A turn repeats the chat and adds blocks of its own; some repeat or replace the
    turn before, and now and then a chat is taken up again that was long silent."""
    dice = np.random.default_rng(seed)
    next_id = 0

    def fresh(most: int) -> Tokens:
        nonlocal next_id
        start, next_id = next_id, next_id + int(dice.integers(1, most + 1))
        return np.arange(start, next_id)

    systems = [fresh(8) for _ in range(20)]
    chats: list[list[Tokens]] = []
    requests = []
    for _ in range(num_requests):
        turn = dice.random()
        if turn < 0.4 or not chats:
            chats.append([systems[min(int(dice.zipf(1.5)), len(systems)) - 1]])
            chat = chats[-1]
        else:
            chat = chats[-1 - int(dice.exponential(150)) % len(chats)]
            if turn < 0.5 and len(chat) > 1:
                chat.pop()
        if turn < 0.9:
            chat.append(fresh(32))
        requests.append(np.concatenate(chat))
    return requests


def replay(requests: Sequence[Tokens], policy: str, capacity: int) -> int:
    """How many blocks of the requests were held when they came. `capacity`: blocks, or UNLIMITED."""
    cache = CacheSimulation(ReplaySettings(capacity or None, policy=policy))
    hits = sum(cache.serve(request).device for request in requests)
    cache.check()
    return hits


def print_table(title: str, capacities: Sequence[int], rates: dict[str, list[float]]) -> None:
    """Policies as rows, capacities as columns."""
    print(f"hit rate, {title}\n{'capacity, blocks':>16}" + "".join(f"{_name(capacity):>11}" for capacity in capacities))
    for policy, row in rates.items():
        print(f"{policy:>16}" + "".join(f"{rate:11.4f}" for rate in row))


def _name(capacity: int) -> str:
    return str(capacity) if capacity != UNLIMITED else "unlimited"

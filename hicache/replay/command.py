"""`hicache replay TRACE`: hit rates over sizes and policies, tokens saved and time to first token."""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Sequence
from dataclasses import fields
from itertools import product
from typing import Any

from hicache.config.settings import Number, Size, Whole, as_flag
from hicache.console import counted, path_of, print_table, progress, require_writable, write_whole
from hicache.errors import ConfigError
from hicache.eviction.policy import EVICTION_POLICIES
from hicache.replay.cache import WRITE_POLICIES, ReplaySettings
from hicache.replay.cost import TierCosts, costs_of
from hicache.replay.flags import add_trace_flags
from hicache.replay.rows import UNLIMITED, hit_rates_svg, result_rows
from hicache.replay.simulation import ReplayResult
from hicache.replay.sweep import Case, cases_of, sweep
from hicache.replay.trace import Trace, read_trace
from hicache.storage.memory import usable_cpus

_TIERS = ("device", "host", "disk")
_DEVICE_BLOCKS = (1_000, 3_000, 10_000, 30_000)
_POLICIES = "auto,lru,lfu"
_SCHEMA = 1
_COUNT = Whole("a count; leave a tier out instead of giving it nothing", 1)
_RATE = as_flag(Number("a rate above 0", 1e-12))


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `hicache replay`."""
    parser.add_argument(
        "trace", metavar="TRACE", type=path_of, help="a trace of requests, may be gzipped: docs/replay.md"
    )
    add_trace_flags(parser)
    sizes = parser.add_argument_group(
        "sizes (a row for every combination; 'unlimited' is a size; default: a device of "
        f"{', '.join(map(str, _DEVICE_BLOCKS))} blocks, no host, no disk)"
    )
    for tier in _TIERS:
        either = sizes.add_mutually_exclusive_group()
        for unit in ("blocks", "tokens"):
            either.add_argument(
                f"--{tier}-{unit}", type=_capacity, nargs="+", metavar="N", help=f"{unit} of the {tier} tier"
            )
    rules = parser.add_argument_group("rules")
    rules.add_argument(
        "--policies", type=_policies, default=_POLICIES, metavar="NAMES",
        help=f"eviction policies, with commas between (default {_POLICIES}): {', '.join(sorted(EVICTION_POLICIES))}",
    )  # fmt: skip
    rules.add_argument(
        "--write-policy", choices=WRITE_POLICIES, default=WRITE_POLICIES[0], help="default write_through"
    )
    rules.add_argument(
        "--selective-hits", type=as_flag(_COUNT), default=2, metavar="N", help="of write_through_selective (default 2)"
    )
    _add_cost_flags(parser)
    parser.add_argument(
        "--processes", type=as_flag(_COUNT), default=len(usable_cpus()), metavar="N",
        help="replays beside each other (default: one a processor)",
    )  # fmt: skip
    parser.add_argument("--json", type=path_of, metavar="FILE", help="write the rows as JSON")
    parser.add_argument("--plot", type=path_of, metavar="FILE", help="draw the hit rates over the sizes, as SVG")


def _add_cost_flags(parser: argparse.ArgumentParser) -> None:
    costs = parser.add_argument_group("time to first token (needs the speed of prefill)")
    costs.add_argument(
        "--calibration", type=path_of, nargs="+", default=[], metavar="FILE",
        help="JSON with rates: engine.stats(), or the names of these flags with _; flags count more",
    )  # fmt: skip
    size = as_flag(Size("bytes of a token", 1))
    costs.add_argument("--bytes-per-token", type=size, metavar="SIZE", help="what a token stores")
    costs.add_argument("--prefill-tokens-per-s", type=_RATE, metavar="RATE", help="speed at the start of a prompt")
    pair = as_flag(Number("seconds of a pair of tokens"))
    costs.add_argument("--prefill-pair-s", type=pair, metavar="SECONDS", help="of a token for each token before it")
    rate = as_flag(Size("bytes a second", 1))
    costs.add_argument("--load-bytes-per-s", type=rate, metavar="SIZE", help="from host to device, like 50GB")
    costs.add_argument("--disk-bytes-per-s", type=rate, metavar="SIZE", help="from disk to host")


def run(flags: argparse.Namespace) -> int:
    """Replay and print the table; returns 0. Raises TraceError and ConfigError."""
    costs = costs_of(flags.calibration, {field.name: vars(flags)[field.name] for field in fields(TierCosts)})
    if flags.json is not None:
        require_writable("--json", flags.json)
    if flags.plot is not None:
        require_writable("--plot", flags.plot)
        importlib.import_module("matplotlib")  # rather than after a long replay
    trace = read_trace(flags.trace, flags.block_tokens, flags.time_unit)
    cases = cases_of(_settings(flags, trace.block_tokens), flags.policies)
    total = len(cases) * len(trace.requests)
    with progress("replay") as step:
        results = sweep(trace, cases, costs, flags.processes, lambda num_done: step(num_done, total))
    if flags.json is not None:
        write_whole(flags.json, _json(trace, results))
    if flags.plot is not None:
        write_whole(flags.plot, hit_rates_svg(results))
    _print(trace, cases, results)
    return 0


def _capacity(text: str) -> int | None:
    return None if text == UNLIMITED else int(as_flag(_COUNT)(text))


def _policies(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in EVICTION_POLICIES:
            raise argparse.ArgumentTypeError(f"{name!r} is unknown; use some of {', '.join(sorted(EVICTION_POLICIES))}")
    return names


def _settings(flags: argparse.Namespace, block_tokens: int) -> list[ReplaySettings]:
    """One for every combination of sizes."""
    device, host, disk = (_sizes(flags, tier, block_tokens) for tier in _TIERS)
    return [
        ReplaySettings(*blocks, write_policy=flags.write_policy, selective_hits=flags.selective_hits)
        for blocks in product(device or _DEVICE_BLOCKS, host or (0,), disk or (0,))
    ]


def _sizes(flags: argparse.Namespace, tier: str, block_tokens: int) -> tuple[int | None, ...]:
    """Of a tier in whole blocks, each once; none for no such tier."""
    given = vars(flags)
    sizes: list[int | None] = list(given[f"{tier}_blocks"] or ())
    for tokens in given[f"{tier}_tokens"] or ():
        if tokens is not None and tokens < block_tokens:
            raise ConfigError(f"--{tier}-tokens {tokens} is less than a block; give at least {block_tokens}")
        sizes.append(None if tokens is None else tokens // block_tokens)
    return tuple(dict.fromkeys(sizes))


def _print(trace: Trace, cases: Sequence[Case], results: Sequence[ReplayResult]) -> None:
    """A row a case; the optimum ends those of one size."""
    rows = result_rows(results)
    lines: list[list[str] | None] = []
    for case, row in zip(cases, rows, strict=True):
        lines += [[*row.values()], None] if case.row == "optimal" else [[*row.values()]]
    requests, blocks = counted(len(trace.requests)), counted(trace.num_blocks)
    span = f"{trace.requests[-1].time_s:,.0f} s"  # shows a wrong unit of time
    title = f"{trace.name}: {requests} requests in {span}, {blocks} blocks of {trace.block_tokens} tokens"
    print_table([*rows[0]], lines, title=title)


def _json(trace: Trace, results: Sequence[ReplayResult]) -> str:
    content: dict[str, Any] = {
        "schema": _SCHEMA,
        "trace": trace.name,
        "block_tokens": trace.block_tokens,
        "requests": len(trace.requests),
        "blocks": trace.num_blocks,
        "rows": [result.to_json() for result in results],
    }
    return json.dumps(content, indent=1) + "\n"

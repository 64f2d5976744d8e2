"""`hicache replay TRACE`: hit rates, computed tokens and copies by size and policy, and a miss-ratio curve."""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from itertools import product
from typing import Any

from hicache.config.settings import Integer, Number, Size, as_flag
from hicache.console import counted, path_of, print_table, progress, require_writable, write_atomically
from hicache.errors import ConfigError
from hicache.pages.order import RANK_POLICIES
from hicache.replay.cost import TierCosts, costs_of
from hicache.replay.curve import CurvePoint, miss_ratio_curve
from hicache.replay.flags import add_trace_flags, trace_of
from hicache.replay.hints import HINTS, HintName
from hicache.replay.rows import UNLIMITED, copy_rows, curve_rows, hit_rates_svg, hit_rows, work_rows
from hicache.replay.settings import WRITE_POLICIES, ReplaySettings
from hicache.replay.simulation import ReplayResult
from hicache.replay.sweep import Case, cases_of, sweep, with_comparisons
from hicache.replay.trace import Trace
from hicache.storage.memory import usable_cpus

_TIERS = ("device", "host", "disk")
_DEVICE_BLOCKS = (1_000, 3_000, 10_000, 30_000)
_POLICIES = "auto,lru,lfu"
_SCHEMA = 1
_COUNT = Integer("a count; to simulate no such tier, leave the flag out", 1)
_RATE = as_flag(Number("a rate above 0", 1e-12))
_BYTES = Size("bytes of a tier, like 32GiB", 1)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `hicache replay` to the parser."""
    parser.add_argument(
        "trace", metavar="TRACE", type=path_of, help="a trace of requests, plain or gzipped; formats: docs/replay.md"
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
        either.add_argument(
            f"--{tier}-bytes", type=_byte_capacity, nargs="+", metavar="SIZE", help=f"bytes of the {tier} tier"
        )
    rules = parser.add_argument_group("rules")
    rules.add_argument(
        "--policies", type=_policies, default=_POLICIES, metavar="NAMES",
        help=f"eviction policies, separated by commas (default {_POLICIES}): {', '.join(sorted(RANK_POLICIES))}",
    )  # fmt: skip
    rules.add_argument(
        "--host-policy", choices=sorted(RANK_POLICIES), default="",
        help="eviction policy of the host (default: that of the device; lru if that is auto under exclusive)",
    )  # fmt: skip
    rules.add_argument(
        "--write-policy", choices=WRITE_POLICIES, default="",
        help="when blocks are backed up to the host (default: that of an engine; write_through with a disk, else "
        "exclusive)",
    )  # fmt: skip
    rules.add_argument(
        "--disk-write-budget", type=as_flag(Number("blocks", 1e-6)), metavar="BLOCKS",
        help="maximum blocks written to the disk for each requested block (default: no limit)",
    )  # fmt: skip
    rules.add_argument(
        "--hints", type=_hints, default=(), metavar="NAMES",
        help="hints that requests give, computed from the trace and separated by commas: session (a request is the "
        "last of its session), next (seconds until the next turn)",
    )  # fmt: skip
    _add_cost_flags(parser)
    parser.add_argument(
        "--processes", type=as_flag(_COUNT), default=len(usable_cpus()), metavar="N",
        help="replays that run in parallel (default: one per processor)",
    )  # fmt: skip
    parser.add_argument(
        "--curve", action="store_true", help="also print the miss ratio of one tier by size, for lru and the optimum"
    )
    parser.add_argument("--json", type=path_of, metavar="FILE", help="write the rows as JSON")
    parser.add_argument("--plot", type=path_of, metavar="FILE", help="write a plot of the hit rates by size, as SVG")


def _add_cost_flags(parser: argparse.ArgumentParser) -> None:
    costs = parser.add_argument_group(
        "cost model (bytes, seconds of the GPU, time to first token; the times need --prefill-tokens-per-s)"
    )
    costs.add_argument(
        "--calibration", type=path_of, nargs="+", default=[], metavar="FILE",
        help="JSON files with rates: engine.stats(), or the names of these flags with underscores; flags override them",
    )  # fmt: skip
    size = as_flag(Size("bytes of a token", 1))
    costs.add_argument("--bytes-per-token", type=size, metavar="SIZE", help="bytes of a token on the device")
    costs.add_argument(
        "--host-bytes-per-token", type=size, metavar="SIZE",
        help="bytes of a token on host and disk, where pages may be packed (default: --bytes-per-token)",
    )  # fmt: skip
    costs.add_argument("--prefill-tokens-per-s", type=_RATE, metavar="RATE", help="rate of prefill at position 0")
    pair = as_flag(Number("seconds of a pair of tokens"))
    costs.add_argument(
        "--prefill-pair-s", type=pair, metavar="SECONDS", help="added prefill time of a token for each token before it"
    )
    rate = as_flag(Size("bytes a second", 1))
    costs.add_argument("--load-bytes-per-s", type=rate, metavar="SIZE", help="host to device, per second, like 50GB")
    costs.add_argument("--disk-bytes-per-s", type=rate, metavar="SIZE", help="disk to host, per second, like 3GB")


def run(flags: argparse.Namespace) -> int:
    """Replay and print the table; returns 0. Raises TraceError and ConfigError."""
    costs = costs_of(flags.calibration, {field.name: vars(flags)[field.name] for field in fields(TierCosts)})
    if flags.json is not None:
        require_writable("--json", flags.json)
    if flags.plot is not None:
        require_writable("--plot", flags.plot)
        importlib.import_module("matplotlib")  # raises here if the package is missing, instead of after a long replay
    trace = trace_of(flags)
    rows = cases_of(_settings(flags, trace.block_tokens, costs), flags.policies)
    cases = with_comparisons(rows)
    total = len(cases) * len(trace.requests)
    with progress("replay") as step:
        found = sweep(trace, cases, costs, flags.processes, lambda num_done: step(num_done, total))
        curve = miss_ratio_curve(trace) if flags.curve else []
    results = dict(zip(cases, found, strict=True))
    if flags.json is not None:
        write_atomically(flags.json, _json(trace, rows, results, curve))
    if flags.plot is not None:
        write_atomically(flags.plot, hit_rates_svg([results[case] for case in rows]))
    _print(trace, rows, results)
    if curve:
        lines = curve_rows(curve, trace.block_tokens, costs)
        print_table([*lines[0]], [[*line.values()] for line in lines], title="miss ratio of one tier")
    return 0


def _capacity(text: str) -> int | None:
    return None if text == UNLIMITED else int(as_flag(_COUNT)(text))


def _byte_capacity(text: str) -> int | None:
    return None if text == UNLIMITED else int(as_flag(_BYTES)(text))


def _policies(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in RANK_POLICIES:
            raise argparse.ArgumentTypeError(f"{name!r} is unknown; use some of {', '.join(sorted(RANK_POLICIES))}")
    return names


def _hints(text: str) -> tuple[HintName, ...]:
    names = {name.strip() for name in text.split(",")}
    if unknown := sorted(names.difference(HINTS)):
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is unknown; use some of {', '.join(HINTS)}")
    return tuple(name for name in HINTS if name in names)


def _settings(flags: argparse.Namespace, block_tokens: int, costs: TierCosts | None) -> list[ReplaySettings]:
    """Return settings for each combination of sizes."""
    device, host, disk = (_sizes(flags, tier, block_tokens, costs) for tier in _TIERS)
    rules = {name: vars(flags)[name] for name in ("write_policy", "host_policy", "hints", "disk_write_budget")}
    return [
        ReplaySettings(*blocks, **rules) for blocks in product(device or _DEVICE_BLOCKS, host or (0,), disk or (0,))
    ]


def _sizes(flags: argparse.Namespace, tier: str, block_tokens: int, costs: TierCosts | None) -> tuple[int | None, ...]:
    """Return the distinct sizes of a tier in full blocks; an empty tuple if no flag names the tier."""
    given, token_bytes = vars(flags), 0.0 if costs is None else costs.bytes_of(tier)
    sizes: list[int | None] = list(given[f"{tier}_blocks"] or ())
    for unit, in_block in (("tokens", block_tokens), ("bytes", block_tokens * token_bytes)):
        for size in given[f"{tier}_{unit}"] or ():
            if not in_block:
                raise ConfigError(f"--{tier}-bytes needs the bytes of a token; give --bytes-per-token, like 128KiB")
            if size is not None and size < in_block:
                raise ConfigError(f"--{tier}-{unit} {size} is less than one block; give at least {in_block:g}")
            sizes.append(None if size is None else int(size // in_block))
    return tuple(dict.fromkeys(sizes))


def _print(trace: Trace, rows: Sequence[Case], results: Mapping[Case, ReplayResult]) -> None:
    """Print tables of hit rates and computed tokens, and of copies if there is a host. The last row for each size is
    the optimum."""
    requests, blocks = counted(len(trace.requests)), counted(trace.num_blocks)
    span = f"{trace.requests[-1].time_s:,.0f} s"  # an implausible duration reveals a wrong --time-unit
    title = f"{trace.name}: {requests} requests in {span}, {blocks} blocks of {trace.block_tokens} tokens"
    if trace.num_warm_up:
        title += f", the first {counted(trace.num_warm_up)} requests not counted"
    is_moving = any(case.settings.host_blocks != 0 for case in rows)
    has_bytes = any(results[case].copied_bytes for case in rows)
    _print_rows(title, rows, hit_rows(rows, results))
    _print_rows("prompts: tokens that are computed, and seconds", rows, work_rows([results[case] for case in rows]))
    if is_moving:
        moved = [case for case in rows if case.row == "policy"]
        copies = copy_rows([results[case] for case in moved])
        _print_rows(f"copies, {'GiB' if has_bytes else 'blocks'}", moved, copies)


def _print_rows(title: str, cases: Sequence[Case], rows: Sequence[Mapping[str, str]]) -> None:
    lines: list[list[str] | None] = []
    for case, row in zip(cases, rows, strict=True):
        lines += [[*row.values()], None] if case.row == "optimal" else [[*row.values()]]
    print_table([*rows[0]], lines, title=title)


def _json(trace: Trace, rows: Sequence[Case], results: Mapping[Case, ReplayResult], curve: Sequence[CurvePoint]) -> str:
    content: dict[str, Any] = {
        "schema": _SCHEMA,
        "trace": trace.name,
        "block_tokens": trace.block_tokens,
        "requests": len(trace.requests),
        "warm_up_requests": trace.num_warm_up,
        "blocks": trace.num_blocks,
        "rows": [
            results[case].to_json()
            | {f"{name}_hit_rate": results[other].hit_rate for name, other in case.comparisons.items()}
            for case in rows
        ],
    }
    if curve:
        content["miss_ratio_curve"] = [asdict(point) for point in curve]
    return json.dumps(content, indent=1) + "\n"

"""The flags of `hicache replay` and `hicache plan` that describe the format of a trace."""

from __future__ import annotations

import argparse
from dataclasses import replace

from hicache.config.settings import Integer, Number, as_flag
from hicache.errors import ConfigError
from hicache.replay.trace import TIME_UNITS, Trace, read_trace


def add_trace_flags(parser: argparse.ArgumentParser) -> None:
    """Add `--block-tokens`, `--time-unit` and `--warm-up`, which `trace_of` reads."""
    parser.add_argument(
        "--block-tokens",
        type=as_flag(Integer("a count", 1)),
        metavar="N",
        help="tokens of a block (default: the block size of the trace)",
    )
    parser.add_argument(
        "--time-unit", choices=TIME_UNITS, help="unit of the times in the trace (default: the unit of its format)"
    )
    parser.add_argument(
        "--warm-up",
        type=as_flag(Number("a share of the requests", 0, 1)),
        default=0.0,
        metavar="SHARE",
        help="share of the requests that only fill the tiers and are not counted (default 0)",
    )


def trace_of(flags: argparse.Namespace) -> Trace:
    """Read the trace that `flags` name. Raises TraceError for an invalid trace. Raises ConfigError if all requests are
    in the warm-up, so that no request would be counted."""
    trace = read_trace(flags.trace, flags.block_tokens, flags.time_unit)
    num_warm_up = int(flags.warm_up * len(trace.requests))
    if num_warm_up == len(trace.requests):
        raise ConfigError(f"--warm-up {flags.warm_up} leaves no request to count; give a share below 1, like 0.5")
    return replace(trace, num_warm_up=num_warm_up)

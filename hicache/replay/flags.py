"""The flags that say how a trace is read, of `hicache replay` and `hicache plan`."""

from __future__ import annotations

import argparse

from hicache.config.settings import Whole, as_flag
from hicache.replay.trace import TIME_UNITS


def add_trace_flags(parser: argparse.ArgumentParser) -> None:
    """`--block-tokens` and `--time-unit`: arguments of `read_trace`."""
    parser.add_argument(
        "--block-tokens",
        type=as_flag(Whole("a count", 1)),
        metavar="N",
        help="tokens of a block (default: the trace's)",
    )
    parser.add_argument(
        "--time-unit", choices=TIME_UNITS, help="of the times in the trace (default: that of its format)"
    )

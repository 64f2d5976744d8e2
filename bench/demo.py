"""The demo as a benchmark: time to first token, and the hits of each tier.

The ceiling of the time to first token is the time of computing the same prompts without a cache, in the same process;
the target is a third of it. May import bench.common and hicache.serving.
"""

from __future__ import annotations

import argparse

from hicache.bench.common import BenchUnavailable, Report
from hicache.serving.demo import TIERS, Outcome, converse
from hicache.serving.demo_flags import add_flags

NAME = "demo"
DESCRIPTION = "long conversations through device, host and disk against computing every prompt again"
# The engine's counters of bytes that moved between two tiers.
_BYTES_MOVED = {
    "device_to_host": "backup.bytes",
    "host_to_device": "restore.bytes",
    "host_to_disk": "persist.bytes",
    "disk_to_host": "prefetch.bytes",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--documents", type=int, default=6, help="conversations (default 6)")
    parser.add_argument("--turns", type=int, default=3, help="questions to each (default 3)")
    parser.add_argument(
        "--document-tokens",
        type=int,
        help="tokens of the longest (default 12288, on CUDA, which computes faster, 98304)",
    )
    parser.add_argument("--model", metavar="PATH", help="a local transformers model (default: the demo's random one)")


def run(args: argparse.Namespace, report: Report) -> None:
    """Run the demo once on `args.device` and record its outcome."""
    if args.turns < 2:
        raise BenchUnavailable("needs --turns of at least 2: the first turns have nothing to find")
    tokens = args.document_tokens or (98304 if args.device.type == "cuda" else 12288)
    parser = argparse.ArgumentParser()
    add_flags(parser)
    flags = ["--document-tokens", str(tokens), "--max-new-tokens", "16", "--device", str(args.device)]
    flags += ["--documents", str(args.documents), "--turns", str(args.turns), "--model", args.model or "random"]
    record(converse(parser.parse_args(flags), print), report)


def record(outcome: Outcome, report: Report) -> None:
    """Add the cases of one demo to the report."""
    later = [turn for turn in outcome.turns if turn.number]
    again = [turn.recomputed.ttft_s * 1e3 for turn in later if turn.recomputed is not None]
    compared = f"{sum(len(turn.cached.tokens) for turn in outcome.turns)} tokens compared"
    report.case("demo.identical", [float(outcome.identical)], "share", ceiling=1.0, target=1.0, note=compared)
    note = f"{outcome.model}, turns after the first; the ceiling is computing the same prompts without a cache"
    cached = [turn.cached.ttft_s * 1e3 for turn in later]
    report.case("demo.ttft", cached, "ms", better="lower", ceiling=again, target=1 / 3, note=note)
    report.case("demo.ttft.recompute", again, "ms", better="lower")
    for tier in TIERS[:-1]:
        share = outcome.hit_tokens[tier] / outcome.prompt_tokens
        size = outcome.sizes.get(tier)
        capacity = f"{size} tokens for {outcome.sizes['working_set']}" if size else "all of them"
        report.case(f"demo.hit.{tier}", [share], "share", note=f"of all prompt tokens; the tier holds {capacity}")
    for way, counter in _BYTES_MOVED.items():
        report.case(f"demo.moved.{way}", [outcome.stats[counter] / 1e6], "MB", better="lower")
    report.case("demo.seconds", [outcome.seconds], "s", better="lower")

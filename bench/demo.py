"""The demo as a benchmark: how much sooner the first token comes, and what each tier contributed.

The ceiling of the time to first token is that of computing the same prompts without any cache, in the same process; the
target is a third of it. May import bench.common and hicache.cli.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from hicache.bench.common import BenchUnavailable, Report
from hicache.cli import main

NAME = "demo"
DESCRIPTION = "long conversations through device, host and disk against computing every prompt again"


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
    """Run `hicache demo` once on `args.device` and record what it found out."""
    if args.turns < 2:
        raise BenchUnavailable("needs --turns of at least 2: the first turns have nothing to find")
    with tempfile.TemporaryDirectory(prefix="hicache-bench-") as folder:
        out = Path(folder) / "demo.json"
        tokens = args.document_tokens or (98304 if args.device.type == "cuda" else 12288)
        flags = ["demo", "--document-tokens", str(tokens), "--device", str(args.device), "--json", str(out)]
        flags += ["--documents", str(args.documents), "--turns", str(args.turns)]
        flags += ["--model", args.model or "random"]
        status = main(flags)
        if status not in (0, 1):
            raise BenchUnavailable(f"the demo ended with status {status}")
        record(json.loads(out.read_text()), report)


def record(figures: dict[str, Any], report: Report) -> None:
    """The cases of one demo, from its `--json` figures."""
    later = [turn for turn in figures["turns"] if turn["turn"] > 1]
    cached = [turn["ttft_ms"]["cached"] for turn in later]
    again = [turn["ttft_ms"]["recompute"] for turn in later]
    pages = figures["pages"]
    checked = f"{figures['generated_tokens']} tokens and {pages['compared']} pages compared"
    report.case("demo.identical", [float(figures["identical"])], "share", ceiling=1.0, target=1.0, note=checked)
    note = f"{figures['model']}, turns after the first; the ceiling is computing the same prompts without a cache"
    report.case("demo.ttft", cached, "ms", better="lower", ceiling=again, target=1 / 3, note=note)
    report.case("demo.ttft.recompute", again, "ms", better="lower")
    for tier, tokens in figures["hit_tokens"].items():
        share = tokens / figures["prompt_tokens"]
        size = figures["sizes"].get(f"{tier}_tokens")
        held = f"{size} tokens for {figures['sizes']['working_set_tokens']}" if size else "all of them"
        report.case(f"demo.hit.{tier}", [share], "share", note=f"of all prompt tokens; the tier holds {held}")
    for way, num_bytes in figures["bytes_moved"].items():
        report.case(f"demo.moved.{way}", [num_bytes / 1e6], "MB", better="lower")
    report.case("demo.seconds", [figures["seconds"]], "s", better="lower")

"""The plug-ins under other servers, through the servers' own classes, beside the page store or the servers' file tiers.

    vllm.*      secondary tiers of vLLM, chunks of 1 MiB, beside the page store and vLLM's tier of files
    sglang.*    SGLang's zero-copy storage calls, pages of 1 MiB, beside the page store
    lmcache.*   the rounds of `lmcache bench l2`, beside LMCache's adapter for files

Each server has an environment of its own (`make test-servers` makes them), and what is not installed is left out with
a line. So there is a result file for each: integrations-lmcache-<machine>.json. From the repository:

    PYTHONPATH=build/package ~/.cache/hicache/environments/lmcache-*/bin/python -m hicache.cli bench run integrations

Everything is timed in turns in one process; what came back is compared with what was stored, outside the timing. Ours
compresses and verifies; nobody drops caches.
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
from pathlib import Path

from hicache.bench.common import BenchUnavailable, Report
from hicache.bench.integrations_lmcache import measure_lmcache
from hicache.bench.integrations_sglang import measure_sglang
from hicache.bench.integrations_vllm import measure_vllm

NAME = "integrations"
DESCRIPTION = "plug-ins under vLLM, SGLang and LMCache, against the page store and the servers' own tiers of files"

_PARTS = {"vllm": measure_vllm, "sglang": measure_sglang, "lmcache": measure_lmcache}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dir", type=Path, help="folder on the disk to be measured (default: the working directory)")
    parser.add_argument("--samples", type=int, default=9, help="timed rounds (default: %(default)s)")


def run(args: argparse.Namespace, report: Report) -> None:
    # A folder of that name, like an environment's own, has no origin.
    specs = {server: importlib.util.find_spec(server) for server in _PARTS}
    installed = [server for server, spec in specs.items() if spec is not None and spec.origin is not None]
    for server in sorted(_PARTS.keys() - installed):
        print(f"{server}: left out, not installed here")
    if not installed:
        raise BenchUnavailable("none of the servers is installed here; use an environment of make test-servers")
    report.bench = "-".join([NAME, *installed])
    with tempfile.TemporaryDirectory(prefix="bench-integrations-", dir=args.dir or Path.cwd()) as folder:
        for server in installed:
            _PARTS[server](report, Path(folder) / server, args.samples)

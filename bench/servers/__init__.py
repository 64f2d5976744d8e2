"""A real server with a model of random weights: no offloading, its own CPU and disk tiers, and ours, in one run.

Each mode has its own process, so that a restart is real, and the device is free for the next mode. The workload
`documents` exists only for vLLM:

    first             time to the first token of new prompts, with `HiCacheOffloadingSpec` and a disk, over no
                      offloading; .cpu, .fs: with vLLM's CPU tier, with its disk tier; .spec: with
                      `HiCacheOffloadingSpec` without a disk
    host.one          a document from CPU memory and 8 tokens, with `HiCacheOffloadingSpec`, over vLLM's own CPU tier
    restart.over_fs   time to the first token of documents after a restart, with `HiCacheOffloadingSpec` and a disk,
                      over vLLM's disk tier; .over_computing: over no offloading
    bytes.<run>       bytes that a run moved, by vLLM's metrics
    tokens            answers that equal another run's with the same number of cached tokens; a difference is an error

Before a restart all files are dropped from the kernel's page cache. With `--document-tokens N` the names begin with
"tokensN". The workload `sessions` has other rows: it has many concurrent requests, and also serves by
SGLang.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from hicache.bench.common import BenchUnavailable, Report
from hicache.bench.servers import sessions, vllm
from hicache.bench.servers.program import file_system, run_program
from hicache.bench.servers.workload import Served, compare_tokens

NAME = "servers"
DESCRIPTION = "a real server (vLLM, SGLang): no offloading, its own CPU and disk tiers, and ours"

_PATIENCE_S = 600.0

_Side = tuple[str, str, Callable[[Served, str], list[float]]]  # run, workload, function that returns the values


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--server", choices=("vllm", "sglang"), default="vllm")
    workload = "documents, one request at a time (vLLM); or sessions of coding agents, many at once"
    parser.add_argument("--workload", choices=("documents", "sessions"), default="documents", help=workload)
    modes = "modes, with commas; a case needs both of its modes (default: all): none, cpu, spec, fs, "
    modes += "hicache; those of sessions: docs/benchmarks.md"
    parser.add_argument("--modes", type=lambda text: text.split(","), metavar="MODES", help=modes)
    parser.add_argument("--model", default="", help="name or folder (default: random weights, 8B geometry)")
    parser.add_argument("--cpu-bytes", type=int, default=0, help="of the CPU tier (default: 36 GiB, small: 64 MiB)")
    chunk = "of the device's cache in a chunk of the offloading, in every mode (default: 4)"
    parser.add_argument("--blocks-per-chunk", type=int, default=4, help=chunk)
    tokens = "of a document of the workload documents, in the names of rows (default: 16384, small: 1024)"
    parser.add_argument("--document-tokens", type=int, default=0, help=tokens)
    parser.add_argument("--folder", type=Path, help="on the disk to measure (default: a temporary folder)")
    sessions.add_arguments(parser)
    parser.add_argument("--small", action="store_true", help="a tiny model and short documents; always so on CPUs")


def run(args: argparse.Namespace, report: Report) -> None:
    args.model = str(Path(args.model).resolve()) if args.model and Path(args.model).exists() else args.model
    args.small = args.small or args.device.type == "cpu"
    (sessions.run_sessions if args.workload == "sessions" else _run_documents)(args, report)


def _run_documents(args: argparse.Namespace, report: Report) -> None:
    if args.server != "vllm":
        raise BenchUnavailable(f"--server {args.server} serves sessions alone; give --workload sessions")
    if reason := vllm.missing():
        raise BenchUnavailable(reason)
    modes = {name.partition(".")[0] for name in vllm.RUNS}
    if unknown := set(args.modes or ()) - modes:
        raise BenchUnavailable(f"--modes {','.join(sorted(unknown))}: there are {', '.join(sorted(modes))}")
    length = [f"tokens{args.document_tokens}"] if args.document_tokens else []
    report.bench = "-".join([NAME, args.server, *length, *(args.modes or ())])  # a part does not replace all results
    runs: dict[str, Served] = {}
    with tempfile.TemporaryDirectory(prefix="hicache-servers-", dir=args.folder) as folder:
        medium = file_system(Path(folder))
        for name in vllm.RUNS:
            if not args.modes or name.partition(".")[0] in args.modes:
                runs[name] = _serve(name, args, Path(folder).resolve())
                if f"{name}.restart" not in vllm.RUNS:  # the disk may be too small for the files of all modes
                    shutil.rmtree(Path(folder) / name.partition(".")[0], ignore_errors=True)
                report.software[args.server] = runs[name].version
                print(f"{name}: started in {runs[name].start_s:.0f} s", flush=True)
    _compare_modes(report, args, runs)
    for name, served in runs.items():
        if served.num_bytes:
            note = ", ".join(f"{what} {number / 1e9:.3f} GB" for what, number in served.num_bytes.items())
            gb = sum(served.num_bytes.values()) / 1e9
            report.case(f"{_base(args)}.bytes.{name}", [gb], "GB", note=f"{note}; files on {medium}")
    compared, different = compare_tokens(runs)
    note = f"equal another's to the same prompt with as many cached tokens; {different} different ones"
    report.case(f"{_base(args)}.tokens", [compared], "answers", note=note)


def _base(args: argparse.Namespace) -> str:
    length = f".tokens{args.document_tokens}" if args.document_tokens else ""
    return f"{NAME}.{args.server}{length}"


def _serve(name: str, args: argparse.Namespace, folder: Path) -> Served:
    task = vllm.documents_task(name, args, folder)
    environment = {**vllm.ENVIRONMENT, **({} if args.model else {"HF_HUB_OFFLINE": "1"})}
    try:
        result = run_program(vllm.__name__, name, task, environment, folder, _PATIENCE_S)
    finally:
        vllm.clean_up(name, folder)
    return Served.from_json(result)


def _compare_modes(report: Report, args: argparse.Namespace, runs: dict[str, Served]) -> None:
    """Add the cases of the finished runs. The targets are for a model that fills a GPU."""
    served = {name: run.answers.keys() for name, run in runs.items()}

    def add(name: str, side: _Side, other: _Side, target: float | None = None) -> None:
        (run, workload, take), (other_run, other_workload, take_other) = side, other
        if workload in served.get(run, ()) and other_workload in served.get(other_run, ()):
            values, ceiling = take(runs[run], workload), take_other(runs[other_run], other_workload)
            cached, of_ceiling = runs[run].cached(workload), runs[other_run].cached(other_workload)
            report.case(
                f"{_base(args)}.{name}",
                values,
                "ms",
                better="lower",
                ceiling=ceiling,
                target=None if args.small else target,
                note=f"{len(runs[run].first(workload))} prompts, {cached:.0f} tokens of each cached by the server's "
                f"count; {of_ceiling:.0f} of the ceiling's",
            )

    computed = ("none", "first", Served.first_ms)
    restarted, of_files = ((f"{mode}.restart", "first", Served.first_ms) for mode in ("hicache", "fs"))
    for mode in [name for name in runs if name != "none" and not name.endswith(".restart")]:
        is_hicache = mode == "hicache"
        add(
            "first" if is_hicache else f"first.{mode}",
            (mode, "first", Served.first_ms),
            computed,
            1.03 if is_hicache else None,
        )
    add("host.one", ("spec", "host", Served.total_ms), ("cpu", "host", Served.total_ms), 0.97)
    add("restart.over_fs", restarted, of_files, 0.85)
    add("restart.over_computing", restarted, computed, 1.03)

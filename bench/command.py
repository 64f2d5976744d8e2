"""`hicache bench list`, `run`, `compare` and `plot`; in a checkout also `python -m bench`.

A benchmark is a module of this package with `NAME`, `DESCRIPTION`, `add_arguments` and `run`. This module finds the
benchmarks, parses their arguments, runs them, writes the result files and prints tables. `run all` runs each benchmark
that this machine can run, with default arguments. `run small` runs some benchmarks with little data, in a few minutes.

May import every module of the package. It imports the benchmarks by name.
"""

from __future__ import annotations

import argparse
import importlib
import math
import pkgutil
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn, cast

import torch

from hicache import bench
from hicache.bench.common import BenchModule, BenchUnavailable, Report, read_report
from hicache.bench.compare import add_compare_flags, compare_command
from hicache.bench.machine import RESULTS, machine_name
from hicache.console import print_table

_PLACES = ("--out", "--resume")
_PARTS = {"NAME", "DESCRIPTION", "add_arguments", "run"}
SETS: dict[str, dict[str, list[str]]] = {
    "small": {
        "transfer": ["--geometry", "gqa8b", "--samples", "5"],
        "disk": ["--gib", "0.25", "--small-pages", "50000", "--samples", "3"],
        "device": [],
        "both": [],
    },
}


# The benchmarks whose figures README and all_results.md quote, in the order in which they run: name, arguments, and
# minutes on one H200. A benchmark of servers has one run for each mode, and `minutes` is the time of one run. The
# result file is written after each run.
RELEASE: list[tuple[str, list[str], float]] = [
    ("transfer", [], 3),
    ("packed", [], 4),
    ("device", [], 2),
    ("disk", [], 4),
    ("overlap", [], 3),
    ("tree", [], 1),
    ("steps", [], 1),
    ("remote", [], 2),
    ("serving", ["--only", "decode", "prefill", "host"], 4),
    ("serving", ["--only", "sessions-host"], 4),
    ("serving", ["--only", "stream", "compiled"], 6),
    ("both", ["--only", "rates", "eight"], 6),
    ("both", ["--only", "neighbours", "restart"], 4),
    ("both", ["--only", "sessions"], 5),
    ("servers", ["--modes", "none,cpu,lazy,lmcache,raw,hicache", "--samples", "3"], 5),
    ("servers", ["--modes", "cpu,lazy,hicache", "--cpu-gib", "32,96"], 5),
    ("servers", ["--modes", "lazy,hicache", "--clients", "8,32"], 5),
    ("servers", ["--modes", "fs,disk,disk-always,disk-never"], 4),
    ("servers", ["--modes", "fs,disk,disk-always,disk-never", "--folder", "/dev/shm"], 4),
    ("servers", ["--workload", "conversation", "--modes", "none,cpu,hicache"], 3),
    ("servers", ["--server", "sglang", "--modes", "none,files,hicache"], 4),
]
_FOLDER_FLAGS = {"disk": "--dir", "both": "--folder", "servers": "--folder"}


class _Parser(argparse.ArgumentParser):
    """Reports wrong arguments of a benchmark in one line, like all errors of the command line."""

    def error(self, message: str) -> NoReturn:
        raise BenchUnavailable(f"{message}; '{self.prog} --help' lists the arguments")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the commands of `hicache bench` and their flags."""
    commands = parser.add_subparsers(dest="bench_command", metavar="COMMAND", required=True)
    commands.add_parser("list", help="name and description of every benchmark", allow_abbrev=False)
    named = "a name from the list; small: a few minutes on any machine; all: each that this machine can run; release: "
    named += "those that README and docs/all_results.md quote, into the folder of --resume"
    run_parser = commands.add_parser("run", help="run one benchmark, a small set, or all", allow_abbrev=False)
    run_parser.add_argument("name", help=named)
    run_parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments; `run NAME --help` shows them")
    text = "compare two result files, or two folders of them"
    add_compare_flags(commands.add_parser("compare", help=text, description=text, allow_abbrev=False))


def run(flags: argparse.Namespace) -> int:
    """Run a command. Returns 0, or 1 if `compare` found a regression. Raises HiCacheError or OSError for wrong
    input."""
    if flags.bench_command == "compare":
        return compare_command(flags)
    benches, broken = find_benches()
    if flags.bench_command == "list":
        _list(benches, broken)
    else:
        _run(flags.name, flags.arguments, benches, broken)
    return 0


def find_benches() -> tuple[dict[str, BenchModule], dict[str, str]]:
    """Return the benchmarks by name, and the import error of each module that cannot be imported here.

    A module without `NAME`, `DESCRIPTION`, `add_arguments` and `run` is a helper. Raises TypeError for a module with
    some but not all of these four names.
    """
    benches: dict[str, BenchModule] = {}
    broken: dict[str, str] = {}
    for info in pkgutil.iter_modules(bench.__path__):
        if info.name in ("__main__", "command"):
            continue
        try:
            module = importlib.import_module(f"{bench.__name__}.{info.name}")
        except ImportError as error:
            broken[info.name] = str(error)
            continue
        present = _PARTS & vars(module).keys()
        if present and present != _PARTS:
            raise TypeError(f"bench/{info.name}.py lacks {', '.join(sorted(_PARTS - present))}")
        if present:
            found = cast(BenchModule, module)
            benches[found.NAME] = found
    return benches, broken


def _device(text: str) -> torch.device:
    try:
        device = torch.device(text)
    except RuntimeError:
        raise argparse.ArgumentTypeError(f"{text!r} is no device; write cpu, cuda or cuda:1") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError(f"{text!r}: torch sees no CUDA device here; use --device cpu")
    return device


def bench_parser(module: BenchModule, results: Path = RESULTS) -> argparse.ArgumentParser:
    """Return the parser for the arguments of one benchmark: its own arguments, and the arguments that all benchmarks
    have."""
    parser = _Parser(prog=f"hicache bench run {module.NAME}", description=module.DESCRIPTION)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=_device, default=torch.device(default), help=f"default: {default}")
    out = f"folder of the result file (default: {results})"
    parser.add_argument("--out", type=Path, default=results, metavar="DIR", help=out)
    parser.add_argument("--commit", default="", metavar="ID", help="commit of a tree that was copied without its .git")
    text = "add to a result file of the same kind of machine and code; it is created if it is missing"
    parser.add_argument("--resume", type=Path, metavar="FILE", help=text)
    module.add_arguments(parser)
    return parser


def command_line(name: str, arguments: Sequence[str]) -> str:
    """Return the command that repeats a run. `--out` and `--resume` are left out, because they do not change the
    measurement."""
    kept: list[str] = []
    skip = False
    for argument in arguments:
        if not skip and argument.partition("=")[0] not in _PLACES:
            kept.append(argument)
        skip = not skip and argument in _PLACES
    return shlex.join(["hicache", "bench", "run", name, *kept])


def run_one(module: BenchModule, arguments: Sequence[str], results: Path = RESULTS) -> Path:
    """Run one benchmark, write its file, print its table and return the file's path."""
    args = bench_parser(module, results).parse_args(arguments)
    report = Report.start(module.NAME, args.device, command_line(module.NAME, arguments), args.commit)
    if args.resume:
        report.resume(args.resume)
    try:
        module.run(args, report)
    except AssertionError:
        print_report(report)  # An interrupted benchmark writes no file, so at least print the cases measured so far.
        raise
    path = report.write(args.resume or args.out)
    print_report(report)
    return path


def print_report(report: Report) -> None:
    """Print the cases of a result, and below them the notes of the cases."""
    rows = []
    for c in report.cases:
        verdict = {None: "", True: " met", False: " MISSED"}[c.met]
        optional = ("" if n is None else f"{n:.4g}" for n in (c.ceiling, c.ratio))
        target = "" if c.target is None else f"{c.target:.4g}{verdict}"
        rows.append([c.name, f"{c.value:.4g} {c.unit}", f"{c.p10:.4g}", f"{c.p90:.4g}", *optional, target])
    print_table(
        ("case", "value", "p10", "p90", "ceiling", "ratio", "target"),
        rows,
        title=f"{report.bench} on {report.machine}, commit {report.commit[:12]}",
        notes=[f"{c.name}: {c.note}" for c in report.cases if c.note],
    )


def _list(benches: dict[str, BenchModule], broken: dict[str, str]) -> None:
    width = max(map(len, [*benches, *broken]), default=0)
    for name, module in sorted(benches.items()):
        print(f"{name:{width}}  {module.DESCRIPTION}")
    for name, reason in sorted(broken.items()):
        print(f"{name:{width}}  cannot be loaded: {reason}")


def _run(name: str, arguments: Sequence[str], benches: dict[str, BenchModule], broken: dict[str, str]) -> None:
    if name == "release":
        _run_release(arguments, benches)
    elif name in SETS or name == "all":
        _run_set(name, arguments, benches, broken)
    elif name in benches:
        print(run_one(benches[name], arguments))
    elif name in broken:
        raise BenchUnavailable(f"bench {name} cannot be loaded: {broken[name]}")
    else:
        raise BenchUnavailable(
            f"unknown bench {name!r}; there are: {', '.join([*sorted(benches), *SETS, 'all', 'release'])}"
        )


def _run_release(arguments: Sequence[str], benches: dict[str, BenchModule]) -> None:
    """Run the entries of `RELEASE` for which the folder has no results. Each benchmark has one result file."""
    parser = _Parser(prog="hicache bench run release", description="run the benchmarks that the documentation quotes")
    add = parser.add_argument
    add("--resume", type=Path, required=True, metavar="DIR", help="folder of result files; their runs are not repeated")
    add("--minutes", type=float, default=math.inf, help="leave out benchmarks that take longer (default: none)")
    add("--folder", default="", help="folder on the disk to measure (default: a temporary folder)")
    add("--gpus", default="0", metavar="N,N", help="GPUs of the benchmark servers (default: 0)")
    add("--trace", default="", metavar="PATH", help="trace for the workload conversation of servers")
    flags, rest = parser.parse_known_args(arguments)
    machine = machine_name(bench_parser(benches["steps"]).parse_args(rest).device)
    end_s = time.monotonic() + 60 * flags.minutes
    for name, own, minutes in RELEASE:
        given = [_FOLDER_FLAGS[name], flags.folder] if flags.folder and name in _FOLDER_FLAGS else []
        if name == "servers":
            given += ["--gpus", flags.gpus, *(["--trace", flags.trace] if flags.trace else [])]
        given, path = [*given, *own, *rest], flags.resume / f"{name}-{machine}.json"
        if name != "servers" and path.exists() and command_line(name, given) in read_report(path).commands:
            continue
        if time.monotonic() + 60 * minutes > end_s:
            print(f"{name} {shlex.join(own)}: left out, it takes {minutes:g} minutes")
            continue
        try:
            print(run_one(benches[name], [*given, "--resume", str(path)]))
        except BenchUnavailable as reason:
            print(f"{name} {shlex.join(own)}: left out: {reason}")


def _run_set(name: str, arguments: Sequence[str], benches: dict[str, BenchModule], broken: dict[str, str]) -> None:
    """Run each benchmark of a set, or all benchmarks. A set has a separate folder for results, because it uses other
    sizes."""
    members = SETS.get(name, {member: [] for member in sorted({**benches, **broken})})
    results = RESULTS / name if name in SETS else RESULTS
    for member in members:
        if member in broken:
            print(f"{member}: left out, it cannot be loaded: {broken[member]}")
            continue
        try:
            print(run_one(benches[member], [*members[member], *arguments], results))
        except BenchUnavailable as reason:
            print(f"{member}: left out: {reason}")

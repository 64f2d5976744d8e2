"""`python -m bench list` and `python -m bench run NAME [arguments]`.

Finds the benchmarks (modules of this package with `NAME`, `DESCRIPTION`, `add_arguments` and `run`), parses, runs,
prints a table and writes the result file. `run all` runs each that this machine can run, with its defaults.

May import bench.common and hicache.errors; loads the benchmarks by name.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch

import bench
from bench.common import RESULTS, BenchModule, BenchUnavailable, Report
from hicache.errors import HiCacheError

_PARTS = {"NAME", "DESCRIPTION", "add_arguments", "run"}


def find_benches() -> tuple[dict[str, BenchModule], dict[str, str]]:
    """The benchmarks by name, and the modules that cannot be imported here with what they lack.

    A module with some of the four parts but not all is a mistake and raises TypeError; one with none is a helper.
    """
    benches: dict[str, BenchModule] = {}
    broken: dict[str, str] = {}
    for info in pkgutil.iter_modules(bench.__path__):
        if info.name in ("__main__", "common"):
            continue
        try:
            module = importlib.import_module(f"bench.{info.name}")
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


def bench_parser(module: BenchModule) -> argparse.ArgumentParser:
    """The arguments of one benchmark: its own, and the three that all have."""
    parser = argparse.ArgumentParser(prog=f"python -m bench run {module.NAME}", description=module.DESCRIPTION)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=_device, default=torch.device(default), help=f"default: {default}")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="folder of the result file")
    parser.add_argument("--commit", default="", metavar="ID", help="commit of a tree that was copied without its .git")
    module.add_arguments(parser)
    return parser


def command_line(name: str, arguments: Sequence[str]) -> str:
    """The command that repeats a run: `--out` is left out, since it does not change what is measured."""
    kept: list[str] = []
    skip = False
    for argument in arguments:
        if not skip and argument != "--out" and not argument.startswith("--out="):
            kept.append(argument)
        skip = not skip and argument == "--out"
    return shlex.join(["python", "-m", "bench", "run", name, *kept])


def run_one(module: BenchModule, arguments: Sequence[str]) -> Path:
    """Run one benchmark, print its table, write its file and return the file's path."""
    args = bench_parser(module).parse_args(arguments)
    report = Report.start(module.NAME, args.device, command_line(module.NAME, arguments), args.commit)
    module.run(args, report)
    report.print()
    return report.write(args.out)


def _list(benches: dict[str, BenchModule], broken: dict[str, str]) -> None:
    width = max(map(len, [*benches, *broken]), default=0)
    for name, module in sorted(benches.items()):
        print(f"{name:{width}}  {module.DESCRIPTION}")
    for name, reason in sorted(broken.items()):
        print(f"{name:{width}}  cannot be loaded: {reason}")


def _run(name: str, arguments: Sequence[str], benches: dict[str, BenchModule], broken: dict[str, str]) -> int:
    if name == "all":
        for module in benches.values():
            try:
                print(run_one(module, arguments))
            except BenchUnavailable as reason:
                print(f"{module.NAME}: left out: {reason}")
        return 0
    if name in broken:
        print(f"bench {name} cannot be loaded: {broken[name]}", file=sys.stderr)
        return 2
    if name not in benches:
        print(f"unknown bench {name!r}; there are: {', '.join(sorted(benches)) or 'none'}", file=sys.stderr)
        return 2
    print(run_one(benches[name], arguments))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=bench.__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="name and description of every benchmark")
    run = commands.add_parser("run", help="run one benchmark, or all", add_help=False)
    run.add_argument("name", help="a name from the list, or all")
    run.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments; --help shows them")
    args = parser.parse_args(argv)
    benches, broken = find_benches()
    if args.command == "list":
        _list(benches, broken)
        return 0
    try:
        return _run(args.name, args.arguments, benches, broken)
    except (BenchUnavailable, HiCacheError) as error:
        print(f"bench {args.name}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

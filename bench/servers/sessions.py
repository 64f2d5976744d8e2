"""Sessions of coding agents on a real server, many concurrently: the value of a cache when requests are queued.

Each mode has its own process and folder, and an empty cache of Triton; all modes serve the same turns
(`hicache.bench.sessions`) under the same loads, in sequence. Modes are not interleaved, because a start takes as long
as a load; they share only the machine and the run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from hicache.bench.common import BenchUnavailable, Report
from hicache.bench.servers import sglang, vllm
from hicache.bench.servers.clients import LoadRun
from hicache.bench.servers.program import file_system, files_dropped, run_program
from hicache.bench.sessions import Scale, Turn, describe_turns, generated_turns, read_turns

_SERVERS: dict[str, ModuleType] = {"vllm": vllm, "sglang": sglang}
_START_S = 300.0
_SETTLE_S = 150.0
_MAIN = "c8"  # the load of rows without a load in their name
_OWN_CPU = "cpu"  # the mode with the server's own CPU tier


class Key(NamedTuple):
    """A run of a server: its mode, and its number of GPUs."""

    mode: str
    tensor_parallel: int

    def __str__(self) -> str:
        return self.mode if self.tensor_parallel == 1 else f"tp{self.tensor_parallel}.{self.mode}"


Runs = Mapping[Key, Mapping[str, LoadRun]]


@dataclass(frozen=True)
class _Row:
    """A comparison of a mode with the best of `others`. `targets`: for one GPU, by load; "" for all other loads."""

    name: str
    mode: str
    others: tuple[str, ...]
    targets: Mapping[str, float]


_DISK = _Row("disk", "hicache", ("hicache-always", "hicache-never"), {"": 1.03, "c32": 1.05})
_ROWS = {
    "vllm": (
        _Row("spec", "spec", ("cpu",), {_MAIN: 0.80}),
        _Row("spec.over_none", "spec", ("none",), {}),
        _Row("spec.packing", "spec", ("spec-raw",), {}),
        _DISK,
        _Row("disk.over_cpu", "hicache", ("cpu",), {}),
        _Row("disk.over_none", "hicache", ("none",), {}),
        _Row("disk.over_fs", "hicache", ("fs",), {"": 0.95}),
        _Row("disk.over_fs.dropped", "hicache", ("fs-dropped",), {"": 0.85}),
    ),
    "sglang": (
        _Row("disk", "hicache", ("file",), {"": 0.7}),
        _Row("disk.over_none", "hicache", ("none",), {"": 1.0}),
    ),
}
_TP_TARGET = 0.82  # target of `spec` on several GPUs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the workload sessions")
    add = group.add_argument
    add("--trace", type=Path, metavar="PATH", help="JSON lines, gzipped or not (default: one that is generated)")
    add("--requests", type=int, default=0, help="the first of these lengths (default: 300, small: 16)")
    add("--block-tokens", type=int, default=8, help="tokens that an id of the trace stands for (default: 8)")
    add("--shortest", type=int, default=200, help="tokens of a prompt (default: 200)")
    add("--longest", type=int, default=0, help="tokens of a prompt (default: 60000, small: 1500)")
    add("--answer-tokens", type=int, default=32, help="tokens of an answer (default: 32)")
    add("--concurrency", type=_numbers, default=[8], metavar="N,N", help="clients, load by load (default: 8)")
    add("--tensor-parallel", type=_numbers, default=[1], metavar="N,N", help="GPUs, one size behind the other")
    add("--gpu-tokens", type=int, default=0, help="of the cache on the device (default: 81920, small: 4096)")
    add("--cpu-gib", type=float, default=0.0, help="of a CPU tier without a disk (default: 16, small: 1/64)")
    add("--disk-cpu-gib", type=float, default=0.0, help="of a CPU tier above a disk (default: half of --cpu-gib)")
    add("--limit-s", type=float, default=200.0, help="after which a load is cut off, which its rows say (default: 200)")
    add("--part", default="", metavar="NAME", help="in the name of the result file, of a run with some modes")


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def run_sessions(args: argparse.Namespace, report: Report) -> None:
    server = _SERVERS[args.server]
    if reason := server.missing():
        raise BenchUnavailable(reason)
    modes = args.modes or list(server.MODES)
    if unknown := set(modes) - set(server.MODES):
        raise BenchUnavailable(f"--modes {','.join(sorted(unknown))}: there are {', '.join(server.MODES)}")
    _settle(args)
    report.bench = "-".join(["servers", args.server, "sessions", *([args.part] if args.part else [])])
    scale = Scale(requests=args.requests, block_tokens=args.block_tokens, shortest=args.shortest, longest=args.longest)
    turns = read_turns(args.trace, scale) if args.trace else generated_turns(scale)
    if not turns:
        raise BenchUnavailable(f"--trace {args.trace}: no request of {scale.shortest} to {scale.longest} tokens")
    args.requests = len(turns)
    about = f"{args.trace.name if args.trace else 'generated'}: {describe_turns(turns, args.block_tokens)}"
    runs: dict[Key, dict[str, LoadRun]] = {}
    with tempfile.TemporaryDirectory(prefix="hicache-sessions-", dir=args.folder) as folder:
        about += f"; files on {file_system(Path(folder))}"
        print(about, flush=True)
        served = _Served(server, args, turns, sorted(modes, key=server.MODES.index), Path(folder).resolve())
        for key in served.plan():
            try:
                runs[key], report.software[args.server] = served.serve(key)
            except BenchUnavailable as error:  # continue with the other runs
                print(error, flush=True)
                continue
            report.cases.clear()
            add_cases(report, args, runs, about)
            report.write(args.out)  # after each run, so that a killed benchmark keeps its results
    if not runs:
        raise BenchUnavailable(f"{args.server} serves none of {', '.join(modes)}")


def _settle(args: argparse.Namespace) -> None:
    """Set defaults that depend on `--small`."""
    small = args.small
    args.requests = args.requests or (16 if small else 300)
    args.longest = args.longest or (1500 if small else 60_000)
    args.gpu_tokens = args.gpu_tokens or (4096 if small else 81_920)
    args.cpu_gib = args.cpu_gib or (1 / 64 if small else 16.0)
    args.disk_cpu_gib = args.disk_cpu_gib or args.cpu_gib / 2


@dataclass(frozen=True)
class _Served:
    """The settings that all runs share. Their files are in `folder`."""

    server: ModuleType
    args: argparse.Namespace
    turns: Sequence[Turn]
    modes: Sequence[str]
    folder: Path

    def plan(self) -> list[Key]:
        return [Key(mode, tensor_parallel) for tensor_parallel in self.args.tensor_parallel for mode in self.modes]

    def serve(self, key: Key) -> tuple[dict[str, LoadRun], str]:
        """Serve all loads of a run; returns the outcomes by load, and the server's release. BenchUnavailable if the
        server does not serve."""
        files, kernels = self.folder / f"{key.mode}.tp{key.tensor_parallel}", self.folder / f"triton-{key}"
        for made in (files, kernels):
            made.mkdir(exist_ok=True)
        task, loads = self._task(key), self.args.concurrency
        environment = {**self.server.ENVIRONMENT, "TRITON_CACHE_DIR": str(kernels), **task.pop("environment", {})}
        environment |= {} if self.args.model else {"HF_HUB_OFFLINE": "1"}
        patience_s = _START_S + len(loads) * (self.args.limit_s + _SETTLE_S)
        try:
            with files_dropped(files) if key.mode.endswith("-dropped") else contextlib.nullcontext():
                result = run_program(self.server.__name__, str(key), task, environment, self.folder, patience_s)
        finally:
            self.server.clean_up(key.mode, self.folder)
            shutil.rmtree(files, ignore_errors=True)  # the disk may have no capacity for the files of all modes
        runs = {name: LoadRun.from_json(run) for name, run in result["runs"].items()}
        stopped = "" if len(runs) == len(loads) else "; it ended early"
        print(f"{key}: started in {result['start_s']:.0f} s{stopped}", flush=True)
        print(*(f"  {name}: {run}" for name, run in runs.items()), sep="\n", flush=True)
        return runs, result["version"]

    def _task(self, key: Key) -> dict[str, Any]:
        turns = self.folder / "turns.json"
        turns.write_text(json.dumps([(turn.session, turn.blocks) for turn in self.turns]))
        return {
            **self.server.task(key.mode, key.tensor_parallel, self.args, self.folder),
            "turns": str(turns),
            "loads": self.args.concurrency,
            **{name: getattr(self.args, name) for name in ("block_tokens", "answer_tokens", "longest", "limit_s")},
        }


def add_cases(report: Report, args: argparse.Namespace, runs: Runs, about: str) -> None:
    """Add all rows of the finished runs. `about`: a description of the turns."""
    base = f"servers.{args.server}.sessions"
    sizes = (
        f"{args.gpu_tokens} tokens on the GPU, {args.cpu_gib:g} GiB of CPU memory, {args.disk_cpu_gib:g} above a disk"
    )
    report.case(f"{base}.requests", [args.requests], "requests", note=f"{about}; {sizes}")
    for tensor_parallel in sorted({key.tensor_parallel for key in runs}):
        of_size = {key.mode: loads for key, loads in runs.items() if key.tensor_parallel == tensor_parallel}
        first = next(iter(of_size))
        for mode, loads in of_size.items():
            for load, run in loads.items():
                name = f"{base}.{Key(mode, tensor_parallel)}.{load}"
                _add_run(report, name, run)
                if mode != first and load in of_size[first]:
                    _add_differing(report, name, run, of_size[first][load], first)
        prefix = base if tensor_parallel == 1 else f"{base}.tp{tensor_parallel}"
        for row in _ROWS[args.server]:
            for load in of_size.get(row.mode, {}):
                _compare(report, prefix, row, load, of_size, args.small)
        _compare_p99(report, prefix, of_size, args.small)


def _add_run(report: Report, name: str, run: LoadRun) -> None:
    """Add the results of one mode under one load."""
    if not run.answers:
        report.case(f"{name}.makespan", [run.makespan_s], "s", better="lower", note="cut off: nothing was answered")
        return
    note = "" if run.is_complete else f"cut off after {len(run.answers)} of {run.requests} requests"
    report.case(f"{name}.makespan", [run.makespan_s], "s", better="lower", note=note)
    report.case(f"{name}.first", run.first_ms, "ms", better="lower", note=run.first_text)
    report.case(f"{name}.p99", [run.p99_first_ms], "ms", better="lower")
    report.case(f"{name}.cached", [run.cached_share], "share")
    if moved := {what: number for what, number in run.num_bytes.items() if number}:
        note = ", ".join(f"{what} {number / 1e9:.2f} GB" for what, number in moved.items())
        report.case(f"{name}.moved", [sum(moved.values()) / 1e9], "GB", better="lower", note=note)
    if decided := sum(run.rates.get(decision, 0.0) for decision in ("accepted", "declined", "unmeasured")):
        note = ", ".join(f"{what} {number:.4g}" for what, number in run.rates.items())
        report.case(f"{name}.declined", [run.rates.get("declined", 0.0) / decided], "share", better="lower", note=note)


def _add_differing(report: Report, name: str, run: LoadRun, first: LoadRun, mode: str) -> None:
    """Add the share of answers that differ from those of the first mode."""
    if (differing := run.differing_share(first)) is not None:
        report.case(f"{name}.differing_from_{mode}", [differing], "share", better="lower")


def _compare(
    report: Report, prefix: str, row: _Row, load: str, of_size: Mapping[str, Mapping[str, LoadRun]], small: bool
) -> None:
    """Add a row under one load: the seconds of all requests."""
    others = {mode: of_size[mode][load] for mode in row.others if load in of_size.get(mode, {})}
    run = of_size[row.mode][load]
    if len(others) < len(row.others) or not all(one.is_complete for one in (run, *others.values())):
        return
    best = min(others, key=lambda mode: others[mode].makespan_s)
    name, target = f"{prefix}.{row.name}", row.targets.get(load, row.targets.get(""))
    if load != _MAIN or row.name == "disk":
        name = f"{name}.{load}"
    if ".tp" in prefix:
        is_main = name == f"{prefix}.spec"
        name, target = (prefix, _TP_TARGET) if is_main else (name, None)
    note = f"{row.mode}, {run.cached_share:.3f} cached, over {best}, {others[best].cached_share:.3f}"
    report.case(
        name,
        [run.makespan_s],
        "s",
        better="lower",
        ceiling=others[best].makespan_s,
        target=None if small else target,
        note=note,
    )


def _compare_p99(report: Report, prefix: str, of_size: Mapping[str, Mapping[str, LoadRun]], small: bool) -> None:
    """Compare the first loads of processes, whose cache of Triton's kernels was empty at first."""
    for mode, name in (("spec", "p99"), ("hicache", "p99.disk")):
        if not of_size.get(mode) or not of_size.get(_OWN_CPU):
            continue
        load = next(iter(of_size[mode]))
        run, other = of_size[mode][load], of_size[_OWN_CPU].get(load)
        if other is not None and run.is_complete and other.is_complete:
            note = (
                f"of the time to the first token under {load}, with an empty cache of Triton's kernels, over {_OWN_CPU}"
            )
            ceiling, target = other.p99_first_ms, None if small or ".tp" in prefix else 1.0
            values = [run.p99_first_ms]
            report.case(f"{prefix}.{name}", values, "ms", better="lower", ceiling=ceiling, target=target, note=note)

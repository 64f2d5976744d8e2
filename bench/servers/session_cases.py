"""The rows of the workload `sessions`: the results of each mode under each load, and the comparisons of modes."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from hicache.bench.common import Report
from hicache.bench.servers.clients import LoadRun

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
    note = "" if run.is_whole else f"cut off after {len(run.answers)} of {run.requests} requests"
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
    if len(others) < len(row.others) or not all(one.is_whole for one in (run, *others.values())):
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
        if other is not None and run.is_whole and other.is_whole:
            note = (
                f"of the time to the first token under {load}, with an empty cache of Triton's kernels, over {_OWN_CPU}"
            )
            ceiling, target = other.p99_first_ms, None if small or ".tp" in prefix else 1.0
            values = [run.p99_first_ms]
            report.case(f"{prefix}.{name}", values, "ms", better="lower", ceiling=ceiling, target=target, note=note)

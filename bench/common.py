"""The harness of all benchmarks. It has the timers, the cases with their ceilings, and the result files.

A benchmark is a module of this package with `NAME`, `DESCRIPTION`, `add_arguments(parser)` and `run(args, report)`;
`args.device` is a torch.device. `run` times the variants of the benchmark in turns with the raw copies that are their
ceiling, using `interleave`, so that case and ceiling are measured under the same conditions. Then it adds `Case`s to
the report. GB/s are 1e9 bytes of payload per second: each byte that must be moved counts once. If copies run in both
directions, the bytes of both count.

Owns the result files, `bench/results/<bench>-<machine>.json`. Imports torch and numpy.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch

from hicache.bench.machine import RESULTS, ROOT, commit_of, machine_name, software, trees
from hicache.console import write_atomically
from hicache.errors import HiCacheError

SCHEMA = 1
AND = " && "  # separates the commands of a result file

Better = Literal["higher", "lower"]
Timer = Callable[[Callable[[], object]], float]


class BenchUnavailable(HiCacheError):
    """This benchmark cannot run here; the message names the requirement."""


class ResultError(HiCacheError):
    """A result file cannot be used for the command; the message names the file and the remedy."""


class BenchModule(Protocol):
    """The names that a module of `bench` must define to be listed and run."""

    NAME: str
    DESCRIPTION: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace, report: Report) -> None: ...


def add_parts(parser: argparse.ArgumentParser, parts: Sequence[str]) -> None:
    """Add `--only`, for `chosen_parts`."""
    help = f"parts to run, of: {' '.join(parts)}; they get a file of their own"
    parser.add_argument("--only", nargs="+", choices=parts, metavar="PART", help=help)


def chosen_parts(args: argparse.Namespace, report: Report, parts: Sequence[str]) -> Sequence[str]:
    """Return the parts that `--only` names, or all of `parts`. Results of only some parts go to a separate file, so
    that they do not replace the results of all parts. With `--resume` they are added to the given file."""
    if args.only and not args.resume:
        report.bench = "-".join([report.bench, *args.only])
    return args.only or parts


def free_memory(device: torch.device) -> None:
    """Free objects in reference cycles, such as closed engines, and release cached memory of the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the value below which `percent` per cent of the samples are, interpolated linearly between two samples."""
    if not values:
        raise ValueError("no samples")
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def gb_per_s(num_bytes: int, seconds: Sequence[float]) -> list[float]:
    """Return the GB/s (1e9 bytes) of each run that moved `num_bytes`."""
    return [num_bytes / 1e9 / s for s in seconds]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One measured number. `value`, `ceiling` and the percentiles are in `unit`; `ratio` is value over ceiling.

    The target applies to the ratio. The ratio should be at least the target if higher is better, and at most the target
    if lower is better.
    """

    name: str
    value: float
    unit: str
    ceiling: float | None = None
    ratio: float | None = None
    better: Better = "higher"
    target: float | None = None
    samples: int = 1
    p10: float
    p50: float
    p90: float
    note: str = ""

    def __post_init__(self) -> None:
        numbers = [self.value, self.ceiling, self.ratio, self.target, self.p10, self.p50, self.p90]
        if not all(math.isfinite(n) for n in numbers if n is not None):
            raise ValueError(f"case {self.name}: not every number is finite")
        if self.better not in ("higher", "lower"):
            raise ValueError(f"case {self.name}: better={self.better!r} is neither 'higher' nor 'lower'")
        if self.target is not None and self.ratio is None:
            raise ValueError(f"case {self.name}: a target speaks of a ratio; give a ceiling (1.0 for a share)")

    @classmethod
    def of(
        cls,
        name: str,
        values: Sequence[float],
        unit: str,
        *,
        better: Better = "higher",
        ceiling: float | Sequence[float] | None = None,
        target: float | None = None,
        note: str = "",
    ) -> Case:
        """Build a case whose value is the median of `values`, all in `unit`. For a number that was measured once,
        `values` has one element.

        `ceiling`: a number, or samples of which the median is the ceiling.
        """
        median = percentile(values, 50)
        if isinstance(ceiling, Sequence):
            ceiling = percentile(ceiling, 50)
        return cls(
            name=name,
            value=median,
            unit=unit,
            ceiling=ceiling,
            ratio=None if ceiling is None else median / ceiling,
            better=better,
            target=target,
            samples=len(values),
            p10=percentile(values, 10),
            p50=median,
            p90=percentile(values, 90),
            note=note,
        )

    @property
    def met(self) -> bool | None:
        """Return whether the ratio reaches the target; None without a target."""
        if self.target is None or self.ratio is None:
            return None
        return self.ratio >= self.target if self.better == "higher" else self.ratio <= self.target


@dataclass
class Report:
    """The cases of one run of one benchmark, and the conditions under which the cases were measured.

    Only one thread may use a report. If a case misses its target, the case is kept and its note says so.

    `trees`: digests of the source code that was measured. `runs`: runs of several commands, if the benchmark computes
    its cases from them. `kept`: cases of earlier commands, read from the file to which this run adds cases.
    """

    bench: str
    machine: str
    software: dict[str, str]
    commit: str
    date: str
    command: str
    cases: list[Case] = field(default_factory=list)
    trees: dict[str, str] = field(default_factory=dict)
    runs: list[dict[str, Any]] = field(default_factory=list)
    kept: list[Case] = field(default_factory=list, compare=False)

    @classmethod
    def start(cls, bench: str, device: torch.device, command: str, commit: str = "") -> Report:
        """Return a report without cases, with this machine's name, the software, the commit and the current time
        (UTC)."""
        date = datetime.now(UTC).isoformat(timespec="seconds")
        commit = commit or commit_of(ROOT)
        return cls(bench, machine_name(device), software(device), commit, date, command, trees=trees())

    def resume(self, path: Path) -> None:
        """Keep the runs and cases of an existing result file, and add the new runs and cases to the file. Do nothing if
        there is no file. Raises ResultError if the file is of another benchmark, kind of machine or state of the
        code."""
        if not path.exists():
            return
        earlier = read_report(path)
        reasons = [f"{name} changed since" for name, tree in self.trees.items() if earlier.trees.get(name) != tree]
        if earlier.machine != self.machine:
            reasons.append(f"it is of {earlier.machine}, not {self.machine}")
        if earlier.bench != self.bench:
            reasons.append(f"it is of the benchmark {earlier.bench}, not {self.bench}")
        if reasons:
            raise ResultError(f"cannot add to {path}: {', '.join(reasons)}; give another file")
        self.kept, self.runs = earlier.cases, earlier.runs
        self.software = earlier.software | self.software
        if self.command not in earlier.commands:
            self.command = AND.join([*earlier.commands, self.command])

    @property
    def commands(self) -> list[str]:
        """The commands that measured the cases."""
        return self.command.split(AND)

    def add(self, case: Case) -> Case:
        """Add a case and return it. If the case misses its target, a note says so. Raises ValueError for a duplicate
        name."""
        if any(case.name == other.name for other in self.cases):
            raise ValueError(f"case {case.name} is there already")
        if case.met is False and "missed" not in case.note:
            missed = f"target missed: ratio {case.ratio:.3f}, wanted {case.target:.3f}"
            case = dataclasses.replace(case, note=f"{missed}; {case.note}" if case.note else missed)
        self.cases.append(case)
        return case

    def case(self, name: str, values: Sequence[float], unit: str, **about: Any) -> Case:
        """Add `Case.of(...)`."""
        return self.add(Case.of(name, values, unit, **about))

    def rate(
        self,
        name: str,
        num_bytes: int,
        seconds: Sequence[float],
        *,
        ceiling_seconds: Sequence[float] | None = None,
        ceiling_bytes: int | None = None,
        **about: Any,
    ) -> Case:
        """Add a case with the GB/s of runs that moved `num_bytes`. `ceiling_seconds`: seconds of the runs that are the
        ceiling. `ceiling_bytes`: bytes that those runs moved; None: `num_bytes`."""
        if ceiling_seconds is not None:
            about["ceiling"] = gb_per_s(ceiling_bytes or num_bytes, ceiling_seconds)
        return self.case(name, gb_per_s(num_bytes, seconds), "GB/s", **about)

    def time(
        self,
        name: str,
        seconds: Sequence[float],
        unit: str,
        *,
        ceiling_seconds: Sequence[float] | None = None,
        **about: Any,
    ) -> Case:
        """Add a case with times in `unit`: s, ms or us. `ceiling_seconds`: seconds of the runs that are the ceiling."""
        per_second = {"s": 1.0, "ms": 1e3, "us": 1e6}[unit]
        if ceiling_seconds is not None:
            about["ceiling"] = [s * per_second for s in ceiling_seconds]
        return self.case(name, [s * per_second for s in seconds], unit, better="lower", **about)

    def to_json(self) -> dict[str, Any]:
        values = dataclasses.asdict(self)
        new = {case.name for case in self.cases}
        values["cases"] = [case for case in values.pop("kept") if case["name"] not in new] + values["cases"]
        return {"schema": SCHEMA, **values}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Report:
        """Parse the report of a result file. Raises ValueError for another schema, or missing or unknown fields."""
        fields = dict(values) if isinstance(values, Mapping) else {}
        found = fields.pop("schema", None)
        if found != SCHEMA:
            raise ValueError(f"schema {found!r}; this harness reads schema {SCHEMA}")
        try:
            report = cls(**{**fields, "cases": [Case(**case) for case in fields["cases"]]})
            if not all(isinstance(text, str) for text in (report.bench, report.machine, report.commit)):
                raise TypeError("bench, machine and commit are texts")
            return report
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a result of schema {SCHEMA}: {error}") from error

    def write(self, place: Path = RESULTS) -> Path:
        """Write the file `<bench>-<machine>.json` if `place` is a folder, or otherwise the file `place`. An earlier
        file is replaced atomically."""
        path = place if place.suffix == ".json" else place / f"{self.bench}-{self.machine}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.to_json(), indent=1, allow_nan=False, ensure_ascii=False)
        write_atomically(path, text + "\n")
        return path


def read_report(path: Path) -> Report:
    """Read a result file. Raises ResultError if the file is not a valid result file."""
    try:
        return Report.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, RecursionError) as error:
        raise ResultError(f"{path} is no result file: {error}") from error


def wall_timer(sync: Callable[[], object] | None = None) -> Timer:
    """Return a timer that uses the host's clock. It calls `sync` before it starts the clock and before it stops the
    clock."""

    def measure(run: Callable[[], object]) -> float:
        if sync is not None:
            sync()
        start = time.perf_counter()
        run()
        if sync is not None:
            sync()
        return time.perf_counter() - start

    return measure


def cuda_timer(device: torch.device, stream: torch.cuda.Stream | None = None) -> Timer:
    """Return a timer that uses two events on the device's current stream. The stream's queue is empty when the first
    event is recorded.

    If a run uses other streams, it must make the current stream wait for them before it returns. If `stream` is given,
    runs use this stream, concurrently with work on other streams.
    """

    def measure(run: Callable[[], object]) -> float:
        with torch.cuda.device(device), torch.cuda.stream(stream):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            if stream is None:
                torch.cuda.synchronize()
            start.record()
            run()
            end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    return measure


def timer_for(device: torch.device) -> Timer:
    """Return a timer that uses events on CUDA, and the host's clock on other devices."""
    return cuda_timer(device) if device.type == "cuda" else wall_timer()


@contextmanager
def no_collection() -> Iterator[None]:
    """Switch off the garbage collector within the block, as timeit does."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def interleave(
    variants: Mapping[str, Callable[[], object]],
    *,
    samples: int,
    warmup: int = 2,
    sync: Callable[[], object] | None = None,
    timer: Timer | None = None,
) -> dict[str, list[float]]:
    """Time `samples` runs of each variant in turns (a b c a b c …), after `warmup` rounds that are not timed. Returns
    the seconds of each variant.

    Uses the host's clock, with `sync` around each run, unless a `timer` is given; giving both raises ValueError.
    """
    if samples < 1 or warmup < 0:
        raise ValueError(f"samples={samples} must be at least 1 and warmup={warmup} at least 0")
    if timer is not None and sync is not None:
        raise ValueError("give a timer or a sync, not both: a timer synchronises by itself")
    measure = timer or wall_timer(sync)
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(-warmup, samples):
        for name, run in variants.items():
            elapsed = measure(run)
            if turn >= 0:
                seconds[name].append(elapsed)
    return seconds


@dataclass(frozen=True)
class RawCopy:
    """A plain copy whose time is a ceiling. One call of `run` fills `targets`, with `num_bytes` of payload in total."""

    run: Callable[[], object]
    targets: tuple[torch.Tensor, ...]

    @property
    def num_bytes(self) -> int:
        return sum(target.nbytes for target in self.targets)


def raw_copies(device: torch.device, num_bytes: int = 256 << 20) -> dict[str, RawCopy]:
    """Return the plain copies that are the ceilings of transfers, as variants for `interleave`.

    On a CPU they are `memcpy` with torch's threads and `memcpy_1thread`; the default size is much larger than the
    caches. On CUDA they are `up` and `down` between pinned and device memory, `both` for both directions at once (twice
    the payload), and `device` within device memory.
    """
    if device.type not in ("cpu", "cuda"):
        raise BenchUnavailable(f"no raw copies are known for {device.type}; use --device cpu or cuda")
    pin = device.type == "cuda"
    host_source = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=pin)
    host_target = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=pin)
    if not pin:
        to, of = host_target.numpy(), host_source.numpy()
        return {
            "memcpy": RawCopy(lambda: host_target.copy_(host_source), (host_target,)),
            "memcpy_1thread": RawCopy(lambda: np.copyto(to, of), (host_target,)),
        }
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    streams = [torch.cuda.Stream(device) for _ in range(2)]

    def both() -> None:
        current = torch.cuda.current_stream(device)
        for stream, to, of in zip(streams, (target, host_target), (host_source, source), strict=True):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                to.copy_(of, non_blocking=True)
        for stream in streams:
            current.wait_stream(stream)

    return {
        "up": RawCopy(lambda: target.copy_(host_source, non_blocking=True), (target,)),
        "down": RawCopy(lambda: host_target.copy_(source, non_blocking=True), (host_target,)),
        "both": RawCopy(both, (target, host_target)),
        "device": RawCopy(lambda: target.copy_(source), (target,)),
    }

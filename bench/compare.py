"""Compares two results of the same benchmarks, before and after a change, and distinguishes changes from noise.

    change    after / before - 1, computed from the medians
    noise     the intervals from p10 to p90 of both results overlap; the noise of a case that was measured once is
              unknown, so for this case only the threshold decides
    regressed the case is worse by more than the threshold, and the intervals do not overlap
    improved  the case is better by more than the threshold, and the intervals do not overlap

Results are paired by benchmark and machine, and cases are paired by name. May import bench.common.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hicache.bench.common import Case, Report, ResultError, read_report
from hicache.console import print_table

THRESHOLD_PERCENT = 5.0

Verdict = Literal["regressed", "improved", "noise", "same", "only before", "only after", "other unit"]


@dataclass(frozen=True)
class Change:
    """A case before and after the change. Either of both results may lack the case. `threshold`: a share, 0.05 for 5
    %."""

    name: str
    before: Case | None
    after: Case | None
    threshold: float

    @property
    def comparable(self) -> bool:
        """Return whether both results have the case, in the same unit."""
        a, b = self.before, self.after
        return a is not None and b is not None and (a.unit, a.better) == (b.unit, b.better)

    @property
    def relative(self) -> float | None:
        """The relative change, after / before - 1; infinite if `before` is zero. Returns None if the results cannot be
        compared."""
        if self.before is None or self.after is None or not self.comparable:
            return None
        difference = self.after.value - self.before.value
        if self.before.value == 0:
            return math.copysign(math.inf, difference) if difference else 0.0
        return difference / abs(self.before.value)

    @property
    def overlap(self) -> bool | None:
        """Return whether the intervals from p10 to p90 overlap. Returns None if a case was measured only once or the
        cases cannot be compared."""
        a, b = self.before, self.after
        if a is None or b is None or not self.comparable or min(a.samples, b.samples) < 2:
            return None
        return a.p10 <= b.p90 and b.p10 <= a.p90

    @property
    def verdict(self) -> Verdict:
        if self.before is None or self.after is None:
            return "only after" if self.before is None else "only before"
        relative = self.relative
        if relative is None:
            return "other unit"
        if abs(relative) <= self.threshold:
            return "same"
        if self.overlap:
            return "noise"
        return "improved" if (relative > 0) == (self.after.better == "higher") else "regressed"


def changes(before: Report, after: Report, threshold: float) -> list[Change]:
    """Return all cases of both results, in the order of `before`, followed by new cases. `threshold`: a share."""
    old = {case.name: case for case in before.cases}
    new = {case.name: case for case in after.cases}
    return [Change(name, old.get(name), new.get(name), threshold) for name in [*old, *(n for n in new if n not in old)]]


def pairs(before: Path, after: Path, across_machines: bool) -> list[tuple[Report, Report]]:
    """Pair the results of two files or of two folders. Raises ResultError if there is no pair."""
    if before.is_dir() != after.is_dir():
        raise ResultError(f"{before} and {after}: give two result files or two folders of them")
    old, new = _results(before, across_machines), _results(after, across_machines)
    shared = [key for key in old if key in new]
    if shared:
        return [(old[key], new[key]) for key in shared]
    benches = [{report.bench for report in side.values()} for side in (old, new)]
    if benches[0] & benches[1]:
        machines = [", ".join(sorted({report.machine for report in side.values()})) for side in (old, new)]
        text = f"{before} was measured on {machines[0]} and {after} on {machines[1]}"
        raise ResultError(f"{text}: other machines; --across-machines compares them nevertheless")
    measured = [", ".join(sorted(names)) for names in benches]
    raise ResultError(f"{before} has results of {measured[0]} and {after} of {measured[1]}: no benchmark is in both")


def _results(place: Path, across_machines: bool) -> dict[tuple[str, str], Report]:
    """Read the results in a file or folder. Returns them by benchmark and machine, or with `across_machines` only by
    benchmark."""
    paths = sorted(place.glob("*.json")) if place.is_dir() else [place]
    if not paths:
        raise ResultError(f"{place} has no result files; `hicache bench run NAME --out {place}` writes one")
    found: dict[tuple[str, str], tuple[Path, Report]] = {}
    for path in paths:
        report = read_report(path)
        key = (report.bench, "" if across_machines else report.machine)
        if key in found:
            raise ResultError(f"{found[key][0]} and {path} are both of bench {report.bench}: name the file to compare")
        found[key] = (path, report)
    return {key: report for key, (_, report) in found.items()}


def add_compare_flags(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Exit status: 0 nothing regressed, 1 a case regressed, 2 the results cannot be compared."
    parser.add_argument("before", type=Path, metavar="A", help="a result file or a folder of them: before")
    parser.add_argument("after", type=Path, metavar="B", help="the same: after")
    text = f"per cent that a case may be worse (default: {THRESHOLD_PERCENT:g})"
    parser.add_argument("--threshold", type=_percent, default=THRESHOLD_PERCENT, metavar="PERCENT", help=text)
    text = "compare results of different machines, which say little about a change"
    parser.add_argument("--across-machines", action="store_true", help=text)


def _percent(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no threshold; give per cent of at least 0")
    return value


def compare_command(flags: argparse.Namespace) -> int:
    """Print a table for each pair of results and a summary line; returns 1 if a case regressed."""
    found = pairs(flags.before, flags.after, flags.across_machines)
    everything: list[Change] = []
    for before, after in found:
        rows = changes(before, after, flags.threshold / 100)
        everything += rows
        sides = [f"{r.commit[:12]} on {r.machine}" for r in (before, after)]
        headings = ("case", "before", "after", "change", "p10-p90", "better", "verdict")
        print_table(headings, map(_row, rows), title=f"{before.bench}: {' -> '.join(sides)}")
    print(_summary(everything, flags.threshold))
    return int(any(change.verdict == "regressed" for change in everything))


def _row(change: Change) -> Sequence[str]:
    case = change.after or change.before
    assert case is not None
    sides = ["" if c is None else f"{c.value:.4g} {c.unit}" for c in (change.before, change.after)]
    relative = "" if change.relative is None else f"{change.relative * 100:+.1f} %"
    spread = {None: "", True: "overlap", False: "apart"}[change.overlap]
    return [change.name, *sides, relative, spread, case.better, change.verdict]


def _summary(found: Sequence[Change], threshold_percent: float) -> str:
    def count() -> Iterator[str]:
        for verdict in ("regressed", "improved", "noise", "same", "only before", "only after", "other unit"):
            number = sum(change.verdict == verdict for change in found)
            if number:
                yield f"{number} {verdict}"

    return f"{len(found)} cases, threshold {threshold_percent:g} %: {', '.join(count()) or 'nothing to compare'}"

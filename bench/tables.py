"""Results as tables: as wide as their text where the output is a file or a pipe, folded to the terminal elsewhere."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from typing import IO

from hicache.bench.common import BenchUnavailable, Report

_NO_TERMINAL_COLUMNS = 1_000  # nothing folds a log's lines
_NAME_COLUMNS = 20  # at least, on a narrow terminal


def require_rich() -> None:
    """BenchUnavailable where tables cannot be printed: said before minutes of measuring."""
    if importlib.util.find_spec("rich") is None:
        raise BenchUnavailable("tables need rich, which is not installed; pip install 'hicache[bench]'")


def print_table(
    title: str,
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    notes: Iterable[str] = (),
    file: IO[str] | None = None,
) -> None:
    """Names left, in the first column; the rest right. `notes` follow, a line each. `file`: stdout by default."""
    from rich.box import SIMPLE  # here, so that the list of benchmarks works without it
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))
    table.add_column(headings[0], overflow="fold", min_width=_NAME_COLUMNS)
    for heading in headings[1:]:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    console = Console(file=file)
    if not console.is_terminal:
        console.width = _NO_TERMINAL_COLUMNS
    console.print(table)
    for note in notes:
        console.print(Text(note))


def print_report(report: Report) -> None:
    """The cases of a result, then what their notes say."""
    rows = []
    for c in report.cases:
        verdict = {None: "", True: " met", False: " MISSED"}[c.met]
        optional = ("" if n is None else f"{n:.4g}" for n in (c.ceiling, c.ratio))
        target = "" if c.target is None else f"{c.target:.4g}{verdict}"
        rows.append([c.name, f"{c.value:.4g} {c.unit}", f"{c.p10:.4g}", f"{c.p90:.4g}", *optional, target])
    print_table(
        f"{report.bench} on {report.machine}, commit {report.commit[:12]}",
        ("case", "value", "p10", "p90", "ceiling", "ratio", "target"),
        rows,
        [f"{c.name}: {c.note}" for c in report.cases if c.note],
    )

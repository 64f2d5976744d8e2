"""Result files as figures, `<result>-ratios.svg`: the share of its ceiling that each case reaches.

A bar a case, p10 to p90 as a whisker, a mark at the target, a line at the ceiling. The same result gives the same
bytes. Needs matplotlib: `pip install 'hicache[plot]'`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hicache.bench.common import BenchUnavailable, Case, Report, ResultError, read_report

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLORS = {None: "C7", True: "C0", False: "C3"}
_MEANINGS = {None: "without a target", True: "meets its target", False: "misses its target"}
_BAR = 0.7


def plot_results(results: Sequence[Path], folder: Path) -> list[Path]:
    """Draw every result into `folder`; returns the figures' paths. All are read and drawn before one is written."""
    if importlib.util.find_spec("matplotlib") is None:
        raise BenchUnavailable("plots need matplotlib, which is not installed; pip install 'hicache[plot]'")
    figures: dict[str, Figure] = {}
    for path in results:
        name = f"{path.stem}-ratios.svg"
        if name in figures:
            raise ResultError(f"{path} and another result would both be drawn as {name}; plot them into two folders")
        figures[name] = ratio_figure(read_report(path))
    folder.mkdir(parents=True, exist_ok=True)
    return [_write(figure, folder / name) for name, figure in figures.items()]


def _write(figure: Figure, path: Path) -> Path:
    import matplotlib as mpl  # here, so that the other commands work without it

    part = path.with_suffix(".part")
    with mpl.rc_context({"svg.hashsalt": path.name}):
        figure.savefig(part, format="svg", metadata={"Date": None})
    return part.replace(path)


def ratio_figure(report: Report) -> Figure:
    """A bar for each case that has a ceiling. ResultError when none has."""
    from matplotlib.figure import Figure

    cases = [case for case in report.cases if case.ratio is not None and case.ceiling]
    if not cases:
        raise ResultError(f"no case of {report.bench} on {report.machine} has a ceiling, so there is no ratio to draw")
    figure = Figure(figsize=(10, 1.6 + 0.28 * len(cases)), layout="constrained")
    panel: Any = figure.subplots()
    for met, color in _COLORS.items():
        _draw(panel, cases, met, color)
    panel.axvline(1.0, color="black", linestyle="dashed", label="ceiling")
    targets = [(at, case.target) for at, case in enumerate(cases) if case.target is not None]
    if targets:
        rows, values = zip(*targets, strict=True)
        ends = [[row + side * _BAR / 2 for row in rows] for side in (-1, 1)]
        panel.vlines(values, *ends, colors="black", linewidth=2, label="target")
    panel.set_yticks(range(len(cases)), [_label(case) for case in cases])
    panel.invert_yaxis()
    panel.set_xlim(left=0)
    panel.set_xlabel("value / ceiling")
    figure.legend(*panel.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    left_out = len(report.cases) - len(cases)
    without = f"; {left_out} cases without a ceiling are left out" if left_out else ""
    figure.suptitle(f"{report.bench} on {report.machine}, commit {report.commit[:12]}{without}")
    return figure


def _draw(panel: Any, cases: Sequence[Case], met: bool | None, color: str) -> None:
    chosen = [(at, case, case.ratio, case.ceiling) for at, case in enumerate(cases) if case.met is met]
    if not chosen:
        return
    rows, _, ratios, _ = zip(*chosen, strict=True)
    low = [max(0.0, ratio - case.p10 / ceiling) for _, case, ratio, ceiling in chosen if ratio and ceiling]
    high = [max(0.0, case.p90 / ceiling - ratio) for _, case, ratio, ceiling in chosen if ratio and ceiling]
    panel.barh(rows, ratios, _BAR, xerr=[low, high], color=color, capsize=2, label=_MEANINGS[met])


def _label(case: Case) -> str:
    return case.name if case.better == "higher" else f"{case.name} (lower is better)"

"""Plots the makespan of each mode and size of CPU memory, from the runs of result files of `servers`. Needs
matplotlib: the extra `replay`. `hicache bench plot FILE [FILE ...] FOLDER` writes a light and a dark picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hicache.bench.common import BenchUnavailable, Report, percentile
from hicache.bench.servers.runs import Run

Points = dict[float, list[float]]  # seconds of each run, by GiB

LABELS = {
    "none": "no CPU tier",
    "cpu": "vLLM's CPU tier",
    "lazy": "vLLM's lazy CPU tier",
    "lmcache": "LMCache",
    "raw": "HiCacheConnector, unpacked",
    "hicache": "HiCacheConnector",
}
_TITLE = "320 turns of agents under vLLM, one H200"
_GAP_ROWS = 0.9  # height of the heading of a group, in bars
_GREY = "#8f98a3"  # colour of the other modes, readable on both backgrounds
_THEMES = {  # background, text, colours of hicache's modes
    "light": ("white", "#1b1f24", {"raw": "#56b4e9", "hicache": "#0072b2"}),
    "dark": ("#161b22", "#e6edf3", {"raw": "#9cc9e8", "hicache": "#56b4e9"}),
}


def makespans(reports: Sequence[Report]) -> dict[str, Points]:
    """Return the seconds until all agents' requests were answered under vLLM with the default sizes, by mode and GiB.
    The mode `none` has its runs at 0 GiB. Runs of a mode and size come from the first report that has them, because
    reports may be of different states of the code."""
    found: dict[str, Points] = {}
    for report in reversed(reports):
        own: dict[str, Points] = {}
        for run in map(Run.from_json, report.runs):
            at = run.setting
            if (at.server, at.workload, at.variant) == ("vllm", "agents", "") and at.mode in LABELS:
                own.setdefault(at.mode, {}).setdefault(at.cpu_gib, []).append(run.makespan_s)
        for mode, points in own.items():
            found[mode] = found.get(mode, {}) | points
    return {mode: dict(sorted(found[mode].items())) for mode in LABELS if mode in found}


def write_plots(reports: Sequence[Report], folder: Path) -> list[Path]:
    """Write `makespan-light.png` and `makespan-dark.png`, and return their paths. Raises BenchUnavailable if the
    reports have no runs of agents under vLLM with a CPU tier, or without matplotlib."""
    found = makespans(reports)
    if not any(size for points in found.values() for size in points):
        raise BenchUnavailable("the files have no runs of agents under vLLM with a CPU tier")
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"makespan-{theme}.png" for theme in _THEMES]
    for path, (background, text, own) in zip(paths, _THEMES.values(), strict=True):
        _draw(found, background, text, {**dict.fromkeys(LABELS, _GREY), **own}, path)
    return paths


def _draw(found: Mapping[str, Points], background: str, text: str, colours: Mapping[str, str], path: Path) -> None:
    """Draw a horizontal bar for each mode and size, in a group for each size, from the smallest size to the largest. A
    bar is the median of its runs, and its whisker is their range."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError:
        raise BenchUnavailable("plots need matplotlib of hicache[replay]: pip install '.[replay]'") from None
    bars = sorted(
        ((size, mode, seconds) for mode, points in found.items() for size, seconds in points.items()),
        key=lambda bar: (bar[0], list(LABELS).index(bar[1])),
    )
    groups = sorted({size for size, _, _ in bars if size})
    rows = [row + _GAP_ROWS * sum(group <= size for group in groups) for row, (size, _, _) in enumerate(bars)]
    names = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    style = {**mpl.rcParamsDefault, **dict.fromkeys(names, text), "axes.facecolor": background, "font.size": 12}
    with mpl.rc_context(style):  # ignores the user's matplotlibrc
        figure = Figure(figsize=(8, 1.6 + 0.45 * (rows[-1] + 1)), layout="constrained", facecolor=background)
        axes = figure.subplots()
        for row, (_, mode, seconds) in zip(rows, bars, strict=True):
            median = percentile(seconds, 50)
            axes.barh(row, median, height=0.72, color=colours[mode])
            if min(seconds) < max(seconds):
                whisker: dict[str, Any] = {"color": text, "capsize": 3}
                axes.errorbar(median, row, xerr=[[median - min(seconds)], [max(seconds) - median]], **whisker)
            weight = "bold" if mode in _THEMES["light"][2] else "normal"
            axes.annotate(
                f"{median:.1f} s", (max(seconds), row), (6, 0), va="center", textcoords="offset points", weight=weight
            )
        axes.set_yticks(rows, [LABELS[mode] for _, mode, _ in bars])
        for size in groups:  # the heading of a group is above its first bar
            first = rows[next(index for index, bar in enumerate(bars) if bar[0] == size)]
            axes.annotate(
                f"{size:g} GiB of CPU memory",
                (0, first - _GAP_ROWS / 2 - 0.45),
                (-3.5, 0),  # as the labels of bars
                va="center",
                ha="right",
                textcoords="offset points",
                weight="bold",
                annotation_clip=False,
            )
        axes.set_ylim(rows[-1] + 0.6, -0.6)
        axes.tick_params(axis="y", length=0)
        axes.set_xticks([])
        axes.set_xlabel("seconds until the last answer; less is better", loc="left")
        axes.margins(x=0.12)  # leaves space for the numbers
        for side in ("top", "right", "bottom"):
            axes.spines[side].set_visible(False)
        figure.suptitle(_TITLE, x=0.01, ha="left", fontsize=12, weight="bold")
        counts = sorted({len(seconds) for _, _, seconds in bars})
        runs = f"median and range of {counts[-1]} runs" if counts[-1] > 1 else "one run of each bar"
        if counts[0] == 1 < counts[-1]:
            runs += "; bars without a range: one run"
        axes.set_title(runs, loc="left", fontsize=10)
        figure.savefig(path, dpi=150, metadata={"Software": None}, bbox_inches="tight", pad_inches=0.15)

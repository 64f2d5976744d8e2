"""Plots the makespan of each mode and size of CPU memory, from the runs of a result file of `servers`. Needs
matplotlib: the extra `replay`. `hicache bench plot FILE FOLDER` writes a light and a dark picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hicache.bench.common import BenchUnavailable, Report, percentile
from hicache.bench.servers.runs import Run

Points = dict[float, list[float]]  # GiB: seconds of each run

LABELS = {
    "none": "no CPU tier",
    "cpu": "vLLM's CPU tier",
    "lazy": "vLLM's lazy CPU tier",
    "lmcache": "LMCache",
    "raw": "HiCacheConnector, unpacked",
    "hicache": "HiCacheConnector",
}
_TITLE = "320 turns of agents under vLLM, one H200: seconds until the last answer"
_OTHERS = ("#6b7480", "#8f98a3", "#b4bcc6", "#d8b4c8")  # of the modes before hicache's, readable on both backgrounds
_THEMES = {  # background, text, colours of hicache's modes
    "light": ("white", "#1b1f24", ("#56b4e9", "#0072b2")),
    "dark": ("#161b22", "#e6edf3", ("#9cc9e8", "#56b4e9")),
}


def makespans(report: Report) -> dict[str, Points]:
    """Seconds of the agents' requests under vLLM with the default sizes, by mode and GiB. `none` has one point at 0."""
    found: dict[str, Points] = {}
    for run in map(Run.from_json, report.runs):
        at = run.setting
        if (at.server, at.workload, at.variant) == ("vllm", "agents", "") and at.mode in LABELS:
            found.setdefault(at.mode, {}).setdefault(at.cpu_gib, []).append(run.makespan_s)
    return {mode: dict(sorted(found[mode].items())) for mode in LABELS if mode in found}


def write_plots(report: Report, folder: Path) -> list[Path]:
    """Write `makespan-light.png` and `makespan-dark.png`; returns their paths. BenchUnavailable without such runs or
    without matplotlib."""
    found = makespans(report)
    if not any(size for points in found.values() for size in points):
        raise BenchUnavailable("the file has no runs of agents under vLLM with a CPU tier")
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"makespan-{theme}.png" for theme in _THEMES]
    for path, (background, text, own) in zip(paths, _THEMES.values(), strict=True):
        _draw(found, background, text, dict(zip(LABELS, _OTHERS + own, strict=True)), path)
    return paths


def _draw(found: Mapping[str, Points], background: str, text: str, colours: Mapping[str, str], path: Path) -> None:
    """Draw a group of bars for each size, and a bar for each mode in it: the median, with the range of the runs."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError:
        raise BenchUnavailable("plots need matplotlib of hicache[replay]: pip install '.[replay]'") from None
    names = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    style = {**mpl.rcParamsDefault, **dict.fromkeys(names, text), "axes.facecolor": background, "font.size": 12}
    sizes = sorted({size for points in found.values() for size in points})
    with mpl.rc_context(style):  # ignores the user's matplotlibrc
        figure = Figure(figsize=(8, 4.5), layout="constrained", facecolor=background)
        axes = figure.subplots()
        position, ticks, labelled = 0.0, [], set()
        for size in sizes:
            modes = [mode for mode, points in found.items() if size in points]
            ticks.append(position + (len(modes) - 1) / 2)
            for mode in modes:
                seconds = found[mode][size]
                median = percentile(seconds, 50)
                label = None if mode in labelled else LABELS[mode]
                [bar] = axes.bar(position, median, width=0.86, color=colours[mode], label=label)
                if min(seconds) < max(seconds):
                    about: dict[str, Any] = {"color": text, "capsize": 3}
                    axes.errorbar(position, median, [[median - min(seconds)], [max(seconds) - median]], **about)
                weight = "bold" if mode == "hicache" else "normal"
                axes.annotate(
                    f"{median:.1f}", (bar.get_x() + bar.get_width() / 2, max(seconds)), (0, 3), ha="center",
                    textcoords="offset points", weight=weight,
                )  # fmt: skip
                labelled.add(mode)
                position += 1
            position += 0.6
        axes.set_xticks(ticks, [f"{size:g} GiB of CPU memory" if size else "no CPU tier" for size in sizes])
        axes.tick_params(axis="x", length=0)
        axes.set_yticks([])
        axes.margins(y=0.35)  # for the legend
        for side in ("top", "left", "right"):
            axes.spines[side].set_visible(False)
        axes.set_title(_TITLE, loc="left", fontsize=12, weight="bold")
        axes.legend(loc="upper left", ncols=2, frameon=False)
        figure.savefig(path, dpi=150, metadata={"Software": None})

"""Plots the makespan of each mode over CPU memory, from the runs of a result file of `servers`. Needs matplotlib: the
extra `replay`. `hicache bench plot FILE FOLDER` writes a light and a dark picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hicache.bench.common import BenchUnavailable, Report, percentile
from hicache.bench.servers.runs import Run

Points = dict[float, list[float]]  # GiB: seconds of each run

LABELS = {
    "none": "no offloading",
    "cpu": "vLLM, CPU tier",
    "lazy": "vLLM, lazy CPU tier",
    "lmcache": "LMCache",
    "raw": "hicache, unpacked",
    "hicache": "hicache",
}
_COLOURS = dict(zip(LABELS, ("#888888", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#0072B2"), strict=True))
_THEMES = {"light": ("white", "#222222"), "dark": ("#0d1117", "#e6edf3")}  # background, text


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
    for path, (background, text) in zip(paths, _THEMES.values(), strict=True):
        _draw(found, background, text, path)
    return paths


def _draw(found: Mapping[str, Points], background: str, text: str, path: Path) -> None:
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError:
        raise BenchUnavailable("plots need matplotlib of hicache[replay]: pip install '.[replay]'") from None
    names = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    style = {**mpl.rcParamsDefault, **dict.fromkeys(names, text), "axes.facecolor": background}
    sizes = sorted({size for points in found.values() for size in points if size})
    with mpl.rc_context(style):  # ignores the user's matplotlibrc
        figure = Figure(figsize=(8, 4.5), layout="constrained", facecolor=background)
        axes = figure.subplots()
        for mode, points in found.items():
            medians = [percentile(seconds, 50) for seconds in points.values()]
            about: dict[str, Any] = {"color": _COLOURS[mode], "label": LABELS[mode]}
            if mode == "none":
                axes.axhline(medians[0], linestyle="--", **about)
                continue
            below = [median - min(seconds) for median, seconds in zip(medians, points.values(), strict=True)]
            above = [max(seconds) - median for median, seconds in zip(medians, points.values(), strict=True)]
            axes.errorbar(list(points), medians, yerr=[below, above], marker="o", capsize=3, **about)
        axes.set(xlabel="CPU memory, GiB", ylabel="makespan, s", ylim=(0, None), xticks=sizes)
        axes.grid(alpha=0.3)
        axes.legend(facecolor=background, edgecolor=background)
        figure.savefig(path, dpi=150, metadata={"Software": None})

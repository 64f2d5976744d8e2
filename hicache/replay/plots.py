"""The figures of a replay's report, each as the text of one SVG. Needs matplotlib, which is imported on the first call.

Panels of one figure share their axes, so that they compare by eye. Colours are those of Okabe and Ito, which people who
see few colours tell apart.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Numbers = NDArray[np.float64]

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#882255", "#999933")
ANY_TIER = "any tier"  # of hits that are not told apart by tier
_TIER_COLOURS = {"device": "#0072B2", "host": "#56B4E9", "disk": "#E69F00", "remote": "#CC79A7", ANY_TIER: "#aaaaaa"}
OPTIMAL, UNLIMITED = "optimal", "unlimited"  # lines that look the same in every figure
_BOUNDS: dict[str, dict[str, Any]] = {
    OPTIMAL: {"color": "#222222", "linestyle": "--"},
    UNLIMITED: {"color": "#777777", "linestyle": ":"},
}
_NUM_QUANTILES = 257  # points of a distribution's line
_MAX_LABEL_LETTERS = 110  # beside each other below a figure
_WIDTH_INCHES, _PANEL_INCHES, _GAP_INCHES = 9.6, 1.6, 0.5
_LEFT_INCHES, _RIGHT_INCHES, _LEGEND_INCHES, _TITLE_INCHES, _BOTTOM_INCHES = 0.65, 0.15, 0.35, 0.15, 0.55
_STYLE = {
    "svg.fonttype": "path",  # letters as shapes: no font has to be there where the report is read
    "svg.hashsalt": "hicache",  # the same results give the same file
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "legend.frameon": False,
}


class Curve(NamedTuple):
    """One line: `values` over the categories or times of its figure, or a sample whose distribution is drawn."""

    name: str
    values: Numbers


class Panel(NamedTuple):
    """One of several small plots beside each other."""

    title: str
    curves: Sequence[Curve]


def style() -> AbstractContextManager[None]:
    """Figures are drawn within it. ImportError where matplotlib is missing."""
    import matplotlib as mpl

    return mpl.rc_context({**mpl.rcParamsDefault, **_STYLE})  # whatever a file of the user's says


def hit_rates(capacities: Sequence[str], policies: Sequence[Curve], unlimited: float | None) -> str:
    """Hit rate over capacity, a line a policy. `values` [capacities], NaN where a pair was not replayed."""
    figure, (axes,) = _grid([Panel("", ())], 1, height_inches=2.4)
    looks = _looks(curve.name for curve in policies)
    for curve in policies:
        axes.plot(range(len(capacities)), curve.values, marker="o", markersize=4, label=curve.name, **looks[curve.name])
    if unlimited is not None:
        axes.axhline(unlimited, label=UNLIMITED, **_BOUNDS[UNLIMITED])
    step = -(-sum(map(len, capacities)) // _MAX_LABEL_LETTERS)  # as many names as have room beside each other
    axes.set_xticks(range(0, len(capacities), step), capacities[::step])
    axes.margins(x=0.14)
    axes.set_ylim(bottom=0)
    return _framed(figure, [axes], "capacity, blocks", "hit rate")


def tiers_over_time(times_s: Numbers, panels: Sequence[Panel], num_columns: int) -> str:
    """Stacked hit rates of the tiers over time. A panel's curves are its tiers [times]."""
    figure, grid = _grid(panels, num_columns)
    for axes, panel in zip(grid, panels, strict=True):
        names = [curve.name for curve in panel.curves]
        colours = [_TIER_COLOURS[name] for name in names]
        axes.stackplot(times_s, [curve.values for curve in panel.curves], labels=names, colors=colours, linewidth=0)
        axes.set_xlim(times_s[0], times_s[-1])
    grid[0].set_ylim(0, 1.05 * max(np.sum([curve.values for curve in panel.curves], axis=0).max() for panel in panels))
    return _framed(figure, grid, "time in the trace, seconds", "hit rate")


def saved_tokens(panels: Sequence[Panel], num_columns: int) -> str:
    """For each number of tokens from 1 the share of requests that saved as many or more. Curves: samples [requests]."""
    figure, grid = _distributions(panels, num_columns, at_least=True)
    return _framed(figure, grid, "tokens of the prompt that a tier held", "share of requests with at least so many")


def times_to_first_token(panels: Sequence[Panel], num_columns: int) -> str:
    """For each time the share of requests whose first token came by then. Curves: samples [requests], in seconds."""
    figure, grid = _distributions(panels, num_columns, at_least=False)
    fastest = min(float(np.quantile(curve.values, 0.01)) for panel in panels for curve in panel.curves)
    if fastest > 0:
        grid[0].set_xlim(left=fastest / 2)  # what is below are a few requests of next to no tokens
    return _framed(figure, grid, "time to first token, seconds", "share of requests by then")


def inline(svg: str, prefix: str) -> str:
    """The `<svg>` element alone, as part of a page: its ids begin with `prefix`, since a page's ids are unique."""
    return re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}-", svg[svg.index("<svg") :])


def _distributions(panels: Sequence[Panel], num_columns: int, at_least: bool) -> tuple[Figure, list[Any]]:
    figure, grid = _grid(panels, num_columns)
    shares = np.linspace(0, 1, _NUM_QUANTILES)
    looks = _looks(curve.name for panel in panels for curve in panel.curves)
    for axes, panel in zip(grid, panels, strict=True):
        for curve in panel.curves:
            points = np.quantile(curve.values, shares, method="inverted_cdf")
            kept = points > 0  # the axis is logarithmic
            heights = 1 - shares if at_least else shares
            axes.plot(points[kept], heights[kept], label=curve.name, **looks[curve.name])
        axes.set_ylim(0, 1)
    grid[0].set_xscale("log")
    return figure, grid


def _looks(names: Iterable[str]) -> dict[str, Mapping[str, Any]]:
    """Colour, dashes and width of each line. The first are wider, so that they are seen behind equal ones."""
    policies = [name for name in dict.fromkeys(names) if name not in _BOUNDS]
    widths = np.linspace(1.5 + 0.5 * min(len(policies) - 1, 4), 1.5, len(policies))
    pairs = enumerate(zip(policies, widths, strict=True))
    return _BOUNDS | {name: {"color": _COLOURS[at % len(_COLOURS)], "linewidth": width} for at, (name, width) in pairs}


def _grid(panels: Sequence[Panel], num_columns: int, height_inches: float = _PANEL_INCHES) -> tuple[Figure, list[Any]]:
    """A figure with one set of axes a panel, row by row; places that are left stay empty."""
    from matplotlib.figure import Figure

    num_rows = -(-len(panels) // num_columns)
    top = _LEGEND_INCHES + _TITLE_INCHES * (1 + panels[0].title.count("\n"))
    height = top + num_rows * height_inches + (num_rows - 1) * _GAP_INCHES + _BOTTOM_INCHES
    figure = Figure(figsize=(_WIDTH_INCHES, height))
    places = list(figure.subplots(num_rows, num_columns, sharex=True, sharey=True, squeeze=False).flat)
    figure.subplots_adjust(  # the layouts of matplotlib take seconds for many panels
        left=_LEFT_INCHES / _WIDTH_INCHES,
        right=1 - _RIGHT_INCHES / _WIDTH_INCHES,
        top=1 - top / height,
        bottom=_BOTTOM_INCHES / height,
        hspace=_GAP_INCHES / height_inches,
        wspace=0.08,
    )
    for axes, panel in zip(places, panels, strict=False):
        axes.set_title(panel.title, loc="left")
    for lowest in places[max(0, len(panels) - num_columns) : len(panels)]:
        lowest.tick_params(labelbottom=True)  # also where the place below is empty
    for axes in places[len(panels) :]:
        axes.set_visible(False)
    return figure, places[: len(panels)]


def _framed(figure: Figure, grid: Sequence[Any], horizontal: str, vertical: str) -> str:
    """The SVG, with names at the axes and one legend above all panels, each name once."""
    figure.supxlabel(horizontal, fontsize=9, y=0.08 / figure.get_figheight())
    figure.supylabel(vertical, fontsize=9, x=0.08 / _WIDTH_INCHES)
    handles = {label: handle for axes in grid for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="upper left", ncols=min(9, len(handles)), borderaxespad=0.1)
    return _svg(figure)


def _svg(figure: Figure) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return text.getvalue()

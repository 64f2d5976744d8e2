"""GB/s against page size beside the ceiling, of a result of the transfer bench. A helper of `hicache bench plot`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hicache.bench.common import Case, Report, ResultError
from hicache.bench.transfer import LAYOUTS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DIRECTIONS = {"up": "up: host to device", "down": "down: device to host"}
ORDERS = {"contiguous": "C0", "random": "C1"}

_NAME = re.compile(r"(?P<direction>up|down)\.(?P<layout>page\d+\.(?P<order>contiguous|random))\.(?P<geometry>\w+)")
_BAR = 0.36
_PAGES = {layout.name: (layout.device_page, layout.host_page) for layout in LAYOUTS}


@dataclass(frozen=True)
class Bar:
    """One measured case: pages of `device_page` and `host_page` tokens in one order and direction."""

    geometry: str
    direction: str
    order: str
    device_page: int
    host_page: int
    case: Case


def bars_of(report: Report) -> list[Bar]:
    """The cases of one direction of a transfer result, in its order. ResultError when there are none."""
    bars = []
    for case in report.cases:
        found = _NAME.fullmatch(case.name)
        if found and found["layout"] in _PAGES and case.ceiling is not None:
            bars.append(Bar(found["geometry"], found["direction"], found["order"], *_PAGES[found["layout"]], case))
    if not bars:
        raise ResultError(f"the result of {report.bench} on {report.machine} has no transfers to draw")
    return bars


def transfer_figure(report: Report) -> Figure:
    """A row per geometry, a column per direction: medians by page size and order, p10 to p90 as whiskers, the ceilings.

    The number on a bar is its share of the ceiling.
    """
    from matplotlib.figure import Figure  # here, so that the other commands work without it

    bars = bars_of(report)
    geometries = list(dict.fromkeys(bar.geometry for bar in bars))
    pages = sorted({(bar.device_page, bar.host_page) for bar in bars})
    figure = Figure(figsize=(10, 0.6 + 3.2 * len(geometries)), layout="constrained")
    panels: Any = figure.subplots(len(geometries), len(DIRECTIONS), sharex=True, sharey=True, squeeze=False)
    for row, geometry in zip(panels, geometries, strict=True):
        for panel, (direction, title) in zip(row, DIRECTIONS.items(), strict=True):
            _draw(panel, [bar for bar in bars if (bar.geometry, bar.direction) == (geometry, direction)], pages)
            panel.set_title(f"{title}, {geometry}")
        row[0].set_ylabel("GB/s")
    for panel in panels[-1]:
        panel.set_xticks(range(len(pages)), [f"{device} / {host}" for device, host in pages])
        panel.set_xlabel("tokens of a device page / host page")
    top = max(max(bar.case.p90, bar.case.ceiling or 0.0) for bar in bars)
    panels[0][0].set_ylim(0, 1.15 * top)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    figure.suptitle(f"Transfers on {report.machine}, commit {report.commit[:12]}")
    return figure


def _draw(panel: Any, bars: Sequence[Bar], pages: Sequence[tuple[int, int]]) -> None:
    for order, color in ORDERS.items():
        drawn = [bar for bar in bars if bar.order == order]
        side = -_BAR / 2 if order == "contiguous" else _BAR / 2
        centers = [pages.index((bar.device_page, bar.host_page)) + side for bar in drawn]
        cases = [bar.case for bar in drawn]
        spread = [[case.value - case.p10 for case in cases], [case.p90 - case.value for case in cases]]
        panel.bar(centers, [c.value for c in cases], _BAR, yerr=spread, color=color, capsize=2, label=f"pages {order}")
        ceilings = [case.ceiling for case in cases]
        left, right = [x - _BAR / 2 for x in centers], [x + _BAR / 2 for x in centers]
        label = "a plain copy in the same process" if order == "contiguous" else None
        panel.hlines(ceilings, left, right, colors="black", linestyles="dashed", label=label)
        for x, case in zip(centers, cases, strict=True):
            panel.annotate(f"{case.ratio:.2f}", (x, case.value / 2), ha="center", va="center", color="white")

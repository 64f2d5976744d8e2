"""What `hicache replay` shows: one row of figures a result, and a picture of the hit rates.

The picture needs matplotlib, of the extra `replay`.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from hicache.console import counted
from hicache.replay.simulation import ReplayResult, ReplaySettings

OPTIMAL, UNLIMITED = "optimal", "unlimited"  # rows of what some cache could hit: that has no tiers
_BOUNDS: dict[str, dict[str, Any]] = {
    OPTIMAL: {"color": "#222222", "linestyle": "--"},
    UNLIMITED: {"color": "#777777", "linestyle": ":"},
}
# Of Okabe and Ito, which people who see few colours tell apart.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#882255", "#999933")
_STYLE = {"axes.grid": True, "svg.hashsalt": "hicache"}  # the same results give the same file


def result_rows(results: Sequence[ReplayResult]) -> list[dict[str, str]]:
    """A row a result, its cells by column."""
    tiers = [
        tier
        for result in results
        if result.name not in _BOUNDS
        for tier, hits in result.hit_blocks.items()
        if hits.any()
    ]
    best = {result.settings.total_blocks: result.hit_rate for result in results if result.name in _BOUNDS}
    return [_row(result, list(dict.fromkeys(tiers)), best.get(result.settings.total_blocks)) for result in results]


def _row(result: ReplayResult, tiers: Sequence[str], best: float | None) -> dict[str, str]:
    has_tiers = result.name not in _BOUNDS
    cells = {
        "policy": result.name,
        "capacity": _capacity(result.settings),
        "hit rate": f"{result.hit_rate:.4f}",
        **{tier: f"{result.tier_hit_rates[tier]:.4f}" if has_tiers else "" for tier in tiers},
        "of optimal": f"{result.hit_rate / best:.3f}" if best else "",
        "tokens saved": counted(result.tokens_saved),
    }
    if result.costs is not None:
        p50, p99 = np.percentile(result.ttft_s, (50, 99))
        cells |= {"TTFT mean, s": f"{result.ttft_s.mean():.3f}", "p50": f"{p50:.3f}", "p99": f"{p99:.3f}"}
    return cells


def _capacity(settings: ReplaySettings) -> str:
    """`1,000` of a device alone, `1,000 + 6,000` of device and host, and so on."""
    blocks = [settings.device_blocks, settings.host_blocks, settings.disk_blocks]
    while len(blocks) > 1 and not blocks[-1]:
        blocks.pop()
    return " + ".join(counted(size) for size in blocks)


def hit_rates_svg(results: Sequence[ReplayResult]) -> str:
    """Hit rate over capacity, a line a policy. ImportError where matplotlib is missing."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    limited = [result for result in results if result.name != UNLIMITED]
    capacities = list(dict.fromkeys(_capacity(result.settings) for result in limited))
    with mpl.rc_context({**mpl.rcParamsDefault, **_STYLE}):  # whatever a file of the user's says
        figure = Figure(figsize=(9.6, 4.8), layout="constrained")
        axes = figure.subplots()
        axes.set_prop_cycle(color=_COLOURS)
        for name in dict.fromkeys(result.name for result in limited):
            own = {_capacity(result.settings): result.hit_rate for result in limited if result.name == name}
            axes.plot(list(own), list(own.values()), marker="o", label=name, **_BOUNDS.get(name, {}))
        for result in results:
            if result.name == UNLIMITED:
                axes.axhline(result.hit_rate, label=UNLIMITED, **_BOUNDS[UNLIMITED])
        axes.set(xlabel="capacity, blocks", ylabel="hit rate", ylim=(0, None), xticks=range(len(capacities)))
        axes.legend()
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()

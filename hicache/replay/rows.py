"""The output of `hicache replay`: rows of tables, and a plot of hit rates.

The plot needs matplotlib, which the extra `replay` installs.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hicache.console import counted, gib, percent
from hicache.replay.cost import TierCosts
from hicache.replay.curve import CurvePoint
from hicache.replay.simulation import ReplayResult, ReplaySettings
from hicache.replay.sweep import Case

OPTIMAL, UNLIMITED = "optimal", "unlimited"  # names of rows with an upper bound instead of tiers
_BOUNDS: dict[str, dict[str, Any]] = {
    OPTIMAL: {"color": "#222222", "linestyle": "--"},
    UNLIMITED: {"color": "#777777", "linestyle": ":"},
}
_TIERS = ("device", "host", "disk")
_COMPARISONS = {"one_tier": "one tier", "twice_the_host": "twice the host"}
_LINKS = {
    "loaded": "host to device",
    "backed_up": "device to host",
    "read": "disk to host",
    "written": "host to disk",
}
# The palette of Okabe and Ito, whose colours colour-blind readers can distinguish.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#882255", "#999933")
_STYLE = {"axes.grid": True, "svg.hashsalt": "hicache"}  # with a fixed salt, equal results give equal files


Cells = dict[str, str]


def hit_rows(rows: Sequence[Case], results: Mapping[Case, ReplayResult]) -> list[Cells]:
    """Return one row of hit rates for each case; a row has cells by column."""
    shown = [results[case] for case in rows]
    hits = [
        tier for result in shown if result.name not in _BOUNDS for tier, at in result.hit_blocks.items() if at.any()
    ]
    best = {_capacity(case.settings): results[case].hit_rate for case in rows if case.row == "optimal"}
    comparisons = dict.fromkeys(name for case in rows for name in case.comparisons)
    found = []
    for case, result in zip(rows, shown, strict=True):
        optimum = best.get(_capacity(case.settings)) if case.row == "policy" else None
        has_tiers = result.name not in _BOUNDS
        others = {name: results[case.comparisons[name]].hit_rate for name in case.comparisons}
        found.append(
            {
                **_names(result),
                "hit rate": f"{result.hit_rate:.4f}",
                **{tier: f"{result.tier_hit_rates[tier]:.4f}" if has_tiers else "" for tier in dict.fromkeys(hits)},
                "of optimal": f"{result.hit_rate / optimum:.3f}" if optimum else "",
                **{_COMPARISONS[name]: f"{others[name]:.4f}" if name in others else "" for name in comparisons},
            }
        )
    return found


def work_rows(results: Sequence[ReplayResult]) -> list[Cells]:
    """Return rows of saved and computed tokens, with times if the cost model has a rate of prefill."""
    found = []
    for result in results:
        p50, p90, p99 = np.percentile(result.uncached_tokens, (50, 90, 99))
        cells = {**_names(result), "tokens saved": counted(result.tokens_saved)}
        cells |= {"computed p50": f"{p50:,.0f}", "p90": f"{p90:,.0f}", "p99": f"{p99:,.0f}"}
        if result.costs is not None and result.costs.prefill_tokens_per_s is not None:
            p50, p90, p99 = np.percentile(result.ttft_s, (50, 90, 99))
            cells |= {"GPU, s": f"{result.gpu_s:,.1f}", "TTFT mean, s": f"{result.ttft_s.mean():.3f}"}
            cells |= {"TTFT p50": f"{p50:.3f}", "TTFT p90": f"{p90:.3f}", "TTFT p99": f"{p99:.3f}"}
        found.append(cells)
    return found


def copy_rows(results: Sequence[ReplayResult]) -> list[Cells]:
    """Return rows of copies on each link, in GiB if the bytes of a token are known, else in blocks."""
    found = []
    for result in results:
        assert result.copies is not None
        blocks, num_bytes = result.copies, result.copied_bytes
        moved = {_LINKS[name]: gib(num_bytes[name]) if num_bytes else counted(vars(blocks)[name]) for name in _LINKS}
        never = percent(blocks.never_read / blocks.written) if blocks.written else ""
        found.append({**_names(result), **moved, "of it never read": never})
    return found


def curve_rows(curve: Sequence[CurvePoint], block_tokens: int, costs: TierCosts | None) -> list[Cells]:
    """Return one row for each size of the miss-ratio curve."""
    block_bytes = 0.0 if costs is None else block_tokens * costs.bytes_of("device")
    return [
        {
            "blocks": counted(point.blocks),
            **({"GiB": gib(int(point.blocks * block_bytes))} if block_bytes else {}),
            "lru": f"{point.lru:.4f}",
            "optimal": f"{point.optimal:.4f}",
        }
        for point in curve
    ]


def _names(result: ReplayResult) -> Cells:
    cells = {"policy": result.name, "capacity": _capacity(result.settings)}
    if result.costs is not None and result.costs.bytes_per_token:
        sizes, token_bytes = _blocks(result.settings), result.block_tokens
        cells["GiB"] = " + ".join(
            UNLIMITED if size is None else gib(int(size * token_bytes * result.costs.bytes_of(tier)))
            for tier, size in zip(_TIERS, sizes, strict=False)
        )
    return cells


def _capacity(settings: ReplaySettings) -> str:
    """Return `1,000` for a device alone, `1,000 + 6,000` for device and host, and so on."""
    return " + ".join(counted(size) for size in _blocks(settings))


def _blocks(settings: ReplaySettings) -> list[int | None]:
    """Return the blocks of each tier, without missing tiers at the end."""
    blocks = [settings.device_blocks, settings.host_blocks, settings.disk_blocks]
    while len(blocks) > 1 and blocks[-1] == 0:
        blocks.pop()
    return blocks


def hit_rates_svg(results: Sequence[ReplayResult]) -> str:
    """Plot hit rate over capacity, one line for each policy, as SVG. Raises ImportError if matplotlib is missing."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    limited = [result for result in results if result.name != UNLIMITED]
    capacities = list(dict.fromkeys(_capacity(result.settings) for result in limited))
    with mpl.rc_context({**mpl.rcParamsDefault, **_STYLE}):  # ignores the user's matplotlibrc
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

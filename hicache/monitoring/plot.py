"""Plots memory of the tiers over time. Needs matplotlib: the extra `replay`.

The module can be imported without matplotlib; plotting then raises `ConfigError`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from hicache.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

try:
    from matplotlib import figure as _matplotlib_figure

    _figure: Any = _matplotlib_figure
except ImportError:
    _figure = None

_GIB = 1 << 30


@dataclass(frozen=True)
class MemorySample:
    """Bytes in use and free on each tier (device, host, disk) at `time_s` seconds after the start."""

    time_s: float
    used_bytes: dict[str, int]
    free_bytes: dict[str, int]

    def __post_init__(self) -> None:
        if self.used_bytes.keys() != self.free_bytes.keys():
            raise ConfigError(f"used_bytes of {list(self.used_bytes)} and free_bytes of {list(self.free_bytes)} differ")


def plot_memory_usage(history: Sequence[MemorySample]) -> Figure:
    """Plot used and free memory of each tier over time, in GiB, one panel for each tier. Save it with
    `figure.savefig(path)`.

    A sample without a tier adds no point to that tier's panel. Needs no display. Raises `ConfigError` if matplotlib is
    missing, the history is empty, or its times decrease.
    """
    if _figure is None:
        raise ConfigError("plots need matplotlib of hicache[replay]: pip install 'hicache[replay]'")
    if not history:
        raise ConfigError("the history is empty; give at least one MemorySample")
    if any(later.time_s < sample.time_s for sample, later in pairwise(history)):
        raise ConfigError("the history is not in order of time; sort it by time_s")
    tiers = list(dict.fromkeys(tier for sample in history for tier in sample.used_bytes))
    figure: Figure = _figure.Figure(figsize=(10, 3 * len(tiers)), layout="constrained")
    panels: Any = figure.subplots(len(tiers), 1, sharex=True, squeeze=False)[:, 0] if tiers else []
    for panel, tier in zip(panels, tiers, strict=True):
        samples = [sample for sample in history if tier in sample.used_bytes]
        times = [sample.time_s for sample in samples]
        panel.plot(times, [sample.used_bytes[tier] / _GIB for sample in samples], label="used")
        panel.plot(times, [sample.free_bytes[tier] / _GIB for sample in samples], label="free")
        panel.set_title(tier)
        panel.set_ylabel("GiB")
        panel.set_ylim(bottom=0)
        panel.legend()
    if tiers:
        panels[-1].set_xlabel("seconds")
    return figure

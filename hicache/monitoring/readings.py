"""Readings of a server's figures, and what two of them say together: rates and hit rates."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from hicache.monitoring.figures import TIERS

_START = "server.start_time_s"


@dataclass(frozen=True)
class Reading:
    """`time_s`: when it was taken, on a clock that only grows. `figures`: their values by name. `about`: the server's
    version and model."""

    time_s: float
    figures: Mapping[str, float]
    about: Mapping[str, str] = field(default_factory=dict)

    def get(self, figure: str) -> float:
        """0 for what the server does not have."""
        return self.figures.get(figure, 0.0)

    def group(self, group: str) -> Iterator[tuple[str, str]]:
        """The figures called `group.LABEL` that the server has, as (figure, label)."""
        for figure in self.figures:
            head, _, label = figure.partition(".")
            if head == group:
                yield figure, label

    @property
    def tiers(self) -> list[str]:
        """Those that the server has; a remote one does not say what it holds, and is known by its hits."""
        return [tier for tier in TIERS if f"used.{tier}" in self.figures or self.get(f"hit_tokens.{tier}")]

    def hit_rate(self, tier: str) -> float | None:
        """The share of all prompt tokens since the server's start that the tier had; None before the first."""
        prompt = self.get("prompt.tokens")
        return self.get(f"hit_tokens.{tier}") / prompt if prompt else None

    def quantile(self, group: str, share: float) -> float | None:
        """What so large a share of the observations of a histogram does not exceed, since the server's start."""
        return _quantile(self, group, share, self.get)

    @property
    def hidden_share(self) -> float | None:
        """Of the time of loads, the share that ran under compute; None where none was timed."""
        timed_s = self.get("loads.timed_s")
        return 1 - self.get("loads.exposed_s") / timed_s if timed_s else None


@dataclass(frozen=True)
class Change:
    """What happened between two readings of one process of a server, `before` the earlier."""

    before: Reading
    after: Reading

    def of(self, figure: str) -> float:
        return self.after.get(figure) - self.before.get(figure)

    def per_s(self, figure: str) -> float:
        return self.of(figure) / (self.after.time_s - self.before.time_s)

    def hit_rate(self, tier: str) -> float | None:
        """As that of a reading, over the prompts admitted meanwhile; None without one."""
        prompt = self.of("prompt.tokens")
        return self.of(f"hit_tokens.{tier}") / prompt if prompt else None

    def quantile(self, group: str, share: float) -> float | None:
        """As that of a reading, over the observations meanwhile."""
        return _quantile(self.after, group, share, self.of)


def _quantile(reading: Reading, group: str, share: float, count: Callable[[str], float]) -> float | None:
    """None without an observation. Those between two bounds are taken as spread evenly, those above all bounds as the
    largest. `count`: of observations up to a bound, by figure."""
    below_s, below, wanted = 0.0, 0.0, share * count(f"{group}.+Inf")
    if not wanted:
        return None
    for figure, bound in reading.group(group):
        counted = count(figure)
        if counted >= wanted and bound != "+Inf":
            return below_s + (float(bound) - below_s) * (wanted - below) / (counted - below)
        below_s, below = float(bound) if bound != "+Inf" else below_s, counted
    return below_s


class History:
    """The readings of the last `window_s` seconds, and always the last two."""

    def __init__(self, first: Reading, window_s: float) -> None:
        self._window_s = window_s
        self._readings = deque([first])

    def add(self, reading: Reading) -> None:
        """Forgets what was before if the server was started anew since."""
        readings = self._readings
        if readings[-1].get(_START) != reading.get(_START):
            readings.clear()
        readings.append(reading)
        while len(readings) > 2 and readings[1].time_s <= reading.time_s - self._window_s:
            readings.popleft()

    @property
    def last(self) -> Reading:
        return self._readings[-1]

    @property
    def change(self) -> Change | None:
        """Over the window; None until there are two readings."""
        return Change(self._readings[0], self.last) if len(self._readings) > 1 else None

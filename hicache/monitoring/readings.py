"""Readings of a server's figures, and the rates and hit rates between two readings."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from hicache.monitoring.figures import TIERS

_START, _PROMPT = "server.start_time_s", "prompt.tokens"


@dataclass(frozen=True)
class Reading:
    """One reading of a server. `time_s`: a monotonic time. `figures`: values by name. `about`: the server's version and
    model."""

    time_s: float
    figures: Mapping[str, float]
    about: Mapping[str, str] = field(default_factory=dict)

    def get(self, figure: str) -> float:
        """Return the value of a figure; 0 if the server does not have it."""
        return self.figures.get(figure, 0.0)

    def group(self, group: str) -> Iterator[tuple[str, str]]:
        """Return the figures called `group.LABEL` that the server has, as (figure, label)."""
        for figure in self.figures:
            head, _, label = figure.partition(".")
            if head == group:
                yield figure, label

    @property
    def tiers(self) -> list[str]:
        """Return the tiers of the server. A remote tier exports no usage, so it is included only after its first
        hit."""
        named = {label for group in ("used", "used_bytes") for _, label in self.group(group)}
        return [tier for tier in TIERS if tier in named or self.get(f"hit_tokens.{tier}")]

    def hit_rate(self, tier: str) -> float | None:
        """Return the share of prompt tokens since the server's start that were hits in the tier; None before the first
        prompt."""
        prompt = self.get(_PROMPT)
        return self.get(f"hit_tokens.{tier}") / prompt if prompt else None

    def quantile(self, group: str, share: float) -> float | None:
        """Return the `share` quantile of a histogram since the server's start; 0.5 is the median. Returns None without
        an observation."""
        return _quantile(self, group, share, self.get)

    @property
    def overlapped_share(self) -> float | None:
        """Return the share of the time of loads that overlapped with compute; None if no load was timed."""
        timed_s = self.get("loads.timed_s")
        return 1 - self.get("loads.exposed_s") / timed_s if timed_s else None


@dataclass(frozen=True)
class Change:
    """The difference of two readings of one server process. `before` is the earlier reading."""

    before: Reading
    after: Reading

    def of(self, figure: str) -> float:
        return self.after.get(figure) - self.before.get(figure)

    def per_s(self, figure: str) -> float:
        return self.of(figure) / (self.after.time_s - self.before.time_s)

    def hit_rate(self, tier: str) -> float | None:
        """Return the share of hits in the tier among the prompt tokens that were admitted between the readings; None if
        no prompt token was admitted."""
        prompt = self.of(_PROMPT)
        return self.of(f"hit_tokens.{tier}") / prompt if prompt else None

    def quantile(self, group: str, share: float) -> float | None:
        """Return the `share` quantile of a histogram over the observations between the readings; None without an
        observation."""
        return _quantile(self.after, group, share, self.of)


def _quantile(reading: Reading, group: str, share: float, count: Callable[[str], float]) -> float | None:
    """Return a quantile of a histogram; None without an observation. Interpolates linearly between two bounds. A
    quantile above all bounds is returned as the largest bound. `count`: returns the number of observations up to a
    bound, for the figure of this bound."""
    below_s, below, target = 0.0, 0.0, share * count(f"{group}.+Inf")
    if not target:
        return None
    for figure, bound in reading.group(group):
        counted = count(figure)
        if counted >= target and bound != "+Inf":
            return below_s + (float(bound) - below_s) * (target - below) / (counted - below)
        below_s, below = float(bound) if bound != "+Inf" else below_s, counted
    return below_s


class History:
    """The readings of the last `window_s` seconds, and always at least the last two."""

    def __init__(self, first: Reading, window_s: float) -> None:
        self._window_s = window_s
        self._readings = deque([first])

    def add(self, reading: Reading) -> None:
        """Add a reading. If the server was restarted since the last one, drop all earlier readings."""
        readings, last = self._readings, self._readings[-1]
        # SGLang reports no start time, but its counters begin at 0 again.
        if last.get(_START) != reading.get(_START) or last.get(_PROMPT) > reading.get(_PROMPT):
            readings.clear()
        readings.append(reading)
        while len(readings) > 2 and readings[1].time_s <= reading.time_s - self._window_s:
            readings.popleft()

    @property
    def last(self) -> Reading:
        return self._readings[-1]

    @property
    def change(self) -> Change | None:
        """Return the change over the window; None until there are two readings."""
        return Change(self._readings[0], self.last) if len(self._readings) > 1 else None

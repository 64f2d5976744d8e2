"""The cost model of a replay. It computes the bytes of tokens, the seconds that the GPU needs for a prefill, and the
time to first token.

    ttft_s = disk bytes / disk rate + disk and host bytes / link rate + prefill_s

    prefill_s = of positions [start, end): (end - start) * (1 / prefill_tokens_per_s + prefill_pair_s * mean position)

`prefill_pair_s` is the time that attention adds to one token for each token before it. `hicache.flow.cost` uses the
same formula. Users give the rates as flags, in JSON files, or as a file with an engine's stats.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hicache.config.settings import short_repr
from hicache.errors import ConfigError

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TierCosts:
    """Rates of one machine and model. Raises ConfigError for a value that is not a rate.

    `prefill_tokens_per_s`: prompt tokens that the GPU computes per second at the start of a prompt; None: unknown, and
    then all times are unknown. `bytes_per_token`: bytes of a token on the device; 0: unknown. `host_bytes_per_token`:
    bytes of a token on host and disk, where pages may be packed; None: as on the device. `load_bytes_per_s`,
    `disk_bytes_per_s`: rates of copies from host to device, and from disk to host; infinite if these copies take no
    time.
    """

    prefill_tokens_per_s: float | None = None
    bytes_per_token: float = 0.0
    host_bytes_per_token: float | None = None
    load_bytes_per_s: float = math.inf
    disk_bytes_per_s: float = math.inf
    prefill_pair_s: float = 0.0

    def __post_init__(self) -> None:
        for item in fields(self):
            value, may_be_zero = vars(self)[item.name], item.default == 0.0
            if value is None and item.default is None:
                continue
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not (value >= 0 if may_be_zero else value > 0):
                least = "of at least 0" if may_be_zero else "above 0"
                raise ConfigError(f"{item.name}={short_repr(value)} is not a number; give a number {least}")

    def bytes_of(self, tier: str) -> float:
        """Return the bytes of a token on `tier` ("device", "host" or "disk"); 0 if they are unknown."""
        packed = None if tier == "device" else self.host_bytes_per_token
        return self.bytes_per_token if packed is None else packed

    def prefill_s(self, input_tokens: Counts, hit_tokens: Counts) -> npt.NDArray[np.float64]:
        """Return the seconds that the GPU computes for each request, float64 `[requests]`; NaN if the prefill rate is
        unknown.

        At least the last token of a prompt is computed."""
        start = np.minimum(hit_tokens, np.maximum(input_tokens - 1, 0))
        pair_s = self.prefill_pair_s * (start + input_tokens) / 2
        token_s = math.nan if self.prefill_tokens_per_s is None else 1 / self.prefill_tokens_per_s
        return np.asarray((input_tokens - start) * (token_s + pair_s), np.float64)

    def ttft_s(
        self, input_tokens: Counts, device_tokens: Counts, host_tokens: Counts, disk_tokens: Counts
    ) -> npt.NDArray[np.float64]:
        """Return the seconds to the first token of each request, float64 `[requests]`.

        Assumes that no other request runs, and that copies end before computing begins."""
        moved = host_tokens + disk_tokens
        seconds = self.prefill_s(input_tokens, device_tokens + moved)
        for tokens, bytes_per_s in ((moved, self.load_bytes_per_s), (disk_tokens, self.disk_bytes_per_s)):
            seconds = seconds + tokens * (self.bytes_of("host") / bytes_per_s)
        return seconds


_NAMES = tuple(item.name for item in fields(TierCosts))
# Names in `CacheEngine.stats()`, and the rates of `TierCosts`. The stats have the disk's rate for a single reader.
_STATS = {
    "cost.load_bytes_per_second": "load_bytes_per_s",
    "cost.read_bytes_per_second": "disk_bytes_per_s",
    "cost.prefill_tokens_per_second": "prefill_tokens_per_s",
}


def costs_of(paths: Sequence[Path], given: Mapping[str, float | None]) -> TierCosts | None:
    """Combine the rates `given` by flags with those of files. A flag overrides all files, and a later file an earlier
    one.

    Returns None if there is no rate at all. Raises ConfigError if a file has no rate, or if a rate is given without
    another rate that it needs.
    """
    rates: dict[str, float] = {}
    for path in paths:
        rates |= _rates_of(path)
    rates |= {name: value for name, value in given.items() if value is not None}
    if not rates:
        return None
    is_timed = any(name.endswith("_s") for name in rates)
    if is_timed and "prefill_tokens_per_s" not in rates:
        raise ConfigError("a time to first token needs the rate of prefill; give --prefill-tokens-per-s, like 10000")
    is_moving = any(name.endswith("_bytes_per_s") for name in rates)
    if (is_moving or "host_bytes_per_token" in rates) and "bytes_per_token" not in rates:
        raise ConfigError("times of copies need the bytes of a token; give --bytes-per-token, like 128KiB")
    return TierCosts(**rates)


def _rates_of(path: Path) -> dict[str, float]:
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--calibration {path} is not JSON; give a file with rates or stats of an engine") from error
    if not isinstance(content, dict):
        content = {}
    found = {_STATS.get(name, name): value for name, value in content.items()}
    rates = {name: found[name] for name in _NAMES if _is_rate(found.get(name))}
    if not rates:
        raise ConfigError(f"--calibration {path} has no rate; give one of {', '.join(_NAMES)}, or stats of an engine")
    return rates


def _is_rate(value: object) -> bool:
    """Return whether `value` is a measured rate. An engine reports 0 before its first measurement."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf

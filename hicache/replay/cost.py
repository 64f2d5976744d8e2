"""What a hit is worth: time to first token from the rates of a machine and a model.

    ttft_s = disk bytes / disk rate + remote bytes / remote rate + all of them and host bytes / link rate + prefill_s

    prefill_s = of positions [start, end): (end - start) * (1 / prefill_tokens_per_s + prefill_pair_s * mean position)

`prefill_pair_s` is the cost of one token for each token before it; the form is that of `hicache.flow.cost`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from hicache.errors import ConfigError
from hicache.settings import short_repr

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TierCosts:
    """Rates of one machine and model; infinite: for nothing. ConfigError for what is no rate."""

    prefill_tokens_per_s: float
    bytes_per_token: float = 0.0
    load_bytes_per_s: float = math.inf
    disk_bytes_per_s: float = math.inf
    remote_bytes_per_s: float = math.inf
    prefill_pair_s: float = 0.0

    def __post_init__(self) -> None:
        for item in fields(self):
            value, may_be_zero = vars(self)[item.name], item.default == 0.0
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not (value >= 0 if may_be_zero else value > 0):
                least = "of at least 0" if may_be_zero else "above 0"
                raise ConfigError(f"{item.name}={short_repr(value)} is no number {least}")

    def ttft_s(
        self,
        input_tokens: Counts,
        device_tokens: Counts,
        host_tokens: Counts,
        disk_tokens: Counts,
        remote_tokens: Counts | int = 0,
    ) -> npt.NDArray[np.float64]:
        """Seconds to the first token of each request, `[requests]`: nothing else runs, and copies end before computing
        begins. At least the last token of a prompt is computed."""
        moved = host_tokens + disk_tokens + remote_tokens
        start = np.minimum(device_tokens + moved, np.maximum(input_tokens - 1, 0))
        pair_s = self.prefill_pair_s * (start + input_tokens) / 2
        seconds = (input_tokens - start) * (1 / self.prefill_tokens_per_s + pair_s)
        for tokens, bytes_per_s in (
            (moved, self.load_bytes_per_s),
            (disk_tokens, self.disk_bytes_per_s),
            (remote_tokens, self.remote_bytes_per_s),
        ):
            seconds = seconds + tokens * (self.bytes_per_token / bytes_per_s)
        return np.asarray(seconds, np.float64)

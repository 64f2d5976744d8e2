"""Why admitted prompts are computed: the tokens that no tier served, by reason."""

from __future__ import annotations

from collections.abc import Sequence

from hicache.flow.lease import Lease
from hicache.flow.prompt import HostWatch
from hicache.metrics import Metrics
from hicache.pages.misses import MISS_HELP, USABLE, MissReason, count
from hicache.pages.table import names_of

# Pages [start, end) of a prompt that a tier has, and why they are not used: a `MissReason`, or `USABLE`.
Unused = tuple[int, int, int]

_HELP = {reason.label: text for reason, text in MISS_HELP.items()} | {
    "tail": "behind the last complete page; at least one token of each prompt is computed",
    "unknown": "of an engine without a host tier, which remembers no evicted pages",
}


class Misses:
    """Owned by the scheduler thread. `watch`: knows the fates of pages that the host evicted; None without a host
    tier."""

    def __init__(self, metrics: Metrics, page_tokens: int, watch: HostWatch | None) -> None:
        self._page_tokens, self._fates = page_tokens, None if watch is None else watch.fates
        self._counters = {
            label: metrics.counter(
                f"admit.{label}_missed_tokens",
                f"computed tokens of admitted prompts, {text}",
                "admit_missed_tokens",
                reason=label,
            )
            for label, text in _HELP.items()
        }

    def count(self, lease: Lease, in_stores: Sequence[Unused]) -> None:
        """Note and count the computed tokens of a lease. `in_stores`: pages that stores have and that were not read."""
        page = self._page_tokens
        in_memory = (
            lease.cached_len // page,
            lease.branching_len // page,
            MissReason.GATE if lease.declines_load else USABLE,
        )
        lease.missed = self.of(lease.keys, lease.cached_len, lease.prompt_len, [*in_stores, in_memory])
        if lease.request.is_counted:
            for label, num_tokens in lease.missed.items():
                self._counters[label].value += num_tokens

    def of(self, keys: Sequence[bytes], cached_len: int, num_tokens: int, unused: Sequence[Unused]) -> dict[str, int]:
        """Tokens [cached_len, num_tokens) of a prompt by reason; `keys`: of its complete pages."""
        if self._fates is None:
            return {"unknown": num_tokens - cached_len}
        first = cached_len // self._page_tokens
        reasons = self._fates.reasons(names_of(keys[first:]))
        for start, end, reason in unused:
            reasons[max(0, start - first) : max(0, end - first)] = reason
        if len(reasons) and reasons[0] == USABLE:
            reasons[0] = MissReason.EVICTED  # its window or state
        missed = {reason.label: num * self._page_tokens for reason, num in count(reasons).items()}
        tail = num_tokens - cached_len - len(reasons) * self._page_tokens
        return {**missed, "tail": tail} if tail > 0 else missed

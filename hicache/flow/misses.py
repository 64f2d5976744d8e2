"""The reasons for which tokens of admitted prompts are computed."""

from __future__ import annotations

from collections.abc import Sequence

from hicache.flow.lease import Lease
from hicache.flow.prompt import HostWatch
from hicache.metrics import Metrics
from hicache.pages.misses import USABLE, MissReason, count, miss_help
from hicache.pages.table import names_of

# Pages [start, end) of a prompt that a tier has, and the reason for which these pages are not used: a `MissReason`, or
# `USABLE`.
Unused = tuple[int, int, int]

_HELP = {reason.label: text for reason, text in miss_help("page").items()} | {
    "tail": "after the last complete page of the prompt",
    "unknown": "without a known reason, because an engine without a host tier does not remember evicted pages",
}


class Misses:
    """Counts the missed (computed) tokens of admitted prompts by reason. Owned by the scheduler thread. `watch`: the
    record of the pages that the host evicted, skipped or failed to read; None without a host tier."""

    def __init__(self, metrics: Metrics, page_tokens: int, watch: HostWatch | None) -> None:
        self._page_tokens, self._miss_reasons = page_tokens, None if watch is None else watch.miss_reasons
        self._counters = {
            label: metrics.counter(
                f"admit.{label}_missed_tokens",
                f"computed prompt tokens {text}",
                "admit_missed_tokens",
                reason=label,
            )
            for label, text in _HELP.items()
        }

    def count(self, lease: Lease, in_stores: Sequence[Unused]) -> None:
        """Count the computed tokens of a lease by reason. `in_stores`: pages that stores have and that were not
        read."""
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
        """Return the number of computed tokens by reason, for positions [cached_len, num_tokens) of a prompt. `keys`:
        keys of the prompt's complete pages."""
        if self._miss_reasons is None:
            return {"unknown": num_tokens - cached_len}
        first = cached_len // self._page_tokens
        reasons = self._miss_reasons.reasons(names_of(keys[first:]))
        for start, end, reason in unused:
            reasons[max(0, start - first) : max(0, end - first)] = reason
        if len(reasons) and reasons[0] == USABLE:
            reasons[0] = MissReason.EVICTED  # the page is in memory, so its window or state is missing
        missed = {reason.label: num * self._page_tokens for reason, num in count(reasons).items()}
        tail = num_tokens - cached_len - len(reasons) * self._page_tokens
        return {**missed, "tail": tail} if tail > 0 else missed

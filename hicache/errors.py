"""Every error the engine raises: one class a cause, and each message names the knob that remedies it.

Owns nothing. May import `hicache.storage` (whose own errors stand below these), and is imported by everything above it.
"""

from __future__ import annotations


class HiCacheError(Exception):
    """Base of all errors raised on purpose. The command line prints it as one line and exits with 2."""


class ConfigError(HiCacheError, ValueError):
    """A setting is wrong, or settings contradict each other."""


class ShapeError(HiCacheError, ValueError):
    """A tensor does not fit the pool it goes to; the message names both sides."""


class TryLater(HiCacheError, RuntimeError):
    """Nothing is wrong and nothing was changed: what was asked for does not fit now. Retry after a release or a
    poll."""


class OutOfSlots(TryLater):
    """The device tier cannot hold what was asked for now, even after eviction. Retry after a release."""

    def __init__(self, asked: int, available: int, evictable: int) -> None:
        self.asked, self.available, self.evictable = asked, available, evictable
        super().__init__(
            f"out of device slots: {asked} tokens asked, {available} available, {evictable} evictable; "
            f"wait for a release, run fewer requests at a time, or raise device_tokens"
        )


class OutOfRows(TryLater):
    """No row of the request table is free. Retry after a release."""

    def __init__(self, max_requests: int) -> None:
        super().__init__(f"all {max_requests} request rows are taken; wait for a release or raise max_requests")


class OutOfStates(TryLater):
    """No recurrent state is free, even after eviction. Retry after a release."""

    def __init__(self, short: int, available: int) -> None:
        super().__init__(
            f"{short} recurrent states more are needed than the {available} that are free; wait for a release, run "
            f"fewer requests at a time, or raise mamba_size"
        )


class TransferBusy(TryLater):
    """Every producer of the layer counter carries a load. Retry after a poll."""

    def __init__(self, producers: int) -> None:
        super().__init__(f"all {producers} loads that may be in flight are; poll and ask again")


class PromptTooLong(HiCacheError, ValueError):
    """The prompt can never fit, whatever is evicted."""

    def __init__(self, tokens: int, limit: int, knob: str) -> None:
        self.tokens, self.limit = tokens, limit
        super().__init__(f"a prompt of {tokens} tokens can never fit in {limit}; raise {knob} to at least {tokens}")


class OutOfMemory(HiCacheError, MemoryError):
    """A tier does not fit in the machine's memory."""


class PrefetchPending(TryLater):
    """The request's prefetch has not reached its end and its mode demands that it does; poll and ask again."""


class IdentityError(HiCacheError, ValueError):
    """What was stored belongs to another model, layout or tenant; or an identity is incomplete."""


class UnsupportedModel(HiCacheError, ValueError):
    """The model has layers this runner cannot serve."""


class InvariantError(HiCacheError, AssertionError):
    """`check()` found violations; the message lists all of them."""

    def __init__(self, where: str, violations: list[str]) -> None:
        self.violations = violations
        super().__init__(f"{where}: {len(violations)} violation(s): " + "; ".join(violations))


class DoubleFree(HiCacheError, RuntimeError):
    """Slots, rows or pages were freed that are not handed out."""


class TransferError(HiCacheError, RuntimeError):
    """A copy between tiers failed; source and destination stay as they were before it."""

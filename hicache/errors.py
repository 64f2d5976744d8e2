"""Every error the engine raises: one class a cause, and each message names the knob that remedies it.

Owns nothing. May import `hicache.storage`, whose own errors and `HiCacheError`, the base of them all, stand below; is
imported by everything above it.
"""

from __future__ import annotations

from hicache.storage import base

HiCacheError = base.HiCacheError


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


class InvalidTokens(HiCacheError, ValueError):
    """Token ids are no one-dimensional run of integers that a key can hold."""


class InvalidArgument(HiCacheError, ValueError):
    """An argument of a call is of the wrong kind or out of range; the message names it and what it takes."""


class TokensMismatch(HiCacheError, ValueError):
    """The tokens of a commit are not those that the lease was made for; the message names the first that differs."""

    def __init__(self, request_id: str, position: int, given: int, held: int) -> None:
        super().__init__(
            f"{request_id}: token {position} of the commit is {given}, the lease was made for {held}; "
            f"commit the sequence that begins with the lease's prompt"
        )


class LeaseEnded(HiCacheError, RuntimeError):
    """The lease was released or its request cancelled: its slots may be another's by now. Acquire again."""

    def __init__(self, request_id: str) -> None:
        super().__init__(f"the lease of {request_id} has ended, by release or cancel; nothing was changed")


class ForeignLease(HiCacheError, ValueError):
    """The lease belongs to another engine."""

    def __init__(self, request_id: str) -> None:
        super().__init__(f"the lease of {request_id} is of another engine; nothing was changed")


class DuplicateRequest(HiCacheError, ValueError):
    """The request id holds a lease already."""

    def __init__(self, request_id: str) -> None:
        super().__init__(f"request {request_id} holds a lease already; release it first, or use another request_id")


class NotRunning(HiCacheError, RuntimeError):
    """The engine was not started, or is closed."""

    def __init__(self, closed: bool) -> None:
        super().__init__("the engine is closed; build another" if closed else "the engine is not started; call start()")


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

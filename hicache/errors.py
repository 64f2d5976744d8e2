"""Every error that hicache raises on purpose: one class for each cause. Each message names the setting that remedies
the error.

Stores add errors of their own in `hicache.storage.base`. This module imports no other module of hicache.
"""

from __future__ import annotations

from collections.abc import Sequence


class HiCacheError(Exception):
    """Base of all errors of hicache and its stores. The command line prints the error in one line and exits with status
    2."""


class ConfigError(HiCacheError, ValueError):
    """A setting is wrong, or settings contradict each other."""


class ShapeError(HiCacheError, ValueError):
    """A tensor does not have the shape that a pool or an allocator needs; the message names both shapes."""


class ResourceExhausted(HiCacheError, RuntimeError):
    """The request does not fit now. The engine gave it no slot, row or lease. Retry after a release or a poll."""


def _until_copied(in_flight: int, what: str) -> str:
    return f"{in_flight} {what} are in copies in flight: call poll() and retry; else " if in_flight else ""


class OutOfSlots(ResourceExhausted):
    """The device tier has too few free slots, even after eviction. Retry after a release. If `in_flight` is above 0,
    copies in flight keep these tokens from eviction: retry after a poll."""

    def __init__(self, asked: int, available: int, evictable: int, in_flight: int = 0) -> None:
        self.asked = asked
        self.available = available
        self.evictable = evictable
        self.in_flight = in_flight
        super().__init__(
            f"out of device slots: {asked} tokens requested, {available} available, {evictable} evictable; "
            f"{_until_copied(in_flight, 'tokens')}wait for a release, run fewer requests at a time, or raise "
            f"device_tokens"
        )


class OutOfRows(ResourceExhausted):
    """No row of the request table is free. Retry after a release."""

    def __init__(self, max_requests: int) -> None:
        super().__init__(f"all {max_requests} request rows are in use; wait for a release or raise max_requests")


class OutOfStates(ResourceExhausted):
    """No recurrent state is free, even after eviction. Retry after a release, or after a poll if states are in copies
    in flight."""

    def __init__(self, short: int, available: int, in_flight: int = 0) -> None:
        super().__init__(
            f"out of recurrent states: {available} are free and {short} more are needed; "
            f"{_until_copied(in_flight, 'states')}wait for a release, run fewer requests at a time, or raise mamba_size"
        )


class TransferBusy(ResourceExhausted):
    """Too many loads are in flight to submit another load, or a load of this prefix has failed. Retry after a poll."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason}; poll and retry")


class PromptTooLong(HiCacheError, ValueError):
    """The prompt exceeds a limit that eviction cannot change, such as the size of a tier."""

    def __init__(self, tokens: int, limit: int, setting: str) -> None:
        self.tokens = tokens
        self.limit = limit
        super().__init__(
            f"a prompt of {tokens} tokens exceeds the limit of {limit}; raise {setting} to at least {tokens}"
        )


class InvalidTokens(HiCacheError, ValueError):
    """Token ids are not a one-dimensional sequence of int64 values of at least 0."""


class InvalidArgument(HiCacheError, ValueError):
    """An argument has the wrong type or is out of range; the message names the argument and the accepted values."""


class TokensMismatch(HiCacheError, ValueError):
    """The committed tokens do not begin with the tokens of the lease; the message names the first difference."""

    def __init__(self, request_id: str, position: int, given: int, held: int) -> None:
        super().__init__(
            f"{request_id}: token {position} of the commit is {given}, but token {position} of the lease is {held}; "
            f"commit a sequence that begins with the lease's prompt"
        )


class LeaseEnded(HiCacheError, RuntimeError):
    """The lease was released, or its request was cancelled. The slots of the lease may belong to another request.
    Acquire the request again."""

    def __init__(self, request_id: str) -> None:
        super().__init__(f"the lease of {request_id} was released or cancelled; nothing was changed")


class ForeignLease(HiCacheError, ValueError):
    """The lease belongs to another engine."""

    def __init__(self, request_id: str) -> None:
        super().__init__(f"the lease of {request_id} belongs to another engine; nothing was changed")


class DuplicateRequest(HiCacheError, ValueError):
    """The request id already has a lease."""

    def __init__(self, request_id: str) -> None:
        super().__init__(f"request {request_id} already has a lease; release it first, or use another request_id")


class NotRunning(HiCacheError, RuntimeError):
    """The engine is not started, is closed, or is unusable after an error inside a call; or the engine, store or cache
    was created before a fork and belongs to the parent process."""


class ConcurrentCall(HiCacheError, RuntimeError):
    """The engine was called during another call. Nothing was changed. Only one thread at a time may call an engine."""

    def __init__(self, thread: str) -> None:
        super().__init__(f"a call of {thread} is under way in this engine; call it from one thread at a time")


class OutOfMemory(HiCacheError, MemoryError):
    """A tier does not fit in the available memory."""


class NotStored(HiCacheError, RuntimeError):
    """The disk or the remote tier refused pages of a flush. The pages stay in memory, and each later flush retries
    them."""

    def __init__(self, num_pages: int, causes: Sequence[str]) -> None:
        self.num_pages = num_pages
        super().__init__(
            f"{num_pages} pages are not stored ({'; '.join(causes) or 'the store is full'}); "
            f"repair the store or raise its budget, and flush again"
        )


class PrefetchPending(ResourceExhausted):
    """The prefetch of the request is in flight, and the mode of the prefetch waits for its end. Retry after a poll."""


class ExchangePending(ResourceExhausted):
    """The request needs pages or slots of the device whose copies to the host are in flight, or its staged load is in
    progress. Under `exclusive`, evictions may have started, and the request's prefix may be locked until the request is
    admitted or cancelled. Retry after a poll."""


class TraceError(HiCacheError, ValueError):
    """A trace of requests cannot be read. The message names the file, the line and the accepted form."""

    def __init__(self, path: object, line: int | None, reason: str) -> None:
        self.line = line
        super().__init__(f"{path}, line {line}: {reason}" if line else f"{path}: {reason}")


class IdentityError(HiCacheError, ValueError):
    """Stored pages belong to another model, layout or tenant, or an identity is incomplete."""


class UnsupportedModel(HiCacheError, ValueError):
    """The model has layers that the model runner does not support."""


class InvariantError(HiCacheError, AssertionError):
    """`check()` found violations of invariants; the message lists them all."""

    def __init__(self, where: str, violations: list[str]) -> None:
        self.violations = violations
        super().__init__(f"{where}: {len(violations)} violation(s): " + "; ".join(violations))


class DoubleFree(HiCacheError, RuntimeError):
    """A caller freed slots, rows, states or pages that are not allocated."""


class TransferError(HiCacheError, RuntimeError):
    """A copy between tiers failed. The source is unchanged, and the engine never uses the bytes at the destination."""


class CallbackFailed(HiCacheError, RuntimeError):
    """The `on_token` callback of a request raised an error, which is `__cause__`. This request was ended; other
    requests continue."""

    def __init__(self, request_id: str, cause: Exception) -> None:
        super().__init__(f"request {request_id}: its on_token raised {type(cause).__name__}: {cause}; it was ended")
        self.__cause__ = cause


class NoServer(HiCacheError, OSError):
    """No server answers at the given address."""

    def __init__(self, server: str, reason: str) -> None:
        self.reason = f"no server at {server}: {reason}"
        super().__init__(f"{self.reason}; give the address of 'hicache serve', vLLM or SGLang, like 127.0.0.1:8000")


class NotOurServer(HiCacheError, ValueError):
    """The server at the given address is neither `hicache serve` nor vLLM nor SGLang."""

    def __init__(self, server: str, reason: str) -> None:
        self.reason = f"{server} is neither hicache serve nor vLLM nor SGLang: {reason}"
        super().__init__(f"{self.reason}; give the address of 'hicache serve', vLLM or SGLang, like 127.0.0.1:8000")

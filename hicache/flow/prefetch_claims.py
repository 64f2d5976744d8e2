"""Host pages that landed for requests that were not admitted: whose they are, and how many in all."""

from __future__ import annotations

from typing import Protocol
from weakref import ref


class Handle(Protocol):
    """What a caller holds of its prefetch."""

    request_id: str


class Claims:
    """Pages by the handle of a prefetch; a request may have had several. Owned by the scheduler thread.

    A claim goes with its handle, so that a caller who forgets a request takes nothing from others for good.
    """

    def __init__(self) -> None:
        self.total = 0
        self._by_request: dict[str, dict[ref[Handle], int]] = {}

    def of(self, handle: Handle) -> int:
        return self._by_request.get(handle.request_id, {}).get(ref(handle), 0)

    def add(self, handle: Handle, num_pages: int) -> None:
        request_id = handle.request_id
        claims = self._by_request.setdefault(request_id, {})
        key = ref(handle, lambda gone: self._drop(request_id, gone))
        claims[key] = claims.get(key, 0) + num_pages  # an equal key that is there stays, and so does its callback
        self.total += num_pages

    def pop(self, request_id: str) -> int:
        """The pages of all prefetches of a request, which are nobody's from now on."""
        num_pages = sum(self._by_request.pop(request_id, {}).values())
        self.total -= num_pages
        return num_pages

    def _drop(self, request_id: str, gone: ref[Handle]) -> None:
        claims = self._by_request.get(request_id, {})
        self.total -= claims.pop(gone, 0)
        if not claims:
            self._by_request.pop(request_id, None)

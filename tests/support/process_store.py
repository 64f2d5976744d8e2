"""The client of a store process as a `PageStore`, for the suite of the contract: pages go through staging memory.

Left to the caller, by design: a job of a wrong page is the engine's own error, so buffers are looked at here; finds and
writes have no deadline on the way, for the queue's is the I/O timeout; a closed client answers with misses.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

from hicache.integrations.staging import WaitingTier
from hicache.storage import PageBuffer, PageCipher, PageFormat, StoreError, StoreStats
from hicache.storage.calls import check_keys, check_pages
from hicache.storage.process.health import Limits
from hicache.storage.process.settings import ServiceSettings
from hicache.storage.process.stores import StoreRequest
from hicache.stores.tier import open_tier
from waiting import BOUND_S

LIMITS = Limits(io_timeout_s=BOUND_S, open_s=BOUND_S, close_s=BOUND_S)
KEYS = (bytes(32), bytes(range(32)))  # those of the suite; a cipher does not tell its own


class ProcessStore:
    """Any thread. `in_process`: the server is a thread of this process."""

    def __init__(
        self,
        url: str,
        *,
        identity: Mapping[str, str | int],
        formats: Sequence[PageFormat],
        cipher: PageCipher | None = None,
        in_process: bool = False,
    ) -> None:
        key = next(key for key in KEYS if PageCipher(key).key_id == cipher.key_id) if cipher else b""
        settings = ServiceSettings(readers=2, limits=LIMITS)
        tier = open_tier(StoreRequest(url, identity, formats, key, settings=settings), in_process=in_process)
        self._tier, self._client = WaitingTier(tier, max(each.page_bytes for each in formats)), tier
        self._is_closed = False

    @property
    def page_sizes(self) -> tuple[int, ...]:
        return self._client.page_sizes

    def register_memory(self, memory: PageBuffer) -> None:
        """The staging is shared."""

    def contains(self, keys: Sequence[bytes], *, deadline_s: float = math.inf) -> list[bool]:
        self._require(keys)
        return [False] * len(keys) if time.monotonic() > deadline_s else self._tier.find(keys)

    def get_into(
        self, keys: Sequence[bytes], buffers: Sequence[PageBuffer], *, deadline_s: float = math.inf
    ) -> list[bool]:
        """Page by page, for a read ends at the first that is missing."""
        self._require(keys, buffers, writeable=True)
        return [
            time.monotonic() < deadline_s and self._tier.read([key], len(buffer), _into(buffer)) == 1
            for key, buffer in zip(keys, buffers, strict=True)
        ]

    def touch(self, keys: Sequence[bytes]) -> None:
        self._require(keys)
        self._tier.used(keys)

    def put(
        self, items: Sequence[tuple[bytes, PageBuffer]], *, lag: float = 0.0, deadline_s: float = math.inf
    ) -> list[bool]:
        """`lag` is what the process sees of its own queue."""
        self._require([key for key, _ in items], [page for _, page in items])
        if time.monotonic() > deadline_s:
            return [False] * len(items)
        stored: list[bool] = []
        for size, run in groupby(items, lambda item: len(item[1])):
            keys, pages = zip(*run, strict=True)
            stored += self._tier.write(keys, size, lambda i, page, pages=pages: page.__setitem__(slice(None), pages[i]))
        return stored

    def reopen(self) -> bool:
        self._require(())
        return self._client.is_open

    def delete(self, keys: Sequence[bytes]) -> int:
        self._require(keys)
        return sum(self._tier._wait(self._tier._do(self._tier._submit_remove, keys)))

    def stats(self) -> StoreStats:
        return self._client.stats()

    def thread_read_errors(self) -> int:
        return self.stats().read_errors

    def sync(self) -> None:
        """Do nothing: answered writes are already as durable as the store makes them."""

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            assert self._tier.close()

    def _require(self, keys: Sequence[bytes], pages: Sequence[PageBuffer] = (), *, writeable: bool = False) -> None:
        if self._is_closed:
            raise StoreError("the store is closed")
        check_keys(keys)
        if pages or writeable:
            check_pages(keys, pages, self.page_sizes or set(map(len, pages)), writeable=writeable)


def _into(buffer: PageBuffer) -> Callable[[int, PageBuffer], None]:
    def landed(_i: int, page: PageBuffer) -> None:
        buffer[:] = page

    return landed

"""Stores over real servers, opened by URL, and their contents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hicache.bench.remote_servers import Server
from hicache.storage import PageCipher, PageFormat, PageStore, open_store
from hicache.storage.conformance import FORMATS, IDENTITY, MakeStore, page

PATIENCE = "timeout=60"  # long, so that a busy machine causes no timeout
PAGES = {b"%d" % n: page(n) for n in range(8)}


def opener(url: str, **more: str) -> MakeStore:
    """Open stores at `url` with an identity. `more`: entries that every identity gets."""

    def make(
        identity: Mapping[str, str | int], formats: Sequence[PageFormat], cipher: PageCipher | None = None
    ) -> PageStore:
        return open_store(url, identity={**identity, **more}, formats=formats, cipher=cipher)

    return make


def with_options(url: str, options: str) -> str:
    return f"{url}{'&' if '?' in url else '?'}{options}"


def opened(server: Server, options: str = PATIENCE, identity: Mapping[str, str | int] = IDENTITY) -> PageStore:
    return opener(with_options(server.url, options))(identity, FORMATS)


def found_in(store: PageStore, pages: Mapping[bytes, np.ndarray] = PAGES) -> list[bytes]:
    """The keys of the pages that the store has. Compares every byte of these pages."""
    buffers = [np.empty(len(content), np.uint8) for content in pages.values()]
    hits = store.get_into(list(pages), buffers)
    for hit, buffer, content in zip(hits, buffers, pages.values(), strict=True):
        assert not hit or np.array_equal(buffer, content)
    return [key for key, hit in zip(pages, hits, strict=True) if hit]

"""Threads encode pages in order, and compress less only if the writer waits for compression."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import Future
from typing import Any

import pytest

from hicache.storage import PageBuffer, PageFilter, PageFormat
from hicache.storage.codec import PageCodec, PageCodecs
from hicache.storage.compressor import PageCompressor
from hicache.storage.header import HeaderAndPayload
from storage_pages import is_compressed, key_of, page_of
from waiting import eventually

FORMAT = PageFormat(64 << 10, PageFilter())
NUM_PAGES, AHEAD = 64, 4


class _Watched(PageCodec):
    """A codec that counts the pages that it has encoded. The codec encodes pages in order, up to an allowed number."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.encoded, self.allowed, self._changed = 0, NUM_PAGES, threading.Condition()

    def allow(self, more: int) -> None:
        with self._changed:
            self.allowed += more
            self._changed.notify_all()

    def encode_split(self, key: bytes, page: PageBuffer, buffer: memoryview, *, lag: float = 0.0) -> HeaderAndPayload:
        with self._changed:
            self._changed.wait_for(lambda: page[0] < self.allowed)
        value = super().encode_split(key, page, buffer, lag=lag)
        with self._changed:
            self.encoded += 1
        return value


@pytest.mark.parametrize("waits", [False, True])
def test_a_writer_that_is_behind_packs_less_where_it_waits_for_that(
    waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue of the writer is full. If every page is encoded before the writer asks for it, all stay compressed. If
    the writer waits for each page, the later ones are raw."""
    codec = _Watched(FORMAT, b"n" * 16, 1, None)
    codecs = PageCodecs([FORMAT], b"n" * 16, 1, None)
    codecs[FORMAT.page_bytes] = codec
    if waits:
        codec.allowed, result = 0, Future.result
        monkeypatch.setattr(Future, "result", lambda self: codec.allow(1) or result(self))
    pages = {key_of(n): page_of(n, FORMAT.page_bytes, "flat") for n in range(NUM_PAGES)}
    packed = []
    with contextlib.closing(PageCompressor(codecs, AHEAD * FORMAT.page_bytes)) as compressor:
        for number, value in enumerate(compressor.values(pages, 1.0), 1):
            packed.append(is_compressed(value.header))
            if not waits:
                eventually(lambda: codec.encoded == min(NUM_PAGES, number + AHEAD))  # noqa: B023
    assert packed[: AHEAD + 1] == [True] * (AHEAD + 1)
    assert all(packed) if not waits else not any(packed[NUM_PAGES // 2 :])

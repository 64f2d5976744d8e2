"""Encodes a page as a value (filter, zstd, cipher, checksum, in this order), and decodes and verifies it.

Owns the compression contexts and scratch memory; header.py defines the header, docs/disk_format.md describes every
byte.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import zstandard

from hicache.storage.base import PageBuffer, StoreError
from hicache.storage.cipher import ENCRYPTION_BYTES, SCRATCH_SLACK_BYTES, PageCipher
from hicache.storage.filters import PageFilter, PageFormat, shuffle, unshuffle
from hicache.storage.header import (
    FIELD_BYTES,
    HEADER_BYTES,
    MAX_PAGE_BYTES,
    NAMESPACE_BYTES,
    RAW,
    ZSTD,
    HeaderAndPayload,
    ValueHeader,
    associated_data,
    finalise_header,
    page_bytes_of,
    read_header,
)
from hicache.storage.memory import CoreScratch, Scratch

# A page is stored compressed only if this saves 1/16 or more. With a smaller saving, decompressing the page takes
# longer than reading the saved bytes would.
_MIN_SAVED_SHARE = 16
# Before a large page is compressed, eight samples of it are compressed. The samples are 1/8 of the page apart, so
# compressible data of this length is found.
_NUM_SAMPLES, _SAMPLE_BYTES, _SAMPLE_MIN_SAVED_SHARE = 8, 8 << 10, 32
_MIN_SAMPLED_PAGE_BYTES = 8 * _NUM_SAMPLES * _SAMPLE_BYTES
# The lag measures the writer's backlog: 0 if there is none, 1 if the writer's queue is full. From a lag of
# `_FAST_FROM`, pages are compressed at the fast level; from `_RAW_FROM`, pages are not compressed. The fast level is 1:
# zstd's negative levels omit entropy coding, and only entropy coding shrinks pages of numbers.
_FAST_FROM, _RAW_FROM, _FAST_LEVEL = 0.5, 0.9, 1

_NO_FILTER = PageFilter()
_NO_KEY = "encrypted page; open the store with its key"


class _Contexts(threading.local):
    """The zstd contexts of one thread: a context used by two threads at once crashes or returns wrong bytes."""

    def __init__(self, page_bytes: int, level: int, filter: PageFilter) -> None:
        window_bytes = max(1 << 17, 1 << (page_bytes - 1).bit_length())
        self.compressor = _zstd_compressor(page_bytes, max(1, level), filter)
        self.fast_compressor = _zstd_compressor(page_bytes, _FAST_LEVEL, filter)
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=window_bytes)


def _zstd_compressor(page_bytes: int, level: int, filter: PageFilter) -> Any:
    # In shuffled numbers, short matches are accidental: finding, coding and copying such a match takes more time than
    # the match saves. With only long matches and a tiny hash table, levels up to 3 compress twice as fast as with a
    # table of 2^12, and the result decompresses 1.4 times as fast. The result is 2 % larger for keys and values of a
    # trained model, and 1 % larger or smaller for synthetic ones. Higher levels are meant to find repetitions and keep
    # zstd's parameters.
    numbers = {"min_match": 7, "hash_log": 7, "chain_log": 7} if filter.kind != "none" and level <= 3 else {}
    settings = zstandard.ZstdCompressionParameters.from_level(
        level, source_size=page_bytes, write_content_size=True, **numbers
    )
    return zstandard.ZstdCompressor(compression_params=settings)


class PageCodec:
    """Encodes and verifies pages of one format in one namespace; any thread.

    `level` 0 stores raw, 1 to 22 are zstd levels. The filter of the format is used for encoding only; decoding uses the
    filter that the header of the value names. A page that does not shrink by 1/16 is stored raw. With `cipher` every
    value is encrypted, and decoding refuses unencrypted values. Without a cipher, decoding refuses encrypted values.
    """

    def __init__(self, format: PageFormat, namespace: bytes, level: int, cipher: PageCipher | None = None) -> None:
        page_bytes, filter = format.page_bytes, format.filter
        if not 0 <= level <= 22:
            raise StoreError(f"level={level}: 0 stores raw, 1 to 22 are zstd levels")
        if not 1 <= page_bytes <= MAX_PAGE_BYTES:
            raise StoreError(f"page_bytes={page_bytes}: choose 1 to {MAX_PAGE_BYTES}")
        mismatch = filter.mismatch(page_bytes)
        if mismatch:
            raise StoreError(mismatch)
        self._page_bytes = page_bytes
        self._namespace = namespace
        self._level = level
        self._filter = filter
        self._cipher = cipher
        self._contexts = _Contexts(page_bytes, level, filter)
        self._shuffled = Scratch()
        self._decrypted = Scratch()
        self._verified = Scratch()
        self._decompressed = CoreScratch()

    @property
    def max_value_bytes(self) -> int:
        """Return the size of the largest value: header and raw payload."""
        return HEADER_BYTES + self.max_payload_bytes

    @property
    def max_payload_bytes(self) -> int:
        return self._page_bytes + (ENCRYPTION_BYTES if self._cipher else 0)

    def encode_split(self, key: bytes, page: PageBuffer, buffer: memoryview, *, lag: float = 0.0) -> HeaderAndPayload:
        """Encode `page`, contiguous uint8 `[page_bytes]`. A raw payload is `page` itself; any other payload lies in
        `buffer`, of at least `max_payload_bytes`.

        `lag`: backlog of the writer, from 0 (it keeps up) to 1 (its queue is full). From 0.5 on pages are compressed at
        level 1, from 0.9 on not at all.
        """
        compressed = self._compress(page, lag)
        payload = page.data if compressed is None else memoryview(compressed)
        fields = ValueHeader(
            codec=RAW if compressed is None else ZSTD,
            encrypted=self._cipher is not None,
            raw_bytes=self._page_bytes,
            stored_bytes=len(payload) + (ENCRYPTION_BYTES if self._cipher else 0),
            filter=_NO_FILTER if compressed is None else self._filter,
            namespace=self._namespace,
        ).pack()
        if self._cipher is not None:
            payload = self._cipher.encrypt(payload, associated_data(key, fields), buffer)
        elif compressed is not None:
            payload = buffer[: len(compressed)]
            # `np.copyto` releases the interpreter lock, unlike an assignment to the view.
            np.copyto(np.frombuffer(payload, dtype=np.uint8), np.frombuffer(compressed, dtype=np.uint8))
        return HeaderAndPayload(finalise_header(key, fields, payload), payload)

    def decode_split(self, key: bytes, header: bytes | memoryview, payload: memoryview, page: PageBuffer) -> str:
        """Verify a value and decode it into `page`, writable contiguous uint8 `[page_bytes]`. `payload` may be `page`
        itself: then a raw page is not copied.

        Returns "" if `page` holds verified bytes. Otherwise returns the reason, and the content of `page` is undefined.
        No value makes this method raise. The size of allocated memory depends on `page_bytes`, never on a length in the
        value.
        """
        fields = read_header(key, header, payload, self._page_bytes, self._namespace)
        if isinstance(fields, str):
            return fields
        if self._cipher is None:
            return _NO_KEY if fields.encrypted else self._decompress_page(fields, payload, page)
        if not fields.encrypted:
            return "unencrypted page in an encrypted store"
        scratch = self._decrypted.take(len(payload) - ENCRYPTION_BYTES + SCRATCH_SLACK_BYTES)
        plain = self._cipher.decrypt(payload, associated_data(key, header[:FIELD_BYTES]), scratch)
        if plain is None:
            return "page does not decrypt: changed, or of another key"
        return self._decompress_page(fields, plain, page)

    def verify_stored(self, key: bytes, value: bytes | memoryview) -> str:
        """Verify `value`. Returns "" if it was stored under `key` and is undamaged, otherwise the reason.

        If the codec does not have the cipher of an encrypted value, it verifies only the header and the checksum over
        all stored bytes. The checksum detects damage, not forgery.
        """
        view, page = memoryview(value), self._verified.take_page(self._page_bytes)
        reason = self.decode_split(key, view[:HEADER_BYTES], view[HEADER_BYTES:], page)
        return "" if reason == _NO_KEY else reason

    def value_fault(self, key: bytes, value: bytes | memoryview) -> str:
        """Return why `value` is not a value of `key` in this namespace; "" if header, lengths and checksum fit. Neither
        decrypts nor decompresses."""
        view = memoryview(value)
        fields = read_header(key, view[:HEADER_BYTES], view[HEADER_BYTES:], self._page_bytes, self._namespace)
        if isinstance(fields, str):
            return fields
        return "" if fields.encrypted == (self._cipher is not None) else "only one of value and store is encrypted"

    def _compress(self, page: PageBuffer, lag: float) -> bytes | None:
        """Shuffle and compress `page`. Returns None if it should be stored raw."""
        if not self._level or lag >= _RAW_FROM or self._filter.kind == "uncompressed":
            return None
        contexts, source = self._contexts, page
        if self._filter.kind != "none":
            source = self._shuffled.take_page(self._page_bytes)
            shuffle(self._filter, page, source)
        if not self._samples_compress(source):
            return None
        compressor = contexts.fast_compressor if lag >= _FAST_FROM else contexts.compressor
        compressed: bytes = compressor.compress(source.data)
        max_bytes = self._page_bytes - self._page_bytes // _MIN_SAVED_SHARE
        return compressed if len(compressed) <= max_bytes else None

    def _samples_compress(self, source: PageBuffer) -> bool:
        """Return whether samples of a large page shrink; Returns True for a small page, because compressing the page
        takes no longer than compressing samples."""
        if self._page_bytes < _MIN_SAMPLED_PAGE_BYTES:
            return True
        step_bytes, compressor = self._page_bytes // _NUM_SAMPLES, self._contexts.fast_compressor
        starts = range(step_bytes // 2, self._page_bytes, step_bytes)
        compressed_bytes = sum(len(compressor.compress(source[at : at + _SAMPLE_BYTES].data)) for at in starts)
        return compressed_bytes <= len(starts) * (_SAMPLE_BYTES - _SAMPLE_BYTES // _SAMPLE_MIN_SAVED_SHARE)

    def _decompress_page(self, header: ValueHeader, payload: memoryview, page: PageBuffer) -> str:
        if header.codec == RAW:
            source = np.frombuffer(payload, dtype=np.uint8)
            if source.ctypes.data != page.ctypes.data:
                np.copyto(page, source)
            return ""
        if header.filter.kind == "none":
            return self._decompress(payload, page)
        with self._decompressed.page(self._page_bytes) as shuffled:
            reason = self._decompress(payload, shuffled)
            if not reason:
                unshuffle(header.filter, shuffled, page)
        return reason

    def _decompress(self, payload: memoryview, target: PageBuffer) -> str:
        """Decompress one frame into `target` `[page_bytes]`. Returns "" or the reason for a failure, such as a frame of
        another length."""
        try:
            frame = zstandard.get_frame_parameters(payload)
            if frame.content_size != self._page_bytes:
                return "frame of another length"
            with self._contexts.decompressor.stream_reader(payload) as reader:
                num_bytes = reader.readinto(target.data)
                return "" if num_bytes == self._page_bytes else f"frame ends after {num_bytes} bytes"
        except zstandard.ZstdError as error:
            return f"frame does not decompress: {error}"


class PageCodecs(dict[int, PageCodec]):
    """The codecs of one store, by page size in bytes. Immutable, so any thread may use them."""

    def __init__(self, formats: Sequence[PageFormat], namespace: bytes, level: int, cipher: PageCipher | None) -> None:
        super().__init__({format.page_bytes: PageCodec(format, namespace, level, cipher) for format in formats})
        self._largest = self[max(self)]

    @property
    def max_value_bytes(self) -> int:
        return self._largest.max_value_bytes

    def verify_stored(self, key: bytes, value: bytes | memoryview) -> str:
        """Call `PageCodec.verify_stored` of the codec for the page size in the value's header."""
        return self._of(value).verify_stored(key, value)

    def value_fault(self, key: bytes, value: bytes | memoryview) -> str:
        """Call `PageCodec.value_fault` of the codec for the page size in the value's header."""
        return self._of(value).value_fault(key, value)

    def _of(self, value: bytes | memoryview) -> PageCodec:
        """Return the codec for the page size in the header. If no codec has this page size, return the codec of the
        largest size, which returns the reason."""
        return self.get(page_bytes_of(value) if len(value) >= HEADER_BYTES else 0, self._largest)


def value_of_page(key: bytes, page: PageBuffer) -> bytes:
    """Encode a page, uint8 `[page_bytes]`, without compression and encryption, for a store that has no identity: the
    namespace in the header is zero."""
    value = PageCodec(PageFormat(len(page)), bytes(NAMESPACE_BYTES), 0).encode_split(key, page, memoryview(b""))
    return value.header + bytes(value.payload)


def page_of_value(key: bytes, value: bytes | memoryview) -> PageBuffer | None:
    """Decode a value that `value_of_page` returned. Returns None unless `value_of_page` returned `value` for `key`."""
    parts = HeaderAndPayload.of(value)
    page = np.empty(max(1, len(parts.payload)), np.uint8)
    codec = PageCodec(PageFormat(len(page)), bytes(NAMESPACE_BYTES), 0)
    return None if codec.decode_split(key, parts.header, parts.payload, page) else page

"""How a page becomes a value, and a value that page again: filter, zstd, cipher, checksum, in this order.

Owns the compression contexts and each thread's scratch memory; header.py defines the header, docs/disk_format.md
describes every byte.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from hicache.storage.base import PageBuffer, StoreError
from hicache.storage.cipher import ENCRYPTION_BYTES, SCRATCH_SLACK_BYTES, PageCipher
from hicache.storage.filters import PageFilter, PageFormat, Shuffler
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
    copy_parts,
    finalise_header,
    page_bytes_of,
    read_header,
)
from hicache.storage.memory import Scratch
from hicache.storage.optional_packages import zstandard

# A page is stored compressed only if that saves at least this share: below, decompressing costs more than reading.
_MIN_SAVED_SHARE = 16
# Whether a page compresses is tried on eight samples, 1/8 of the page apart: a run that makes up an eighth is seen.
_NUM_SAMPLES, _SAMPLE_BYTES, _SAMPLE_MIN_SAVED_SHARE = 8, 8 << 10, 32
_MIN_SAMPLED_PAGE_BYTES = 8 * _NUM_SAMPLES * _SAMPLE_BYTES
# How far behind the writer may be (0: it keeps up, 1: its queue is full) before it compresses fast, and before it does
# not compress at all. Fast is level 1: zstd's negative levels omit entropy coding, the only gain there is in numbers.
_FAST_FROM, _RAW_FROM, _FAST_LEVEL = 0.5, 0.9, 1

_NO_FILTER = PageFilter()


class _Contexts(threading.local):
    """One thread's zstd contexts: a context used by two threads at once crashes or returns wrong bytes."""

    def __init__(self, page_bytes: int, level: int, filter: PageFilter) -> None:
        window_bytes = max(1 << 17, 1 << (page_bytes - 1).bit_length())
        self.compressor = _zstd_compressor(page_bytes, max(1, level), filter)
        self.fast_compressor = _zstd_compressor(page_bytes, _FAST_LEVEL, filter)
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=window_bytes)
        self.shuffler = Shuffler(page_bytes)


def _zstd_compressor(page_bytes: int, level: int, filter: PageFilter) -> Any:
    # In shuffled numbers short matches are chance: finding, coding and copying them costs more than it saves. With long
    # matches only and a tiny hash table the levels up to 3 compress twice as fast as with a table of 2^12, and the
    # result decompresses 1.4 times as fast; keys and values of a trained model come out 2 % larger, synthetic ones 1 %
    # larger or smaller. The higher levels exist to find repetitions and are left unchanged.
    numbers = {"min_match": 7, "hash_log": 7, "chain_log": 7} if filter.kind != "none" and level <= 3 else {}
    settings = zstandard.ZstdCompressionParameters.from_level(
        level, source_size=page_bytes, write_content_size=True, **numbers
    )
    return zstandard.ZstdCompressor(compression_params=settings)


class PageCodec:
    """Encodes and verifies pages of one size in one namespace; any thread.

    `level` 0 stores raw, 1 to 22 are zstd levels. `filter` applies to encoding only: values name their own. A page that
    does not shrink by 1/16 is stored raw. With `cipher` every value is encrypted, and an unencrypted one is refused;
    without, an encrypted one is refused.
    """

    def __init__(
        self,
        *,
        page_bytes: int,
        namespace: bytes,
        level: int,
        filter: PageFilter = _NO_FILTER,
        cipher: PageCipher | None = None,
    ) -> None:
        if len(namespace) != NAMESPACE_BYTES:
            raise StoreError(f"a namespace has {NAMESPACE_BYTES} bytes, this one {len(namespace)}")
        if not 0 <= level <= 22:
            raise StoreError(f"level={level}: 0 stores raw, 1 to 22 are zstd levels")
        if not 1 <= page_bytes <= MAX_PAGE_BYTES:
            raise StoreError(f"page_bytes={page_bytes}: choose 1 to {MAX_PAGE_BYTES}")
        mismatch = filter.mismatch(page_bytes)
        if mismatch:
            raise StoreError(mismatch)
        self._page_bytes, self._namespace = page_bytes, namespace
        self._level, self._filter, self._cipher = level, filter, cipher
        self._contexts = _Contexts(page_bytes, level, filter)
        self._shuffled, self._encrypted, self._verified = Scratch(), Scratch(), Scratch()

    @property
    def max_value_bytes(self) -> int:
        """Size of the largest value, a raw one."""
        return HEADER_BYTES + self.max_payload_bytes

    @property
    def max_payload_bytes(self) -> int:
        return self._page_bytes + (ENCRYPTION_BYTES if self._cipher else 0)

    def encode(self, key: bytes, page: PageBuffer, *, lag: float = 0.0) -> bytes:
        """The value of `page` in one part, as `encode_split` makes it in two."""
        value = self.encode_split(key, page, memoryview(bytearray(self.max_payload_bytes)), lag=lag)
        return value.header + bytes(value.payload)

    def encode_split(self, key: bytes, page: PageBuffer, buffer: memoryview, *, lag: float = 0.0) -> HeaderAndPayload:
        """The value of `page`, contiguous uint8 `[page_bytes]`. A raw payload is `page` itself, an encrypted one lies
        in `buffer`, of `max_payload_bytes`.

        `lag` says how far the writer is behind, from 0 (it keeps up) to 1 (its queue is full): from 0.5 on pages are
        compressed at level 1, from 0.9 on not at all.
        """
        fields, payload = self._encode(key, page, lag)
        header = finalise_header(key, fields, *payload)
        whole = payload[0] if len(payload) == 1 else buffer[: copy_parts(buffer, *payload)]
        return HeaderAndPayload(header, whole)

    def decode_into(self, key: bytes, value: bytes | memoryview, page: PageBuffer) -> str:
        """Verify `value` and decode it into `page`, writable contiguous uint8 `[page_bytes]`.

        Returns "" when `page` holds verified bytes, else the reason why not; then its content is undefined. Never
        raises for any `value`, and allocates by `page_bytes`, never by a length that the value states.
        """
        view = memoryview(value)
        return self.decode_split(key, view[:HEADER_BYTES], view[HEADER_BYTES:], page)

    def decode_split(self, key: bytes, header: bytes | memoryview, payload: memoryview, page: PageBuffer) -> str:
        """The same for a value in two parts. `payload` may be `page` itself: then a raw page is not copied."""
        fields = read_header(key, header, payload, self._page_bytes, self._namespace)
        if isinstance(fields, str):
            return fields
        if fields.encrypted and self._cipher is None:
            return "encrypted page; open the store with its key"
        if self._cipher is not None:
            if not fields.encrypted:
                return "unencrypted page in an encrypted store"
            scratch = self._encrypted.take_page(len(payload) - ENCRYPTION_BYTES + SCRATCH_SLACK_BYTES)
            plain = self._cipher.decrypt(payload, associated_data(key, header[:FIELD_BYTES]), scratch)
            if plain is None:
                return "page does not decrypt: changed, or of another key"
            payload = plain
        return self._decompress_page(fields, payload, page)

    def verify(self, key: bytes, value: bytes | memoryview) -> str:
        """Why `value` is not what was stored under `key`; "" if it is. Decrypts an encrypted one."""
        return self.decode_into(key, value, self._verified.take_page(self._page_bytes))

    def verify_stored(self, key: bytes, value: bytes | memoryview) -> str:
        """The same without decrypting.

        An unencrypted value is decompressed too. Of an encrypted one the header and the checksum over all stored bytes
        are compared, which needs no key and detects damage, not forgery.
        """
        view = memoryview(value)
        fields = read_header(key, view[:HEADER_BYTES], view[HEADER_BYTES:], self._page_bytes, self._namespace)
        if isinstance(fields, str):
            return fields
        if fields.encrypted:
            return ""
        if self._cipher is not None:
            return "unencrypted page in an encrypted store"
        if fields.codec == RAW:
            return ""
        return self._decompress(view[HEADER_BYTES:], self._shuffled.take_page(self._page_bytes))

    def _encode(self, key: bytes, page: PageBuffer, lag: float) -> tuple[bytes, tuple[bytes | memoryview, ...]]:
        """A header without its checksum, and the payload in parts."""
        compressed = self._compress(page, lag)
        content = page.data if compressed is None else compressed
        header = ValueHeader(
            codec=RAW if compressed is None else ZSTD,
            encrypted=self._cipher is not None,
            raw_bytes=self._page_bytes,
            stored_bytes=len(content) + (ENCRYPTION_BYTES if self._cipher else 0),
            filter=_NO_FILTER if compressed is None else self._filter,
            namespace=self._namespace,
        )
        fields = header.pack()
        if self._cipher is None:
            return fields, (content,)
        scratch = self._encrypted.take_page(len(content) + SCRATCH_SLACK_BYTES)
        return fields, self._cipher.encrypt(content, associated_data(key, fields), scratch)

    def _compress(self, page: PageBuffer, lag: float) -> bytes | None:
        """The page shuffled and compressed; None when it is to be stored raw."""
        if not self._level or lag >= _RAW_FROM:
            return None
        contexts, source = self._contexts, page
        if self._filter.kind != "none":
            source = self._shuffled.take_page(self._page_bytes)
            contexts.shuffler.shuffle(self._filter, page, source)
        if not self._samples_compress(source):
            return None
        compressor = contexts.fast_compressor if lag >= _FAST_FROM else contexts.compressor
        compressed: bytes = compressor.compress(source.data)
        max_bytes = self._page_bytes - self._page_bytes // _MIN_SAVED_SHARE
        return compressed if len(compressed) <= max_bytes else None

    def _samples_compress(self, source: PageBuffer) -> bool:
        """Whether samples of a large page shrink; a small page is compressed as fast as it is sampled."""
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
        shuffled = self._shuffled.take_page(self._page_bytes)
        reason = self._decompress(payload, shuffled)
        if not reason:
            self._contexts.shuffler.unshuffle(header.filter, shuffled, page)
        return reason

    def _decompress(self, payload: memoryview, target: PageBuffer) -> str:
        """Decompress one frame of exactly `page_bytes` into `target`, whatever length the frame states."""
        try:
            frame = zstandard.get_frame_parameters(payload)
            if frame.content_size != self._page_bytes:
                return "frame of another length"
            with self._contexts.decompressor.stream_reader(payload) as reader:
                return _read_exactly(reader, target.data)
        except zstandard.ZstdError as error:
            return f"frame does not decompress: {error}"


class PageCodecs(dict[int, PageCodec]):
    """The codecs of one store, by page size in bytes; any thread, never changed."""

    def __init__(self, formats: Sequence[PageFormat], namespace: bytes, level: int, cipher: PageCipher | None) -> None:
        for format in formats:
            self[format.page_bytes] = PageCodec(
                page_bytes=format.page_bytes, namespace=namespace, level=level, filter=format.filter, cipher=cipher
            )
        self._largest = self[max(self)]

    @property
    def max_value_bytes(self) -> int:
        return self._largest.max_value_bytes

    def verify(self, key: bytes, value: bytes | memoryview) -> str:
        """`PageCodec.verify` for a page of any of the sizes."""
        return self._codec_of(value).verify(key, value)

    def verify_stored(self, key: bytes, value: bytes | memoryview) -> str:
        """`PageCodec.verify_stored` for a page of any of the sizes."""
        return self._codec_of(value).verify_stored(key, value)

    def _codec_of(self, value: bytes | memoryview) -> PageCodec:
        """The codec of the size that a value states; any codec names the reason if there is none for that size."""
        if len(value) < HEADER_BYTES:
            return self._largest
        return self.get(page_bytes_of(value), self._largest)


def choose_filter(sample_pages: Sequence[PageBuffer], candidates: Sequence[PageFilter], level: int) -> PageFilter:
    """The filter with which the samples, all of one size, compress best; of equal ones the first candidate.

    Offline: it compresses every sample with every candidate. Raises `StoreError` when there is nothing to compare.
    """
    if not sample_pages or not candidates or not level:
        raise StoreError("choose_filter needs sample pages, candidates and a level above 0; give at least one of each")

    def stored_bytes(filter: PageFilter) -> int:
        codec = PageCodec(page_bytes=len(sample_pages[0]), namespace=bytes(NAMESPACE_BYTES), level=level, filter=filter)
        return sum(len(codec.encode(b"sample", page)) for page in sample_pages)

    return min(candidates, key=stored_bytes)


def _read_exactly(reader: Any, target: memoryview) -> str:
    filled_bytes = 0
    while filled_bytes < len(target):
        got_bytes = reader.readinto(target[filled_bytes:])
        if not got_bytes:
            return f"frame ends after {filled_bytes} bytes"
        filled_bytes += got_bytes
    return "frame is longer than the page" if reader.read(1) else ""

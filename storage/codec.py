"""How a page becomes a value and how a value proves that it is that page.

Owns the value header, its checksum and the packing. May import numpy, zstandard, the standard library and base.

A value is a header of 48 bytes and the payload, all integers little-endian:

    [ 0,  4)  magic b"HKVP"
    [ 4,  6)  u16 format version, 1
    [ 6,  7)  u8  codec: 0 raw, 1 zstd, 2 zstd over byte planes
    [ 7,  8)  u8  element width in bytes for codec 2, else 1
    [ 8, 16)  u64 raw length, the page's
    [16, 24)  u64 stored length, the payload's
    [24, 40)  namespace, the first 16 bytes of SHA-256 over the store's identity
    [40, 44)  u32 flags, 0
    [44, 48)  u32 CRC-32 over: u16 key length, key, header [0, 44), payload
    [48, ..)  payload

The checksum covers the key, so a value under another key does not verify. CRC-32 (zlib's) is chosen for speed: at
3.8 GB/s it was the fastest of what every Python has (adler32 3.1, sha1 1.7, sha256 1.6, blake2b 0.8), it lets other
threads run meanwhile and finds every burst of up to 32 bits. It is taken over the stored bytes, before anything parses
them. Packed payloads carry zstd's own content checksum too, so that a wrong unpacking is found as well.
"""

from __future__ import annotations

import struct
import threading
import zlib
from typing import Any, NamedTuple

import numpy as np

from hicache.storage.base import PageBuffer, StoreError
from hicache.storage.packages import zstandard

MAGIC = b"HKVP"
FORMAT_VERSION = 1
RAW, ZSTD, ZSTD_PLANES = 0, 1, 2
NAMESPACE_BYTES = 16

_FIELDS = struct.Struct("<4sHBBQQ16sI")
_CHECKSUM = struct.Struct("<I")
_KEY_LENGTH = struct.Struct("<H")
HEADER_BYTES = _FIELDS.size + _CHECKSUM.size

# A page is stored packed only when packing saves at least this share of it: below, unpacking costs more than reading.
_MIN_SAVING = 16
_PLANE_WIDTHS = (1, 2, 4, 8)


class ValueHeader(NamedTuple):
    magic: bytes
    version: int
    codec: int
    element_bytes: int
    raw_bytes: int
    stored_bytes: int
    namespace: bytes
    flags: int


def checksum(key: bytes, fields: bytes | memoryview, payload: bytes | memoryview) -> int:
    """CRC-32 over key length, key, the header's first 44 bytes and the payload."""
    return zlib.crc32(payload, zlib.crc32(fields, zlib.crc32(_KEY_LENGTH.pack(len(key)) + key)))


def seal(key: bytes, header: ValueHeader, payload: bytes | memoryview) -> bytes:
    """The value that stores `payload` under `key`."""
    fields = _FIELDS.pack(*header)
    return b"".join((fields, _CHECKSUM.pack(checksum(key, fields, payload)), payload))


class _Contexts(threading.local):
    """One thread's zstd contexts and scratch page: a context shared by two threads crashes or returns wrong bytes."""

    def __init__(self, page_bytes: int, level: int) -> None:
        window_bytes = max(1 << 17, 1 << (page_bytes - 1).bit_length())
        self.compressor = zstandard.ZstdCompressor(level=max(1, level), write_checksum=True)
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=window_bytes)
        self.scratch: PageBuffer = np.empty(page_bytes, dtype=np.uint8)


class PageCodec:
    """Encodes and verifies the pages of one namespace; any thread may call it.

    `level` 0 stores raw, 1 to 22 are zstd levels. `element_bytes` above 1 packs the i-th bytes of all elements together
    (exponents pack well, mantissas do not); it governs encoding only, values name their own width. A page that does not
    shrink by 1/16 is stored raw.
    """

    def __init__(self, *, page_bytes: int, namespace: bytes, level: int, element_bytes: int = 1) -> None:
        if len(namespace) != NAMESPACE_BYTES:
            raise StoreError(f"a namespace has {NAMESPACE_BYTES} bytes, this one {len(namespace)}")
        if not 0 <= level <= 22:
            raise StoreError(f"level={level}: 0 stores raw, 1 to 22 are zstd levels")
        if element_bytes not in _PLANE_WIDTHS or page_bytes % element_bytes:
            raise StoreError(
                f"element_bytes={element_bytes}: choose 1, 2, 4 or 8, a divisor of page_bytes={page_bytes}"
            )
        self._page_bytes, self._namespace = page_bytes, namespace
        self._level, self._element_bytes = level, element_bytes
        self._contexts = _Contexts(page_bytes, level)

    @property
    def max_value_bytes(self) -> int:
        """Size of the largest value, a raw one."""
        return HEADER_BYTES + self._page_bytes

    def encode(self, key: bytes, page: PageBuffer) -> bytes:
        """The value of `page`, contiguous uint8 `[page_bytes]`."""
        if self._level:
            codec = ZSTD_PLANES if self._element_bytes > 1 else ZSTD
            source = self._split_planes(page) if codec == ZSTD_PLANES else page
            packed = self._contexts.compressor.compress(source.data)
            if len(packed) <= self._page_bytes - self._page_bytes // _MIN_SAVING:
                return seal(key, self._header(codec, len(packed)), packed)
        return seal(key, self._header(RAW, self._page_bytes), page.data)

    def decode_into(self, key: bytes, value: bytes | memoryview, page: PageBuffer) -> str:
        """Verify `value` and unpack it into `page`, writable contiguous uint8 `[page_bytes]`.

        Returns "" when `page` holds verified bytes, else the reason why not; then its content is undefined. Never
        raises for any `value`, and allocates by `page_bytes` only, never by a length that the value names.
        """
        view = memoryview(value)
        reason = self._refusal(key, view)
        if reason:
            return reason
        codec, width = view[6], view[7]
        payload = view[HEADER_BYTES:]
        if codec == RAW:
            np.copyto(page, np.frombuffer(payload, dtype=np.uint8))
            return ""
        target = page if codec == ZSTD else self._contexts.scratch
        reason = self._unpack(payload, target)
        if not reason and codec == ZSTD_PLANES:
            planes = target.reshape(width, -1)
            for plane in range(width):
                page[plane::width] = planes[plane]
        return reason

    def _header(self, codec: int, stored_bytes: int) -> ValueHeader:
        width = self._element_bytes if codec == ZSTD_PLANES else 1
        return ValueHeader(MAGIC, FORMAT_VERSION, codec, width, self._page_bytes, stored_bytes, self._namespace, 0)

    def _refusal(self, key: bytes, view: memoryview) -> str:
        """Why header or checksum are not to be trusted; "" if they are. Every length is checked before it is used."""
        if len(view) < HEADER_BYTES:
            return f"value of {len(view)} bytes is shorter than a header"
        header = ValueHeader(*_FIELDS.unpack_from(view))
        planar = header.codec == ZSTD_PLANES
        rules = (
            (header.magic == MAGIC, "not the value of a page"),
            (header.version == FORMAT_VERSION, f"format version {header.version}"),
            (header.codec in (RAW, ZSTD, ZSTD_PLANES), f"unknown codec {header.codec}"),
            (header.element_bytes in _PLANE_WIDTHS[1:] if planar else header.element_bytes == 1, "wrong element width"),
            (header.raw_bytes == self._page_bytes, f"page of {header.raw_bytes} bytes"),
            (self._page_bytes % max(1, header.element_bytes) == 0, "element width does not divide the page"),
            (header.stored_bytes == len(view) - HEADER_BYTES, "stored length differs from the value's"),
            (header.codec != RAW or header.stored_bytes == self._page_bytes, "raw page of another length"),
            (header.namespace == self._namespace, "another namespace"),
            (header.flags == 0, f"unknown flags {header.flags}"),
        )
        for holds, reason in rules:
            if not holds:
                return reason
        stated = _CHECKSUM.unpack_from(view, _FIELDS.size)[0]
        return "" if stated == checksum(key, view[: _FIELDS.size], view[HEADER_BYTES:]) else "checksum differs"

    def _split_planes(self, page: PageBuffer) -> PageBuffer:
        width = self._element_bytes
        planes = self._contexts.scratch.reshape(width, -1)
        for plane in range(width):
            planes[plane] = page[plane::width]
        return self._contexts.scratch

    def _unpack(self, payload: memoryview, target: PageBuffer) -> str:
        """Decompress one frame of exactly `page_bytes` into `target`; bounded by it whatever the frame says."""
        try:
            if zstandard.get_frame_parameters(payload).content_size != self._page_bytes:
                return "frame of another length"
            with self._contexts.decompressor.stream_reader(payload) as reader:
                return _read_exactly(reader, target.data)
        except zstandard.ZstdError as error:
            return f"frame does not unpack: {error}"


def _read_exactly(reader: Any, target: memoryview) -> str:
    filled_bytes = 0
    while filled_bytes < len(target):
        got_bytes = reader.readinto(target[filled_bytes:])
        if not got_bytes:
            return f"frame ends after {filled_bytes} bytes"
        filled_bytes += got_bytes
    # Reading on makes the decoder reach the frame's end, where it compares the content checksum.
    return "frame is longer than the page" if reader.read(1) else ""

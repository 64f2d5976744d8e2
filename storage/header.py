"""The header of a stored value: what it says, and why it is or is not believed.

docs/disk_format.md describes every byte. Writers write version 2; readers read 1 and 2. Every field is checked before
it is used, and no length in it is ever allocated. Owns the format of the header and the checksum. May import the
standard library, numpy, filters, and cipher for its overhead.

The checksum covers the key, so a value under another key does not verify. CRC-32 (zlib's) is chosen for speed: at
3.8 GB/s it was the fastest of what every Python has (adler32 3.1, sha1 1.7, sha256 1.6, blake2b 0.8), it lets other
threads run meanwhile and finds every burst of up to 32 bits. It is taken over the stored bytes, before anything parses
them. Packed payloads carry zstd's own content checksum too, so that a wrong unpacking is found as well.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

import numpy as np

from hicache.storage.cipher import SEAL_BYTES
from hicache.storage.filters import FILTER_KINDS, PageFilter

MAGIC = b"HKVP"
FORMAT_VERSION = 2
RAW, ZSTD = 0, 1
NAMESPACE_BYTES = 16
# Lengths are 32 bits wide; cipher and zstd count in signed ones.
MAX_PAGE_BYTES = (1 << 31) - (1 << 16)

_ENCRYPTED = 1
_START = struct.Struct("<4sH")
_FIELDS_1 = struct.Struct("<4sHBBQQ16sI")
_FIELDS_2 = struct.Struct("<4sHBBIIBBHII16s")
_CHECKSUM = struct.Struct("<I")
_KEY_LENGTH = struct.Struct("<H")
FIELD_BYTES = _FIELDS_2.size
HEADER_BYTES = FIELD_BYTES + _CHECKSUM.size
_ZSTD_PLANES_1 = 2  # version 1: zstd over byte planes was a codec of its own


@dataclass(frozen=True)
class ValueHeader:
    """What a header says, of either version. `stored_bytes` is the length of the payload, `raw_bytes` of the page."""

    codec: int
    encrypted: bool
    raw_bytes: int
    stored_bytes: int
    filter: PageFilter
    namespace: bytes

    def pack(self) -> bytes:
        """The header's fields in version 2, without the checksum."""
        how = self.filter
        flags = _ENCRYPTED if self.encrypted else 0
        lengths = (self.raw_bytes, self.stored_bytes)
        arrangement = (FILTER_KINDS.index(how.kind), how.element_bytes, 0, how.tokens, how.channels)
        return _FIELDS_2.pack(MAGIC, FORMAT_VERSION, self.codec, flags, *lengths, *arrangement, self.namespace)

    def contradiction(self, view: memoryview, page_bytes: int, namespace: bytes) -> str:
        """Why no value `view` of a page of `page_bytes` in `namespace` has this header; "" if one may."""
        overhead_bytes = SEAL_BYTES if self.encrypted else 0
        packed_bytes = self.stored_bytes - overhead_bytes
        rules = (
            (self.codec in (RAW, ZSTD), f"unknown codec {self.codec}"),
            (self.raw_bytes == page_bytes, f"page of {self.raw_bytes} bytes"),
            (self.stored_bytes == len(view) - HEADER_BYTES, "stored length differs from the value's"),
            (0 <= packed_bytes <= page_bytes, f"payload of {packed_bytes} bytes"),
            (self.codec != RAW or packed_bytes == page_bytes, "raw page of another length"),
            (self.codec != RAW or self.filter == PageFilter(), "raw page with a filter"),
            (self.namespace == namespace, "another namespace"),
        )
        return next((reason for holds, reason in rules if not holds), "") or self.filter.misfit(page_bytes)


def bound_to(key: bytes, fields: bytes | memoryview) -> bytes:
    """What checksum and cipher tie a payload to: the key, with its length, and the header's fields."""
    return b"".join((_KEY_LENGTH.pack(len(key)), key, fields))


def seal_into(room: memoryview, key: bytes, fields: bytes, *payload: bytes | memoryview) -> int:
    """Write the value that stores `payload` under `key` to the start of `room`; returns its length.

    Header fields, checksum, and the payload's parts in a row.
    """
    checksum, end = zlib.crc32(bound_to(key, fields)), HEADER_BYTES
    into = np.frombuffer(room, dtype=np.uint8)  # numpy copies beside other threads, a memoryview does not
    for part in payload:
        checksum = zlib.crc32(part, checksum)
        start, end = end, end + len(part)
        np.copyto(into[start:end], np.frombuffer(part, dtype=np.uint8))
    room[:HEADER_BYTES] = fields + _CHECKSUM.pack(checksum)
    return end


def seal(key: bytes, fields: bytes, *payload: bytes | memoryview) -> bytes:
    """The same in memory of its own."""
    room = bytearray(HEADER_BYTES + sum(map(len, payload)))
    seal_into(memoryview(room), key, fields, *payload)
    return bytes(room)


def read_header(key: bytes, view: memoryview, page_bytes: int, namespace: bytes) -> ValueHeader | str:
    """The header of a value that holds together in every length and in its checksum, or the reason why it does not."""
    if len(view) < HEADER_BYTES:
        return f"value of {len(view)} bytes is shorter than a header"
    magic, version = _START.unpack_from(view)
    if magic != MAGIC:
        return "not the value of a page"
    if version not in (1, FORMAT_VERSION):
        age = "newer than" if version > FORMAT_VERSION else "unknown beside"
        return f"format version {version}, {age} {FORMAT_VERSION}, which this release reads and writes"
    header = _parse_1(view) if version == 1 else _parse_2(view)
    if isinstance(header, str):
        return header
    reason = header.contradiction(view, page_bytes, namespace)
    if reason:
        return reason
    stated = _CHECKSUM.unpack_from(view, FIELD_BYTES)[0]
    actual = zlib.crc32(view[HEADER_BYTES:], zlib.crc32(bound_to(key, view[:FIELD_BYTES])))
    return header if stated == actual else "checksum differs"


def is_packed(value: bytes | memoryview) -> bool:
    """Whether an encoded value holds its page packed, by zstd, rather than raw."""
    return value[6] != RAW


def _parse_1(view: memoryview) -> ValueHeader | str:
    _, _, codec, element_bytes, raw_bytes, stored_bytes, namespace, flags = _FIELDS_1.unpack_from(view)
    if flags:
        return f"unknown flags {flags}"
    if codec not in (RAW, ZSTD, _ZSTD_PLANES_1):
        return f"unknown codec {codec}"
    planar = codec == _ZSTD_PLANES_1
    if planar == (element_bytes == 1):
        return "wrong element width"
    how = PageFilter("planes" if planar else "none", element_bytes)
    return ValueHeader(ZSTD if planar else codec, False, raw_bytes, stored_bytes, how, namespace)


def _parse_2(view: memoryview) -> ValueHeader | str:
    fields = _FIELDS_2.unpack_from(view)
    _, _, codec, flags, raw_bytes, stored_bytes, kind, element_bytes, reserved, tokens, channels, namespace = fields
    if flags not in (0, _ENCRYPTED) or reserved:
        return f"unknown flags {flags}, {reserved}"
    if kind >= len(FILTER_KINDS):
        return f"unknown filter {kind}"
    how = PageFilter(FILTER_KINDS[kind], element_bytes, tokens, channels)
    return ValueHeader(codec, flags == _ENCRYPTED, raw_bytes, stored_bytes, how, namespace)

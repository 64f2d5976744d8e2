"""The header of a stored value: what it says, and why it is or is not believed.

docs/disk_format.md describes every byte. Writers write version 2; readers read 1 and 2. Every field is checked before
it is used, and no length in it is ever allocated. Owns the format of the header and the checksum. May import the
standard library, numpy, filters, and cipher for its overhead.

The checksum covers the key, so a value under another key does not verify. In version 3 it covers of a frame of zstd its
head and its end alone, which is zstd's own checksum over what comes out: taking both takes a third of the time of
unpacking. CRC-32 (zlib's) is chosen for speed: at
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
# Of values in tables, and of values in slots.
TABLE_VERSION, SLOT_VERSION = 2, 3
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
# From version 3 on the checksum covers these bytes of a frame of zstd: its header, of up to 18, and its own checksum.
_FRAME_HEAD_BYTES, _FRAME_CHECKSUM_BYTES = 32, 4


@dataclass(frozen=True)
class ValueHeader:
    """What a header says, of any version. `stored_bytes` is the length of the payload, `raw_bytes` of the page."""

    codec: int
    encrypted: bool
    raw_bytes: int
    stored_bytes: int
    filter: PageFilter
    namespace: bytes
    version: int = TABLE_VERSION

    @property
    def rests_on_frame(self) -> bool:
        """Whether the payload is verified by the checksum in its frame of zstd, over what comes out."""
        return _rests_on_frame(self.version, self.codec, self.encrypted)

    def pack(self) -> bytes:
        """The header's fields in version 2 or 3, without the checksum."""
        how = self.filter
        flags = _ENCRYPTED if self.encrypted else 0
        lengths = (self.raw_bytes, self.stored_bytes)
        arrangement = (FILTER_KINDS.index(how.kind), how.element_bytes, 0, how.tokens, how.channels)
        return _FIELDS_2.pack(MAGIC, self.version, self.codec, flags, *lengths, *arrangement, self.namespace)

    def contradiction(self, payload_bytes: int, page_bytes: int, namespace: bytes) -> str:
        """Why no value of a page of `page_bytes` in `namespace` with such a payload has this header; "" if one may."""
        overhead_bytes = SEAL_BYTES if self.encrypted else 0
        packed_bytes = self.stored_bytes - overhead_bytes
        rules = (
            (self.codec in (RAW, ZSTD), f"unknown codec {self.codec}"),
            (self.raw_bytes == page_bytes, f"page of {self.raw_bytes} bytes"),
            (self.stored_bytes == payload_bytes, "stored length differs from the value's"),
            (0 <= packed_bytes <= page_bytes, f"payload of {packed_bytes} bytes"),
            (self.codec != RAW or packed_bytes == page_bytes, "raw page of another length"),
            (self.codec != RAW or self.filter == PageFilter(), "raw page with a filter"),
            (self.namespace == namespace, "another namespace"),
        )
        return next((reason for holds, reason in rules if not holds), "") or self.filter.misfit(page_bytes)


def bound_to(key: bytes, fields: bytes | memoryview) -> bytes:
    """What checksum and cipher tie a payload to: the key, with its length, and the header's fields."""
    return b"".join((_KEY_LENGTH.pack(len(key)), key, fields))


def head_of(key: bytes, fields: bytes, *payload: bytes | memoryview) -> bytes:
    """The header of the value that stores `payload`, given in parts, under `key`."""
    checksum = zlib.crc32(bound_to(key, fields))
    for part in _covered(fields, *payload):
        checksum = zlib.crc32(part, checksum)
    return fields + _CHECKSUM.pack(checksum)


def copy_parts(into: memoryview, *parts: bytes | memoryview) -> int:
    """Write parts in a row to the start of `into`; returns how many bytes they have."""
    end, target = 0, np.frombuffer(into, dtype=np.uint8)  # numpy copies beside other threads, a memoryview does not
    for part in parts:
        start, end = end, end + len(part)
        np.copyto(target[start:end], np.frombuffer(part, dtype=np.uint8))
    return end


def seal_into(room: memoryview, key: bytes, fields: bytes, *payload: bytes | memoryview) -> int:
    """Write the value that stores `payload` under `key` to the start of `room`; returns its length.

    Header fields, checksum, and the payload's parts in a row.
    """
    room[:HEADER_BYTES] = head_of(key, fields, *payload)
    return HEADER_BYTES + copy_parts(room[HEADER_BYTES:], *payload)


def seal(key: bytes, fields: bytes, *payload: bytes | memoryview) -> bytes:
    """The same in memory of its own."""
    room = bytearray(HEADER_BYTES + sum(map(len, payload)))
    seal_into(memoryview(room), key, fields, *payload)
    return bytes(room)


def read_header(
    key: bytes, head: bytes | memoryview, payload: memoryview, page_bytes: int, namespace: bytes
) -> ValueHeader | str:
    """The header of a value that holds together in every length and in its checksum, or the reason why it does not."""
    if len(head) < HEADER_BYTES:
        return f"value of {len(head)} bytes is shorter than a header"
    magic, version = _START.unpack_from(head)
    if magic != MAGIC:
        return "not the value of a page"
    if not 1 <= version <= SLOT_VERSION:
        age = "newer than" if version > SLOT_VERSION else "unknown beside"
        return f"format version {version}, {age} {SLOT_VERSION}, which this release reads and writes"
    header = _parse_1(head) if version == 1 else _parse_2(head)
    if isinstance(header, str):
        return header
    reason = header.contradiction(len(payload), page_bytes, namespace)
    if reason:
        return reason
    return header if head == head_of(key, bytes(head[:FIELD_BYTES]), payload) else "checksum differs"


def is_packed(value: bytes | memoryview) -> bool:
    """Whether an encoded value holds its page packed, by zstd, rather than raw."""
    return value[6] != RAW


def _parse_1(view: bytes | memoryview) -> ValueHeader | str:
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


def _parse_2(view: bytes | memoryview) -> ValueHeader | str:
    fields = _FIELDS_2.unpack_from(view)
    _, version, codec, flags, *rest = fields
    raw_bytes, stored_bytes, kind, element_bytes, reserved, tokens, channels, namespace = rest
    if flags not in (0, _ENCRYPTED) or reserved:
        return f"unknown flags {flags}, {reserved}"
    if kind >= len(FILTER_KINDS):
        return f"unknown filter {kind}"
    how = PageFilter(FILTER_KINDS[kind], element_bytes, tokens, channels)
    return ValueHeader(codec, flags == _ENCRYPTED, raw_bytes, stored_bytes, how, namespace, version)


def _rests_on_frame(version: int, codec: int, encrypted: bool) -> bool:
    return version >= SLOT_VERSION and codec == ZSTD and not encrypted


def _covered(fields: bytes, *payload: bytes | memoryview) -> tuple[bytes | memoryview, ...]:
    """The parts of a payload, here in one part if it is a frame, that the checksum is taken over."""
    _, version, codec, flags = _FIELDS_2.unpack(fields)[:4]
    if not _rests_on_frame(version, codec, flags != 0):
        return payload
    (frame,) = payload
    return frame[:_FRAME_HEAD_BYTES], frame[-_FRAME_CHECKSUM_BYTES:]

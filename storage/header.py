"""The header of a stored value: what it says, and why it is or is not believed.

docs/disk_format.md describes every byte. Every field is checked before it is used, and no length in it is ever
allocated. Owns the format of the header and the checksum.

The checksum covers the key, so a value under another key does not verify. Of a plain zstd frame it covers only the
first bytes and the last ones, which are zstd's own checksum of the decompressed page: computing both checksums over the
whole takes a third of the time of decompression. CRC-32 (zlib's) is chosen for speed: at
3.8 GB/s it was the fastest of what every Python has (adler32 3.1, sha1 1.7, sha256 1.6, blake2b 0.8), it lets other
threads run meanwhile and finds every burst of up to 32 bits. It is taken over the stored bytes, before anything parses
them.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

import numpy as np

from hicache.storage.cipher import SEAL_BYTES
from hicache.storage.filters import FILTER_KINDS, PageFilter

MAGIC = b"HKVP"
VERSION = 1
RAW, ZSTD = 0, 1
NAMESPACE_BYTES = 16
# Lengths are 32 bits wide, and cipher and zstd count in signed ones; tested up to here.
MAX_PAGE_BYTES = 1 << 30

_ENCRYPTED = 1
_START = struct.Struct("<4sH")
_FIELDS = struct.Struct("<4sHBBIIBBHII16s")
_CHECKSUM = struct.Struct("<I")
_KEY_LENGTH = struct.Struct("<H")
FIELD_BYTES = _FIELDS.size
HEADER_BYTES = FIELD_BYTES + _CHECKSUM.size
_PAGE_BYTES, _PAGE_BYTES_OFFSET = struct.Struct("<I"), 8
# The checksum covers these bytes of a plain zstd frame: its header, of up to 18 bytes, and its own checksum.
_FRAME_HEAD_BYTES, _FRAME_CHECKSUM_BYTES = 32, 4


@dataclass(frozen=True)
class ValueHeader:
    """What a header says. `stored_bytes` is the length of the payload, `raw_bytes` of the page."""

    codec: int
    encrypted: bool
    raw_bytes: int
    stored_bytes: int
    filter: PageFilter
    namespace: bytes

    @property
    def rests_on_frame(self) -> bool:
        """Whether the payload is verified by the checksum in its zstd frame, over the decompressed page."""
        return self.codec == ZSTD and not self.encrypted

    def pack(self) -> bytes:
        """The header's fields, without the checksum."""
        how = self.filter
        flags = _ENCRYPTED if self.encrypted else 0
        lengths = (self.raw_bytes, self.stored_bytes)
        arrangement = (FILTER_KINDS.index(how.kind), how.element_bytes, 0, how.tokens, how.channels)
        return _FIELDS.pack(MAGIC, VERSION, self.codec, flags, *lengths, *arrangement, self.namespace)

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
    if version != VERSION:
        return f"value version {version}, this release reads {VERSION}"
    header = _parse(head)
    if isinstance(header, str):
        return header
    reason = header.contradiction(len(payload), page_bytes, namespace)
    if reason:
        return reason
    return header if head == head_of(key, bytes(head[:FIELD_BYTES]), payload) else "checksum differs"


def is_packed(value: bytes | memoryview) -> bool:
    """Whether an encoded value holds its page packed, by zstd, rather than raw."""
    return value[6] != RAW


def page_bytes_of(value: bytes | memoryview) -> int:
    """The length of the page that a value, of at least a header, says it holds. Not verified."""
    return int(_PAGE_BYTES.unpack_from(value, _PAGE_BYTES_OFFSET)[0])


def _parse(view: bytes | memoryview) -> ValueHeader | str:
    _, _, codec, flags, *rest = _FIELDS.unpack_from(view)
    raw_bytes, stored_bytes, kind, element_bytes, reserved, tokens, channels, namespace = rest
    if flags not in (0, _ENCRYPTED) or reserved:
        return f"unknown flags {flags}, {reserved}"
    if kind >= len(FILTER_KINDS):
        return f"unknown filter {kind}"
    how = PageFilter(FILTER_KINDS[kind], element_bytes, tokens, channels)
    return ValueHeader(codec, flags == _ENCRYPTED, raw_bytes, stored_bytes, how, namespace)


def _covered(fields: bytes, *payload: bytes | memoryview) -> tuple[bytes | memoryview, ...]:
    """The parts of a payload, here in one part if it is a frame, that the checksum is taken over."""
    codec, flags = _FIELDS.unpack(fields)[2:4]
    if codec != ZSTD or flags:
        return payload
    (frame,) = payload
    return frame[:_FRAME_HEAD_BYTES], frame[-_FRAME_CHECKSUM_BYTES:]

"""The header of a stored value: its fields, its checksum, and the rules by which a value is accepted or refused.

docs/disk_format.md describes every byte. Each field is checked before use, and no length in a header decides how much
memory is allocated.

The checksum is XXH3_64 (https://github.com/Cyan4973/xxHash) over every stored byte, verified before the payload is
parsed. The seed of the checksum is the XXH3_64 of the page key and the fields, so the verification of a value fails
under another page key. XXH3_64 processes 19 GB/s from memory and 60 GB/s from a CPU cache (CRC-32: 3.8 GB/s), and
releases the interpreter lock.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from hicache.storage.cipher import ENCRYPTION_BYTES
from hicache.storage.filters import FILTER_KINDS, PageFilter

MAGIC = b"HKVP"
VERSION = 1
RAW, ZSTD = 0, 1
NAMESPACE_BYTES = 16
# Lengths in a header have 32 bits, but the cipher and zstd count bytes in signed integers. Pages up to this size were
# tested.
MAX_PAGE_BYTES = 1 << 30

_ENCRYPTED = 1
_FIELDS = struct.Struct("<4sHBBIIBB10s16s")
_RESERVED = bytes(10)
_CHECKSUM = struct.Struct("<Q")
_KEY_LENGTH = struct.Struct("<H")
FIELD_BYTES = _FIELDS.size
HEADER_BYTES = FIELD_BYTES + _CHECKSUM.size


@dataclass(frozen=True)
class HeaderAndPayload:
    """A stored value in two parts, as a slot contains it."""

    header: bytes
    payload: memoryview

    def __len__(self) -> int:
        return len(self.header) + len(self.payload)

    @classmethod
    def of(cls, value: bytes | memoryview) -> HeaderAndPayload:
        """Split a contiguous value."""
        view = memoryview(value)
        return cls(bytes(view[:HEADER_BYTES]), view[HEADER_BYTES:])


@dataclass(frozen=True)
class ValueHeader:
    """The fields of a header. `stored_bytes`: length of the payload. `raw_bytes`: length of the page."""

    codec: int
    encrypted: bool
    raw_bytes: int
    stored_bytes: int
    filter: PageFilter
    namespace: bytes

    def pack(self) -> bytes:
        """Return the header without its checksum."""
        filter = self.filter
        flags = _ENCRYPTED if self.encrypted else 0
        lengths = (self.raw_bytes, self.stored_bytes)
        order = (FILTER_KINDS.index(filter.kind), filter.element_bytes, _RESERVED)
        return _FIELDS.pack(MAGIC, VERSION, self.codec, flags, *lengths, *order, self.namespace)

    def contradiction(self, payload_bytes: int, page_bytes: int, namespace: bytes) -> str:
        """Return the reason why this header does not fit a payload of `payload_bytes` for a page of `page_bytes` in
        `namespace`; "" if the header fits."""
        overhead_bytes = ENCRYPTION_BYTES if self.encrypted else 0
        content_bytes = self.stored_bytes - overhead_bytes
        rules = (
            (self.codec in (RAW, ZSTD), f"unknown codec {self.codec}"),
            (self.raw_bytes == page_bytes, f"page of {self.raw_bytes} bytes"),
            (self.stored_bytes == payload_bytes, "stored length differs from the value's"),
            (0 <= content_bytes <= page_bytes, f"payload of {content_bytes} bytes"),
            (self.codec != RAW or content_bytes == page_bytes, "raw page of another length"),
            (self.codec != RAW or self.filter == PageFilter(), "raw page with a filter"),
            (self.namespace == namespace, "another namespace"),
        )
        return next((reason for holds, reason in rules if not holds), "") or self.filter.mismatch(page_bytes)


def associated_data(key: bytes, fields: bytes | memoryview) -> bytes:
    """Return the bytes that checksum and cipher cover in addition to the payload: the length of the page key, the page
    key, and the header's fields."""
    return b"".join((_KEY_LENGTH.pack(len(key)), key, fields))


def finalise_header(key: bytes, fields: bytes, payload: bytes | memoryview) -> bytes:
    """Append the checksum to `fields`. Returns the header of the value that stores `payload` under `key`."""
    checksum = xxhash.xxh3_64(seed=xxhash.xxh3_64_intdigest(associated_data(key, fields)))
    # `update` releases the interpreter lock. A digest in a single call keeps the lock and takes longer.
    checksum.update(payload)
    return fields + _CHECKSUM.pack(checksum.intdigest())


def parse_header(header: bytes | memoryview) -> ValueHeader | str:
    """Parse a header without verifying its checksum. Returns the reason if the bytes are not a header."""
    if len(header) < HEADER_BYTES:
        return f"value of {len(header)} bytes is shorter than a header"
    magic, version, codec, flags, raw_bytes, stored_bytes, *order, namespace = _FIELDS.unpack_from(header)
    kind, element_bytes, reserved = order
    if magic != MAGIC:
        return "not the value of a page"
    if version != VERSION:
        return f"value version {version}, this release reads {VERSION}"
    if flags not in (0, _ENCRYPTED) or reserved != _RESERVED:
        return f"unknown flags {flags}, {reserved.hex()}"
    if kind >= len(FILTER_KINDS):
        return f"unknown filter {kind}"
    filter = PageFilter(FILTER_KINDS[kind], element_bytes)
    return ValueHeader(codec, flags == _ENCRYPTED, raw_bytes, stored_bytes, filter, namespace)


def read_header(
    key: bytes, header: bytes | memoryview, payload: memoryview, page_bytes: int, namespace: bytes
) -> ValueHeader | str:
    """Parse the header of a value and verify its lengths and checksum; returns the reason if the value is refused."""
    fields = parse_header(header)
    if isinstance(fields, str):
        return fields
    reason = fields.contradiction(len(payload), page_bytes, namespace)
    if not reason and header != finalise_header(key, bytes(header[:FIELD_BYTES]), payload):
        reason = "checksum differs"
    return reason or fields


def page_bytes_of(value: bytes | memoryview) -> int:
    """Return the page length in bytes according to the header of `value`, which must be long enough for a header. The
    header is not verified."""
    return int.from_bytes(value[8:12], "little")

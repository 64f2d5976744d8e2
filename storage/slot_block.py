"""The first block of a slot: which page the slot holds. An index can be built anew from these blocks alone.

[ 0,  4)  magic, b"HKVS"
[ 4,  6)  u16 version, 1
[ 6,  8)  u16 length k of the key, 1 to 511
[ 8, 16)  u64 sequence: of two slots with one key the higher one counts
[16, 68)  header of the value (header.py)
and k     the key
and 8     u64 XXH3_64 over all of that; zeros up to 4096
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import xxhash

from hicache.storage.header import HEADER_BYTES

MAGIC, VERSION = b"HKVS", 1
BLOCK_BYTES = 4096
MAX_KEY_BYTES = 511
_START = struct.Struct(f"<4sHHQ{HEADER_BYTES}s")
_CHECKSUM = struct.Struct("<Q")


class SlotBlock(NamedTuple):
    """What identifies the page of a slot."""

    key: bytes
    sequence: int
    header: bytes

    def pack(self) -> bytes:
        content = _START.pack(MAGIC, VERSION, len(self.key), self.sequence, self.header) + self.key
        return (content + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(content))).ljust(BLOCK_BYTES, b"\0")

    @classmethod
    def unpack(cls, raw: bytes | memoryview) -> SlotBlock | None:
        """None for what is no such block, or a damaged one."""
        if len(raw) < BLOCK_BYTES:
            return None
        magic, version, key_bytes, sequence, header = _START.unpack_from(raw)
        if magic != MAGIC or version != VERSION or not 1 <= key_bytes <= MAX_KEY_BYTES:
            return None
        end = _START.size + key_bytes
        if _CHECKSUM.unpack_from(raw, end)[0] != xxhash.xxh3_64_intdigest(raw[:end]):
            return None
        return cls(bytes(raw[_START.size : end]), sequence, header)

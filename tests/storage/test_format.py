"""The format of values and slots on disk. Frozen values and slots stay readable, and match their description in
docs/disk_format.md."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import numpy as np
import pytest
import xxhash

from hicache.storage.cipher import PageCipher
from hicache.storage.filters import PageFilter, PageFormat
from hicache.storage.header import FIELD_BYTES, HEADER_BYTES, page_bytes_of
from hicache.storage.memory import aligned_buffer
from hicache.storage.slot_file import SlotBlock
from storage_pages import WholeCodec, is_compressed

NAMESPACE = b"n" * 16
KEY = bytes(range(32))
DOCUMENT = Path(__file__).parents[2] / "docs" / "disk_format.md"
SHUFFLED = PageFilter("byte_shuffle", 2)
FIELDS = struct.Struct("<4sHBBIIBB10s16s")

# Frozen values of this page under b"key" and NAMESPACE, header and payload, as version 1 writes them. Later releases
# must read them in the same way.
PAGE = np.tile(np.array([1, 2, 3, 200], dtype=np.uint8), 24)
FROZEN = {
    "raw": (
        "484b56500100000060000000600000000001000000000000000000006e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e67ea92a8c882cb22"
        + "010203c8" * 24
    ),
    "zstd": (
        "484b56500100010060000000130000000001000000000000000000006e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e81adf37e5baf67f5"
        "28b52ffd206055000020010203c80100f9e488"
    ),
    "byte_shuffle": (
        "484b56500100010060000000150000000102000000000000000000006e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e210bc98eac26d643"
        "28b52ffd206065000020010302c8020003139fe9b0"
    ),
    "encrypted": (
        "484b56500100010160000000310000000102000000000000000000006e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e4f6d571f07ecae2f"
        "6ee00c1ac84df010197c8ff7ebc6372656aa3339e13c9efed9f29a0eaeb40d0fa3539dc2d0fe3985f491f7dd79b4a8c1e5"
    ),
}
FILTERS = {"byte_shuffle": SHUFFLED, "encrypted": SHUFFLED}


def codec_for(name: str) -> WholeCodec:
    """The codec for the frozen value of that name, with the settings that wrote it."""
    cipher = PageCipher(KEY) if name == "encrypted" else None
    filter = FILTERS.get(name, PageFilter())
    return WholeCodec(PageFormat(96, filter), NAMESPACE, 0 if name == "raw" else 1, cipher)


@pytest.mark.parametrize("name", FROZEN)
def test_frozen_values_are_read(name: str) -> None:
    """Frozen values decode to their page under their key, and are refused under another key."""
    value, back = bytes.fromhex(FROZEN[name]), np.zeros(96, dtype=np.uint8)
    codec = codec_for(name)
    assert codec.decode_into(b"key", value, back) == codec.verify_stored(b"key", value) == ""
    np.testing.assert_array_equal(back, PAGE)
    assert codec.decode_into(b"kex", value, back) == "checksum differs"
    assert is_compressed(value) == (name != "raw")


@pytest.mark.parametrize("name", FROZEN)
def test_writers_write_this_version(name: str) -> None:
    """A value that is written now, in one or two parts, has the frozen header. Only the compressed length, which
    depends on the version of zstd, and the checksum may differ."""
    codec, frozen = codec_for(name), bytes.fromhex(FROZEN[name])
    split = codec.encode_split(b"key", PAGE, aligned_buffer(codec.max_value_bytes))
    for value in (codec.encode(b"key", PAGE), split.header + bytes(split.payload)):
        assert value[:12] == frozen[:12] and value[16:FIELD_BYTES] == frozen[16:FIELD_BYTES]
        assert int.from_bytes(value[12:16], "little") == len(value) - HEADER_BYTES
        assert page_bytes_of(value) == len(PAGE)
        if name == "raw":
            assert value == frozen


@pytest.mark.parametrize("name", FROZEN)
def test_what_the_checksum_covers(name: str) -> None:
    """The checksum is XXH3_64 over the stored payload. The seed of the checksum depends on the key, the key's length,
    and the header fields."""
    value = codec_for(name).encode(b"key", PAGE)
    seed = xxhash.xxh3_64_intdigest(struct.pack("<H", 3) + b"key" + value[:FIELD_BYTES])
    assert int.from_bytes(value[FIELD_BYTES:HEADER_BYTES], "little") == xxhash.xxh3_64_intdigest(
        value[HEADER_BYTES:], seed
    )


def documented(section: str) -> list[tuple[int, int]]:
    """The positions of the fields that a section of docs/disk_format.md lists."""
    text = DOCUMENT.read_text().split(f"## {section}\n")[1].split("\n## ")[0]
    return [(int(a), int(b)) for a, b in re.findall(r"^\[ *(\d+), *(\d+)\)", text, re.MULTILINE)]


def test_the_document_states_the_fields() -> None:
    """docs/disk_format.md lists every field of the header with its position, in order and without a gap."""
    places = documented("A value")
    sizes = [struct.calcsize(f"<{code}") for code in re.findall(r"\d*s|[A-Z]", FIELDS.format)] + [8]
    assert [end - start for start, end in places] == sizes
    assert [0] + [end for _, end in places] == [start for start, _ in places] + [HEADER_BYTES]


# The frozen used bytes of the first block of a slot, as version 1 writes them.
FROZEN_BLOCK = (
    "484b5653010003000900000000000000484b56500100000060000000600000000001000000000000000000006e6e6e6e6e6e"
    "6e6e6e6e6e6e6e6e6e6e67ea92a8c882cb226b6579b13308076fffc89e"
)


def test_the_block_of_a_slot() -> None:
    """A block has the frozen bytes, and docs/disk_format.md describes its fields. A block with a flipped bit is
    refused."""
    assert documented("Slots") == [(0, 4), (4, 6), (6, 8), (8, 16), (16, 16 + HEADER_BYTES)]
    header = bytes.fromhex(FROZEN["raw"])[:HEADER_BYTES]
    raw = SlotBlock(b"key", 9, header).pack()
    content = b"HKVS" + struct.pack("<HHQ", 1, 3, 9) + header + b"key"
    assert raw == (content + struct.pack("<Q", xxhash.xxh3_64_intdigest(content))).ljust(4096, b"\0")
    assert raw.rstrip(b"\0").hex() == FROZEN_BLOCK
    assert SlotBlock.unpack(raw) == SlotBlock(b"key", 9, header) and SlotBlock.unpack(raw[:4095]) is None
    for at in range(len(content) + 8):
        for bit in range(8):
            changed = bytearray(raw)
            changed[at] ^= 1 << bit
            assert SlotBlock.unpack(changed) is None, at

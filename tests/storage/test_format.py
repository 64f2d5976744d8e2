"""The format of a value on disk: frozen values stay readable, and each rule of the header has a name."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import numpy as np
import pytest
import xxhash

from hicache.storage.base import PageBuffer
from hicache.storage.cipher import PageCipher
from hicache.storage.filters import PageFilter, PageFormat
from hicache.storage.header import FIELD_BYTES, HEADER_BYTES, page_bytes_of
from hicache.storage.memory import aligned_buffer
from hicache.storage.slot_file import SlotBlock
from storage_pages import WholeCodec, is_compressed, page_of, value_of

NAMESPACE = b"n" * 16
KEY = bytes(range(32))
DOCUMENT = Path(__file__).parents[2] / "docs" / "disk_format.md"
CHANNELS = PageFilter("channel_byte_shuffle", 2, 3, 4)
FIELDS = struct.Struct("<4sHBBIIBBHII16s")

# Frozen: values of this page under b"key" and NAMESPACE, as version 1 has them, header and payload. No later release
# may read them otherwise.
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
    "channel byte shuffle": (
        "484b565001000100600000001d0000000202000003000000040000006e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e923350407141e679"
        "28b52ffd2060a5000060010101030303020202c8c8c802000154062a45"
    ),
    "encrypted": (
        "484b56500100010160000000390000000202000003000000040000006e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e5737135956128cb6"
        "268cf8569b691a70c2894fb14e0e88d7646891023451099079d4ddc9ccde9cf5f7515f98574ed8c33e29d491e6c1d61bf0fc"
        "4ac8b75fc349a6"
    ),
}
FILTERS = {"byte_shuffle": PageFilter("byte_shuffle", 2), "channel byte shuffle": CHANNELS, "encrypted": CHANNELS}


def codec_for(name: str, level: int = 1) -> WholeCodec:
    """The codec that wrote, or would now write, the frozen value of that name."""
    cipher = PageCipher(KEY) if name == "encrypted" else None
    filter = FILTERS.get(name, PageFilter())
    return WholeCodec(PageFormat(96, filter), NAMESPACE, 0 if name == "raw" else level, cipher)


@pytest.mark.parametrize("name", FROZEN)
def test_frozen_values_are_read(name: str) -> None:
    """Frozen values decode to the page they were made of, and to nothing under another key."""
    value, back = bytes.fromhex(FROZEN[name]), np.zeros(96, dtype=np.uint8)
    codec = codec_for(name)
    assert codec.decode_into(b"key", value, back) == codec.verify_stored(b"key", value) == ""
    np.testing.assert_array_equal(back, PAGE)
    assert codec.decode_into(b"kex", value, back) == "checksum differs"
    assert is_compressed(value) == (name != "raw")


@pytest.mark.parametrize("name", FROZEN)
def test_writers_write_this_version(name: str) -> None:
    """A value written now, whole or in two parts, has the frozen header, except the compressed length, which is zstd's
    affair, and the checksum."""
    codec, frozen = codec_for(name), bytes.fromhex(FROZEN[name])
    split = codec.encode_split(b"key", PAGE, aligned_buffer(codec.max_value_bytes))
    for value in (codec.encode(b"key", PAGE), split.header + bytes(split.payload)):
        assert value[:12] == frozen[:12] and value[16:FIELD_BYTES] == frozen[16:FIELD_BYTES]
        assert int.from_bytes(value[12:16], "little") == len(value) - HEADER_BYTES
        assert page_bytes_of(value) == len(PAGE)
        if name == "raw":
            assert value == frozen


def encoded(kind: str, filter: PageFilter, page_bytes: int = 4096) -> tuple[WholeCodec, bytes, PageBuffer]:
    codec = WholeCodec(PageFormat(page_bytes, filter), NAMESPACE, 1)
    page = page_of(3, page_bytes, kind)
    return codec, codec.encode(b"key", page), page


@pytest.mark.parametrize(("kind", "filter"), [("normal", PageFilter("byte_shuffle", 2)), ("random", PageFilter())])
def test_what_the_checksum_covers(kind: str, filter: PageFilter) -> None:
    """It is XXH3_64 over the payload; the seed is that of the key, with its length, and the fields."""
    _, value, _ = encoded(kind, filter)
    payload = value[HEADER_BYTES:]
    assert is_compressed(value) == (kind == "normal") and len(payload) > 1000
    seed = xxhash.xxh3_64_intdigest(struct.pack("<H", 3) + b"key" + value[:FIELD_BYTES])
    assert int.from_bytes(value[FIELD_BYTES:HEADER_BYTES], "little") == xxhash.xxh3_64_intdigest(payload, seed)


def fields_of(**changes: int | bytes) -> bytes:
    """The header fields of a plain raw value of PAGE, changed here and there."""
    fields: dict[str, int | bytes] = {
        "magic": b"HKVP",
        "version": 1,
        "codec": 0,
        "flags": 0,
        "raw_bytes": 96,
        "stored_bytes": 96,
        "filter": 0,
        "element_bytes": 1,
        "reserved": 0,
        "tokens": 0,
        "channels": 0,
        "namespace": NAMESPACE,
    }
    assert changes.keys() <= fields.keys()
    return FIELDS.pack(*{**fields, **changes}.values())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"magic": b"HKVQ"}, "not the value of a page"),
        ({"version": 0}, "value version 0, this release reads 1"),
        ({"version": 2}, "value version 2, this release reads 1"),
        ({"version": 513}, "value version 513, this release reads 1"),
        ({"codec": 2}, "unknown codec 2"),
        ({"flags": 2}, "unknown flags 2"),
        ({"flags": 1}, "payload of 68 bytes|raw page of another length"),
        ({"raw_bytes": 95}, "page of 95 bytes"),
        ({"raw_bytes": 0}, "page of 0 bytes"),
        ({"stored_bytes": 95}, "stored length"),
        ({"filter": 3}, "unknown filter 3"),
        ({"filter": 1, "element_bytes": 2}, "raw page with a filter"),
        ({"codec": 1, "filter": 1, "element_bytes": 3}, "element_bytes=3"),
        ({"codec": 1, "filter": 1, "element_bytes": 0}, "element_bytes=0"),
        ({"codec": 1, "filter": 0, "element_bytes": 2}, "element_bytes=2"),
        ({"codec": 1, "filter": 1, "element_bytes": 2, "tokens": 3}, "segment"),
        ({"codec": 1, "filter": 2, "element_bytes": 2}, "segment"),
        ({"codec": 1, "filter": 2, "element_bytes": 2, "tokens": 5, "channels": 1}, "units of 10 bytes"),
        ({"codec": 1, "filter": 2, "element_bytes": 8, "tokens": 2**32 - 1, "channels": 2**32 - 1}, "units of"),
        ({"reserved": 1}, "unknown flags 0, 1"),
        ({"namespace": b"m" * 16}, "another namespace"),
        ({"codec": 1}, "frame|Unknown frame"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_each_rule_of_the_header_is_named(changes: dict[str, int | bytes], reason: str) -> None:
    """A header that breaks one rule, under a right checksum, is refused by that rule; unchanged it is not."""
    codec, back = codec_for("raw"), np.empty(96, dtype=np.uint8)
    assert codec.decode_into(b"key", value_of(b"key", fields_of(), PAGE.data), back) == ""
    value = value_of(b"key", fields_of(**changes), PAGE.data)
    said = codec.decode_into(b"key", value, back)
    assert said and any(part in said for part in reason.split("|")), said
    assert codec.verify_stored(b"key", value) == said


def test_the_document_states_the_fields() -> None:
    """docs/disk_format.md gives every field of the header its place, in a row and without a gap."""
    section = DOCUMENT.read_text().split("## A value\n")[1].split("\n## ")[0]
    places = [(int(a), int(b)) for a, b in re.findall(r"^    \[ *(\d+), *(\d+)\)", section, re.MULTILINE)]
    sizes = [struct.calcsize(f"<{code}") for code in re.findall(r"\d*s|[A-Z]", FIELDS.format)] + [8]
    assert [end - start for start, end in places] == sizes
    assert [0] + [end for _, end in places] == [start for start, _ in places] + [HEADER_BYTES]


# Frozen: the used bytes of the first block of a slot, as version 1 has them.
FROZEN_BLOCK = (
    "484b5653010003000900000000000000484b56500100000060000000600000000001000000000000000000006e6e6e6e6e6e"
    "6e6e6e6e6e6e6e6e6e6e67ea92a8c882cb226b6579b13308076fffc89e"
)


def test_the_block_of_a_slot() -> None:
    """A block has the frozen bytes, those that docs/disk_format.md gives its fields; none with a flipped bit is one."""
    section = DOCUMENT.read_text().split("## Slots\n")[1].split("\n## ")[0]
    places = [(int(a), int(b)) for a, b in re.findall(r"^    \[ *(\d+), *(\d+)\)", section, re.MULTILINE)]
    assert places == [(0, 4), (4, 6), (6, 8), (8, 16), (16, 16 + HEADER_BYTES)]
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

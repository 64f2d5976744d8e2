"""The format of a value on disk: frozen values stay readable, and each rule of the header has a name."""

from __future__ import annotations

import re
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import zstandard

from hicache.storage.base import PageBuffer
from hicache.storage.cipher import PageCipher
from hicache.storage.codec import PageCodec, is_packed
from hicache.storage.direct_read import aligned_room
from hicache.storage.filters import PageFilter
from hicache.storage.header import FIELD_BYTES, HEADER_BYTES, seal
from hicache.storage.slots import SlotRecord
from storage_pages import page_of

NAMESPACE = b"n" * 16
KEY = bytes(range(32))
DOCUMENT = Path(__file__).parents[2] / "docs" / "disk_format.md"
CHANNELS = PageFilter("channel_planes", 2, 3, 4)
FIELDS_1, FIELDS_2 = struct.Struct("<4sHBBQQ16sI"), struct.Struct("<4sHBBIIBBHII16s")

# Frozen: values of this page under b"key" and NAMESPACE, as releases wrote them, header and payload. The number before
# the name is the format version. No later release may read them otherwise.
PAGE = np.tile(np.array([1, 2, 3, 200], dtype=np.uint8), 24)
FROZEN = {
    "1 raw": (
        "484b565001000001600000000000000060000000000000006e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e000000009478bd24"
        + "010203c8" * 24
    ),
    "1 zstd": (
        "484b565001000101600000000000000017000000000000006e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e0000000032b5a3e3"
        "28b52ffd246055000020010203c80100f9e488bba25dbe"
    ),
    "1 planes": (
        "484b565001000202600000000000000019000000000000006e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e000000001be25bc5"
        "28b52ffd246065000020010302c8020003139fe9b0d73ffae5"
    ),
    "2 raw": (
        "484b56500200000060000000600000000001000000000000000000006e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6ee34a8de5"
        + "010203c8" * 24
    ),
    "2 zstd": (
        "484b56500200010060000000170000000001000000000000000000006e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e5136964e"
        "28b52ffd246055000020010203c80100f9e488bba25dbe"
    ),
    "2 planes": (
        "484b56500200010060000000190000000102000000000000000000006e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e06df12c0"
        "28b52ffd246065000020010302c8020003139fe9b0d73ffae5"
    ),
    "2 channel planes": (
        "484b56500200010060000000210000000202000003000000040000006e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e3c4c15f7"
        "28b52ffd2460a5000060010101030303020202c8c8c802000154062a453379c302"
    ),
    "2 encrypted": (
        "484b565002000101600000003d0000000202000003000000040000006e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e3dafba08"
        "6465666768696a6b6c6d6e6f60aef19b5d89f39e3e025ee9db6669fe40c004c243a4f172a685aa62be90dc8b966b4a5a1fc057df"
        "f291008351b1db8d07"
    ),
    "3 raw": (
        "484b56500300000060000000600000000001000000000000000000006e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e9962ccda"
        + "010203c8" * 24
    ),
    "3 zstd": (
        "484b56500300010060000000170000000001000000000000000000006e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6ead766e7a"
        "28b52ffd246055000020010203c80100f9e488bba25dbe"
    ),
    "3 planes": (
        "484b56500300010060000000190000000102000000000000000000006e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e9f00e81e"
        "28b52ffd246065000020010302c8020003139fe9b0d73ffae5"
    ),
    "3 channel planes": (
        "484b56500300010060000000210000000202000003000000040000006e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e77b90d70"
        "28b52ffd2460a5000060010101030303020202c8c8c802000154062a453379c302"
    ),
    "3 encrypted": (
        "484b565003000101600000003d0000000202000003000000040000006e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6ef75e42ff"
        "f3f8ab94cf47206788d17221b075a0e3e3b4cfdf9ec443f8893d858d73875781d8b34fcedb53bf9f0bd033a332cae2a58f69d763"
        "ad7a4c8faec677c4ae"
    ),
}
FILTERS = {"planes": PageFilter("planes", 2), "channel planes": CHANNELS, "encrypted": CHANNELS}


def codec_for(name: str, level: int = 1) -> PageCodec:
    """The codec that wrote, or would now write, the frozen value of that name."""
    what = name[2:]
    cipher = PageCipher(KEY) if what == "encrypted" else None
    how = FILTERS.get(what, PageFilter())
    return PageCodec(page_bytes=96, namespace=NAMESPACE, level=0 if what == "raw" else level, filter=how, cipher=cipher)


@pytest.mark.parametrize("name", FROZEN)
def test_frozen_values_are_read(name: str) -> None:
    """Values of all versions decode to the page they were made of, and to nothing under another key."""
    value, back = bytes.fromhex(FROZEN[name]), np.zeros(96, dtype=np.uint8)
    codec = codec_for(name)
    assert codec.decode_into(b"key", value, back) == codec.verify_stored(b"key", value) == ""
    np.testing.assert_array_equal(back, PAGE)
    assert codec.decode_into(b"kex", value, back) == "checksum differs"
    assert is_packed(value) == (name[2:] != "raw")


def written(name: str) -> bytes:
    """The value of PAGE that the codec writes now, for tables or, from version 3 on, for slots."""
    codec = codec_for(name)
    if name[0] == "2":
        return codec.encode(b"key", PAGE)
    apart = codec.encode_apart(b"key", PAGE, aligned_room(codec.max_value_bytes))
    return apart.head + bytes(apart.payload)


@pytest.mark.parametrize("name", [name for name in FROZEN if name[0] in "23"])
def test_writers_write_these_versions(name: str) -> None:
    """A value written now has the frozen header, except the packed length, which is zstd's affair, and the checksum."""
    frozen, value = bytes.fromhex(FROZEN[name]), written(name)
    assert value[:12] == frozen[:12] and value[16:FIELD_BYTES] == frozen[16:FIELD_BYTES]
    assert int.from_bytes(value[12:16], "little") == len(value) - HEADER_BYTES
    if name[2:] == "raw":
        assert value == frozen


def in_version_3(kind: str, how: PageFilter, page_bytes: int = 4096) -> tuple[PageCodec, bytes, PageBuffer]:
    codec = PageCodec(page_bytes=page_bytes, namespace=NAMESPACE, level=1, filter=how)
    page = page_of(3, page_bytes, kind)
    apart = codec.encode_apart(b"key", page, aligned_room(codec.max_value_bytes))
    return codec, apart.head + bytes(apart.payload), page


@pytest.mark.parametrize(("kind", "how"), [("normal", PageFilter("planes", 2)), ("random", PageFilter())])
def test_the_checksum_of_version_3(kind: str, how: PageFilter) -> None:
    """It covers what the description says: of a frame of zstd the first 32 bytes and the last 4, else all."""
    _, value, _ = in_version_3(kind, how)
    payload = value[HEADER_BYTES:]
    covered = payload[:32] + payload[-4:] if kind == "normal" else payload
    assert is_packed(value) == (kind == "normal") and len(payload) > 1000
    stated = int.from_bytes(value[FIELD_BYTES:HEADER_BYTES], "little")
    assert stated == zlib.crc32(struct.pack("<H", 3) + b"key" + value[:FIELD_BYTES] + covered)


def test_no_flip_in_a_frame_changes_a_page() -> None:
    """Any bit of a value of version 3 that is flipped, in the part of the frame too that the checksum does not cover,
    leaves the page or is found; under another key, cut or lengthened it is refused."""
    codec, value, page = in_version_3("normal", PageFilter("planes", 2))
    back, harmless = np.empty(len(page), dtype=np.uint8), 0
    for place in range(len(value)):
        changed = bytearray(value)
        changed[place] ^= 1 << place % 8
        if codec.decode_into(b"key", bytes(changed), back):
            assert codec.verify_stored(b"key", bytes(changed))
        else:
            np.testing.assert_array_equal(back, page)
            harmless += 1
    assert harmless < 8
    assert codec.decode_into(b"kex", value, back) == codec.verify_stored(b"kex", value) == "checksum differs"
    for other in (value[:-1], value + b"\0", value[: HEADER_BYTES + 36], value[:HEADER_BYTES]):
        assert codec.decode_into(b"key", other, back)
    assert codec.decode_into(b"key", value, back) == ""


def test_a_frame_of_version_3_has_its_own_checksum() -> None:
    """Without zstd's checksum in the frame a value of version 3 is refused, and one of version 2 is not."""
    frame = zstandard.ZstdCompressor(write_checksum=False, write_content_size=True).compress(PAGE.tobytes())
    codec, back = codec_for("3 zstd"), np.empty(96, dtype=np.uint8)
    for version, reason in ((2, ""), (3, "frame without a checksum")):
        fields = header_2(version=version, codec=1, stored_bytes=len(frame))
        assert codec.decode_into(b"key", seal(b"key", fields, frame), back) == reason


def header_2(**changes: int | bytes) -> bytes:
    """The header fields of a plain raw value of PAGE, changed here and there."""
    fields: dict[str, int | bytes] = {
        "magic": b"HKVP",
        "version": 2,
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
    return FIELDS_2.pack(*{**fields, **changes}.values())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"magic": b"HKVQ"}, "not the value of a page"),
        ({"version": 0}, "format version 0, unknown"),
        ({"version": 4}, "format version 4, newer than 3"),
        ({"version": 513}, "format version 513, newer than 3"),
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
    codec, back = codec_for("2 raw"), np.empty(96, dtype=np.uint8)
    assert codec.decode_into(b"key", seal(b"key", header_2(), PAGE.data), back) == ""
    value = seal(b"key", header_2(**changes), PAGE.data)
    said = codec.decode_into(b"key", value, back)
    assert said and any(part in said for part in reason.split("|")), said
    assert codec.verify_stored(b"key", value) == said


@pytest.mark.parametrize(
    ("codec", "width", "raw_bytes", "stored_bytes", "flags", "reason"),
    [
        (3, 1, 96, 96, 0, "unknown codec 3"),
        (0, 2, 96, 96, 0, "wrong element width"),
        (1, 0, 96, 96, 0, "wrong element width"),
        (2, 1, 96, 96, 0, "wrong element width"),
        (2, 5, 96, 96, 0, "element_bytes=5"),
        (0, 1, 1 << 40, 96, 0, "page of 1099511627776 bytes"),
        (0, 1, 96, 1 << 40, 0, "stored length"),
        (0, 1, 96, 96, 1, "unknown flags 1"),
    ],
)
def test_version_1_rules(codec: int, width: int, raw_bytes: int, stored_bytes: int, flags: int, reason: str) -> None:
    """Version 1 keeps its own rules: a value that breaks one is refused by name."""
    fields = FIELDS_1.pack(b"HKVP", 1, codec, width, raw_bytes, stored_bytes, NAMESPACE, flags)
    said = codec_for("1 raw").decode_into(b"key", seal(b"key", fields, PAGE.data), np.empty(96, dtype=np.uint8))
    assert reason in said


def test_a_version_is_part_of_what_the_checksum_covers() -> None:
    """A value whose version alone was changed is refused, whichever it is and becomes."""
    back = np.empty(96, dtype=np.uint8)
    for name, text in FROZEN.items():
        for other in {1, 2, 3} - {int(name[0])}:
            value = bytearray.fromhex(text)
            value[4] = other
            assert codec_for(name).decode_into(b"key", bytes(value), back), name


@pytest.mark.parametrize(("version", "fields"), [(1, FIELDS_1), (2, FIELDS_2)])
def test_the_document_states_the_fields(version: int, fields: struct.Struct) -> None:
    """docs/disk_format.md gives every field of a version's header its place, in a row and without a gap."""
    section = DOCUMENT.read_text().split(f"## A value, version {version}\n")[1].split("\n## ")[0]
    places = [(int(a), int(b)) for a, b in re.findall(r"^    \[ *(\d+), *(\d+)\)", section, re.MULTILINE)]
    sizes = [struct.calcsize(f"<{code}") for code in re.findall(r"\d*s|[A-Z]", fields.format)] + [4]
    assert [end - start for start, end in places] == sizes
    assert [0] + [end for _, end in places] == [start for start, _ in places] + [HEADER_BYTES]


def test_the_document_states_the_record_of_a_slot() -> None:
    """docs/disk_format.md gives its fields their places, as a store writes them."""
    section = DOCUMENT.read_text().split("## Slots\n")[1].split("\n## ")[0]
    places = [(int(a), int(b)) for a, b in re.findall(r"^    \[ *(\d+), *(\d+)\)", section, re.MULTILINE)]
    assert places == [(0, 8), (8, 12), (12, 60), (60, 64)]
    raw = SlotRecord(3, 4, b"h" * HEADER_BYTES).pack(b"key")
    fields = raw[:60]
    assert fields == struct.pack("<QI", 3, 4) + b"h" * 48
    assert raw[60:] == struct.pack("<I", zlib.crc32(b"key" + fields))

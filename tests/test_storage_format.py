"""The format of a value on disk: frozen values stay readable, and each rule of the header has a name."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import numpy as np
import pytest

from hicache.storage.cipher import PageCipher
from hicache.storage.codec import PageCodec, is_packed
from hicache.storage.filters import PageFilter
from hicache.storage.header import FIELD_BYTES, HEADER_BYTES, seal

NAMESPACE = b"n" * 16
KEY = bytes(range(32))
DOCUMENT = Path(__file__).parents[1] / "docs" / "disk_format.md"
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
}
FILTERS = {"planes": PageFilter("planes", 2), "channel planes": CHANNELS, "encrypted": CHANNELS}


def codec_for(name: str, level: int = 1) -> PageCodec:
    """The codec that wrote, or in version 1 would now write, the frozen value of that name."""
    what = name[2:]
    cipher = PageCipher(KEY) if what == "encrypted" else None
    how = FILTERS.get(what, PageFilter())
    return PageCodec(page_bytes=96, namespace=NAMESPACE, level=0 if what == "raw" else level, filter=how, cipher=cipher)


@pytest.mark.parametrize("name", FROZEN)
def test_frozen_values_are_read(name: str) -> None:
    """Values of both versions decode to the page they were made of, and to nothing under another key."""
    value, back = bytes.fromhex(FROZEN[name]), np.zeros(96, dtype=np.uint8)
    codec = codec_for(name)
    assert codec.decode_into(b"key", value, back) == codec.verify_stored(b"key", value) == ""
    np.testing.assert_array_equal(back, PAGE)
    assert codec.decode_into(b"kex", value, back) == "checksum differs"
    assert is_packed(value) == (name[2:] != "raw")


@pytest.mark.parametrize("name", [name for name in FROZEN if name.startswith("2")])
def test_writers_write_version_2(name: str) -> None:
    """A value written now has the frozen header, except the packed length, which is zstd's affair, and the checksum."""
    frozen, value = bytes.fromhex(FROZEN[name]), codec_for(name).encode(b"key", PAGE)
    assert value[:12] == frozen[:12] and value[16:FIELD_BYTES] == frozen[16:FIELD_BYTES]
    assert int.from_bytes(value[12:16], "little") == len(value) - HEADER_BYTES
    if name == "2 raw":
        assert value == frozen


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
        ({"version": 3}, "format version 3, newer than 2"),
        ({"version": 513}, "format version 513, newer than 2"),
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
    """A value whose version alone was changed is refused, in both directions."""
    back = np.empty(96, dtype=np.uint8)
    for name, value in ((name, bytearray.fromhex(text)) for name, text in FROZEN.items()):
        value[4] = 3 - value[4]
        assert codec_for(name).decode_into(b"key", bytes(value), back), name


@pytest.mark.parametrize(("version", "fields"), [(1, FIELDS_1), (2, FIELDS_2)])
def test_the_document_states_the_fields(version: int, fields: struct.Struct) -> None:
    """docs/disk_format.md gives every field of a version's header its place, in a row and without a gap."""
    section = DOCUMENT.read_text().split(f"## A value, version {version}\n")[1].split("\n## ")[0]
    places = [(int(a), int(b)) for a, b in re.findall(r"^    \[ *(\d+), *(\d+)\)", section, re.MULTILINE)]
    sizes = [struct.calcsize(f"<{code}") for code in re.findall(r"\d*s|[A-Z]", fields.format)] + [4]
    assert [end - start for start, end in places] == sizes
    assert [0] + [end for _, end in places] == [start for start, _ in places] + [HEADER_BYTES]

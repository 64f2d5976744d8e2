"""For any bytes of a value, decoding returns the stored page or a reason for refusing it, and never raises."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.storage.cipher import ENCRYPTION_BYTES, PageCipher
from hicache.storage.filters import PageFilter, PageFormat
from hicache.storage.header import FIELD_BYTES, HEADER_BYTES
from storage_pages import WholeCodec, is_compressed, page_of, value_of

PAGE = 256
NAMESPACE = b"n" * 16
FIELDS = struct.Struct("<4sHBBIIBB10s16s")
CIPHER, OTHER_CIPHER = PageCipher(bytes(32)), PageCipher(bytes(range(32)))
SHUFFLED = PageFilter("byte_shuffle", 2)
CODECS = {
    name: WholeCodec(PageFormat(PAGE, filter), NAMESPACE, level, cipher)
    for name, level, filter, cipher in (
        ("raw", 0, PageFilter(), None),
        ("zstd", 1, PageFilter(), None),
        ("shuffled", 1, SHUFFLED, None),
        ("encrypted raw", 0, PageFilter(), CIPHER),
        ("encrypted shuffled", 1, SHUFFLED, CIPHER),
    )
}


def fields_of(**changes: int | bytes) -> bytes:
    """The header fields of a plain raw value, with `changes`."""
    fields: dict[str, int | bytes] = {
        "magic": b"HKVP",
        "version": 1,
        "codec": 0,
        "flags": 0,
        "raw_bytes": PAGE,
        "stored_bytes": PAGE,
        "filter": 0,
        "element_bytes": 1,
        "reserved": bytes(10),
        "namespace": NAMESPACE,
    }
    assert changes.keys() <= fields.keys()
    return FIELDS.pack(*{**fields, **changes}.values())


def decode_guarded(codec: WholeCodec, value: bytes, key: bytes = b"key") -> tuple[str, bytes]:
    """Decode a value; returns the result and the page's bytes. Checks that the bytes around the page are unchanged."""
    buffer = np.full(PAGE + 64, 0xA5, dtype=np.uint8)
    reason = codec.decode_into(key, value, buffer[32:-32])
    assert (buffer[:32] == 0xA5).all() and (buffer[-32:] == 0xA5).all()
    verdict = codec.verify_stored(key, value)
    assert isinstance(reason, str) and isinstance(verdict, str)
    assert reason or not verdict, "decoded what does not verify"
    return reason, buffer[32:-32].tobytes()


def with_right_checksum(value: bytes, key: bytes = b"key") -> bytes:
    """The value with a new checksum, as an attacker without the cipher's key could compute it."""
    return value_of(key, value[:FIELD_BYTES], value[HEADER_BYTES:])


@pytest.mark.parametrize("name", CODECS)
def test_every_flip_and_every_length_is_refused(name: str) -> None:
    """No changed byte of header or payload, no truncation and no extension passes verification, even without the key of
    an encrypted value. If an encrypted value has a right checksum, its cipher refuses it."""
    codec, plain = CODECS[name], CODECS["raw"]
    value = codec.encode(b"key", page_of(0, PAGE, "flat"))
    assert is_compressed(value) == ("raw" not in name) and plain.verify_stored(b"key", value) == ""
    changes = [
        value[:at] + bytes([value[at] ^ bits]) + value[at + 1 :] for at in range(len(value)) for bits in (1, 128)
    ]
    changes += [value[:at] for at in range(len(value))] + [value + tail for tail in (b"\0", bytes(16), value)]
    for changed in changes:
        assert decode_guarded(codec, changed)[0] and plain.verify_stored(b"key", changed)
        if "encrypted" in name and len(changed) >= HEADER_BYTES + ENCRYPTION_BYTES:
            forged = with_right_checksum(changed)
            assert forged == value or decode_guarded(codec, forged)[0]


@pytest.mark.parametrize("name", CODECS)
def test_a_value_serves_its_key_and_namespace_only(name: str) -> None:
    """A value verifies only under its own key and namespace, also as a memoryview. Otherwise the result names the
    reason. An encrypted value under another key does not decrypt, even with a right checksum."""
    codec, back = CODECS[name], np.empty(PAGE, dtype=np.uint8)
    value = codec.encode(b"key", page_of(0, PAGE))
    other = WholeCodec(PageFormat(PAGE), b"m" * 16, 1)
    assert codec.decode_into(b"key", memoryview(value), back) == ""
    for key in (b"kez", b"ke"):
        assert codec.decode_into(key, value, back) == "checksum differs"
    assert other.decode_into(b"key", value, back) == "another namespace"
    moved = decode_guarded(codec, with_right_checksum(value, b"kez"), b"kez")[0]
    assert ("does not decrypt" in moved) == ("encrypted" in name)


RULES: list[tuple[dict[str, Any], str]] = [
    ({"magic": b"HKVQ"}, "not the value of a page"),
    *(({"version": version}, f"value version {version}, this release reads 1") for version in (0, 2, 513)),
    ({"codec": 2}, "unknown codec 2"),
    ({"flags": 2}, "unknown flags 2"),
    ({"flags": 1}, f"raw page of another length|payload of {PAGE - 28} bytes"),
    ({"raw_bytes": PAGE - 1}, f"page of {PAGE - 1} bytes"),
    ({"raw_bytes": 0}, "page of 0 bytes"),
    ({"stored_bytes": PAGE - 1}, "stored length"),
    ({"filter": 3}, "unknown filter 3"),
    ({"filter": 1, "element_bytes": 2}, "raw page with a filter"),
    ({"codec": 1, "filter": 1, "element_bytes": 3}, "element_bytes=3"),
    ({"codec": 1, "filter": 1, "element_bytes": 0}, "element_bytes=0"),
    ({"codec": 1, "filter": 0, "element_bytes": 2}, "element_bytes=2"),
    ({"codec": 1, "filter": 2, "element_bytes": 2}, "unknown filter 2"),
    ({"reserved": bytes(9) + b"\1"}, "unknown flags 0, 00000000000000000001"),
    ({"namespace": b"m" * 16}, "another namespace"),
    ({"codec": 1}, "frame"),
]


@pytest.mark.parametrize(("changes", "reason"), RULES, ids=[",".join(map(str, changes)) for changes, _ in RULES])
def test_each_rule_of_the_header_is_named(changes: dict[str, Any], reason: str) -> None:
    """A header that breaks one rule, with a right checksum, is refused by that rule. The unchanged header is
    accepted."""
    page, codec = page_of(3, PAGE).tobytes(), CODECS["raw"]
    assert decode_guarded(codec, value_of(b"key", fields_of(), page)) == ("", page)
    value = value_of(b"key", fields_of(**changes), page)
    reason_of, _ = decode_guarded(codec, value)
    assert any(part in reason_of for part in reason.split("|")), reason_of
    assert codec.verify_stored(b"key", value) == reason_of


def test_frames_that_are_not_the_page() -> None:
    """With a right checksum, a zstd frame is refused if it has another length, no stated length, or another content
    checksum."""
    page = page_of(0, PAGE, "flat").tobytes()

    def reason_of(payload: bytes) -> str:
        return decode_guarded(CODECS["zstd"], value_of(b"key", fields_of(codec=1, stored_bytes=len(payload)), payload))[
            0
        ]

    frame = zstandard.ZstdCompressor(write_checksum=True).compress(page)
    assert reason_of(frame) == ""
    assert (
        reason_of(zstandard.compress(page + b"x"))
        == reason_of(zstandard.compress(page[1:]))
        == "frame of another length"
    )
    assert reason_of(zstandard.ZstdCompressor(write_content_size=False).compress(page)) == "frame of another length"
    for at in range(len(frame)):
        for bits in (0x01, 0x80):
            assert reason_of(frame[:at] + bytes([frame[at] ^ bits]) + frame[at + 1 :]), at
    for length in range(len(frame) - 4):  # zstd cannot tell a frame without its checksum from a complete one
        assert reason_of(frame[:length]), length


def test_no_downgrade() -> None:
    """A plain value is refused if a key is set, and an encrypted one if no key or another key is set. If the header of
    an encrypted value names another valid filter, only the cipher refuses it."""
    page, secret = page_of(0, PAGE, "flat"), CODECS["encrypted shuffled"]
    plain, encrypted = CODECS["shuffled"].encode(b"key", page), secret.encode(b"key", page)
    other = WholeCodec(PageFormat(PAGE), NAMESPACE, 1, OTHER_CIPHER)
    filtered = bytearray(encrypted)
    filtered[16:28] = fields_of(filter=1, element_bytes=4)[16:28]
    for codec, value, reason in (
        (secret, plain, "unencrypted page"),
        (CODECS["raw"], encrypted, "with its key"),
        (other, encrypted, "does not decrypt"),
        (secret, with_right_checksum(bytes(filtered)), "does not decrypt"),
    ):
        assert reason in decode_guarded(codec, value)[0]
    assert secret.verify_stored(b"key", plain) and not CODECS["raw"].verify_stored(b"key", encrypted)


def test_nothing_shows() -> None:
    """An encrypted value contains no part of its page. The same page under the same key gives another value each
    time."""
    page = page_of(1, PAGE)
    values = {CODECS["encrypted raw"].encode(b"key", page) for _ in range(50)}
    assert len({value[HEADER_BYTES : HEADER_BYTES + 12] for value in values}) == 50
    for value in values:
        assert not any(page[at : at + 8].tobytes() in value for at in range(PAGE - 8))


def frames(max_bytes: int) -> st.SearchStrategy[bytes]:
    """Payloads similar to those of zstd: complete, cut, of other lengths, with and without length and checksum."""

    def frame(num_bytes: int, states_size: bool, checks: bool, cut: int, tail: bytes) -> bytes:
        compressor = zstandard.ZstdCompressor(write_content_size=states_size, write_checksum=checks)
        compressed = compressor.compress(bytes(i % 7 for i in range(min(num_bytes, 64))) * -(-num_bytes // 64))
        return compressed[: len(compressed) - cut] + tail

    sizes = st.one_of(st.just(PAGE), st.integers(0, 2 * PAGE), st.integers(0, max_bytes))
    return st.builds(frame, sizes, st.booleans(), st.booleans(), st.integers(0, 9), st.binary(max_size=9))


NONSENSE = st.fixed_dictionaries(
    {
        "version": st.sampled_from([1, 1, 1, 0, 2]),
        "codec": st.integers(0, 3),
        "flags": st.sampled_from([0, 0, 1, 2, 255]),
        "raw_bytes": st.sampled_from([PAGE, PAGE, PAGE, 0, PAGE - 1, PAGE + 1, 2**32 - 1]),
        "filter": st.integers(0, 3),
        "element_bytes": st.sampled_from([1, 2, 4, 8, 0, 3, 255]),
    }
)
PAYLOADS = st.one_of(st.binary(max_size=PAGE + 40), st.just(bytes(PAGE)), frames(1 << 22))


@given(NONSENSE, st.sampled_from([0, 0, 0, -1, 1, 28, -28]), PAYLOADS)
@settings(max_examples=settings.default.max_examples * 10)
def test_well_sealed_nonsense(fields: dict[str, int], stored_off: int, payload: bytes) -> None:
    """A value with a right checksum and any content is decoded within the rules of its header, or refused."""
    stored_bytes = max(0, len(payload) + stored_off)
    value = value_of(b"key", fields_of(stored_bytes=stored_bytes, **fields), payload)
    for name, codec in CODECS.items():
        reason, page = decode_guarded(codec, value)
        if not reason:
            assert "encrypted" not in name and fields["flags"] == 0 and fields["version"] == 1
            assert fields["raw_bytes"] == PAGE and len(value) == HEADER_BYTES + stored_bytes
            assert fields["codec"] > 0 or page == payload


@given(st.binary(max_size=2 * PAGE), st.booleans())
def test_arbitrary_bytes(tail: bytes, headed: bool) -> None:
    """Arbitrary bytes, from the start or after a magic and version, are refused."""
    for codec in CODECS.values():
        assert decode_guarded(codec, b"HKVP\x01\x00" + tail if headed else tail)[0]

"""Values prove which page they are: whatever else they hold is refused, and refusing never raises."""

from __future__ import annotations

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from storage_pages import page_of

from hicache.storage import StoreError
from hicache.storage.codec import HEADER_BYTES, MAGIC, RAW, ZSTD, ZSTD_PLANES, PageCodec, ValueHeader, seal

PAGE = 256
NAMESPACE = b"n" * 16


def codec_of(page_bytes: int = PAGE, level: int = 1, element_bytes: int = 1, namespace: bytes = NAMESPACE) -> PageCodec:
    return PageCodec(page_bytes=page_bytes, namespace=namespace, level=level, element_bytes=element_bytes)


@pytest.mark.parametrize("element_bytes", [1, 2, 4, 8])
@pytest.mark.parametrize("level", [0, 1, 3])
@pytest.mark.parametrize("kind", ["random", "normal", "flat"])
@pytest.mark.parametrize("page_bytes", [8, 264, 4096, 100_000])
def test_roundtrip(page_bytes: int, kind: str, level: int, element_bytes: int) -> None:
    """What was encoded decodes to the same bytes, for every codec, kind of data and size."""
    codec, page = codec_of(page_bytes, level, element_bytes), page_of(7, page_bytes, kind)
    value = codec.encode(b"key", page)
    back = np.zeros(page_bytes, dtype=np.uint8)
    assert codec.decode_into(b"key", value, back) == ""
    np.testing.assert_array_equal(back, page)
    assert len(value) <= codec.max_value_bytes


def test_choice_of_codec() -> None:
    """Packing is kept when it saves a sixteenth, planes pack floats better, and level 0 never packs."""
    floats, noise = page_of(1, 1 << 20, "normal"), page_of(1, 1 << 20, "random")
    plain, planes, raw = codec_of(1 << 20), codec_of(1 << 20, element_bytes=2), codec_of(1 << 20, level=0)
    assert plain.encode(b"k", noise)[6] == RAW
    assert raw.encode(b"k", floats)[6] == RAW
    assert plain.encode(b"k", floats)[6] == ZSTD
    assert planes.encode(b"k", floats)[6] == ZSTD_PLANES
    assert len(planes.encode(b"k", floats)) < 0.9 * len(plain.encode(b"k", floats))


def test_values_do_not_depend_on_the_reader() -> None:
    """A value names its own codec and width: a codec set up otherwise reads it."""
    page = page_of(3, 4096, "normal")
    back = np.empty(4096, dtype=np.uint8)
    for writer in (codec_of(4096, 0), codec_of(4096, 1), codec_of(4096, 1, 2), codec_of(4096, 5, 4)):
        assert codec_of(4096, 1, 8).decode_into(b"k", writer.encode(b"k", page), back) == ""
        np.testing.assert_array_equal(back, page)


@pytest.mark.parametrize("level", [0, 1])
def test_every_flipped_byte_is_refused(level: int) -> None:
    """No single changed byte of header or payload, and no truncation or extension, passes verification."""
    codec, back = codec_of(level=level, element_bytes=2), np.empty(PAGE, dtype=np.uint8)
    value = codec.encode(b"key", page_of(0, PAGE, "flat"))
    assert (value[6] == ZSTD_PLANES) == (level == 1)
    for at in range(len(value)):
        for bit in (0x01, 0x80, 0xFF):
            changed = bytearray(value)
            changed[at] ^= bit
            assert codec.decode_into(b"key", bytes(changed), back)
        assert codec.decode_into(b"key", value[:at], back)
    assert codec.decode_into(b"key", value + b"\0", back)


def test_another_key_or_namespace_is_refused() -> None:
    """A value verifies under its own key and namespace only."""
    value, back = codec_of().encode(b"key", page_of(0, PAGE)), np.empty(PAGE, dtype=np.uint8)
    assert codec_of().decode_into(b"kez", value, back) == "checksum differs"
    assert codec_of(namespace=b"m" * 16).decode_into(b"key", value, back) == "another namespace"
    assert codec_of().decode_into(b"key", value, back) == ""


@given(st.binary(max_size=2 * PAGE))
@settings(max_examples=300, deadline=None)
def test_arbitrary_bytes_are_refused(value: bytes) -> None:
    """Whatever bytes a value consists of, decoding says why it refuses and does not raise."""
    assert codec_of().decode_into(b"key", value, np.empty(PAGE, dtype=np.uint8))


def sealed(codec: int, width: int, raw_bytes: int, stored_bytes: int, flags: int, payload: bytes) -> bytes:
    return seal(b"key", ValueHeader(MAGIC, 1, codec, width, raw_bytes, stored_bytes, NAMESPACE, flags), payload)


def frame(size: int, states_size: bool) -> bytes:
    return zstandard.ZstdCompressor(write_content_size=states_size).compress(b"z" * size)


@given(
    codec=st.integers(0, 4),
    width=st.integers(0, 255),
    raw_bytes=st.sampled_from([0, PAGE - 1, PAGE, PAGE + 1, 1 << 40, (1 << 64) - 1]),
    honest=st.booleans(),
    flags=st.sampled_from([0, 1]),
    payload=st.one_of(
        st.binary(max_size=PAGE + 2),
        st.binary(max_size=64).map(lambda tail: zstandard.compress(b"x" * PAGE)[:-4] + tail),
        st.integers(0, 3 * PAGE).map(lambda size: zstandard.ZstdCompressor(write_checksum=True).compress(b"y" * size)),
        st.integers(1, 1 << 24).map(
            lambda n: zstandard.ZstdCompressor(write_content_size=n & 1 == 0).compress(b"z" * n)
        ),
    ),
)
@settings(max_examples=300, deadline=None)
def test_wellsealed_nonsense(codec: int, width: int, raw_bytes: int, honest: bool, flags: int, payload: bytes) -> None:
    """Values with a right checksum and any content decode to a page of the right length or are refused, never raise."""
    value = sealed(codec, width, raw_bytes, len(payload) if honest else 3, flags, payload)
    guarded = np.full(PAGE + 32, 0xA5, dtype=np.uint8)
    reason = codec_of().decode_into(b"key", value, guarded[16:-16])
    assert (guarded[:16] == 0xA5).all() and (guarded[-16:] == 0xA5).all()
    if not reason:
        assert raw_bytes == PAGE and flags == 0 and codec <= ZSTD_PLANES
        assert len(value) == HEADER_BYTES + len(payload)


def test_wrong_settings_are_named() -> None:
    """A level, width or namespace that cannot be is refused by name."""
    with pytest.raises(StoreError, match="level=23"):
        codec_of(level=23)
    with pytest.raises(StoreError, match="element_bytes=2"):
        codec_of(page_bytes=9, element_bytes=2)
    with pytest.raises(StoreError, match="16 bytes"):
        codec_of(namespace=b"short")

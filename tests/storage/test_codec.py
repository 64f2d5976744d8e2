"""A codec decodes its values to the same bytes. The data and the lag of the writer decide how it compresses."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.storage.cipher import PageCipher
from hicache.storage.filters import PageFilter, PageFormat
from storage_pages import WholeCodec, is_compressed, page_of

NAMESPACE = b"n" * 16
LARGE = 1 << 20
NONE, BYTE_SHUFFLE = PageFilter(), PageFilter("byte_shuffle", 2)
FILTERS = [NONE, BYTE_SHUFFLE, PageFilter("byte_shuffle", 8)]
CIPHERS = [None, PageCipher(bytes(32))]


def codec_of(
    page_bytes: int, level: int = 1, filter: PageFilter = NONE, cipher: PageCipher | None = None
) -> WholeCodec:
    return WholeCodec(PageFormat(page_bytes, filter), NAMESPACE, level, cipher)


@settings(max_examples=settings.default.max_examples * 4)
@given(
    page_bytes=st.sampled_from([8, 264, 4096, 100_000]),
    kind=st.sampled_from(["random", "normal", "flat"]),
    level=st.one_of(st.sampled_from([0, 1, 3]), st.integers(0, 22)),
    filters=st.tuples(st.sampled_from(FILTERS), st.sampled_from(FILTERS)),
    cipher=st.sampled_from(CIPHERS),
)
def test_roundtrip(
    page_bytes: int, kind: str, level: int, filters: tuple[PageFilter, PageFilter], cipher: PageCipher | None
) -> None:
    """For all data, sizes, filters and levels, with and without a key, an encoded page decodes to the same bytes, also
    by a codec with other settings, because a value names its filter."""
    page = page_of(7, page_bytes, kind)
    before, back = page.copy(), np.zeros(page_bytes, dtype=np.uint8)
    codec, reader = codec_of(page_bytes, level, filters[0], cipher), codec_of(page_bytes, 1, filters[1], cipher)
    value = codec.encode(b"key", page)
    assert reader.decode_into(b"key", value, back) == codec.verify_stored(b"key", value) == ""
    np.testing.assert_array_equal(back, before)
    np.testing.assert_array_equal(page, before)
    assert len(value) <= codec.max_value_bytes
    assert is_compressed(value) or len(value) == codec.max_value_bytes


def test_what_is_compressed() -> None:
    """A compressed page is kept if it saves at least a sixteenth. byte_shuffle compresses floats better, and level 0
    never compresses."""
    floats, noise = page_of(1, LARGE, "normal"), page_of(1, LARGE, "random")
    plain, shuffled = codec_of(LARGE), codec_of(LARGE, filter=BYTE_SHUFFLE)
    assert not is_compressed(plain.encode(b"k", noise)) and not is_compressed(shuffled.encode(b"k", noise))
    assert not is_compressed(codec_of(LARGE, level=0).encode(b"k", floats))
    assert len(shuffled.encode(b"k", floats)) < 0.9 * len(plain.encode(b"k", floats)) < 0.9 * LARGE
    for zeros, compressed in ((1 / 12, True), (1 / 25, False)):
        page = page_of(1, 96_000)
        page[: int(len(page) * zeros)] = 0
        assert is_compressed(codec_of(96_000).encode(b"k", page)) == compressed


def test_samples_decide_for_large_pages() -> None:
    """If samples of a large page do not shrink, the page is stored raw without compressing it. Samples detect zeros
    anywhere if they make up an eighth of the page."""
    codec, step = codec_of(LARGE), LARGE // 8
    sampled = np.arange(LARGE) % step // (8 << 10) == step // 2 // (8 << 10)
    page = np.where(sampled, page_of(2, LARGE), 0).astype(np.uint8)
    assert not is_compressed(codec.encode(b"k", page))
    for start in range(0, LARGE - step, 100_000):
        page = page_of(3, LARGE)
        page[start : start + step + (8 << 10)] = 0
        assert is_compressed(codec.encode(b"k", page)), start


@pytest.mark.parametrize("level", [1, 6])
def test_lag_packs_faster_then_not_at_all(level: int) -> None:
    """Below a lag of 0.5 the level is the configured one, from 0.5 it is 1, and from 0.9 pages are stored raw. With a
    key they are always encrypted."""
    text = np.frombuffer(b"".join(b"%d squared is %d\n" % (n, n * n) for n in range(9000))[:100_000], dtype=np.uint8)
    codec = codec_of(len(text), level)
    values = {lag: codec.encode(b"k", text, lag=lag) for lag in (0.0, 0.49, 0.5, 0.89, 0.9, 1.0)}
    assert values[0.0] == values[0.49] == codec.encode(b"k", text)
    assert values[0.5] == values[0.89] == codec_of(len(text), 1).encode(b"k", text)
    assert (values[0.49] != values[0.5]) == (level > 1)
    assert len(values[0.9]) == len(values[1.0]) == codec.max_value_bytes
    encrypted, back = codec_of(len(text), level, cipher=CIPHERS[1]), np.empty(len(text), dtype=np.uint8)
    for lag, value in values.items():
        assert codec.decode_into(b"k", value, back) == "" and np.array_equal(back, text)
        assert codec.decode_into(b"k", encrypted.encode(b"k", text, lag=lag), back).startswith("encrypted")


@pytest.mark.parametrize(("level", "cipher"), [(0, None), (1, None), (1, CIPHERS[1])])
def test_reading_allocates_no_page(level: int, cipher: PageCipher | None) -> None:
    """After a thread has read one page, reading another page allocates less than a quarter of its bytes."""
    codec = codec_of(LARGE, level, BYTE_SHUFFLE, cipher=cipher)
    value, back = codec.encode(b"k", page_of(1, LARGE, "normal")), np.empty(LARGE, dtype=np.uint8)
    assert codec.decode_into(b"k", value, back) == ""
    tracemalloc.start()
    try:
        assert codec.decode_into(b"k", value, back) == ""
        assert tracemalloc.get_traced_memory()[1] < len(back) // 4
    finally:
        tracemalloc.stop()

"""What a codec encodes it decodes to the same bytes, and how it compresses follows the data and the writer's lag."""

from __future__ import annotations

import threading
import tracemalloc

import numpy as np
import numpy.typing as npt
import pytest

from hicache.storage.base import StoreError
from hicache.storage.cipher import PageCipher
from hicache.storage.filters import PageFilter, PageFormat
from hicache.storage.header import HEADER_BYTES
from storage_pages import WholeCodec, is_compressed, page_of

PAGE = 256
NAMESPACE = b"n" * 16
LARGE = 1 << 20
NONE, BYTE_SHUFFLE = PageFilter(), PageFilter("byte_shuffle", 2)
FILTERS = [NONE, BYTE_SHUFFLE, PageFilter("byte_shuffle", 8), PageFilter("channel_byte_shuffle", 2, 2, 2)]


def codec_of(
    page_bytes: int = PAGE,
    level: int = 1,
    filter: PageFilter = NONE,
    namespace: bytes = NAMESPACE,
    cipher: PageCipher | None = None,
) -> WholeCodec:
    return WholeCodec(PageFormat(page_bytes, filter), namespace, level, cipher)


def channels_page(seed: int, segments: int, tokens: int, channels: int) -> npt.NDArray[np.uint8]:
    """16-bit floats of which each channel has its own magnitude and drifts slowly from token to token."""
    generator = np.random.default_rng(seed)
    steps = generator.standard_normal((segments, tokens, channels)).cumsum(axis=1) * 0.05
    scales = np.exp(2 * generator.standard_normal((segments, 1, channels)))
    floats = ((steps + generator.standard_normal((segments, 1, channels))) * scales).astype(np.float32)
    return (floats.view(np.uint32) >> 16).astype("<u2").reshape(-1).view(np.uint8)


@pytest.mark.parametrize("filter", FILTERS, ids=lambda filter: f"{filter.kind}{filter.element_bytes}")
@pytest.mark.parametrize("level", [0, 1, 3])
@pytest.mark.parametrize("kind", ["random", "normal", "flat"])
@pytest.mark.parametrize("page_bytes", [8, 264, 4096, 100_000])
def test_roundtrip(page_bytes: int, kind: str, level: int, filter: PageFilter) -> None:
    """What was encoded decodes to the same bytes, for every filter, kind of data and size."""
    codec, page = codec_of(page_bytes, level, filter), page_of(7, page_bytes, kind)
    before = page.copy()
    value = codec.encode(b"key", page)
    back = np.zeros(page_bytes, dtype=np.uint8)
    assert codec.decode_into(b"key", value, back) == codec.verify_stored(b"key", value) == ""
    np.testing.assert_array_equal(back, before)
    np.testing.assert_array_equal(page, before)
    assert len(value) <= codec.max_value_bytes


@pytest.mark.parametrize("filter", [NONE, BYTE_SHUFFLE], ids=["none", "byte_shuffle"])
def test_every_level(filter: PageFilter) -> None:
    """Each of zstd's levels is accepted and gives the page back."""
    page, back = page_of(5, 1 << 16, "normal"), np.empty(1 << 16, dtype=np.uint8)
    for level in range(1, 23):
        codec = codec_of(1 << 16, level, filter)
        value = codec.encode(b"key", page)
        assert is_compressed(value) and codec.decode_into(b"key", value, back) == ""
        np.testing.assert_array_equal(back, page)
        back[:] = 0


def test_what_is_compressed() -> None:
    """Compression is kept when it saves a sixteenth, byte_shuffle compresses floats better, and level 0 never
    compresses."""
    floats, noise = page_of(1, LARGE, "normal"), page_of(1, LARGE, "random")
    plain, shuffled = codec_of(LARGE), codec_of(LARGE, filter=BYTE_SHUFFLE)
    assert not is_compressed(plain.encode(b"k", noise))
    assert not is_compressed(shuffled.encode(b"k", noise))
    assert not is_compressed(codec_of(LARGE, level=0).encode(b"k", floats))
    assert is_compressed(plain.encode(b"k", floats))
    assert len(shuffled.encode(b"k", floats)) < 0.9 * len(plain.encode(b"k", floats))


@pytest.mark.parametrize(("zeros", "compressed"), [(1 / 12, True), (1 / 25, False)])
def test_a_sixteenth_must_be_saved(zeros: float, compressed: bool) -> None:
    """A small page of noise with a share of zeros is compressed when that share is above a sixteenth, else raw."""
    page = page_of(1, 96_000)
    page[: int(len(page) * zeros)] = 0
    assert is_compressed(codec_of(96_000).encode(b"k", page)) == compressed


def test_samples_decide_for_large_pages() -> None:
    """A large page whose samples do not shrink is stored raw unseen; zeros that make up an eighth anywhere are seen."""
    codec, step = codec_of(LARGE), LARGE // 8
    sampled = np.arange(LARGE) % step // (8 << 10) == step // 2 // (8 << 10)
    page = np.where(sampled, page_of(2, LARGE), 0).astype(np.uint8)
    assert not is_compressed(codec.encode(b"k", page))
    for start in range(0, LARGE - step, 50_000):
        page = page_of(3, LARGE)
        page[start : start + step + (8 << 10)] = 0
        assert is_compressed(codec.encode(b"k", page)), start


@pytest.mark.parametrize("level", [1, 6])
def test_lag_packs_faster_then_not_at_all(level: int) -> None:
    """Below 0.5 the level stands, from 0.5 it is 1, from 0.9 pages are raw; whatever came out decodes the same."""
    text = np.frombuffer(b"".join(b"%d squared is %d\n" % (n, n * n) for n in range(9000))[:100_000], dtype=np.uint8)
    codec, back = codec_of(len(text), level), np.empty(len(text), dtype=np.uint8)
    values = {lag: codec.encode(b"k", text, lag=lag) for lag in (0.0, 0.49, 0.5, 0.89, 0.9, 1.0)}
    assert values[0.0] == values[0.49] == codec.encode(b"k", text)
    assert values[0.5] == values[0.89] == codec_of(len(text), 1).encode(b"k", text)
    assert (values[0.49] != values[0.5]) == (level > 1)
    assert len(values[0.9]) == len(values[1.0]) == codec.max_value_bytes
    for value in values.values():
        back[:] = 0
        assert codec.decode_into(b"k", value, back) == ""
        np.testing.assert_array_equal(back, text)


def test_lag_never_stores_plain() -> None:
    """However far behind the writer is, a codec with a cipher encrypts."""
    codec, page = codec_of(filter=BYTE_SHUFFLE, cipher=PageCipher(bytes(32))), page_of(1, PAGE, "flat")
    back = np.empty(PAGE, dtype=np.uint8)
    for lag in (0.0, 0.5, 0.9, 1.0):
        value = codec.encode(b"k", page, lag=lag)
        assert codec_of().decode_into(b"k", value, back) == "encrypted page; open the store with its key"


def test_values_do_not_depend_on_the_reader() -> None:
    """A value names its own filter: a codec set up otherwise reads it."""
    page, back = page_of(3, 4096, "normal"), np.empty(4096, dtype=np.uint8)
    for filter in (*FILTERS, PageFilter("channel_byte_shuffle", 2, 64, 32)):
        for level in (0, 1, 5):
            value = codec_of(4096, level, filter).encode(b"k", page)
            assert codec_of(4096, 1, PageFilter("byte_shuffle", 4)).decode_into(b"k", value, back) == ""
            np.testing.assert_array_equal(back, page)
            back[:] = 0


def test_channels_compress_best_together() -> None:
    """What drifts within a channel compresses best by channel, then by byte, then as it is."""
    page = channels_page(0, 4, 64, 256)
    filters = (PageFilter("channel_byte_shuffle", 2, 64, 256), BYTE_SHUFFLE, NONE)
    lengths = [len(codec_of(len(page), 1, filter).encode(b"k", page)) for filter in filters]
    assert lengths == sorted(lengths) and len(set(lengths)) == 3


@pytest.mark.parametrize("cipher", [None, PageCipher(bytes(32))], ids=["plain", "encrypted"])
@pytest.mark.parametrize("level", [0, 1])
def test_reading_allocates_no_page(level: int, cipher: PageCipher | None) -> None:
    """Once a thread has read one page, reading another allocates a small part of it."""
    codec = codec_of(4 << 20, level, PageFilter("channel_byte_shuffle", 2, 64, 128), cipher=cipher)
    value, back = codec.encode(b"k", page_of(1, 4 << 20, "normal")), np.empty(4 << 20, dtype=np.uint8)
    assert codec.decode_into(b"k", value, back) == ""
    tracemalloc.start()
    try:
        assert codec.decode_into(b"k", value, back) == ""
        assert tracemalloc.get_traced_memory()[1] < len(back) // 16
    finally:
        tracemalloc.stop()


def test_threads_do_not_share_scratch() -> None:
    """Threads that encode and decode with one codec at the same time get their own pages back."""
    size = 512 << 10
    codec = codec_of(size, filter=PageFilter("channel_byte_shuffle", 2, 64, 64), cipher=PageCipher(bytes(32)))
    wrong: list[str] = []

    def work(number: int) -> None:
        page, back = page_of(number, size, "normal"), np.empty(size, dtype=np.uint8)
        for _ in range(12):
            reason = codec.decode_into(b"k", codec.encode(b"k", page), back)
            if reason or not np.array_equal(page, back):
                wrong.append(reason or "other bytes")

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_wrong_settings_are_named() -> None:
    """A level, size or filter that cannot be is refused by name."""
    with pytest.raises(StoreError, match="level=23"):
        codec_of(level=23)
    with pytest.raises(StoreError, match="units of 2 bytes"):
        codec_of(page_bytes=9, filter=BYTE_SHUFFLE)
    with pytest.raises(StoreError, match="page_bytes=0"):
        codec_of(page_bytes=0)
    with pytest.raises(StoreError, match="page_bytes=4294967296"):
        codec_of(page_bytes=1 << 32)
    assert codec_of(level=0).max_value_bytes == HEADER_BYTES + PAGE

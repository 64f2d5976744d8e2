"""How a page becomes a value, and a value that page again: filter, zstd, cipher, checksum, in this order.

Owns the compression and each thread's scratch memory for it; header.py owns the header, docs/disk_format.md describes
every byte.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hicache.storage.base import PageBuffer, StoreError
from hicache.storage.cipher import SEAL_BYTES, SLACK_BYTES, PageCipher
from hicache.storage.filters import Arranger, PageFilter, PageFormat
from hicache.storage.header import (
    FIELD_BYTES,
    HEADER_BYTES,
    MAX_PAGE_BYTES,
    NAMESPACE_BYTES,
    RAW,
    ZSTD,
    ValueHeader,
    bound_to,
    copy_parts,
    head_of,
    is_packed,
    page_bytes_of,
    read_header,
    seal_into,
)
from hicache.storage.memory import Scratch
from hicache.storage.packages import zstandard
from hicache.storage.slot_file import Apart

__all__ = ["HEADER_BYTES", "NAMESPACE_BYTES", "RAW", "ZSTD", "PageCodec", "PageCodecs", "choose_filter", "is_packed"]

# A page is stored packed only when packing saves at least this share of it: below, unpacking costs more than reading.
_MIN_SAVING = 16
# Whether packing will pay is tried on eight places, 1/8 of the page apart: a run that makes up an eighth is seen.
_PROBE_PLACES, _PROBE_BYTES, _PROBE_MIN_SAVING = 8, 8 << 10, 32
_PROBED_PAGE_BYTES = 8 * _PROBE_PLACES * _PROBE_BYTES
# How far behind the writer may be (0 it keeps up, 1 its queue is full) before it packs fast, and before not at all.
# Fast is level 1: zstd's negative levels code no entropy, which is all there is to gain in numbers.
_FAST_FROM, _RAW_FROM, _FAST_LEVEL = 0.5, 0.9, 1

_NO_FILTER = PageFilter()


class _Contexts(threading.local):
    """One thread's zstd contexts and scratch memory: a context shared by two threads crashes or returns wrong bytes."""

    def __init__(self, page_bytes: int, level: int, how: PageFilter) -> None:
        window_bytes = max(1 << 17, 1 << (page_bytes - 1).bit_length())
        self.packer = _compressor(page_bytes, max(1, level), how)
        self.fast = _compressor(page_bytes, _FAST_LEVEL, how)
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=window_bytes)
        self.arranger = Arranger(page_bytes)


def _compressor(page_bytes: int, level: int, how: PageFilter) -> Any:
    # In arranged numbers short matches are chance, and finding, coding and copying them costs more than it saves. With
    # long ones and a tiny table alone the levels up to 3 pack twice as fast as with a table of 2^12, and what they pack
    # unpacks 1.4 times as fast; keys and values of a trained model come out 2 % larger, synthetic ones 1 % larger or
    # smaller. The higher levels are there to find what repeats: they stay as are.
    numbers = {"min_match": 7, "hash_log": 7, "chain_log": 7} if how.kind != "none" and level <= 3 else {}
    settings = zstandard.ZstdCompressionParameters.from_level(
        level, source_size=page_bytes, write_checksum=True, write_content_size=True, **numbers
    )
    return zstandard.ZstdCompressor(compression_params=settings)


class PageCodec:
    """Encodes and verifies pages of one size in one namespace; any thread may call it.

    `level` 0 stores raw, 1 to 22 are zstd levels. `filter` governs encoding only: values name their own. A page that
    does not shrink by 1/16 is stored raw. With `cipher` every value is encrypted and a plain one is refused; without,
    an encrypted one.
    """

    def __init__(
        self,
        *,
        page_bytes: int,
        namespace: bytes,
        level: int,
        filter: PageFilter = _NO_FILTER,
        cipher: PageCipher | None = None,
    ) -> None:
        if len(namespace) != NAMESPACE_BYTES:
            raise StoreError(f"a namespace has {NAMESPACE_BYTES} bytes, this one {len(namespace)}")
        if not 0 <= level <= 22:
            raise StoreError(f"level={level}: 0 stores raw, 1 to 22 are zstd levels")
        if not 1 <= page_bytes <= MAX_PAGE_BYTES:
            raise StoreError(f"page_bytes={page_bytes}: choose 1 to {MAX_PAGE_BYTES}")
        misfit = filter.misfit(page_bytes)
        if misfit:
            raise StoreError(misfit)
        self._page_bytes, self._namespace = page_bytes, namespace
        self._level, self._filter, self._cipher = level, filter, cipher
        self._contexts = _Contexts(page_bytes, level, filter)
        self._arranged, self._sealed, self._verified = Scratch(), Scratch(), Scratch()

    @property
    def max_value_bytes(self) -> int:
        """Size of the largest value, a raw one."""
        return HEADER_BYTES + self._page_bytes + (SEAL_BYTES if self._cipher else 0)

    def encode(self, key: bytes, page: PageBuffer, *, lag: float = 0.0) -> bytes:
        """The value of `page`, as `encode_into` makes it."""
        room = memoryview(bytearray(self.max_value_bytes))
        return bytes(room[: self.encode_into(key, page, room, lag=lag)])

    def encode_into(self, key: bytes, page: PageBuffer, room: memoryview, *, lag: float = 0.0) -> int:
        """Write the value of `page`, contiguous uint8 `[page_bytes]`, to `room`, `max_value_bytes`; returns its length.

        `is_packed` tells how it came out. `lag` says how far the writer is behind, from 0, it keeps up, to 1, its queue
        is full: from 0.5 pages are packed at level 1, from 0.9 not at all.
        """
        fields, parts = self._parts(key, page, lag)
        return seal_into(room, key, fields, *parts)

    def encode_apart(self, key: bytes, page: PageBuffer, room: memoryview, *, lag: float = 0.0) -> Apart:
        """The same value in two parts, for a slot. A raw payload is `page` itself, an encrypted one lies in `room`."""
        fields, parts = self._parts(key, page, lag)
        head = head_of(key, fields, *parts)
        return Apart(head, parts[0] if len(parts) == 1 else room[: copy_parts(room, *parts)])

    def _parts(self, key: bytes, page: PageBuffer, lag: float) -> tuple[bytes, tuple[bytes | memoryview, ...]]:
        """A value's header without its checksum, and its payload in parts."""
        packed = self._pack(page, lag)
        payload = page.data if packed is None else packed
        header = ValueHeader(
            codec=RAW if packed is None else ZSTD,
            encrypted=self._cipher is not None,
            raw_bytes=self._page_bytes,
            stored_bytes=len(payload) + (SEAL_BYTES if self._cipher else 0),
            filter=_NO_FILTER if packed is None else self._filter,
            namespace=self._namespace,
        )
        fields = header.pack()
        if self._cipher is None:
            return fields, (payload,)
        scratch = self._sealed.take_page(len(payload) + SLACK_BYTES)
        return fields, self._cipher.seal(payload, bound_to(key, fields), scratch)

    def decode_into(self, key: bytes, value: bytes | memoryview, page: PageBuffer) -> str:
        """Verify `value` and unpack it into `page`, writable contiguous uint8 `[page_bytes]`.

        Returns "" when `page` holds verified bytes, else the reason why not; then its content is undefined. Never
        raises for any `value`, and allocates by `page_bytes` only, never by a length that the value names.
        """
        view = memoryview(value)
        return self.decode_apart(key, view[:HEADER_BYTES], view[HEADER_BYTES:], page)

    def decode_apart(self, key: bytes, head: bytes | memoryview, payload: memoryview, page: PageBuffer) -> str:
        """The same for a value in two parts. `payload` may be `page` itself: a raw page is then left where it is."""
        header = read_header(key, head, payload, self._page_bytes, self._namespace)
        if isinstance(header, str):
            return header
        if header.encrypted and self._cipher is None:
            return "encrypted page; open the store with its key"
        if self._cipher is not None:
            if not header.encrypted:
                return "plain page in an encrypted store"
            scratch = self._sealed.take_page(len(payload) - SEAL_BYTES + SLACK_BYTES)
            plain = self._cipher.unseal(payload, bound_to(key, head[:FIELD_BYTES]), scratch)
            if plain is None:
                return "page does not decrypt: changed, or of another key"
            payload = plain
        return self._unpack(header, payload, page)

    def verify(self, key: bytes, value: bytes | memoryview) -> str:
        """Why `value` is not what was stored under `key`; "" if it is. Decrypts an encrypted one."""
        return self.decode_into(key, value, self._verified.take_page(self._page_bytes))

    def verify_stored(self, key: bytes, value: bytes | memoryview) -> str:
        """The same as far as that shows without decrypting.

        Plain values are unpacked too. Of encrypted ones the header and the checksum over all stored bytes are compared,
        which needs no cipher and finds damage, not forgery.
        """
        view = memoryview(value)
        header = read_header(key, view[:HEADER_BYTES], view[HEADER_BYTES:], self._page_bytes, self._namespace)
        if isinstance(header, str):
            return header
        if header.encrypted:
            return ""
        if self._cipher is not None:
            return "plain page in an encrypted store"
        if header.codec == RAW:
            return ""
        return self._inflate(header, view[HEADER_BYTES:], self._arranged.take_page(self._page_bytes))

    def _pack(self, page: PageBuffer, lag: float) -> bytes | None:
        """The page filtered and compressed; None when it is to be stored raw."""
        if not self._level or lag >= _RAW_FROM:
            return None
        contexts, source = self._contexts, page
        if self._filter.kind != "none":
            source = self._arranged.take_page(self._page_bytes)
            contexts.arranger.arrange(self._filter, page, source)
        if not self._promising(source):
            return None
        compressor = contexts.fast if lag >= _FAST_FROM else contexts.packer
        packed: bytes = compressor.compress(source.data)
        return packed if len(packed) <= self._page_bytes - self._page_bytes // _MIN_SAVING else None

    def _promising(self, source: PageBuffer) -> bool:
        """Whether samples of a large page shrink; a small one is as quickly packed as sampled."""
        if self._page_bytes < _PROBED_PAGE_BYTES:
            return True
        step_bytes, fast = self._page_bytes // _PROBE_PLACES, self._contexts.fast
        starts = range(step_bytes // 2, self._page_bytes, step_bytes)
        packed_bytes = sum(len(fast.compress(source[start : start + _PROBE_BYTES].data)) for start in starts)
        return packed_bytes <= len(starts) * (_PROBE_BYTES - _PROBE_BYTES // _PROBE_MIN_SAVING)

    def _unpack(self, header: ValueHeader, payload: memoryview, page: PageBuffer) -> str:
        if header.codec == RAW:
            source = np.frombuffer(payload, dtype=np.uint8)
            if source.ctypes.data != page.ctypes.data:
                np.copyto(page, source)
            return ""
        if header.filter.kind == "none":
            return self._inflate(header, payload, page)
        arranged = self._arranged.take_page(self._page_bytes)
        reason = self._inflate(header, payload, arranged)
        if not reason:
            self._contexts.arranger.restore(header.filter, arranged, page)
        return reason

    def _inflate(self, header: ValueHeader, payload: memoryview, target: PageBuffer) -> str:
        """Decompress one frame of exactly `page_bytes` into `target`; bounded by it whatever the frame says."""
        try:
            frame = zstandard.get_frame_parameters(payload)
            if frame.content_size != self._page_bytes:
                return "frame of another length"
            if header.rests_on_frame and not frame.has_checksum:
                return "frame without a checksum"
            with self._contexts.decompressor.stream_reader(payload) as reader:
                return _read_exactly(reader, target.data)
        except zstandard.ZstdError as error:
            return f"frame does not unpack: {error}"


class PageCodecs(Mapping[int, PageCodec]):
    """The codecs of one store: page size in bytes -> codec. Any thread."""

    def __init__(self, formats: Sequence[PageFormat], namespace: bytes, level: int, cipher: PageCipher | None) -> None:
        self._by_page_bytes = {
            one.page_bytes: PageCodec(
                page_bytes=one.page_bytes, namespace=namespace, level=level, filter=one.filter, cipher=cipher
            )
            for one in formats
        }
        self._largest = self._by_page_bytes[max(self._by_page_bytes)]

    def __getitem__(self, page_bytes: int) -> PageCodec:
        return self._by_page_bytes[page_bytes]

    def __iter__(self) -> Iterator[int]:
        return iter(self._by_page_bytes)

    def __len__(self) -> int:
        return len(self._by_page_bytes)

    @property
    def max_value_bytes(self) -> int:
        return self._largest.max_value_bytes

    def verify(self, key: bytes, value: bytes | memoryview) -> str:
        """See `PageCodec.verify`; the page may have any of the sizes."""
        return self._codec_of(value).verify(key, value)

    def verify_stored(self, key: bytes, value: bytes | memoryview) -> str:
        """See `PageCodec.verify_stored`; the page may have any of the sizes."""
        return self._codec_of(value).verify_stored(key, value)

    def _codec_of(self, value: bytes | memoryview) -> PageCodec:
        """The codec of the size that a value states; for any other size one that says why it is refused."""
        if len(value) < HEADER_BYTES:
            return self._largest
        return self._by_page_bytes.get(page_bytes_of(value), self._largest)


def choose_filter(sample_pages: Sequence[PageBuffer], candidates: Sequence[PageFilter], level: int) -> PageFilter:
    """The filter with which the samples, all of one size, take the fewest bytes; of equal ones the first candidate.

    Offline: it packs every sample with every candidate. Raises `StoreError` when there is nothing to compare.
    """
    if not sample_pages or not candidates or not level:
        raise StoreError("choose_filter needs sample pages, candidates and a level above 0; give at least one of each")

    def stored_bytes(how: PageFilter) -> int:
        codec = PageCodec(page_bytes=len(sample_pages[0]), namespace=bytes(NAMESPACE_BYTES), level=level, filter=how)
        return sum(len(codec.encode(b"sample", page)) for page in sample_pages)

    return min(candidates, key=stored_bytes)


def _read_exactly(reader: Any, target: memoryview) -> str:
    filled_bytes = 0
    while filled_bytes < len(target):
        got_bytes = reader.readinto(target[filled_bytes:])
        if not got_bytes:
            return f"frame ends after {filled_bytes} bytes"
        filled_bytes += got_bytes
    # Reading on makes the decoder reach the frame's end, where it compares the content checksum.
    return "frame is longer than the page" if reader.read(1) else ""

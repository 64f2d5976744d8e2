"""A coverage-guided fuzzer of the page codec, for atheris: `python fuzz_page.py CORPUS [libFuzzer options]`.

The first byte of an input chooses how the rest becomes a value: as it is, or under a checksum that is made right, so
that the rules behind the checksum are reached too. Whatever the value, decoding must neither raise nor write outside
the page, must say the same twice, and must refuse what its own header contradicts.
"""

from __future__ import annotations

import sys

import atheris
import numpy as np

with atheris.instrument_imports(include=["hicache.storage"]):
    from hicache.storage.cipher import PageCipher
    from hicache.storage.codec import PageCodec
    from hicache.storage.filters import PageFormat
    from hicache.storage.header import FIELD_BYTES, HEADER_BYTES, finalise_header

PAGE_BYTES, GUARD_BYTES = 256, 32
NAMESPACE = b"n" * 16
PLAIN = PageCodec(PageFormat(PAGE_BYTES), NAMESPACE, 1)
# Nobody who made a corpus has this key.
SECRET = PageCodec(PageFormat(PAGE_BYTES), NAMESPACE, 1, PageCipher(bytes(range(7, 39))))


def decode(codec: PageCodec, value: bytes) -> tuple[str, bytes]:
    buffer = np.full(PAGE_BYTES + 2 * GUARD_BYTES, 0xA5, dtype=np.uint8)
    header, payload, page = value[:HEADER_BYTES], memoryview(value)[HEADER_BYTES:], buffer[GUARD_BYTES:-GUARD_BYTES]
    reason = codec.decode_split(b"key", header, payload, page)
    guards = (buffer[:GUARD_BYTES], buffer[-GUARD_BYTES:])
    if any((guard != 0xA5).any() for guard in guards):
        raise AssertionError("bytes outside the page changed")
    return reason, buffer[GUARD_BYTES:-GUARD_BYTES].tobytes()


def finalised(data: bytes) -> bytes:
    """`data` as a value whose namespace, stored length and checksum are right; the other fields are the fuzzer's."""
    fields, payload = bytearray(data[:FIELD_BYTES].ljust(FIELD_BYTES, b"\0")), data[HEADER_BYTES:]
    fields[:4], fields[5] = b"HKVP", 0
    fields[12:16], fields[28:44] = len(payload).to_bytes(4, "little"), NAMESPACE
    return finalise_header(b"key", bytes(fields), payload) + payload


def one_input(data: bytes) -> None:
    value = data[1:] if data[:1] < b"\x01" else finalised(data[1:])
    reason, page = decode(PLAIN, value)
    if not reason:
        if decode(PLAIN, value) != ("", page) or PLAIN.verify_stored(b"key", value):
            raise AssertionError("a second reading differs from the first")
        if int.from_bytes(value[8:12], "little") != PAGE_BYTES or value[4] != 1:
            raise AssertionError("a page was made of a header that contradicts it")
        if not value[6] and value[HEADER_BYTES:] != page:
            raise AssertionError("a raw page differs from its payload")
    if not decode(SECRET, value)[0]:
        raise AssertionError("a page was made without the key")


if __name__ == "__main__":
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()

"""Whatever bytes a value consists of, decoding yields the page that was stored or a reason, and never raises."""

from __future__ import annotations

import re
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.storage.cipher import PageCipher
from hicache.storage.filters import PageFilter, PageFormat
from hicache.storage.header import HEADER_BYTES
from storage_pages import WholeCodec, is_compressed, page_of, value_of

PAGE = 256
NAMESPACE = b"n" * 16
FIELDS = struct.Struct("<4sHBBIIBBHII16s")
CODECS = {
    name: WholeCodec(PageFormat(PAGE, filter), NAMESPACE, level, cipher)
    for name, level, filter, cipher in (
        ("raw", 0, PageFilter(), None),
        ("zstd", 1, PageFilter(), None),
        ("byte_shuffle", 1, PageFilter("byte_shuffle", 2), None),
        ("channels", 1, PageFilter("channel_byte_shuffle", 2, 4, 8), None),
        ("encrypted raw", 0, PageFilter(), PageCipher(bytes(32))),
        ("encrypted channels", 1, PageFilter("channel_byte_shuffle", 2, 4, 8), PageCipher(bytes(32))),
    )
}


def decode_guarded(codec: WholeCodec, value: bytes) -> tuple[str, bytes]:
    """What decoding says and leaves in the page, after a look at the bytes around the page."""
    buffer = np.full(PAGE + 64, 0xA5, dtype=np.uint8)
    reason = codec.decode_into(b"key", value, buffer[32:-32])
    assert (buffer[:32] == 0xA5).all() and (buffer[-32:] == 0xA5).all()
    verdict = codec.verify_stored(b"key", value)
    assert isinstance(reason, str) and isinstance(verdict, str)
    assert reason or not verdict, "decoded what does not verify"
    return reason, buffer[32:-32].tobytes()


@pytest.mark.parametrize("name", CODECS)
def test_every_flip_and_every_length_is_refused(name: str) -> None:
    """No single changed byte of header or payload, no truncation and no extension passes verification."""
    codec = CODECS[name]
    value = codec.encode(b"key", page_of(0, PAGE, "flat"))
    assert is_compressed(value) == ("raw" not in name)
    for at in range(len(value)):
        for bits in (0x01, 0x80, 0xFF):
            changed = bytearray(value)
            changed[at] ^= bits
            assert decode_guarded(codec, bytes(changed))[0]
            assert codec.verify_stored(b"key", bytes(changed))
        assert decode_guarded(codec, value[:at])[0]
    for tail in (b"\0", bytes(16), value):
        assert decode_guarded(codec, value + tail)[0]


@pytest.mark.parametrize("name", CODECS)
def test_a_value_serves_its_key_and_namespace_only(name: str) -> None:
    """A value verifies under its own key and namespace, and as a memoryview too; elsewhere the reason is named."""
    value, back = CODECS[name].encode(b"key", page_of(0, PAGE)), np.empty(PAGE, dtype=np.uint8)
    other = WholeCodec(PageFormat(PAGE), b"m" * 16, 1)
    assert CODECS[name].decode_into(b"key", memoryview(value), back) == ""
    assert CODECS[name].decode_into(b"kez", value, back) == "checksum differs"
    assert CODECS[name].decode_into(b"ke", value, back) == "checksum differs"
    assert other.decode_into(b"key", value, back) == "another namespace"


@pytest.mark.parametrize("num_bytes", [0, 1, 27, 28, 29, PAGE + 27, PAGE + 28, PAGE + 29, PAGE + 44, 99 * PAGE])
@pytest.mark.parametrize("flags", [0, 1])
@pytest.mark.parametrize("name", ["zstd", "encrypted raw"])
def test_payloads_of_any_length(name: str, flags: int, num_bytes: int) -> None:
    """A compressed payload shorter than a cipher's nonce and tag, or longer than a page, is refused before it is
    read."""
    fields = FIELDS.pack(b"HKVP", 1, 1, flags, PAGE, num_bytes, 0, 1, 0, 0, 0, NAMESPACE)
    reason, _ = decode_guarded(CODECS[name], value_of(b"key", fields, bytes(num_bytes)))
    assert reason
    assert reason.startswith("payload of") == (not 0 <= num_bytes - 28 * flags <= PAGE)


def test_frames_that_are_not_the_page() -> None:
    """A frame of another or an unstated length, or with another content checksum, is refused under a right checksum."""
    page = page_of(0, PAGE, "flat").tobytes()

    def said(payload: bytes) -> str:
        fields = FIELDS.pack(b"HKVP", 1, 1, 0, PAGE, len(payload), 0, 1, 0, 0, 0, NAMESPACE)
        return decode_guarded(CODECS["zstd"], value_of(b"key", fields, payload))[0]

    frame = zstandard.ZstdCompressor(write_checksum=True).compress(page)
    assert said(frame) == ""
    assert said(zstandard.compress(page + b"x")) == said(zstandard.compress(page[1:])) == "frame of another length"
    assert said(zstandard.ZstdCompressor(write_content_size=False).compress(page)) == "frame of another length"
    for at in range(len(frame)):
        for bits in (0x01, 0x80):
            assert said(frame[:at] + bytes([frame[at] ^ bits]) + frame[at + 1 :]), at
    for length in range(len(frame) - 4):  # zstd does not tell a frame that lacks its checksum alone from a whole one
        assert said(frame[:length]), length


def frames(max_bytes: int) -> st.SearchStrategy[bytes]:
    """Payloads near what zstd makes: whole, cut, of other lengths, with and without length and checksum."""

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
        "stored_off": st.sampled_from([0, 0, 0, -1, 1, 28, -28]),
        "kind": st.integers(0, 3),
        "width": st.sampled_from([1, 2, 4, 8, 0, 3, 255]),
        "tokens": st.sampled_from([0, 1, 2, 4, 16, 128, 5, 2**32 - 1]),
        "channels": st.sampled_from([0, 1, 2, 4, 16, 128, 5, 2**32 - 1]),
        "payload": st.one_of(st.binary(max_size=PAGE + 40), st.just(bytes(PAGE)), frames(1 << 22)),
    }
)


def check_nonsense(drawn: dict[str, int | bytes]) -> None:
    """A value with a right checksum and any content decodes within the rules of its header or is refused."""
    d = {name: value for name, value in drawn.items() if isinstance(value, int)}
    payload = bytes(drawn["payload"])
    stored = max(0, len(payload) + d["stored_off"])
    shape = (d["kind"], d["width"], 0, d["tokens"], d["channels"])
    fields = FIELDS.pack(b"HKVP", d["version"], d["codec"], d["flags"], d["raw_bytes"], stored, *shape, NAMESPACE)
    value = value_of(b"key", fields, payload)
    for name, codec in CODECS.items():
        reason, page = decode_guarded(codec, value)
        if not reason:
            assert "encrypted" not in name and d["flags"] == 0 and d["version"] == 1
            assert d["raw_bytes"] == PAGE and len(value) == HEADER_BYTES + stored
            assert d["codec"] > 0 or page == payload


def check_bytes(value: bytes) -> None:
    """Bytes that no store wrote are refused by every codec."""
    for codec in CODECS.values():
        assert decode_guarded(codec, value)[0]


@given(st.binary(max_size=2 * PAGE), st.booleans())
@settings(max_examples=150)
def test_arbitrary_bytes(tail: bytes, headed: bool) -> None:
    """Arbitrary bytes, from the start or behind a magic and version, are refused."""
    check_bytes(b"HKVP\x01\x00" + tail if headed else tail)


@given(NONSENSE)
@settings(max_examples=150)
def test_well_sealed_nonsense(drawn: dict[str, int | bytes]) -> None:
    check_nonsense(drawn)


@pytest.mark.long
@given(st.binary(max_size=2 * PAGE), st.booleans())
@settings(max_examples=20_000, derandomize=False)
def test_arbitrary_bytes_long(tail: bytes, headed: bool) -> None:
    """As above, many more."""
    check_bytes(b"HKVP\x01\x00" + tail if headed else tail)


@pytest.mark.long
@given(NONSENSE)
@settings(max_examples=20_000, derandomize=False)
def test_well_sealed_nonsense_long(drawn: dict[str, int | bytes]) -> None:
    """As above, many more."""
    check_nonsense(drawn)


@pytest.mark.long
def test_guided_fuzzing(tmp_path: Path) -> None:
    """A minute of coverage-guided fuzzing, from valid values on, finds nothing that raises or decodes wrongly."""
    pytest.importorskip("atheris")
    for number, (name, codec) in enumerate(CODECS.items()):
        (tmp_path / name).write_bytes(bytes([number % 2]) + codec.encode(b"key", page_of(0, PAGE, "flat")))
    program = [sys.executable, str(Path(__file__).with_name("fuzz_page.py")), str(tmp_path)]
    limits = ["-max_total_time=60", "-max_len=1024", "-rss_limit_mb=4096", f"-artifact_prefix={tmp_path}/"]
    done = subprocess.run([*program, *limits], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    runs = re.search(r"Done (\d+) runs", done.stderr)
    assert runs and int(runs[1]) > 10_000, done.stderr[-3000:]
